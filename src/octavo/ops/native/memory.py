"""Memory for packed weights that lies in huge pages where the system grants them.

Owns the chunks that packed weights share: a weight alone seldom begins and ends at huge pages, so advice on its own
memory reaches few of them. Does not know what is stored. Invariant: a chunk lives exactly as long as an owner of a part
of it; where the system refuses the advice, or has none, the memory is ordinary.
"""

from __future__ import annotations

import threading
import weakref

import torch
from torch import Tensor

from octavo.ops import native

CHUNK_BYTES = 64 << 20
_HUGE_PAGE = 2 << 20
_LINE = 64  # parts begin at cache lines


class ChunkedMemory:
    """Hands out parts of chunks, one after another; what a chunk has left for too large a part is never touched."""

    def __init__(self) -> None:
        """Empty: the first part makes the first chunk."""
        self._lock = threading.Lock()
        self._chunk: weakref.ref[Tensor] | None = None
        self._next = 0  # offset of the next part

    def take(self, size: int) -> tuple[Tensor, Tensor]:
        """(part, owner): `size` bytes as uint8 [size], uninitialized; keep `owner` for as long as the part is used."""
        with self._lock:
            chunk = None if self._chunk is None else self._chunk()
            if chunk is None or self._next + size > chunk.numel():
                chunk = torch.empty(max(CHUNK_BYTES, size) + _HUGE_PAGE, dtype=torch.uint8)
                native.lib().octavo_advise_huge(chunk.data_ptr(), chunk.numel())
                self._chunk, self._next = weakref.ref(chunk), -chunk.data_ptr() % _HUGE_PAGE
            begin = self._next
            self._next = begin + -(-size // _LINE) * _LINE
            return chunk[begin : begin + size], chunk


PACKED_WEIGHTS = ChunkedMemory()
