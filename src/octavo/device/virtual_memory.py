"""VirtualMemory: tensors whose addresses stay while the memory behind them is given back and taken again.

Owns one range of addresses, the pieces of it that have had memory behind them, and the host's copy of their values
while they have none. Does not know what is stored, nor whose driver it is. Invariants: a tensor's address never
changes, so a captured graph finds it; memory is taken away only while the device is idle, and after its values were
copied where they are to be kept; a move that fails leaves memory as it was; the range lives as long as its owner or a
tensor in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Protocol

import torch

_ALIGNED = 512  # bytes, of a tensor's address, as torch's are
_COPIED = 64 << 20  # bytes of a block of the host's copy: torch rounds pinned ones up to a power of two


class Pages(Protocol):
    """A device's memory apart from its addresses. Sizes and addresses are multiples of `page` bytes."""

    page: int
    total_bytes: int  # of the device's memory: no range needs more

    def reserve(self, size: int) -> int:
        """Addresses without memory: the first one."""

    def create(self, size: int) -> int:
        """Memory without addresses: its handle. Raises torch.OutOfMemoryError."""

    def map(self, address: int, size: int, handle: int) -> None:
        """Put memory behind addresses."""

    def allow(self, address: int, size: int) -> None:
        """Let the device read and write there."""

    def unmap(self, address: int, size: int) -> None:
        """Take away what one `map` has put there."""

    def release(self, handle: int) -> None:
        """Forget a handle: memory goes back once nothing maps it."""

    def free(self, address: int, size: int) -> None:
        """Give back addresses, which have no memory."""

    def settle(self) -> None:
        """Wait until the device is idle."""

    def may_settle(self) -> bool:
        """Whether that can be done now, in this thread."""

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        """Bytes that have memory, uint8 [size]; the tensor keeps `owner`."""

    def host(self, size: int) -> torch.Tensor:
        """Memory of the host that copies go to, uint8 [size]. Raises RuntimeError where there is none."""


@dataclasses.dataclass(slots=True)
class _Piece:
    """Bytes that one handle is for."""

    address: int
    size: int
    is_mapped: bool = False


class _Range:
    """Addresses, and what of them has memory. Tensors keep it."""

    def __init__(self, pages: Pages) -> None:
        _end_ranges()
        self._pages = pages
        self.size = -(-pages.total_bytes // pages.page) * pages.page
        self.address = pages.reserve(self.size)
        self.pieces: list[_Piece] = []

    @property
    def num_bytes(self) -> int:
        """That have had memory: they are the first ones."""
        return sum(piece.size for piece in self.pieces)

    def reach(self, num_bytes: int) -> None:
        """Have memory behind the first `num_bytes`. Raises torch.OutOfMemoryError."""
        begin, page = self.num_bytes, self._pages.page
        if num_bytes <= begin:
            return
        size = -(-(num_bytes - begin) // page) * page
        if begin + size > self.size:
            raise torch.OutOfMemoryError(f"{begin + size} bytes are more than the device's {self._pages.total_bytes}")
        piece = _Piece(self.address + begin, size)
        self.map(piece)
        self.pieces.append(piece)

    def map(self, piece: _Piece) -> None:
        """Put memory behind a piece. Raises torch.OutOfMemoryError, and then has put none."""
        pages = self._pages
        handle = pages.create(piece.size)
        try:
            pages.map(piece.address, piece.size, handle)
        finally:
            pages.release(handle)  # the mapping keeps it
        try:
            pages.allow(piece.address, piece.size)
        except BaseException:
            pages.unmap(piece.address, piece.size)
            raise
        piece.is_mapped = True

    def unmap(self, piece: _Piece) -> None:
        """Take the memory away. Nothing may use it."""
        self._pages.unmap(piece.address, piece.size)
        piece.is_mapped = False

    def __del__(self) -> None:
        """The last tensor is gone."""
        _ENDED.append((self._pages, self.address, self.size, self.pieces))
        with contextlib.suppress(Exception):  # the process ends, or the device failed
            _end_ranges()


_ENDED: list[tuple[Pages, int, int, list[_Piece]]] = []  # ranges that nobody has, and whose memory is there yet


def _end_ranges() -> None:
    """Give back what ranges had that nobody has any more, as soon as that can be done."""
    while _ENDED and _ENDED[-1][0].may_settle():
        pages, address, size, pieces = _ENDED.pop()
        pages.settle()
        for piece in pieces:
            if piece.is_mapped:
                pages.unmap(piece.address, piece.size)
        pages.free(address, size)


class VirtualMemory:
    """Of one kind of values on one device. For one thread at a time."""

    def __init__(self, pages: Pages) -> None:
        """Nothing is taken."""
        self._pages = pages
        self._range: _Range | None = None
        self._end = 0  # bytes of the range that tensors have
        self._saved: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        """That its tensors need, whether they have them or not."""
        return self._range.num_bytes if self._range is not None else 0

    @property
    def is_away(self) -> bool:
        """Whether some memory is given back."""
        return self._range is not None and not all(piece.is_mapped for piece in self._range.pieces)

    @property
    def is_saved(self) -> bool:
        """Whether the host has its values."""
        return bool(self._saved)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor whose values nobody has written. Raises torch.OutOfMemoryError."""
        assert not self.is_away, "tensors are made while all memory is there"
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._range is None:
            self._range = _Range(self._pages)
        begin = -(-self._end // _ALIGNED) * _ALIGNED
        self._range.reach(begin + max(num_bytes, 1))  # a tensor of nothing has an address, too
        self._end = begin + num_bytes
        data = self._pages.tensor(self._range.address + begin, num_bytes, self._range)
        return data.view(dtype).view(shape)

    def save(self) -> None:
        """Copy all values to the host, if they are here. Raises RuntimeError where the host has no room."""
        if self._range is None or self.is_away or self._saved:
            return
        saved: list[torch.Tensor] = []
        for begin in range(0, self._end, _COPIED):
            size = min(_COPIED, self._end - begin)
            saved.append(self._pages.host(size))
            saved[-1].copy_(self._values(begin, size), non_blocking=True)
        self._pages.settle()
        self._saved = saved

    def forget(self) -> None:
        """Let the host's copy go."""
        self._saved = []

    def give_back(self) -> int:
        """Give all memory to the device; how many bytes. Values are lost, but for those that were saved."""
        if self._range is None:
            return 0
        self._pages.settle()
        given = 0
        for piece in self._range.pieces:
            if piece.is_mapped:
                self._range.unmap(piece)
                given += piece.size
        return given

    def take_again(self) -> None:
        """Put memory behind all addresses; values are anything until `restore`.

        Raises torch.OutOfMemoryError, and then has taken none.
        """
        taken: list[_Piece] = []
        range_ = self._range
        if range_ is None:
            return
        self._pages.settle()  # the device is this thread's then
        try:
            for piece in range_.pieces:
                if not piece.is_mapped:
                    range_.map(piece)
                    taken.append(piece)
        except BaseException:
            for piece in taken:
                range_.unmap(piece)
            raise

    def restore(self) -> None:
        """Bring the saved values back, if there are any. All memory is there."""
        begin = 0
        for block in self._saved:
            self._values(begin, len(block)).copy_(block, non_blocking=True)
            begin += len(block)
        self._pages.settle()
        self._saved = []

    def _values(self, begin: int, size: int) -> torch.Tensor:
        assert self._range is not None, "there are values"
        return self._pages.tensor(self._range.address + begin, size, self._range)
