"""Temperature, min_p, top_k and top_p: what is cut off before a token is drawn.

Owns the parameters of rows that cut something off. Such a row is divided by its temperature here, since min_p and top_p
depend on it, and the drawing kernel then takes it at temperature 1; other rows pass this file untouched. Greedy rows
never come here: no cut can remove the likeliest token. Invariant: which of its tokens a row keeps depends on the row.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from octavo.device.staging import StagedTensor, WriteQueue
from octavo.ops.sample import FEW, truncate_
from octavo.plan import NewRow
from octavo.sampling.rows import RowSet, SampleBatch, Selection, to_device


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Logits rows that are cut together, with what stays the same between steps: [n] each."""

    at: torch.Tensor  # int64, places among the S
    temperature: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor  # int64
    few: bool


class Truncation:
    """Divides by the temperature, then forbids by min_p, top_k and top_p, in this order."""

    def __init__(
        self, max_num_rows: int, vocab_size: int, device: torch.device, queue: WriteQueue | None = None
    ) -> None:
        """No row asks at first."""
        self._rows = RowSet(max_num_rows, device)
        self._vocab_size = vocab_size
        self._params = StagedTensor(max_num_rows, 3, torch.float32, device, queue)  # temperature, top_p, min_p
        self._top_k = StagedTensor(max_num_rows, 0, torch.int64, device, queue)
        self._few_np = np.zeros(max_num_rows, np.bool_)  # rows with a small top_k: a GPU has a way of its own for them
        self._device = device
        self._selection: Selection | None = None
        self._parts: list[_Part] = []  # of the selection

    def add(self, new: NewRow) -> bool:
        """Stage the cuts of a row. Returns whether there are any; if so, it is to be drawn at temperature 1."""
        params = new.sampling
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        if params.greedy or (top_k == self._vocab_size and params.top_p == 1.0 and params.min_p == 0.0):
            return False
        self._rows.add(new.row)
        self._params.stage(new.row, 0, (params.temperature, params.top_p, params.min_p))
        self._top_k.stage_one(new.row, top_k)
        self._few_np[new.row] = top_k <= FEW and self._device.type != "cpu"
        return True

    def remove(self, row: int) -> None:
        """Forget `row`."""
        self._rows.discard(row)

    def apply_staged(self) -> None:
        """Bring staged rows to the device."""
        self._params.apply()
        self._top_k.apply()

    def __call__(self, logits: torch.Tensor, batch: SampleBatch) -> None:
        """Change `logits` ([S, vocab_size] float32, contiguous) in place."""
        selection = self._rows.select(batch.rows_np)
        if selection is None:
            return
        if selection is not self._selection:
            self._selection = selection
            self._parts = self._split(selection, batch)
        for part in self._parts:
            truncate_(logits, part.at, part.temperature, part.top_k, part.top_p, part.min_p, few=part.few)

    def _split(self, selection: Selection, batch: SampleBatch) -> list[_Part]:
        few_np = self._few_np[batch.rows_np[selection.at_np]]
        parts = []
        for few in (False, True):
            mine = np.flatnonzero(few_np == few)
            if len(mine):
                at = selection.at if len(mine) == len(few_np) else to_device(selection.at_np[mine], self._device)
                rows = batch.rows.index_select(0, at)
                temperature, top_p, min_p = self._params.data.index_select(0, rows).t().contiguous()
                parts.append(_Part(
                    at=at, temperature=temperature, top_p=top_p, min_p=min_p,
                    top_k=self._top_k.data.index_select(0, rows), few=few,
                ))  # fmt: skip
        return parts
