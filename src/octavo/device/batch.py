"""InputBuffers and Batch: one step's inputs.

Owns the static tensors that a step's inputs live in, and the views of them that one step uses. Batches are made anew
each step from the persistent rows; nothing here survives a step but addresses. Knows no requests. Invariant: rows with
few queries come first; host maxima are bounds on what the device holds.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from octavo.device.block_table import BlockTables
from octavo.device.request_table import RequestTable
from octavo.ops.inputs import IntArray, gather_inputs, map_slots
from octavo.plan import StepPlan


class InputBuffers:
    """Static tensors, large enough for any step."""

    def __init__(self, tables: BlockTables, *, max_num_rows: int, max_num_tokens: int, device: torch.device) -> None:
        """Sized by the two limits of a step and by the widths of the block tables."""
        self._max_num_rows, self._max_num_tokens = max_num_rows, max_num_tokens
        self.input_ids = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self.query_start = torch.zeros(max_num_rows + 1, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(max_num_rows, dtype=torch.int32, device=device)
        self.slot_mapping = torch.full((len(tables.tables), max_num_tokens), -1, dtype=torch.int64, device=device)
        self.block_tables = [
            torch.zeros((max_num_rows, table.data.shape[1]), dtype=torch.int32, device=device)
            for table in tables.tables
        ]

    def check(self, num_rows: int, num_tokens: int) -> None:
        """Raises ValueError for a step that is larger than what these buffers were made for."""
        if num_rows > self._max_num_rows or num_tokens > self._max_num_tokens:
            raise ValueError(
                f"a step of {num_rows} rows and {num_tokens} tokens exceeds max_num_seqs={self._max_num_rows} or "
                f"max_num_batched_tokens={self._max_num_tokens}"
            )


@dataclasses.dataclass(kw_only=True, slots=True)
class Batch:
    """One step. R rows with T tokens in all, of which S rows sample."""

    rows: IntArray  # [R] row of each batch entry
    num_tokens: IntArray  # [R] queries of each
    max_query_len: int
    max_seq_len: int  # host upper bound of this batch
    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    query_start: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32
    slot_mapping: list[torch.Tensor]  # per group [T] int64
    block_tables: list[torch.Tensor]  # per group [R, width] int32, kernel block ids
    sampling: IntArray  # [S] batch entries whose last query gives logits
    logits_indices: IntArray  # [S] token index of each

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.rows)

    @property
    def total_tokens(self) -> int:
        """T."""
        return len(self.input_ids)


def build_batch(plan: StepPlan, requests: RequestTable, tables: BlockTables, buffers: InputBuffers) -> Batch:
    """Gather the inputs of `plan` from the rows. The plan's writes must have been applied."""
    rows, num_tokens = plan.rows, plan.num_tokens
    max_query_len = int(num_tokens.max())
    if max_query_len > 1:
        order = np.argsort(num_tokens, kind="stable")
        rows, num_tokens = rows[order], num_tokens[order]
    num_rows, total = len(rows), int(num_tokens.sum())
    buffers.check(num_rows, total)
    token_row = gather_inputs(
        rows, num_tokens, requests.token_ids.data, requests.num_computed.data,
        buffers.input_ids, buffers.positions, buffers.query_start, buffers.seq_lens,
    )  # fmt: skip
    upper = requests.num_computed_upper[rows] + num_tokens
    requests.num_computed_upper[rows] = upper
    max_seq_len = int(upper.max())
    positions = buffers.positions[:total]
    slots, block_tables = [], []
    for index, (block_size, table) in enumerate(zip(tables.block_sizes, tables.tables, strict=True)):
        map_slots(token_row, positions.numpy(), table.data, block_size, buffers.slot_mapping[index])
        slots.append(buffers.slot_mapping[index, :total])
        width = -(-max_seq_len // block_size)
        gathered = buffers.block_tables[index][:num_rows, :width]
        gathered.numpy()[:] = table.data.numpy()[rows, :width]
        block_tables.append(gathered)
    sampling = np.flatnonzero(upper >= requests.prefill_len_np[rows])
    query_start = buffers.query_start[: num_rows + 1]
    return Batch(
        rows=rows,
        num_tokens=num_tokens,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        input_ids=buffers.input_ids[:total],
        positions=positions,
        query_start=query_start,
        seq_lens=buffers.seq_lens[:num_rows],
        slot_mapping=slots,
        block_tables=block_tables,
        sampling=sampling,
        logits_indices=query_start.numpy()[sampling + 1] - 1,
    )
