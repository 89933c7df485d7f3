"""Batch inputs on the GPU: one kernel gathers a step's inputs from the persistent rows, one commits what was sampled.

Owns the kernels. Knows rows, lengths and slots, not requests. Invariant: a kernel reads lengths on the device only; the
host passes which rows run and where their queries begin. Their reference implementation is `octavo.ops.inputs`.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.ops.compile.launch import begin_after, chained, launched
from octavo.ops.inputs.tensors import GroupTables, RowTensors, StepInputs

_BLOCK = 256  # tokens or table columns that a program handles at once
_COLUMNS = 4096  # table columns of a row per program
_ENTRIES, _RUNS = 128, 32  # batch entries per program of `commit` and of `commit_runs`
_MAX_TILES = 64  # programs per row


@triton.jit
def _int32(address):
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def _int64(address):
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def _pad(groups, input_ids, positions, begin, num_tokens, tile, NUM_GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """Tokens from `begin` on belong to no row."""
    base = begin + tile * BLOCK
    while base < num_tokens:
        at = base + tl.arange(0, BLOCK)
        tl.store(input_ids + at, tl.zeros((BLOCK,), tl.int64), mask=at < num_tokens)
        tl.store(positions + at, tl.zeros((BLOCK,), tl.int64), mask=at < num_tokens)
        for group in tl.static_range(NUM_GROUPS):
            slots = _int64(tl.load(groups + group * 7 + 4))
            tl.store(slots + at, tl.full((BLOCK,), -1, tl.int64), mask=at < num_tokens)
        base += tl.num_programs(1) * BLOCK


@launched(triton.jit(do_not_specialize=["num_rows", "num_tokens"]))
def _gather(
    rows, query_start, token_ids, num_computed, input_ids, positions, seq_lens, next_positions, turn, groups, width,
    num_rows, num_tokens, NUM_GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_after(PDL)
    entry, tile = tl.program_id(0), tl.program_id(1)
    begin = tl.load(query_start + entry)
    if entry == num_rows:
        if tile == 0:
            tl.store(turn, tl.load(turn) ^ 1)
        _pad(groups, input_ids, positions, begin, num_tokens, tile, NUM_GROUPS, BLOCK)
    else:
        count = tl.load(query_start + entry + 1) - begin
        row = tl.load(rows + entry)
        computed = tl.load(num_computed + row)
        length = tl.where(count > 0, computed + count, 0)
        if tile == 0:
            tl.store(seq_lens + entry, length)
            tl.store(next_positions + entry, length.to(tl.int64))
        step = tl.num_programs(1) * BLOCK
        base = tile * BLOCK
        while base < count:
            at = base + tl.arange(0, BLOCK)
            mask = at < count
            position = computed + at
            token = tl.load(token_ids + row * width + position, mask=mask, other=0)
            tl.store(input_ids + begin + at, token.to(tl.int64), mask=mask)
            tl.store(positions + begin + at, position.to(tl.int64), mask=mask)
            for group in tl.static_range(NUM_GROUPS):
                facts = groups + group * 7
                table = _int32(tl.load(facts)) + row * tl.load(facts + 1)
                slots, block_size = _int64(tl.load(facts + 4)), tl.load(facts + 5).to(tl.int32)
                block = tl.load(table + position // block_size, mask=mask, other=0).to(tl.int64)
                tl.store(slots + begin + at, block * block_size + position % block_size, mask=mask)
            base += step
        for group in tl.static_range(NUM_GROUPS):
            facts = groups + group * 7
            table = _int32(tl.load(facts)) + row * tl.load(facts + 1)
            out = _int32(tl.load(facts + 2)) + entry.to(tl.int64) * tl.load(facts + 3)
            block_size, columns = tl.load(facts + 5).to(tl.int32), tl.load(facts + 6).to(tl.int32)
            live = tl.where(count > 0, (length + block_size - 1) // block_size, columns)  # padding: zero them all
            base = tile * BLOCK
            while base < live:
                at = base + tl.arange(0, BLOCK)
                ids = tl.load(table + at, mask=(at < live) & (count > 0), other=0)
                tl.store(out + at, ids, mask=at < live)
                base += step


def gather(step: StepInputs, table: RowTensors, groups: GroupTables) -> None:
    """See `ops.inputs.gather_inputs`."""
    num_rows = step.seq_lens.shape[0]
    tiles = max(triton.cdiv(step.max_query_len, _BLOCK), triton.cdiv(groups.max_columns, _COLUMNS))
    _gather[(num_rows + 1, min(tiles, _MAX_TILES))](
        step.rows, step.query_start, table.token_ids, table.num_computed, step.input_ids, step.positions, step.seq_lens,
        step.next_positions, step.turn, groups.addresses, table.token_ids.shape[1], num_rows, step.input_ids.shape[0],
        NUM_GROUPS=len(groups.tables), BLOCK=_BLOCK, num_warps=2, **chained(step.rows.device),
    )  # fmt: skip


@launched(triton.jit(do_not_specialize=["num_rows"]))
def _commit(
    rows, seq_lens, sample_of, sampled, failed, token_ids, total_len, num_computed, turn, results, width, max_num_rows,
    results_width, num_rows, AGAIN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What the forward pass does not write is read before the kernel ahead is done, see `octavo.ops.compile.launch`."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < num_rows
    length = tl.load(seq_lens + entry, mask=inside, other=0)
    live = inside & (length > 0)
    row = tl.load(rows + entry, mask=inside, other=0)
    sample = tl.load(sample_of + entry, mask=inside, other=-1)
    total = tl.load(total_len + row, mask=inside, other=0)
    slot = tl.load(turn) * max_num_rows + sample
    begin_after(PDL)
    tl.store(num_computed + row, length, mask=live)
    inside = live & (sample >= 0)
    token = tl.load(sampled + sample, mask=inside, other=0)
    reason = tl.load(failed + sample, mask=inside, other=0).to(tl.int64)
    tl.store(results + slot * results_width, token | (reason << 32), mask=inside)
    if AGAIN:
        total -= 1
    else:
        tl.store(total_len + row, total + 1, mask=inside)
    tl.store(token_ids + row * width + total, token.to(tl.int32), mask=inside & (total < width))


def commit(
    step: StepInputs,
    table: RowTensors,
    sample_of: torch.Tensor,
    sampled: torch.Tensor,
    failed: torch.Tensor,
    *,
    again: bool = False,
) -> None:
    """See `ops.inputs.commit_tokens`."""
    num_rows = step.seq_lens.shape[0]
    _commit[(triton.cdiv(num_rows, _ENTRIES),)](
        step.rows, step.seq_lens, sample_of, sampled, failed, table.token_ids, table.total_len, table.num_computed,
        step.turn, step.results, table.token_ids.shape[1], step.results.shape[1],
        step.results.shape[2], num_rows, AGAIN=again, BLOCK=_ENTRIES, num_warps=4,
        **chained(sampled.device),
    )  # fmt: skip


@launched(triton.jit(do_not_specialize=["num_rows", "held"]))
def _commit_runs(
    rows, seq_lens, sample_of, num_drafts, sampled, failed, token_ids, total_len, num_computed, turn, results, counts,
    width, max_num_rows, held, num_rows, WIDTH: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """All but what was drawn is read before the kernel ahead is done, as in `_commit`; all places of a run at once."""
    entry, place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PLACES)[None, :]
    inside = entry < num_rows
    length = tl.load(seq_lens + entry, mask=inside, other=0)
    live = inside & (length > 0)
    row = tl.load(rows + entry, mask=inside, other=0)
    first = tl.load(sample_of + entry, mask=inside, other=-1)
    samples = live & (first >= 0)
    drafts = tl.load(num_drafts + entry, mask=samples, other=0)
    total = tl.load(total_len + row, mask=samples, other=0)
    line = tl.load(turn) * max_num_rows + entry
    is_draft, at = place < drafts[:, None], total[:, None] + place
    of_row = token_ids + row[:, None] * width
    draft = tl.load(of_row + at, mask=samples[:, None] & is_draft & (at < width), other=-1)
    begin_after(PDL)
    tl.store(num_computed + row, length, mask=live & (first < 0))
    sample, used = first[:, None] + tl.minimum(place, drafts[:, None]), samples[:, None] & (place < WIDTH)
    token = tl.load(sampled + sample, mask=used, other=0)
    reason = tl.load(failed + sample, mask=used, other=0).to(tl.int64)
    agrees = is_draft & (draft.to(tl.int64) == token) & (reason == 0)
    accepted = tl.min(tl.where(agrees, PLACES, place), 1)
    reason = tl.where(place <= accepted[:, None], reason, 0)
    tl.store(results + line[:, None] * WIDTH + place, token | (reason << 32), mask=used)
    is_last = place == accepted[:, None]
    last, last_reason = tl.sum(tl.where(is_last, token, 0), 1), tl.sum(tl.where(is_last, reason, 0), 1)
    count = accepted + (last_reason != held).to(tl.int32)
    tl.store(counts + line, count.to(tl.int64), mask=samples)
    tl.store(num_computed + row, length - (1 + drafts - count), mask=samples)
    tl.store(total_len + row, total + count, mask=samples)
    new = total + accepted
    tl.store(token_ids + row * width + new, last.to(tl.int32), mask=samples & (count > accepted) & (new < width))


def commit_runs(
    step: StepInputs,
    table: RowTensors,
    sample_of: torch.Tensor,
    num_drafts: torch.Tensor,
    sampled: torch.Tensor,
    failed: torch.Tensor,
    held: int,
) -> None:
    """See `ops.inputs.commit_drafts`."""
    num_rows, width = step.seq_lens.shape[0], step.results.shape[2]
    _commit_runs[(triton.cdiv(num_rows, _RUNS),)](
        step.rows, step.seq_lens, sample_of, num_drafts, sampled, failed, table.token_ids, table.total_len,
        table.num_computed, step.turn, step.results, step.counts, table.token_ids.shape[1], step.results.shape[1], held,
        num_rows, WIDTH=width, PLACES=triton.next_power_of_2(width), BLOCK=_RUNS, num_warps=4,
        **chained(sampled.device),
    )  # fmt: skip
