"""Mamba-1 over the open chunk, on a GPU: one kernel for prefill, decode and verification.

Invariant: the recurrence is the order: places of the open chunk are computed again, from the state at the border on.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.compile.launch import launched
from octavo.ops.compile.row_sum import row_sums
from octavo.ops.scan.gates_gpu import softplus
from octavo.ops.scan.kept import PLACES, place


@triton.jit
def _brought(fresh, stride, kept, of_row, position, channel, inside, FORM: tl.constexpr):
    """[channels]: what the token at `position` brought, of the step or kept."""
    table, first_part, token, computed, _, block = of_row
    is_old = inside & (position < computed)
    at = (token + position - computed).to(tl.int64) * stride
    new = tl.load(fresh + at + channel, mask=inside & (position >= computed), other=0.0).to(tl.float32)
    where, _ = place(table, first_part, position // block, position % block, channel, is_old, FORM, 1)
    return tl.where(is_old, tl.load(kept + where, mask=is_old, other=0.0).to(tl.float32), new)


@triton.jit
def _keep(kept, of_row, position, channel, values, inside, FORM: tl.constexpr):
    """Write values [channels] of the token at `position`, as far as the table keeps them."""
    table, first_part, _, computed, _, block = of_row
    asked = inside & (position >= computed)
    where, is_there = place(table, first_part, position // block, position % block, channel, asked, FORM, 1)
    tl.store(kept + where, values.to(kept.dtype.element_ty), mask=is_there)


@launched(triton.jit(do_not_specialize=PLACES))
def mamba1_scan(
    x,  # [T, CHANNELS]; dt too
    dt,
    b,  # [T, STATES]; c too
    c,
    x_row,
    dt_row,
    b_row,
    c_row,
    decay,  # [STATES, CHANNELS]
    dt_bias,
    skip,
    out,  # [T, CHANNELS]
    rows,
    query_start,
    seq_lens,
    state_table,
    state_columns,
    input_table,
    input_columns,
    state_kept,
    x_kept,
    dt_kept,
    b_kept,
    state_first,
    input_first,
    CHANNELS: tl.constexpr,
    STATES: tl.constexpr,
    PADDED: tl.constexpr,
    LEVELS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    STATE_FORM: tl.constexpr,
    X_FORM: tl.constexpr,
    DT_FORM: tl.constexpr,
    B_FORM: tl.constexpr,
):
    """One row of the step and TILE channels."""
    row = tl.program_id(1)
    token, end = tl.load(query_start + row), tl.load(seq_lens + row)
    computed = end - (tl.load(query_start + row + 1) - token)
    if (computed >= end) | (computed < 0):
        return
    table_row = tl.load(rows + row)
    states = state_table + table_row * state_columns
    of_row = (input_table + table_row * input_columns, input_first, token, computed, end, BLOCK)
    channel, place_of = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, PADDED)
    inside, within = channel < CHANNELS, place_of < STATES
    both = within[:, None] & inside[None, :]
    runs = place_of[:, None] * CHANNELS + channel[None, :]
    rate = tl.load(decay + runs, mask=both, other=0.0)
    bias, factor = tl.load(dt_bias + channel, mask=inside), tl.load(skip + channel, mask=inside)
    border = computed // CHUNK * CHUNK
    where, is_there = place(states, state_first, border // CHUNK - 1, 0, runs, both & (border > 0), STATE_FORM, 1)
    state = tl.load(state_kept + where, mask=is_there, other=0.0).to(tl.float32)
    for position in range(border, end):
        value = _brought(x, x_row, x_kept, of_row, position, channel, inside, X_FORM)
        step = _brought(dt, dt_row, dt_kept, of_row, position, channel, inside, DT_FORM)
        step = tl.where(position < computed, step, softplus(step + bias))
        own_b = _brought(b, b_row, b_kept, of_row, position, place_of, within, B_FORM)
        _keep(x_kept, of_row, position, channel, value, inside, X_FORM)
        _keep(dt_kept, of_row, position, channel, step, inside, DT_FORM)
        _keep(b_kept, of_row, position, place_of, own_b, within & (tl.program_id(0) == 0), B_FORM)
        state = tl.exp(step[None, :] * rate) * state + (step * value)[None, :] * own_b[:, None]
        if position >= computed:
            at = (token + position - computed).to(tl.int64)
            own_c = tl.load(c + at * c_row + place_of, mask=within, other=0.0).to(tl.float32)
            result = row_sums(tl.trans(state * own_c[:, None]), LEVELS) + factor * value
            tl.store(out + at * CHANNELS + channel, result.to(out.dtype.element_ty), mask=inside)
        if (position + 1) % CHUNK == 0:
            state = state.to(state_kept.dtype.element_ty).to(tl.float32)
            goal, is_there = place(states, state_first, position // CHUNK, 0, runs, both, STATE_FORM, 1)
            tl.store(state_kept + goal, state.to(state_kept.dtype.element_ty), mask=is_there)
