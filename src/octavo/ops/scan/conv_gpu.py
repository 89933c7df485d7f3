"""The short convolution, on a GPU: one kernel for prefill, decode and verification.

Invariant: a sum is a chain from the bias and the oldest token on, so a token's bits are its own.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.compile.launch import launched
from octavo.ops.scan.kept import PLACES, place, row_of


@launched(triton.jit(do_not_specialize=["num_rows", *PLACES]))
def short_convolution(
    x,
    x_row,
    weight,  # [WIDTH, CHANNELS]
    bias,
    out,  # [T, CHANNELS]
    rows,
    query_start,
    seq_lens,
    num_rows,
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
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    STATE_FORM: tl.constexpr,
    INPUT_FORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """TOKENS of the step, whatever rows they are of, and TILE channels. TOKENS 1: every row has one."""
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)[:, None]
    row = token if TOKENS == 1 else row_of(query_start, num_rows, token, 1, 0)
    first, behind = tl.load(query_start + row), tl.load(query_start + row + 1)
    end = tl.load(seq_lens + row)
    computed = end - (behind - first)
    table_row = tl.load(rows + row)
    states, inputs = state_table + table_row * state_columns, input_table + table_row * input_columns
    channel = (tl.program_id(0) * TILE + tl.arange(0, TILE))[None, :]
    inside = channel < CHANNELS
    border = computed // CHUNK * CHUNK
    at = computed + token - first
    is_own = (token < behind) & (computed >= 0) & inside
    sum = tl.zeros((TOKENS, TILE), tl.float32)
    if HAS_BIAS:
        sum += tl.load(bias + channel, mask=inside, other=0.0)
    value = tl.zeros((TOKENS, TILE), x.dtype.element_ty)
    for j in tl.static_range(WIDTH):
        position = at - (WIDTH - 1) + j
        fresh = (first + position - computed).to(tl.int64) * x_row
        value = tl.load(x + fresh + channel, mask=is_own & (position >= computed), other=0.0)
        is_open = is_own & (position < computed) & (position >= border)
        where, _ = place(inputs, input_first, position // BLOCK, position % BLOCK, channel, is_open, INPUT_FORM, 1)
        value += tl.load(input_kept + where, mask=is_open, other=0.0)
        is_before = is_own & (position < border) & (border > 0)
        run = (position - border + WIDTH - 1) * CHANNELS + channel
        where, _ = place(states, state_first, border // CHUNK - 1, 0, run, is_before, STATE_FORM, 1)
        value += tl.load(state_kept + where, mask=is_before, other=0.0)
        sum += value.to(tl.float32) * tl.load(weight + j * CHANNELS + channel, mask=inside, other=0.0)
        if j > 0:  # where the next token begins a chunk, the inputs that it sees are the state
            is_border = is_own & ((at + 1) % CHUNK == 0)
            run = (j - 1) * CHANNELS + channel
            where, is_there = place(states, state_first, (at + 1) // CHUNK - 1, 0, run, is_border, STATE_FORM, 1)
            tl.store(state_kept + where, value, mask=is_there)
    if SILU:
        sum = sum / (1.0 + tl.exp(-sum))
    tl.store(out + token.to(tl.int64) * CHANNELS + channel, sum.to(out.dtype.element_ty), mask=is_own)
    where, is_there = place(inputs, input_first, at // BLOCK, at % BLOCK, channel, is_own, INPUT_FORM, 1)
    tl.store(input_kept + where, value, mask=is_there)
