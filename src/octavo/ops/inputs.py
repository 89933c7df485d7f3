"""Batch inputs: gather a step's tokens from the persistent rows, and commit what was sampled.

Owns the two operators and their eager form, on CPU tensors through their numpy views. Knows rows, lengths and slots,
not requests. Invariant: the result depends on the rows' device state alone; the host passes only which rows run and
where their queries begin. A row without queries is padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

IntArray = NDArray[np.integer]


class GroupTables:
    """Per cache group: the persistent block table, the batch's copy of it, and the slots. All stay where they are."""

    def __init__(
        self,
        tables: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        slots: torch.Tensor,
        block_sizes: Sequence[int],
    ) -> None:
        """tables, outs: [rows, columns] int32; slots: [groups, max_num_tokens] int64; block_sizes: tokens per block."""
        self.tables, self.outs, self.slots, self.block_sizes = tuple(tables), tuple(outs), slots, tuple(block_sizes)
        self.max_columns = max(out.shape[1] for out in outs)
        # what a kernel reads: [groups, 7] int64
        self.addresses = torch.tensor([
            [table.data_ptr(), table.stride(0), out.data_ptr(), out.stride(0), slot.data_ptr(), size, out.shape[1]]
            for table, out, slot, size in zip(tables, outs, slots, block_sizes, strict=True)
        ]).to(slots.device)  # fmt: skip


def gather_inputs(
    rows: torch.Tensor,
    query_start: torch.Tensor,
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    next_positions: torch.Tensor,
    groups: GroupTables,
    *,
    max_query_len: int,
) -> None:
    """Fill the inputs of R rows and T tokens, padding included, and by `groups` their slots and block tables.

    rows: [R] int64; query_start: [R + 1] int32; token_ids: [max_num_rows, max_model_len] int32; num_computed:
    [max_num_rows] int32; input_ids, positions: [T] int64; seq_lens: [R] int32; next_positions: [R] int64, the same
    numbers. Row i's tokens are its next ones after `num_computed`. Padding: a row without queries has seq_len 0 and
    zeros as its block table; tokens from query_start[R] on are token 0 at position 0 with slot -1. A live row's table
    ends with garbage, see BlockTables.
    max_query_len: a bound.
    """
    if input_ids.device.type == "cuda":
        from octavo.ops.gpu.inputs import gather

        gather(
            rows, query_start, token_ids, num_computed, input_ids, positions, seq_lens, next_positions, groups,
            max_query_len=max_query_len,
        )  # fmt: skip
        return
    gather_inputs_eager(
        rows, query_start, token_ids, num_computed, input_ids, positions, seq_lens, next_positions, groups
    )


def gather_inputs_eager(
    rows: torch.Tensor,
    query_start: torch.Tensor,
    token_ids: torch.Tensor,
    num_computed: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    next_positions: torch.Tensor,
    groups: GroupTables,
) -> None:
    """The twin of `gather_inputs`, for CPU tensors."""
    row, begin, tokens = rows.numpy(), query_start.numpy(), token_ids.numpy()
    num_rows, num_padded = len(row), len(input_ids)
    total = int(begin[num_rows])
    start = num_computed.numpy()[row]
    lengths = seq_lens.numpy()
    count = np.diff(begin)
    has_padding = not count.all()
    if total == num_rows and not has_padding:  # one token each: nothing to repeat
        token_row, position = row, start
        np.add(start, 1, out=lengths)
    else:
        np.multiply(start + count, count > 0, out=lengths)
        token_row = np.repeat(row, count)
        position = np.arange(total) - np.repeat(begin[:num_rows] - start, count)
    next_positions.numpy()[:] = lengths
    positions.numpy()[:total] = position
    input_ids.numpy()[:total] = tokens[token_row, position]
    if total < num_padded:
        positions[total:] = 0
        input_ids[total:] = 0
    longest = int(lengths.max())
    for table, out, slots, size in zip(
        groups.tables, groups.outs, groups.slots.numpy(), groups.block_sizes, strict=True
    ):
        index, offset = np.divmod(position, size)
        table_np = table.numpy()
        np.add(table_np[token_row, index].astype(np.int64) * size, offset, out=slots[:total])
        width = -(-longest // size)
        out_np = out.numpy()
        out_np[:num_rows, :width] = table_np[row, :width]
        slots[total:num_padded] = -1
        if has_padding:
            out_np[:num_rows][count == 0] = 0


def commit_tokens(
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    sample_of: torch.Tensor,
    sampled: torch.Tensor,
    failed: torch.Tensor,
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    num_computed: torch.Tensor,
    results: torch.Tensor,
    *,
    again: bool = False,
) -> None:
    """Count the step's tokens as computed, append to each row what it sampled, and note that in `results`.

    rows: [R] int64; seq_lens: [R] int32, 0 for padding; sample_of: [R] int32, which of the S samples is an entry's, -1
    for none; sampled: [S] int64; failed: [S] uint8; token_ids, total_len, num_computed: the request table's;
    results: [>= S] int64 becomes token | failed << 32. `again`: the step was committed before, its tokens are replaced.
    """
    if rows.device.type == "cuda":
        from octavo.ops.gpu.inputs import commit

        commit(
            rows, seq_lens, sample_of, sampled, failed, token_ids, total_len, num_computed, results, again=again
        )  # fmt: skip
        return
    commit_tokens_eager(
        rows, seq_lens, sample_of, sampled, failed, token_ids, total_len, num_computed, results, again=again
    )


def commit_tokens_eager(
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    sample_of: torch.Tensor,
    sampled: torch.Tensor,
    failed: torch.Tensor,
    token_ids: torch.Tensor,
    total_len: torch.Tensor,
    num_computed: torch.Tensor,
    results: torch.Tensor,
    *,
    again: bool = False,
) -> None:
    """The twin of `commit_tokens`, for CPU tensors."""
    length, sample = seq_lens.numpy(), sample_of.numpy()
    live = length > 0
    num_computed.numpy()[rows.numpy()[live]] = length[live]
    live &= sample >= 0
    row, sample = rows.numpy()[live], sample[live]
    token = sampled.numpy()[sample]
    results.numpy()[sample] = token | failed.numpy()[sample].astype(np.int64) << 32
    totals = total_len.numpy()
    at = totals[row] - again
    if not again:
        totals[row] = at + 1
    inside = at < token_ids.shape[1]
    token_ids.numpy()[row[inside], at[inside]] = token[inside]
