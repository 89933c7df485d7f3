"""Temperature, min_p, top_k and top_p: what is cut off before a token is drawn.

Owns the parameters of rows that cut something off. Such a row is divided by its temperature here, since min_p and top_p
depend on it, and the drawing kernel then takes it at temperature 1; other rows have a divisor of 0, which says so.
Greedy rows never come here: no cut can remove the likeliest token. Invariant: which of its tokens a row keeps depends
on the row.
"""

from __future__ import annotations

import msgspec
import torch

from octavo.device.staging import Queue, StagedTensor
from octavo.ops.sampling.truncation import FEW, TruncationRows
from octavo.plan import NewRow
from octavo.sampling.rows import IntArray, RowSet


class Truncation:
    """The cuts of rows: a division by the temperature, then min_p, top_k and top_p, in this order."""

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device, queue: Queue) -> None:
        """No row asks at first."""
        self._vocab_size = vocab_size
        self._divisors, self._top_p, self._min_p = (
            StagedTensor(max_num_rows, 0, torch.float32, device, queue) for _ in range(3)
        )
        self._top_k = StagedTensor(max_num_rows, 0, torch.int64, device, queue)
        self._few, self._many = RowSet(max_num_rows, device), RowSet(max_num_rows, device)  # by top_k
        self._cuts = TruncationRows(
            divisors=self._divisors.data, top_k=self._top_k.data, top_p=self._top_p.data, min_p=self._min_p.data
        )

    def add(self, new: NewRow) -> bool:
        """Stage the cuts of a row. Returns whether there are any; if so, it is to be drawn at temperature 1."""
        params = new.sampling
        by_rank = 0 < params.top_k < self._vocab_size
        if params.greedy or not (by_rank or params.top_p < 1.0 or params.min_p > 0.0):
            return False
        (self._few if 0 < params.top_k <= FEW else self._many).add(new.row)
        self._divisors.stage_one(new.row, params.temperature)
        self._top_p.stage_one(new.row, params.top_p)
        self._min_p.stage_one(new.row, params.min_p)
        self._top_k.stage_one(new.row, params.top_k)
        return True

    def remove(self, row: int) -> None:
        """Forget `row`, whether it asked or not."""
        if self._few.discard(row) or self._many.discard(row):
            self._divisors.stage_one(row, 0.0)

    @property
    def ways(self) -> tuple[TruncationRows, TruncationRows]:
        """The tables for rows of one way to be cut, and of the other."""
        few, many = (msgspec.structs.replace(self._cuts, few=few, many=not few) for few in (True, False))
        return few, many

    def select(self, rows_np: IntArray) -> TruncationRows | None:
        """The tables of all rows' cuts; None if none of these table rows has any."""
        few, many = self._few.has_any(rows_np), self._many.has_any(rows_np)
        return msgspec.structs.replace(self._cuts, few=few, many=many) if few or many else None
