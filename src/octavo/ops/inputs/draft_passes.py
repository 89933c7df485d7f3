"""The passes of a drafter behind a step, laid out at once: positions, slots and lengths of each, and block tables.

Owns the operator and its eager form, on CPU tensors through their numpy views. Knows rows, lengths and slots, not
requests, and no drafter. Invariant: all of it follows from what the step has committed; drafts change nothing in it.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.ops.inputs.tensors import GroupTables, PassTensors, RowTensors, StepInputs


def lay_out_passes(
    step: StepInputs,
    table: RowTensors,
    sample_of: torch.Tensor,
    groups: GroupTables,
    passes: PassTensors,
    *,
    max_model_len: int,
) -> None:
    """Fill `passes` and by `groups` the block tables, of a step behind its commit.

    sample_of: [R] int32, -1 of an entry that did not sample. Such rows, padding, and passes that would leave
    max_model_len, have position 0 and no slot. Tables go as far as the last pass; those of padding have one entry.
    Behind a row's known tokens `behind` is anything, and of tokens of no row it is 0.
    """
    if sample_of.device.type == "cuda":
        from octavo.ops.inputs.draft_passes_gpu import lay_out

        lay_out(step, table, sample_of, groups, passes, max_model_len)
        return
    lay_out_passes_eager(step, table, sample_of, groups, passes, max_model_len=max_model_len)


def lay_out_passes_eager(
    step: StepInputs,
    table: RowTensors,
    sample_of: torch.Tensor,
    groups: GroupTables,
    passes: PassTensors,
    *,
    max_model_len: int,
) -> None:
    """The reference implementation of `lay_out_passes`, for CPU tensors."""
    rows, start, lengths = step.rows.numpy(), step.query_start.numpy(), step.seq_lens.numpy()
    token_ids, totals = table.token_ids.numpy(), table.total_len.numpy()[rows].astype(np.int64)
    num_rows, num_tokens, width = len(rows), len(step.input_ids), token_ids.shape[1]
    rejected = lengths - table.num_computed.numpy()[rows]
    passes.last.numpy()[:num_rows] = np.maximum(start[1:] - 1 - rejected, start[:-1]).clip(max=num_tokens - 1)
    end = int(start[num_rows])
    row, position = np.repeat(rows, np.diff(start)), step.positions.numpy()[:end]
    behind = passes.behind.numpy()
    behind[:end] = token_ids[row, (position + 1).clip(max=width - 1)]
    behind[end:num_tokens] = 0
    number = np.arange(len(passes.positions))[:, None]
    at = totals - 2 + number
    live = (sample_of.numpy() >= 0) & (lengths > 0) & (at >= 0) & (at < max_model_len)  # [passes, R]
    at[~live] = 0
    passes.tokens.numpy()[:num_rows] = token_ids[rows, at[1]]
    passes.positions.numpy()[:, :num_rows] = at
    passes.next_positions.numpy()[:, :num_rows] = at + 1
    passes.seq_lens.numpy()[:, :num_rows] = at + 1
    longest = int(at.max(initial=0)) + 1
    for blocks, out, slots, size in zip(
        groups.tables, groups.outs, passes.slots.numpy(), groups.block_sizes, strict=True
    ):
        index, offset = np.divmod(at, size)
        blocks_np = blocks.numpy()
        own = blocks_np[rows, index].astype(np.int64) * size + offset
        slots[:, :num_rows] = np.where(live & (number > 0), own, -1)
        columns = -(-longest // size)
        out.numpy()[:num_rows, :columns] = blocks_np[rows, :columns]
