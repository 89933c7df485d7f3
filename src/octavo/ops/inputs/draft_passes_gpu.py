"""A drafter's passes laid out on the GPU by one kernel. Its reference implementation is `ops.inputs.draft_passes`.

Owns the kernel. Invariant: it reads lengths on the device only.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.ops.compile.launch import begin_after, chained, launched
from octavo.ops.inputs.tensors import GroupTables, PassTensors, RowTensors, StepInputs

_BLOCK = 256  # tokens or table columns that a program handles at once
_COLUMNS = 4096  # table columns of a row per program
_MAX_TILES = 64  # programs per row
_MOST_PASSES = 32  # side by side


@triton.jit
def _int32(address):
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def _lay_out_row(
    entry, row, known, total, own, query_start, sample_of, num_computed, last, tokens, pass_positions, pass_next,
    pass_lens, slots, groups, max_model_len, most_rows, num_tokens, num_passes,
    NUM_GROUPS: tl.constexpr, PASSES: tl.constexpr,
):  # fmt: skip
    """All that a row has one of for each pass; the tokens of the longest of them."""
    begin, end = tl.load(query_start + entry), tl.load(query_start + entry + 1)
    place = tl.minimum(tl.maximum(end - 1 - (known - tl.load(num_computed + row)), begin), num_tokens - 1)
    tl.store(last + entry, place.to(tl.int64))
    number = tl.arange(0, PASSES)
    there = number < num_passes
    at = total - 2 + number
    live = (tl.load(sample_of + entry) >= 0) & (known > 0) & (at >= 0) & (at < max_model_len) & there
    at = tl.where(live, at, 0)
    first = tl.sum(tl.where(number == 1, at, 0), 0)
    tl.store(tokens + entry, tl.load(own + first).to(tl.int64))
    out = number * most_rows + entry
    tl.store(pass_positions + out, at.to(tl.int64), mask=there)
    tl.store(pass_next + out, at.to(tl.int64) + 1, mask=there)
    tl.store(pass_lens + out, at + 1, mask=there)
    for group in tl.static_range(NUM_GROUPS):
        facts = groups + group * 7
        table = _int32(tl.load(facts)) + row * tl.load(facts + 1)
        block_size = tl.load(facts + 5).to(tl.int32)
        block = tl.load(table + at // block_size, mask=there, other=0).to(tl.int64)
        slot = tl.where(live & (number > 0), block * block_size + at % block_size, -1)
        tl.store(slots + group * num_passes * most_rows + out, slot, mask=there)


@launched(triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_passes"]))
def _lay_out(
    rows, query_start, seq_lens, sample_of, positions, token_ids, total_len, num_computed, last, tokens, behind,
    pass_positions, pass_next, pass_lens, slots, groups, width, max_model_len, most_rows, num_rows, num_tokens,
    num_passes, NUM_GROUPS: tl.constexpr, PASSES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (entry, tile) of a row; behind the last entry the tokens of none."""
    begin_after(PDL)
    entry, tile = tl.program_id(0), tl.program_id(1)
    begin = tl.load(query_start + entry)
    stride = tl.num_programs(1) * BLOCK
    base = begin + tile * BLOCK
    if entry == num_rows:
        while base < num_tokens:
            at = base + tl.arange(0, BLOCK)
            tl.store(behind + at, tl.zeros((BLOCK,), tl.int64), mask=at < num_tokens)
            base += stride
    else:
        end = tl.load(query_start + entry + 1)
        row, known = tl.load(rows + entry), tl.load(seq_lens + entry)
        total, own = tl.load(total_len + row), token_ids + row * width
        while base < end:
            at = base + tl.arange(0, BLOCK)
            position = tl.load(positions + at, mask=at < end, other=0)
            token = tl.load(own + tl.minimum(position + 1, width - 1), mask=at < end, other=0)
            tl.store(behind + at, token.to(tl.int64), mask=at < end)
            base += stride
        if tile == 0:
            _lay_out_row(
                entry, row, known, total, own, query_start, sample_of, num_computed, last, tokens, pass_positions,
                pass_next, pass_lens, slots, groups, max_model_len, most_rows, num_tokens, num_passes, NUM_GROUPS,
                PASSES,
            )  # fmt: skip
        samples = (tl.load(sample_of + entry) >= 0) & (known > 0)
        longest = tl.where(samples, tl.minimum(tl.maximum(total - 2 + num_passes, 1), max_model_len), 1)
        for group in tl.static_range(NUM_GROUPS):
            facts = groups + group * 7
            table = _int32(tl.load(facts)) + row * tl.load(facts + 1)
            out = _int32(tl.load(facts + 2)) + entry.to(tl.int64) * tl.load(facts + 3)
            block_size = tl.load(facts + 5).to(tl.int32)
            columns = (longest + block_size - 1) // block_size
            base = tile * BLOCK
            while base < columns:
                at = base + tl.arange(0, BLOCK)
                tl.store(out + at, tl.load(table + at, mask=at < columns, other=0), mask=at < columns)
                base += stride


def lay_out(
    step: StepInputs,
    table: RowTensors,
    sample_of: torch.Tensor,
    groups: GroupTables,
    passes: PassTensors,
    max_model_len: int,
) -> None:
    """See `ops.inputs.draft_passes.lay_out_passes`."""
    num_rows, num_passes = step.seq_lens.shape[0], passes.positions.shape[0]
    assert num_passes <= _MOST_PASSES, "more passes than a row may have"
    tiles = max(triton.cdiv(step.max_query_len, _BLOCK), triton.cdiv(groups.max_columns, _COLUMNS))
    _lay_out[(num_rows + 1, min(tiles, _MAX_TILES))](
        step.rows, step.query_start, step.seq_lens, sample_of, step.positions, table.token_ids, table.total_len,
        table.num_computed, passes.last, passes.tokens, passes.behind, passes.positions, passes.next_positions,
        passes.seq_lens, passes.slots, groups.addresses, table.token_ids.shape[1], max_model_len,
        passes.positions.shape[1], num_rows, step.input_ids.shape[0], num_passes, NUM_GROUPS=len(groups.tables),
        PASSES=_MOST_PASSES, BLOCK=_BLOCK, num_warps=2, **chained(step.rows.device),
    )  # fmt: skip
