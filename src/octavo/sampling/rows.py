"""SampleBatch, and the two ways in which a sampling feature keeps what its rows asked for.

Owns SampleBatch (which logits row belongs to which table row), RowSet (the rows that use a feature, known to the host)
and RowLists (lists of unequal length per row, on the device). Does not know what a feature does with them. Invariant:
between two `apply_staged` calls the device side does not change; a selection is remade only when the batch's rows or
the set of users change, so a steady decode step uploads nothing.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from octavo.ops.copying import to_device

IntArray = NDArray[np.integer]


class SampleBatch(msgspec.Struct, kw_only=True):
    """The S logits rows of a step. A table row may own several of them: one per draft token, and one more."""

    rows: torch.Tensor  # [S] int64, the table row of each
    positions: torch.Tensor  # [S] int64, the absolute position of the token that is sampled: the tokens before it
    rows_np: IntArray  # [S] int64, `rows` on the host
    max_position: int  # host upper bound of `positions`; sizes scratch, never masks
    has_drafts: bool = False  # whether a table row may own several logits rows


class Selection(msgspec.Struct, frozen=True):
    """The logits rows of a batch that use a feature."""

    at_np: IntArray  # [n] int64, ascending
    at: torch.Tensor  # [n] int64, the same on the device


class Entries(msgspec.Struct, frozen=True):
    """The list entries of a selection, end to end: E in all."""

    at: torch.Tensor  # [n] int64, as in Selection
    entry_at: torch.Tensor  # [E] int64, the logits row of each entry
    columns: tuple[torch.Tensor, ...]  # each [E] or [E, width]
    cells: torch.Tensor  # [E] int64, entry_at * vocab_size + columns[0]: where in the flat logits


class RowSet:
    """The rows that use a feature."""

    def __init__(self, max_num_rows: int, device: torch.device) -> None:
        """Empty at first."""
        self._device = device
        self._member = np.zeros(max_num_rows, np.bool_)
        self._num = 0
        self._key: bytes | None = None  # rows of the batch that `_selection` was made for
        self._selection: Selection | None = None

    def __len__(self) -> int:
        """Number of rows in the set."""
        return self._num

    def add(self, row: int) -> None:
        """Take `row` in."""
        self._num += not self._member[row]
        self._member[row] = True
        self._key = None

    def discard(self, row: int) -> bool:
        """Let `row` go. Returns whether it was there."""
        if not self._num or not self._member[row]:
            return False
        self._member[row] = False
        self._num -= 1
        self._key = None
        return True

    def has_any(self, rows_np: IntArray) -> bool:
        """Whether one of these table rows is in the set."""
        return self._num > 0 and bool(self._member[rows_np].any())

    def select(self, rows_np: IntArray) -> Selection | None:
        """The logits rows whose table row is in the set; None if there is none. Equal calls give one object."""
        if not self._num:
            return None
        key = rows_np.tobytes()
        if key != self._key:
            at_np = np.flatnonzero(self._member[rows_np])
            self._selection = Selection(at_np, to_device(at_np, self._device)) if len(at_np) else None
            self._key = key
        return self._selection


class RowLists:
    """Per row, parallel columns of one length; columns[0] holds token ids. Two-dimensional ones may differ in width."""

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Empty at first."""
        self._rows = RowSet(max_num_rows, device)
        self._vocab_size = vocab_size
        self._device = device
        self._staged: dict[int, tuple[NDArray[np.generic], ...]] = {}
        self._columns: dict[int, tuple[torch.Tensor, ...]] = {}
        self._selection: Selection | None = None
        self._entries: Entries | None = None

    def __len__(self) -> int:
        """Number of rows that have a list."""
        return len(self._rows)

    def stage(self, row: int, *columns: NDArray[np.generic]) -> None:
        """Stage the list of `row`: columns of [n] or [n, width], n >= 1. The arrays are kept, not copied."""
        ids = columns[0]
        assert len(ids) and ids.min() >= 0 and ids.max() < self._vocab_size, "token ids are checked before sampling"
        self._staged[row] = columns
        self._rows.add(row)

    def remove(self, row: int) -> None:
        """Forget the list of `row`, if it has one."""
        self._rows.discard(row)
        self._staged.pop(row, None)
        if self._columns.pop(row, None) is not None:
            self._selection = self._entries = None

    def apply_staged(self) -> None:
        """Bring the staged lists to the device."""
        for row, columns in self._staged.items():
            self._columns[row] = tuple(to_device(column, self._device) for column in columns)
        self._staged.clear()

    def select(self, rows_np: IntArray) -> Entries | None:
        """The entries of the batch's rows; None if no row has a list."""
        selection = self._rows.select(rows_np)
        if selection is not self._selection:
            self._selection = selection
            self._entries = None if selection is None else self._gather(selection, rows_np)
        return self._entries

    def _gather(self, selection: Selection, rows_np: IntArray) -> Entries:
        lists = [self._columns[row] for row in rows_np[selection.at_np].tolist()]
        columns = tuple(_join(parts) for parts in zip(*lists, strict=True))
        counts = [len(columns[0]) for columns in lists]
        entry_at = to_device(np.repeat(selection.at_np, counts), self._device)
        return Entries(selection.at, entry_at, columns, entry_at * self._vocab_size + columns[0])


def _join(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Concatenate; two-dimensional parts get -1 on the left up to the greatest width."""
    if parts[0].dim() == 2:
        width = max(part.shape[1] for part in parts)
        parts = tuple(torch.nn.functional.pad(part, (width - part.shape[1], 0), value=-1) for part in parts)
    return torch.cat(parts)
