"""Mamba-2 over prompts, on a GPU: one program walks the chunks of a row, and asks for the next one's tokens ahead.

Owns the kernel. Its formula, roundings and order of sums are those of `octavo.ops.scan.mamba2.mamba2_gpu`, bit for
bit. It serves rows whose step begins at a border: their tokens are the step's own, and no table of inputs is read.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.compile.launch import end_before, launched
from octavo.ops.scan.kept import PLACES, keep
from octavo.ops.scan.mamba2.mamba2_states import read, rounded, write


@triton.jit
def asked(source, inside, ALL: tl.constexpr):
    """[places, channels]: 0 outside. ALL: everything is inside."""
    if ALL:  # a mask would take registers
        return tl.load(source)
    else:
        return tl.load(source, mask=inside[None, :], other=0.0)


@triton.jit
def results(c, b, x, state, sums, steps, skip, PRECISION: tl.constexpr):
    """[places, channels] of the tokens of a chunk, in float32."""
    here = tl.arange(0, sums.shape[0])
    is_seen = here[:, None] >= here[None, :]
    left = tl.exp(tl.where(is_seen, sums[:, None] - sums[None, :], 0.0))
    weight = left * tl.dot(c, tl.trans(b), input_precision=PRECISION) * steps[None, :]
    weight = tl.where(is_seen, weight, 0.0).to(x.dtype)
    result = tl.exp(sums)[:, None] * tl.dot(c, state, input_precision=PRECISION)
    result += tl.dot(weight, x, input_precision=PRECISION)
    result += skip * x.to(tl.float32)
    return result


@triton.jit
def behind(state, b, x, sums, steps, last, PRECISION: tl.constexpr):
    """The state behind a whole chunk whose last sum is `last`, not rounded."""
    weighted = (b.to(tl.float32) * (tl.exp(last - sums) * steps)[:, None]).to(x.dtype)
    return tl.exp(last) * state + tl.dot(tl.trans(weighted), x, input_precision=PRECISION)


@launched(triton.jit(do_not_specialize=["num_rows", *PLACES]))
def mamba2_walk(
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
    SPAN: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row behind the first `num_ahead` whose step begins at a border, one head and WIDE of its channels.

    SPAN: the CHUNK; or, where no row has more tokens, so many of it, and no row ends it.
    """
    end_before(PDL)  # the next kernel reads nothing of this one's
    row, tiles = tl.program_id(1) + tl.load(num_ahead), tl.cdiv(SIZE, WIDE)
    head, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if row >= num_rows:
        return
    token, end = tl.load(query_start + row), tl.load(seq_lens + row)
    computed = end - (tl.load(query_start + row + 1) - token)
    if (computed >= end) | (computed < 0) | (computed % CHUNK > 0):  # nothing, padding, or begun within a chunk
        return
    table_row = tl.load(rows + row)
    told = (state_kept, state_table + table_row * state_columns, state_first, head)
    of_row = (input_table + table_row * input_columns, input_first, token, computed, end, BLOCK)
    group = head // (HEADS // GROUPS)
    channel, width, places = tile * WIDE + tl.arange(0, WIDE), tl.arange(0, STATES_PADDED), tl.arange(0, SPAN)
    inside, within = channel < SIZE, width < STATES
    first_b = HEADS * SIZE + group * STATES
    bs, xs = (xbc, xbc_row, first_b, b_kept), (xbc, xbc_row, head * SIZE, x_kept)
    own_skip = tl.load(skip + head)
    in_state = within[:, None] & inside[None, :]
    kind = xbc.dtype.element_ty
    advances = SPAN == CHUNK  # else nobody reads more of the state than products take
    state, first_upper = read(
        told, computed, width, channel, in_state, STATE_FORM, SIZE, STATES, CHUNK, PARTED, kind, advances
    )

    is_first = (head % (HEADS // GROUPS) == 0) & (tile == 0)  # of those that share B
    if SPAN == CHUNK:
        # The inputs of the last two chunks, of which the last may be open: those before are kept by no table.
        begin = tl.maximum(computed, (end - 1) // CHUNK * CHUNK - CHUNK)
        while begin < end:
            at = begin + places
            is_new = ((at >= computed) & (at < end))[:, None]
            fresh = (xbc + (token + at - computed).to(tl.int64) * xbc_row)[:, None]
            x = tl.load(fresh + (head * SIZE + channel)[None, :], mask=is_new & inside[None, :], other=0.0)
            keep(xs, of_row, at, head, channel, x, is_new & inside[None, :], X_FORM, SIZE)
            if is_first:
                b = tl.load(fresh + (first_b + width)[None, :], mask=is_new & within[None, :], other=0.0)
                keep(bs, of_row, at, group, width, b, is_new & within[None, :], B_FORM, STATES)
            begin += CHUNK

    for begin in tl.range(computed, end, CHUNK, num_stages=STAGES, disable_licm=True):  # see mamba2_scan
        left = end - begin
        fresh = (token + begin - computed).to(tl.int64)
        here = tl.minimum(places, left - 1)  # of tokens that are not there nothing comes into a result
        line = xbc + fresh * xbc_row + here[:, None] * xbc_row
        c = asked(line + (first_b + GROUPS * STATES + width)[None, :], within, STATES == STATES_PADDED)
        b = asked(line + (first_b + width)[None, :], within, STATES == STATES_PADDED)
        x = asked(line + (head * SIZE + channel)[None, :], inside, SIZE % WIDE == 0)
        sums = tl.load(total + fresh * HEADS + head + here * HEADS)
        steps = tl.load(dt + fresh * HEADS + head + here * HEADS)
        last = tl.load(total + fresh * HEADS + head + tl.minimum(CHUNK - 1, left - 1) * HEADS)
        if SPAN < CHUNK:
            is_new = (places < left)[:, None]
            keep(xs, of_row, begin + places, head, channel, x, is_new & inside[None, :], X_FORM, SIZE)
            if is_first:
                keep(bs, of_row, begin + places, group, width, b, is_new & within[None, :], B_FORM, STATES)
            upper = first_upper
        else:
            upper = rounded(state, kind)
        y = results(c, b, x, upper, sums, steps, own_skip, PRECISION)
        goal = out + (fresh * HEADS + head) * SIZE + (places * (HEADS * SIZE))[:, None] + channel[None, :]
        tl.store(goal, y.to(out.dtype.element_ty), mask=(places < left)[:, None] & inside[None, :])
        if SPAN == CHUNK:
            state = behind(state, b, x, sums, steps, last, PRECISION)  # of an open chunk nobody reads it
            if left >= CHUNK:
                state, _ = write(
                    told, begin + CHUNK, state, width, channel, in_state, STATE_FORM, SIZE, STATES, CHUNK, PARTED, kind
                )
