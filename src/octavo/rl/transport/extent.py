"""Extent: whether as many bytes came into a buffer as were announced.

A broadcast tells its receiver no length. A buffer has room beyond what is announced, so that a sender of more is read
to its end, and marks where its tensors end, which those who come overwrite. Invariant: no weight can look like a mark,
which is NaN in every type of DTYPES, so that a buffer that is given out has come whole, and nothing behind it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from octavo.rl.plan import Incoming
from octavo.rl.session import WeightUpdateError

_MARK = bytes.fromhex("a97fd5ffb37ff5ff")  # each two bytes are NaN in 16 bits; the last two make wider ones NaN
_MOST_SPARE = 4 << 30  # bytes; memory is taken where something comes, and no earlier
_FACTORS = (2, 4)  # between the sizes of one number in two types


class Extent:
    """A buffer on the host in which a part of a message is received."""

    def __init__(self, part: Sequence[Incoming], *, likely: int = 0) -> None:
        """likely: bytes that a sender may send by mistake; 0: no more than announced, as where members forward."""
        self._part, self._size = part, sum(each.num_bytes for each in part)
        spare = max(min(likely, _MOST_SPARE) - self._size, self._size) if likely else 0
        try:
            self.room = torch.empty(self._size + spare, dtype=torch.uint8)
        except RuntimeError:  # a machine that promises no memory that it has not
            self.room = torch.empty(self._size, dtype=torch.uint8)
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
