"""Temperature, min_p, top_k and top_p: what is cut off before a token is drawn.

Owns the parameters of rows that cut something off. Such a row is divided by its temperature here, since min_p and top_p
depend on it, and the drawing kernel then takes it at temperature 1; other rows pass this file untouched. Greedy rows
never come here: no cut can remove the likeliest token. Invariant: which of its tokens a row keeps depends on the row.
"""

from __future__ import annotations

import torch

from octavo.device.staging import StagedTensor, WriteQueue
from octavo.ops.sample import top_k_top_p_mask_
from octavo.plan import NewRow
from octavo.sampling.rows import RowSet, SampleBatch, Selection


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
        self._selection: Selection | None = None
        # of the selection, so that steady steps gather nothing: [n] each, float32 but top_k
        self._temperature = self._top_p = self._min_p = torch.empty(0, device=device)
        self._cut = torch.empty(0, dtype=torch.int64, device=device)

    def add(self, new: NewRow) -> bool:
        """Stage the cuts of a row. Returns whether there are any; if so, it is to be drawn at temperature 1."""
        params = new.sampling
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        if params.greedy or (top_k == self._vocab_size and params.top_p == 1.0 and params.min_p == 0.0):
            return False
        self._rows.add(new.row)
        self._params.stage(new.row, 0, (params.temperature, params.top_p, params.min_p))
        self._top_k.stage_one(new.row, top_k)
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
            rows = batch.rows.index_select(0, selection.at)
            columns = self._params.data.index_select(0, rows).t().contiguous()
            self._temperature, self._top_p, self._min_p = columns[0, :, None], columns[1], columns[2]
            self._cut = self._top_k.data.index_select(0, rows)
        whole = len(selection.at_np) == len(logits)
        part = logits if whole else logits.index_select(0, selection.at)
        part.div_(self._temperature)
        top_k_top_p_mask_(part, self._cut, self._top_p, self._min_p)
        if not whole:
            logits.index_copy_(0, selection.at, part)
