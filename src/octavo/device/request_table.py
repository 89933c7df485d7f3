"""RequestTable: the device truth of every request, one persistent row each.

Owns the tokens of a row and its lengths. A row stays put from admission to finish or preemption (which is completion);
batches gather from it. Does not know blocks or sampling parameters. Invariants: `token_ids[row, :total_len[row]]` are
the known tokens, sampled ones included as soon as the sampling kernel ran; `num_computed` of them have their K and V in
the cache. `*_upper` are host mirrors that count work as soon as it is issued: bounds, never masks.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch

from octavo.device.staging import Queue, StagedTensor
from octavo.ops.copying import to_device
from octavo.ops.inputs.tensors import RowTensors
from octavo.plan import IntArray, NewRow, StepLimits


class RequestTable:
    """Tables of [max_num_rows + 1] or [max_num_rows + 1, max_model_len]; the last row is the null row, always empty."""

    def __init__(self, limits: StepLimits, *, device: torch.device, queue: Queue) -> None:
        """Every row is empty at first. `queue`: see StagedTensor."""
        max_num_rows, max_model_len = limits.max_num_rows, limits.max_model_len
        self.null_row = max_num_rows
        self.token_ids = StagedTensor(max_num_rows + 1, max_model_len, torch.int32, device, queue)
        self.prompt_len = StagedTensor(max_num_rows + 1, 0, torch.int32, device, queue)
        self.total_len = StagedTensor(max_num_rows + 1, 0, torch.int32, device, queue)
        self.num_computed = StagedTensor(max_num_rows + 1, 0, torch.int32, device, queue)
        self.tensors = RowTensors(self.token_ids.data, self.total_len.data, self.num_computed.data)
        # prefill_len: tokens that were known when the row was added. A step that computes the last of them, or any
        # later token, samples. After preemption it exceeds the prompt, since replayed output is prefilled as well.
        self.prefill_len_np = np.zeros(max_num_rows, np.int32)
        self.num_computed_upper = np.zeros(max_num_rows, np.int32)

    def add(self, *new: NewRow) -> None:
        """Stage requests' whole states into their rows."""
        rows = np.array([one.row for one in new])
        lengths = np.array([len(one.token_ids) for one in new])
        num_computed = np.array([one.num_computed for one in new])
        tokens = itertools.chain.from_iterable(one.token_ids for one in new)
        self.token_ids.stage_lines(rows, lengths, np.fromiter(tokens, np.int32, int(lengths.sum())))
        self.prompt_len.stage_each(rows, 0, np.array([one.num_prompt for one in new]))
        self.total_len.stage_each(rows, 0, lengths)
        self.num_computed.stage_each(rows, 0, num_computed)
        self.prefill_len_np[rows] = lengths
        self.num_computed_upper[rows] = num_computed

    def take_back(self, rows: IntArray) -> None:
        """The last token of each of `rows` is to be computed again, and what was sampled behind it is dropped."""
        at = to_device(rows, self.num_computed.data.device)
        for lengths in (self.num_computed.data, self.total_len.data):
            lengths.index_add_(0, at, torch.full_like(at, -1, dtype=lengths.dtype))
        self.num_computed_upper[rows] -= 1
