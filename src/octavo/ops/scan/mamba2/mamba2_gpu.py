"""Mamba-2 over the open chunk, on a GPU: prefill and verification are one kernel; for decoding see `mamba2_decode_gpu`.

Owns the kernels and their order. Of a token t of a chunk, with S the state at the border and G the summed logarithms of
what is left,

    y = exp(G_t) C_t S + sum over i up to t of (exp(G_t - G_i) (C_t . B_i) dt_i) x_i + skip x_t

where the sum over i is one product over all places of the chunk, those behind t being 0. The state is read once, and
written at a chunk's end. Products are of the model's type with float32 sums. Invariant: a row of a product has the same
bits in a tile of any height, so a decoded token is a tile of few rows, and a prompt's are of many. Where every row
decodes one token `mamba2_advance_gpu` writes states, behind the kernel: with that it would take twice the registers.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.compile.launch import launched, wait_before
from octavo.ops.scan.kept import PLACES, keep, numbers, tokens
from octavo.ops.scan.mamba2.mamba2_states import read, write


@triton.jit
def attend(
    fixed,
    asked,
    own,
    at,
    sums,
    steps,
    b,
    x,
    state,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the results of the step's tokens at positions `own`, of the chunk at positions `at`."""
    total, skip, out, token, computed, end, head, channel, inside, width, within = fixed
    xbc, xbc_row, first_c, first_x = asked
    is_own = (own >= computed) & (own < end) & (own // CHUNK == tl.min(at, 0) // CHUNK)
    fresh = (token + own - computed).to(tl.int64)
    mask = is_own[:, None] & inside[None, :]
    c = tl.load(
        xbc + (fresh * xbc_row + first_c)[:, None] + width[None, :], mask=is_own[:, None] & within[None, :], other=0.0
    )
    own_sum = tl.load(total + fresh * HEADS + head, mask=is_own, other=0.0)
    is_seen = own[:, None] >= at[None, :]
    left = tl.exp(tl.where(is_seen, own_sum[:, None] - sums[None, :], 0.0))
    weight = left * tl.dot(c, tl.trans(b), input_precision=PRECISION) * steps[None, :]
    weight = tl.where(is_seen, weight, 0.0).to(x.dtype)
    result = tl.exp(own_sum)[:, None] * tl.dot(c, state, input_precision=PRECISION)
    result += tl.dot(weight, x, input_precision=PRECISION)
    own_x = tl.load(xbc + (fresh * xbc_row + first_x)[:, None] + channel[None, :], mask=mask, other=0.0)
    result += tl.load(skip + head) * own_x.to(tl.float32)
    target = ((fresh * HEADS + head) * SIZE)[:, None] + channel[None, :]
    tl.store(out + target, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def advanced(state, b, x, sums, steps, PRECISION: tl.constexpr):
    """The state behind a whole chunk, not rounded."""
    place = tl.arange(0, sums.shape[0])
    last = tl.sum(tl.where(place == sums.shape[0] - 1, sums, 0.0), 0)
    weighted = (b.to(tl.float32) * (tl.exp(last - sums) * steps)[:, None]).to(x.dtype)
    return tl.exp(last) * state + tl.dot(tl.trans(weighted), x, input_precision=PRECISION)


@launched(triton.jit(do_not_specialize=["num_rows", *PLACES]))
def mamba2_scan(
    xbc,  # [T, channels of x, B and C]
    xbc_row,
    total,  # [T, HEADS] float32; dt too
    dt,
    skip,
    out,  # [T, HEADS, SIZE]
    rows,
    query_start,
    seq_lens,
    num_ahead,
    num_rows,
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
    WIDE: tl.constexpr,
    STATES: tl.constexpr,
    STATES_PADDED: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    STATE_FORM: tl.constexpr,
    X_FORM: tl.constexpr,
    B_FORM: tl.constexpr,
    TOTAL_FORM: tl.constexpr,
    DT_FORM: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTED: tl.constexpr,
    WALKED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of the step behind the first `num_ahead`, one head and WIDE of its channels; TILE tokens at a time.

    WALKED: rows that begin at a border are another kernel's, which is ahead and may still run.
    """
    row, tiles = tl.program_id(1) + tl.load(num_ahead), tl.cdiv(SIZE, WIDE)
    head, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    is_other, row = row >= num_rows, tl.minimum(row, num_rows - 1)
    token, end = tl.load(query_start + row), tl.load(seq_lens + row)
    computed = end - (tl.load(query_start + row + 1) - token)
    is_other |= (computed >= end) | (computed < 0)  # nothing, or a row of padding
    if WALKED:
        is_other |= computed % CHUNK == 0
    if (is_other == 0) | (tl.program_id(0) + tl.program_id(1) == 0):
        wait_before(PDL)
    if is_other:
        return
    table_row = tl.load(rows + row)
    states = state_table + table_row * state_columns
    of_row = (input_table + table_row * input_columns, input_first, token, computed, end, BLOCK)
    group = head // (HEADS // GROUPS)
    channel, width, here = tile * WIDE + tl.arange(0, WIDE), tl.arange(0, STATES_PADDED), tl.arange(0, TILE)
    place = tl.arange(0, CHUNK)
    inside, within = channel < SIZE, width < STATES
    first_b = HEADS * SIZE + group * STATES
    bs, xs = (xbc, xbc_row, first_b, b_kept), (xbc, xbc_row, head * SIZE, x_kept)
    totals, dts = (total, HEADS, head, total_kept), (dt, HEADS, head, dt_kept)
    kind = xbc.dtype.element_ty
    border = computed // CHUNK * CHUNK
    told, in_state = (state_kept, states, state_first, head), within[:, None] & inside[None, :]
    advances = border + CHUNK <= end  # else nobody reads more of the state than products take
    state, upper = read(told, border, width, channel, in_state, STATE_FORM, SIZE, STATES, CHUNK, PARTED, kind, advances)
    for begin in tl.range(border, end, CHUNK, disable_licm=True):  # what moved out of the loop would spill
        at = begin + place
        b = tokens(bs, of_row, begin, place, group, width, within, B_FORM, STATES)
        x = tokens(xs, of_row, begin, place, head, channel, inside, X_FORM, SIZE)
        sums = numbers(totals, of_row, begin, place, head, TOTAL_FORM)
        steps = numbers(dts, of_row, begin, place, head, DT_FORM)
        is_new = ((at >= computed) & (at < end))[:, None]
        if begin + 2 * CHUNK > end:  # chunks before are kept by no table
            keep(xs, of_row, at, head, channel, x, is_new & inside[None, :], X_FORM, SIZE)
            is_first = (head % (HEADS // GROUPS) == 0) & (tile == 0)  # of those that share B
            keep(bs, of_row, at, group, width, b, is_new & within[None, :] & is_first, B_FORM, STATES)
        fixed = (total, skip, out, token, computed, end, head, channel, inside, width, within)
        asked = (xbc, xbc_row, first_b + GROUPS * STATES, head * SIZE)
        if TILE == CHUNK:
            attend(fixed, asked, at, at, sums, steps, b, x, upper, HEADS, SIZE, CHUNK, PRECISION)
        else:
            for first in range(tl.maximum(begin, computed), tl.minimum(begin + CHUNK, end), TILE):
                attend(fixed, asked, first + here, at, sums, steps, b, x, upper, HEADS, SIZE, CHUNK, PRECISION)
        if begin + CHUNK <= end:
            state = advanced(state, b, x, sums, steps, PRECISION)
            state, upper = write(
                told, begin + CHUNK, state, width, channel, in_state, STATE_FORM, SIZE, STATES, CHUNK, PARTED, kind
            )
