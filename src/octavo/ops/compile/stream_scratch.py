"""StreamScratch: memory that one launch at a time may use, once for each stream.

Owns who shares what. Does not know what lies in it. Invariant: launches of two streams never share: an engine rehearses
its graphs on a stream of its own while another one of the process decodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import torch

_Made = TypeVar("_Made")


class StreamScratch(Generic[_Made]):
    """What `make(device)` gave, by device and the stream that is current there."""

    def __init__(self, make: Callable[[torch.device], _Made]) -> None:
        """Nothing is made yet."""
        self._make = make
        self._made: dict[tuple[torch.device, int], _Made] = {}

    def of(self, device: torch.device) -> _Made:
        """That of the current stream. A capture on a stream that has none takes the first: graphs run among steps.

        What a capture makes has no zeros before the graph runs, so none is made there. Raises RuntimeError for a
        capture where nothing was made on the device before.
        """
        stream = _stream(device)
        found = self._made.get((device, stream))
        if found is None and stream and torch.cuda.is_current_stream_capturing():
            return self._first_of(device)
        if found is None:
            found = self._made[device, stream] = self._make(device)
        return found

    def _first_of(self, device: torch.device) -> _Made:
        for (own, _), made in [*self._made.items()]:  # of now: other engines' threads make theirs meanwhile
            if own == device:
                return made
        raise RuntimeError(f"a capture on {device} needs scratch memory of launches before it: rehearse what it holds")


def _stream(device: torch.device) -> int:
    """Its handle, 0: the default one, or no GPU's."""
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    handle: int = torch._C._cuda_getCurrentRawStream(index)
    return handle
