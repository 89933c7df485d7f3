"""The short convolution where every row has one token, on a GPU.

Owns the kernel, which finds a token's line once a program, and has read what earlier steps kept when the kernel ahead
ends. Its chain of sums is that of `octavo.ops.scan.conv_gpu`, bit for bit.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.compile.launch import begin_after, launched
from octavo.ops.scan.kept import PLACES, place


@launched(triton.jit(do_not_specialize=PLACES))
def decode_convolution(
    x,
    x_row,
    weight,  # [WIDTH, CHANNELS]
    bias,
    out,  # [T, CHANNELS]
    rows,
    query_start,
    seq_lens,
    state_table,
    state_columns,
    input_table,
    input_columns,
    state_kept,
    input_kept,
    state_first,
    input_first,
    CHANNELS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    STATE_FORM: tl.constexpr,
    INPUT_FORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    PDL: tl.constexpr,
):
    """The one token of a row, and TILE channels. A token's channels lie in one line."""
    row = tl.program_id(1)
    token, at = tl.load(query_start + row).to(tl.int64), tl.load(seq_lens + row) - 1
    is_own = (tl.load(query_start + row + 1) > token) & (at >= 0)
    table_row = tl.load(rows + row)
    states, inputs = state_table + table_row * state_columns, input_table + table_row * input_columns
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = channel < CHANNELS
    border, nothing = at // CHUNK * CHUNK, tl.zeros((TILE,), x.dtype.element_ty)
    sum = tl.zeros((TILE,), tl.float32)
    if HAS_BIAS:
        sum += tl.load(bias + channel, mask=inside, other=0.0)
    last_weight = tl.load(weight + (WIDTH - 1) * CHANNELS + channel, mask=inside, other=0.0)
    is_border = is_own & ((at + 1) % CHUNK == 0)
    next, is_stored = place(inputs, input_first, at // BLOCK, at % BLOCK, 0, is_own, INPUT_FORM, CHANNELS)
    for j in tl.static_range(WIDTH - 1):
        position = at - (WIDTH - 1) + j
        is_open = is_own & (position >= border)
        where, _ = place(inputs, input_first, position // BLOCK, position % BLOCK, 0, is_open, INPUT_FORM, CHANNELS)
        value = nothing + tl.load(input_kept + where + channel, mask=is_open & inside, other=0.0)
        is_before = is_own & (position < border) & (border > 0)
        run = tl.maximum(position - border + WIDTH - 1, 0)
        where, _ = place(states, state_first, border // CHUNK - 1, 0, run, is_before, STATE_FORM, CHANNELS)
        value += tl.load(state_kept + where + channel, mask=is_before & inside, other=0.0)
        sum += value.to(tl.float32) * tl.load(weight + j * CHANNELS + channel, mask=inside, other=0.0)
    begin_after(PDL)
    value = tl.load(x + token * x_row + channel, mask=is_own & inside, other=0.0) + nothing
    sum += value.to(tl.float32) * last_weight
    if is_border:  # the inputs that the next token sees, which begins a chunk, are the state
        tl.static_assert(WIDTH <= CHUNK, "they are all of this chunk")
        entry = (at + 1) // CHUNK - 1
        for j in tl.static_range(1, WIDTH - 1):
            position = at - (WIDTH - 1) + j
            where, _ = place(inputs, input_first, position // BLOCK, position % BLOCK, 0, True, INPUT_FORM, CHANNELS)
            seen = tl.load(input_kept + where + channel, mask=inside, other=0.0) + nothing
            where, is_there = place(states, state_first, entry, 0, j - 1, True, STATE_FORM, CHANNELS)
            tl.store(state_kept + where + channel, seen, mask=is_there & inside)
        where, is_there = place(states, state_first, entry, 0, WIDTH - 2, True, STATE_FORM, CHANNELS)
        tl.store(state_kept + where + channel, value, mask=is_there & inside)
    if SILU:
        sum = sum / (1.0 + tl.exp(-sum))
    tl.store(out + token * CHANNELS + channel, sum.to(out.dtype.element_ty), mask=is_own & inside)
    tl.store(input_kept + next + channel, value, mask=is_stored & inside)
