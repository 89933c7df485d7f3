"""Batch inputs: gather a step's tokens from the persistent rows, and commit what was sampled.

Owns the two operators and their eager form, on CPU tensors through their numpy views. Knows rows, lengths and slots,
not requests. Invariant: the result depends on the rows' device state alone; the host passes only which rows run and
where their queries begin. A row without queries is padding.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.ops.inputs.tensors import GroupTables, RowTensors, StepInputs


def gather_inputs(step: StepInputs, table: RowTensors, groups: GroupTables) -> None:
    """Fill all of `step` but its rows and `query_start`, and by `groups` its slots and block tables. Begins a turn.

    Row i's tokens are its next ones after `num_computed`. Padding: a row without queries has seq_len 0 and zeros as its
    block table; tokens from query_start[R] on are token 0 at position 0 with slot -1. A live row's table ends with
    garbage, see BlockTables.
    """
    if step.input_ids.device.type == "cuda":
        from octavo.ops.inputs.gpu import gather

        gather(step, table, groups)
        return
    gather_inputs_eager(step, table, groups)


def gather_inputs_eager(step: StepInputs, table: RowTensors, groups: GroupTables) -> None:
    """The reference implementation of `gather_inputs`, for CPU tensors."""
    input_ids, positions = step.input_ids, step.positions
    row, begin, tokens = step.rows.numpy(), step.query_start.numpy(), table.token_ids.numpy()
    num_rows, num_padded = len(row), len(input_ids)
    step.turn.numpy()[0] ^= 1
    total = int(begin[num_rows])
    start = table.num_computed.numpy()[row]
    lengths = step.seq_lens.numpy()
    count = np.diff(begin)
    has_padding = not count.all()
    if total == num_rows and not has_padding:  # one token each: nothing to repeat
        token_row, position = row, start
        np.add(start, 1, out=lengths)
    else:
        np.multiply(start + count, count > 0, out=lengths)
        token_row = np.repeat(row, count)
        position = np.arange(total) - np.repeat(begin[:num_rows] - start, count)
    step.next_positions.numpy()[:] = lengths
    positions.numpy()[:total] = position
    input_ids.numpy()[:total] = tokens[token_row, position]
    if total < num_padded:
        positions[total:] = 0
        input_ids[total:] = 0
    longest = int(lengths.max())
    for blocks, out, slots, size in zip(
        groups.tables, groups.outs, groups.slots.numpy(), groups.block_sizes, strict=True
    ):
        index, offset = np.divmod(position, size)
        blocks_np = blocks.numpy()
        np.add(blocks_np[token_row, index].astype(np.int64) * size, offset, out=slots[:total])
        width = -(-longest // size)
        out_np = out.numpy()
        out_np[:num_rows, :width] = blocks_np[row, :width]
        slots[total:num_padded] = -1
        if has_padding:
            out_np[:num_rows][count == 0] = 0


def commit_tokens(
    step: StepInputs,
    table: RowTensors,
    sample_of: torch.Tensor,
    sampled: torch.Tensor,
    failed: torch.Tensor,
    *,
    again: bool = False,
) -> None:
    """Count the step's tokens as computed, append to each row what it sampled, and note that in the turn's results.

    Of a step without drafts. sample_of: [R] int32, which of the S samples is an entry's, -1 for none; sampled: [S]
    int64; failed: [S] uint8.
    `again`: the step was committed before, its tokens are replaced.
    """
    if sampled.device.type == "cuda":
        from octavo.ops.inputs.gpu import commit

        commit(step, table, sample_of, sampled, failed, again=again)
        return
    commit_tokens_eager(step, table, sample_of, sampled, failed, again=again)


def commit_tokens_eager(
    step: StepInputs,
    table: RowTensors,
    sample_of: torch.Tensor,
    sampled: torch.Tensor,
    failed: torch.Tensor,
    *,
    again: bool = False,
) -> None:
    """The reference implementation of `commit_tokens`, for CPU tensors."""
    rows, token_ids = step.rows.numpy(), table.token_ids
    length, sample = step.seq_lens.numpy(), sample_of.numpy()
    live = length > 0
    table.num_computed.numpy()[rows[live]] = length[live]
    live &= sample >= 0
    row, sample = rows[live], sample[live]
    token = sampled.numpy()[sample]
    step.results.numpy()[step.turn.numpy()[0], sample, 0] = token | failed.numpy()[sample].astype(np.int64) << 32
    totals = table.total_len.numpy()
    at = totals[row] - again
    if not again:
        totals[row] = at + 1
    inside = at < token_ids.shape[1]
    token_ids.numpy()[row[inside], at[inside]] = token[inside]


def commit_drafts(
    step: StepInputs,
    table: RowTensors,
    sample_of: torch.Tensor,
    num_drafts: torch.Tensor,
    sampled: torch.Tensor,
    failed: torch.Tensor,
    held: int,
) -> None:
    """What `commit_tokens` does, for rows that may have drafts: accept them as far as they are what was drawn.

    num_drafts: [R] int32; an entry's samples are its `1 + num_drafts` from sample_of on. A draft is accepted where it,
    and each before it, equals the token drawn in its place and nothing failed there; the token drawn behind the
    accepted ones counts too, unless its failure is `held`. Of the step's queries the row has computed those that count.
    Results say failures up to that token alone: one that is `held` behind those that count is what ended the run.
    """
    if sampled.device.type == "cuda":
        from octavo.ops.inputs.gpu import commit_runs

        commit_runs(step, table, sample_of, num_drafts, sampled, failed, held)
        return
    commit_drafts_eager(step, table, sample_of, num_drafts, sampled, failed, held)


def commit_drafts_eager(
    step: StepInputs,
    table: RowTensors,
    sample_of: torch.Tensor,
    num_drafts: torch.Tensor,
    sampled: torch.Tensor,
    failed: torch.Tensor,
    held: int,
) -> None:
    """The reference implementation of `commit_drafts`, for CPU tensors."""
    rows, length, first, drafts = (x.numpy() for x in (step.rows, step.seq_lens, sample_of, num_drafts))
    token_ids, totals = table.token_ids.numpy(), table.total_len.numpy()
    live = length > 0
    table.num_computed.numpy()[rows[live]] = length[live]
    entry = (live & (first >= 0)).nonzero()[0]
    row, total, most = rows[entry], totals[rows[entry]], drafts[entry]
    place = np.arange(step.results.shape[2])  # in a run, [W]
    samples = first[entry, None] + np.minimum(place, most[:, None])
    token, reason = sampled.numpy()[samples], failed.numpy()[samples].astype(np.int64)
    at = total[:, None] + place
    draft = token_ids[row[:, None], at.clip(max=token_ids.shape[1] - 1)]
    agrees = (draft == token) & (reason == 0) & (place < most[:, None])
    accepted = np.cumprod(agrees, axis=1).sum(axis=1)
    lines = np.arange(len(entry))
    count = accepted + (reason[lines, accepted] != held)
    turn = step.turn.numpy()[0]
    step.results.numpy()[turn, entry] = token | reason * (place <= accepted[:, None]) << 32
    step.counts.numpy()[turn, entry] = count
    table.num_computed.numpy()[row] = length[entry] - (1 + most - count)
    totals[row] = total + count
    new = total + accepted
    written = (count > accepted) & (new < token_ids.shape[1])
    token_ids[row[written], new[written]] = token[lines, accepted][written]
