"""Prompt lookup: what followed the last tokens of a row where they, or the most of them, stood before.

Owns the operator and its eager form, on CPU tensors through their numpy views. Knows rows and lengths, not requests.
Invariant: what a row is given follows from its own known tokens, and whoever had it before does not matter; nothing
waits for the device.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.ops.inputs.tensors import RowTensors

MAX_RUN = 64


def look_up(
    table: RowTensors, rows: torch.Tensor, live: torch.Tensor, *, shortest: int, longest: int, num_drafts: int
) -> None:
    """Write `num_drafts` tokens behind the known ones of `rows` ([R] int64), as far as the table goes.

    The longest run of a row's last `shortest` to `longest` tokens that stands anywhere before, its first place, is
    looked for, and what follows there is written, again and again where known tokens end. A row without such a run has
    its last token written again and again. Rows that are not live ([R] bool) stay as they are.
    """
    assert 1 <= shortest <= longest <= MAX_RUN, "a run has 1 to 64 tokens"
    if rows.is_cuda:
        from octavo.ops.lookup.gpu import look_up_rows

        look_up_rows(table, rows, live, shortest, longest, num_drafts)
        return
    look_up_eager(table, rows, live, shortest=shortest, longest=longest, num_drafts=num_drafts)


def look_up_eager(
    table: RowTensors, rows: torch.Tensor, live: torch.Tensor, *, shortest: int, longest: int, num_drafts: int
) -> None:
    """The reference implementation of `look_up`, for CPU tensors."""
    row = rows.numpy()[live.numpy()]
    row = row[table.total_len.numpy()[row] > 0]
    totals, token_ids = table.total_len.numpy()[row], table.token_ids.numpy()
    if not len(row) or not num_drafts:
        return
    width = int(totals.max())
    tokens = token_ids[row, :width]
    at = np.arange(width)
    length = np.zeros((len(row), width), np.int32)  # of the run that ends at a place, as far as it is the row's end
    goes_on = at < totals[:, None] - 1
    for back in range(longest):
        end = tokens[np.arange(len(row)), (totals - 1 - back).clip(min=0)]
        goes_on[:, :back] = False
        goes_on[:, back:] &= tokens[:, : width - back] == end[:, None]
        if not goes_on.any():
            break
        length += goes_on
    best = length.argmax(axis=1)  # of equals the first
    found = length[np.arange(len(row)), best] >= shortest
    best = np.where(found, best, totals - 2)  # else the last token goes on: the host counts drafts anyway
    place = np.arange(num_drafts)
    source = best[:, None] + 1 + place % (totals - 1 - best)[:, None]
    target = totals[:, None] + place
    inside = target < token_ids.shape[1]
    lines = np.broadcast_to(row[:, None], target.shape)
    token_ids[lines[inside], target[inside]] = token_ids[lines[inside], source[inside]]
