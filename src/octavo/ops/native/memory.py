"""Memory for packed weights that lies in huge pages where the system grants them.

Owns the chunks that packed weights share: a weight alone seldom begins and ends at huge pages, so advice on its own
memory reaches few of them; and `drop_pages`, which gives memory back while its address stays. Does not know what is
stored. Invariant: a chunk lives exactly as long as an owner of a part of it; where the system refuses the advice, or
has none, the memory is ordinary.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Iterator

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
        self._source: Callable[[], mmap.mmap | None] = _nothing

    def take(self, size: int) -> tuple[Tensor, Tensor]:
        """(part, owner): `size` bytes as uint8 [size], uninitialized; keep `owner` for as long as the part is used."""
        with self._lock:
            chunk = None if self._chunk is None else self._chunk()
            if chunk is None or self._next + size > chunk.numel():
                chunk = self._new_chunk(size)
                self._chunk, self._next = weakref.ref(chunk), -chunk.data_ptr() % _HUGE_PAGE
            begin = self._next
            self._next = begin + -(-size // _LINE) * _LINE
            return chunk[begin : begin + size], chunk

    @contextlib.contextmanager
    def fed_by(self, source: Callable[[], mmap.mmap | None]) -> Iterator[None]:
        """Within: chunks are what `source` gives, of CHUNK_BYTES and a huge page, as long as it gives any."""
        self._source = source
        try:
            yield
        finally:
            self._source = _nothing

    def _new_chunk(self, size: int) -> Tensor:
        memory = self._source() if size <= CHUNK_BYTES else None
        if memory is not None:
            return torch.frombuffer(memory, dtype=torch.uint8)
        chunk = torch.empty(max(CHUNK_BYTES, size) + _HUGE_PAGE, dtype=torch.uint8)
        native.lib().octavo_advise_huge(chunk.data_ptr(), chunk.numel())
        return chunk


def _nothing() -> None:
    """No source of chunks."""


PACKED_WEIGHTS = ChunkedMemory()


def drop_pages(tensor: Tensor) -> int:
    """Give the whole pages that lie within `tensor`, a CPU's, back to the system; their bytes. They are zeros then.

    The address stays, and memory comes back when it is next written. Where the system takes no such advice nothing is
    given back, and values stay.
    """
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), "pages are of a CPU's memory, in one piece"
    start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if size <= 0 or not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return 0 if madvise(start, size, mmap.MADV_DONTNEED) else size
