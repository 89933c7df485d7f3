"""Extent: whether as many bytes came into a buffer as were announced.

A broadcast tells its receiver no length. A buffer has room beyond what is announced, so that a sender of more is read
to its end, and marks where its tensors end, which those who come overwrite. Invariant: no weight can look like a mark,
which is NaN in every type of DTYPES, so that a buffer that is given out has come whole, and nothing behind it.
"""

from __future__ import annotations

import itertools
import mmap
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from octavo.rl.plan import Incoming
from octavo.rl.session import WeightUpdateError

_MARK = bytes.fromhex("a97fd5ffb37ff5ff")  # each two bytes are NaN in 16 bits; the last two make wider ones NaN
_MOST_SPARE = 4 << 30  # bytes; memory is taken where something comes, and no earlier
_MOST_KEPT = 32 << 20  # bytes of Rooms
_FACTORS = (2, 4)  # between the sizes of one number in two types


class Rooms:
    """Memory that buffers are received into, kept from one update to the next where it is little.

    Where memory has its pages already, it is read into in three quarters of the time. It is free again when the last
    tensor in it has gone, which nobody has to say: tensors hold a view of it, whose end is told.
    """

    def __init__(self) -> None:
        """None yet."""
        self._free: list[_Room] = []
        self._num_kept = 0  # bytes that were announced for those that are kept, free or not

    def take(self, size: int, spare: int) -> torch.Tensor:
        """[size + spare] uint8 with any values, or [size] where a machine promises no memory that it has not.

        size: what will be written, as far as all goes well; the rest takes no memory until something comes there.
        """
        found = next((each for each in self._free if (each.size, len(each.memory)) == (size, size + spare)), None)
        if found is None:
            found = self._made(size, spare)
        else:
            self._free.remove(found)
        if found is None:
            try:
                return torch.empty(size + spare, dtype=torch.uint8)
            except RuntimeError:
                return torch.empty(size, dtype=torch.uint8)
        view = memoryview(found.memory)
        weakref.finalize(view, self._free.append, found).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def _made(self, size: int, spare: int) -> _Room | None:
        """One more that is kept; None: it would be too much. Free ones of other sizes are let go of for it."""
        if self._num_kept + size > _MOST_KEPT:
            self._num_kept -= sum(self._free.pop().size for _ in range(len(self._free)))
        if not 0 < size <= _MOST_KEPT - self._num_kept:
            return None
        try:
            room = _Room(size, mmap.mmap(-1, size + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        except OSError:
            return None
        self._num_kept += size
        return room


class _Room(NamedTuple):
    """Memory that is kept."""

    size: int  # what was announced for it
    memory: mmap.mmap


class Extent:
    """A buffer on the host in which a part of a message is received."""

    def __init__(self, part: Sequence[Incoming], rooms: Rooms, *, likely: int = 0) -> None:
        """likely: bytes that a sender may send by mistake; 0: no more than announced, as where members forward."""
        self._part, self._size = part, sum(each.num_bytes for each in part)
        spare = max(min(likely, _MOST_SPARE) - self._size, self._size) if likely else 0
        self.room = rooms.take(self._size, spare)
        self._memory = memoryview(self.room.numpy())  # type: ignore[arg-type]
        self._ends = self._likely_ends()
        for end in self._ends:
            begin = max(end - len(_MARK), 0)
            self._memory[begin:end] = _MARK[begin - end :]
            self._memory[end : end + len(_MARK)] = _MARK[: len(self._memory) - end]

    def come(self) -> torch.Tensor:
        """What was announced, [bytes] uint8. Raises WeightUpdateError where fewer came, or more."""
        size, memory = self._size, self._memory
        is_short = self._is_short()
        behind = memory[size : size + len(_MARK)]
        if not is_short and behind == _MARK[: len(behind)]:
            return self.room[:size]
        came = [f"{end:,}" for end in self._ends if end != size and self._is_end(end)]
        raise WeightUpdateError(
            f"{_names(self._part)}: {size:,} bytes were announced ({_types(self._part)}), and "
            f"{came[-1] if came else 'fewer' if is_short else 'more'} came: {ADVICE}"
        )

    def _is_short(self) -> bool:
        """Whether what came ends before `size`.

        Where a single byte is missing the last number has the mark's upper byte: it is NaN, or beyond -1.7e38, as no
        weight is but for a type's least number, which stands for minus infinity.
        """
        size, dtype = self._size, self._part[-1].dtype
        if self._memory[size - 2 : size] == _MARK[-2:]:
            return True
        if self._memory[size - 1] != _MARK[-1]:
            return False
        last = self.room[size - dtype.itemsize : size].clone().view(dtype)
        return bool(last.isfinite() & (last != torch.finfo(dtype).min))

    def _likely_ends(self) -> list[int]:
        """Where what comes may end, with room for marks between."""
        size, length = self._size, len(_MARK)
        tensors = list(itertools.accumulate(each.num_bytes for each in self._part))
        others = {end * factor for end in (size, tensors[0]) for factor in _FACTORS}
        others |= {size // factor for factor in _FACTORS} | set(tensors[:-1])
        ends = [size]
        for end in sorted(others):
            has_room = length <= end <= len(self._memory) - length
            if has_room and all(abs(end - one) >= 2 * length for one in (size, ends[-1])):
                ends.append(end)
        return ends

    def _is_end(self, end: int) -> bool:
        """Whether what came ends here."""
        length = len(_MARK)
        return self._memory[end - length : end] != _MARK and self._memory[end : end + length] == _MARK


ADVICE = (
    "do dtype_names, shapes, packed and packed_buffer_size_bytes say what the trainer sends? "
    "The group has ended: init_weight_transfer_engine makes another"
)


def likely_bytes(parts: Sequence[Sequence[Incoming]], number: int) -> int:
    """What a sender may send by mistake in place of a part: wider numbers, another tensor, or all of them at first."""
    sizes = [sum(each.num_bytes for each in part) for part in parts]
    return max(_FACTORS[-1] * max(sizes), 0 if number else _FACTORS[-1] * sum(sizes))


def _names(part: Sequence[Incoming]) -> str:
    return part[0].name if len(part) == 1 else f"{len(part)} tensors, {part[0].name} to {part[-1].name}"


def _types(part: Sequence[Incoming]) -> str:
    return ", ".join(dict.fromkeys(str(each.dtype).removeprefix("torch.") for each in part))
