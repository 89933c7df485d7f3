"""Weights by broadcast from GPU to GPU. Tensors go to where they belong as they come."""

from __future__ import annotations

import datetime
from typing import Any

import torch
from torch import distributed

from octavo.rl.session import WeightUpdateError
from octavo.rl.transport.group import GroupTransport


def make_nccl(store: Any, rank: int, size: int, timeout: datetime.timedelta, host: str) -> Any:
    """A process group of NCCL, on the current device."""
    backend: Any = distributed.ProcessGroupNCCL
    options = backend.Options()
    options._timeout = timeout
    return backend(store, rank, size, options)


class NcclTransport(GroupTransport):
    """See GroupTransport."""

    overwrites = True
    make = staticmethod(make_nccl)

    def __init__(self, device: torch.device, options: Any) -> None:
        """Raises WeightUpdateError without a GPU."""
        if device.type != "cuda":
            raise WeightUpdateError(f"backend 'nccl' needs a GPU, and the engine runs on {device.type}: take 'gloo'")
        super().__init__(device, options)


TRANSPORT = NcclTransport
