"""Weights from this very process: tensors that are handed over by a key, on any device, and never copied to travel."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from octavo.rl.plan import Incoming
from octavo.rl.session import WeightUpdateError
from octavo.rl.transport import Alone, Put, Read, field, told

_HANDED: dict[int, list[torch.Tensor]] = {}
_KEYS = itertools.count()


class Handed:
    """Tensors that workers of this process may take while the context is open. `update_info` tells of them."""

    def __init__(self, named: Mapping[str, torch.Tensor]) -> None:
        """Nothing is copied. Raises WeightUpdateError for what is no tensor, or holds no values, by name."""
        for name, tensor in named.items():
            if not isinstance(tensor, torch.Tensor):
                raise WeightUpdateError(f"{name}: expected a tensor, got {type(tensor).__name__}")
            if tensor.layout is not torch.strided or tensor.is_meta:
                kind = f"{tensor.layout} on {tensor.device}"
                raise WeightUpdateError(f"{name}: expected a dense tensor with values, got {kind}")
        self._key = next(_KEYS)
        self._tensors = [tensor.detach() for tensor in named.values()]
        self.update_info: dict[str, Any] = {
            "names": list(named),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in self._tensors],
            "shapes": [list(tensor.shape) for tensor in self._tensors],
            "local_key": self._key,
        }

    def __enter__(self) -> dict[str, Any]:
        """What is told of them."""
        _HANDED[self._key] = self._tensors
        return self.update_info

    def __exit__(self, *error: object) -> None:
        """They may be taken no more."""
        _HANDED.pop(self._key, None)


class LocalTransport(Alone):
    """See octavo.rl.transport.Transport. A message has `local_key`, of a Handed that is open."""

    waits = False
    gives = False

    def __init__(self, device: torch.device, options: Mapping[str, Any]) -> None:
        """Nothing is opened."""
        super().__init__()

    def receive(self, info: Mapping[str, Any], read: Read, put: Put) -> list[Incoming]:
        """Take the tensors where they are."""
        tensors = _HANDED.get(field(info, "local_key", int))
        if tensors is None:
            raise WeightUpdateError("local_key names no tensors of this process: use another backend between processes")
        incoming = told(info, read)
        for each, tensor in zip(incoming, tensors, strict=True):
            put(each, tensor)
        return incoming


TRANSPORT = LocalTransport
