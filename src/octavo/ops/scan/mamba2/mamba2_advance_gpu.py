"""Mamba-2's states behind chunks that decoding ended, on a GPU: one launch behind all layers of a step.

Owns the kernel. Its formula, roundings and order of sums are those of `octavo.ops.scan.mamba2.mamba2_gpu`, bit for
bit. A task is EACH heads of a row that share B: where the chunk's tokens lie is found once for them, and the next
head's state and tokens are on their way while one is computed.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.compile.launch import begin_after, launched
from octavo.ops.scan.kept import PLACES, block_of, place
from octavo.ops.scan.mamba2.mamba2_states import read_in, write_in


@triton.jit
def _begins(of_row, position, kept, FORM: tl.constexpr, WIDTH: tl.constexpr):
    """Where what the tokens at `position` brought for run 0 begins."""
    table, first_part, block = of_row
    tl.static_assert(FORM[4] == 1, "what a token brings is one line")
    where, _ = place(table, first_part, position // block, position % block, 0, position >= 0, FORM, WIDTH)
    return kept + where


@triton.jit
def _blocks(states, first, head, entry, is_old, FORM: tl.constexpr, STATES: tl.constexpr):
    """The blocks of a head's states ahead of a chunk, 0 if there is none, and behind it."""
    old = block_of(states, first, tl.maximum(entry - 1, 0), 0, head * STATES, is_old, FORM)
    return old, block_of(states, first, entry, 0, head * STATES, True, FORM)


@launched(triton.jit(do_not_specialize=["num_rows", "num_layers", "state_next", "input_next", *PLACES]))
def mamba2_advance(
    rows,
    query_start,
    seq_lens,
    num_rows,
    num_layers,
    state_next,  # parts from a layer's to the next one's
    input_next,
    state_table,
    state_columns,
    input_table,
    input_columns,
    state_kept,
    x_kept,
    b_kept,
    total_kept,
    dt_kept,
    state_first,
    input_first,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    STATES: tl.constexpr,
    STATES_PADDED: tl.constexpr,
    WIDE: tl.constexpr,
    EACH: tl.constexpr,
    ROWS_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    STATE_FORM: tl.constexpr,
    X_FORM: tl.constexpr,
    B_FORM: tl.constexpr,
    TOTAL_FORM: tl.constexpr,
    DT_FORM: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of rows of one token, behind all layers: where that ends a chunk, the states behind it.

    The heads of all such rows, EACH at a time and in tiles, are dealt to the programs in turn: mostly there are none.
    No task reads what another writes.
    """
    each, tiles = tl.arange(0, ROWS_PADDED), tl.cdiv(SIZE, WIDE)
    is_row = each < num_rows
    ends = tl.load(seq_lens + each, mask=is_row, other=1)
    begun = tl.load(query_start + each, mask=is_row, other=0)
    is_full = (ends % CHUNK == 0) & (tl.load(query_start + each + 1, mask=is_row, other=0) == begun + 1)
    rank = tl.where(is_full, tl.cumsum(is_full.to(tl.int32), 0), 0)  # of those, from 1 on
    of_row = HEADS // EACH * tiles
    of_layer = tl.sum(is_full.to(tl.int32), 0) * of_row
    count = of_layer * num_layers
    begin_after(PDL)
    width, here = tl.arange(0, STATES_PADDED), tl.arange(0, CHUNK)
    within = width < STATES
    for task in range(tl.program_id(0), count, tl.num_programs(0)):
        layer, own = task // of_layer, task % of_layer
        row = tl.sum(tl.where(rank == own // of_row + 1, each, 0), 0)
        end, part, table_row = tl.load(seq_lens + row), own % of_row, tl.load(rows + row)
        states, first_state = state_table + table_row * state_columns, state_first + layer * state_next
        inputs = (input_table + table_row * input_columns, input_first + layer * input_next, BLOCK)
        first, channel = part // tiles * EACH, part % tiles * WIDE + tl.arange(0, WIDE)
        group, inside, at = first // (HEADS // GROUPS), channel < SIZE, end - CHUNK + here
        in_state = within[:, None] & inside[None, :]
        b_at = _begins(inputs, at, b_kept, B_FORM, STATES) + group * STATES
        b = tl.load(b_at[:, None] + width[None, :], mask=within[None, :], other=0.0)
        x_at = _begins(inputs, at, x_kept, X_FORM, SIZE)[:, None] + channel[None, :]
        total_at, dt_at = _begins(inputs, at, total_kept, TOTAL_FORM, 1), _begins(inputs, at, dt_kept, DT_FORM, 1)
        last_at = _begins(inputs, end - 1, total_kept, TOTAL_FORM, 1)
        entry, is_old = end // CHUNK - 1, end > CHUNK
        old, new = _blocks(states, first_state, first, entry, is_old, STATE_FORM, STATES)
        for head in tl.range(first, first + EACH, num_stages=STAGES, disable_licm=True):
            told = (state_kept, first_state, head)
            state = read_in(told, old, width, channel, in_state, STATE_FORM, SIZE, STATES, PARTED)
            x = tl.load(x_at + head * SIZE, mask=inside[None, :], other=0.0)
            sums, steps, last = tl.load(total_at + head), tl.load(dt_at + head), tl.load(last_at + head)
            goal, next = new, tl.minimum(head + 1, first + EACH - 1)
            old, new = _blocks(states, first_state, next, entry, is_old, STATE_FORM, STATES)  # on their way meanwhile
            weighted = (b.to(tl.float32) * (tl.exp(last - sums) * steps)[:, None]).to(x.dtype)
            state = tl.exp(last) * state + tl.dot(tl.trans(weighted), x, input_precision=PRECISION)
            write_in(told, goal, state, width, channel, in_state, STATE_FORM, SIZE, STATES, PARTED)
