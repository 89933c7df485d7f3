"""The short convolution, on a GPU: a kernel for decode and short steps, and one for prompts.

Owns both. Invariant: a sum is a chain from the bias and the oldest token on, so a token's bits are its own and rows may
change from one to the other. What a prompt costs is its bytes: it asks tables where a row or a chunk ends alone.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment, var-annotated"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.compile.launch import launched
from octavo.ops.scan.kept import PLACES, place, row_of


@triton.jit
def _brought(
    told,
    position,
    channel,
    asked,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    STATE_FORM: tl.constexpr,
    INPUT_FORM: tl.constexpr,
):
    """What tokens before the step's brought, where `asked`, else 0: of the open chunk, or the state at its border.

    told: (the row's table of states, the layer's first part, what is kept; of inputs the same; the border).
    """
    states, state_first, state_kept, inputs, input_first, input_kept, border = told
    is_open = asked & (position >= border)
    where, _ = place(inputs, input_first, position // BLOCK, position % BLOCK, channel, is_open, INPUT_FORM, 1)
    value = tl.load(input_kept + where, mask=is_open, other=0.0)
    is_before = asked & (position < border) & (border > 0)
    run = (position - border + WIDTH - 1) * CHANNELS + channel
    where, _ = place(states, state_first, border // CHUNK - 1, 0, run, is_before, STATE_FORM, 1)
    return value + tl.load(state_kept + where, mask=is_before, other=0.0)


@triton.jit
def _activated(sum, SILU: tl.constexpr):
    """What becomes of sums, not rounded."""
    if SILU:
        sum = sum / (1.0 + tl.exp(-sum))
    return sum


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
    told = (states, state_first, state_kept, inputs, input_first, input_kept, border)
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
        is_old = is_own & (position < computed)
        value += _brought(told, position, channel, is_old, CHANNELS, WIDTH, CHUNK, BLOCK, STATE_FORM, INPUT_FORM)
        sum += value.to(tl.float32) * tl.load(weight + j * CHANNELS + channel, mask=inside, other=0.0)
        if j > 0:  # where the next token begins a chunk, the inputs that it sees are the state
            is_border = is_own & ((at + 1) % CHUNK == 0)
            run = (j - 1) * CHANNELS + channel
            where, is_there = place(states, state_first, (at + 1) // CHUNK - 1, 0, run, is_border, STATE_FORM, 1)
            tl.store(state_kept + where, value, mask=is_there)
    sum = _activated(sum, SILU)
    tl.store(out + token.to(tl.int64) * CHANNELS + channel, sum.to(out.dtype.element_ty), mask=is_own)
    where, is_there = place(inputs, input_first, at // BLOCK, at % BLOCK, channel, is_own, INPUT_FORM, 1)
    tl.store(input_kept + where, value, mask=is_there)


@launched(triton.jit(do_not_specialize=["num_rows", *PLACES]))
def convolve_prompts(
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
    """TOKENS of one row, from a multiple of it on, and TILE channels. TOKENS divides CHUNK."""
    tl.static_assert(CHUNK % TOKENS == 0, "a chunk ends where a program does")
    slot = tl.program_id(1)
    row = row_of(query_start, num_rows, slot, TOKENS, 2)
    first, end = tl.load(query_start + row), tl.load(seq_lens + row)
    computed = end - (tl.load(query_start + row + 1) - first)
    begin = (computed // TOKENS + slot - first // TOKENS - 2 * row) * TOKENS
    if (begin >= end) | (computed < 0):  # nothing, or a row of padding
        return
    table_row = tl.load(rows + row)
    states, inputs = state_table + table_row * state_columns, input_table + table_row * input_columns
    told = (states, state_first, state_kept, inputs, input_first, input_kept, computed // CHUNK * CHUNK)
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = channel < CHANNELS
    behind = begin + TOKENS
    last = tl.minimum(behind, end)
    line = x + (first + begin - computed).to(tl.int64) * x_row + channel  # of the token at `begin`
    goal = out + (first + begin - computed).to(tl.int64) * CHANNELS + channel
    weights = ()
    for j in tl.static_range(WIDTH):
        weights += (tl.load(weight + j * CHANNELS + channel, mask=inside, other=0.0),)
    start = tl.zeros((TILE,), tl.float32)
    if HAS_BIAS:
        start += tl.load(bias + channel, mask=inside, other=0.0)
    alone = computed + WIDTH - 1  # from there on a token's window is the step's own
    if alone < last:
        values = ()
        for i in tl.static_range(1 - WIDTH, TOKENS):  # all are on their way at once
            is_own = (begin + i >= computed) & (begin + i < end)
            values += (tl.load(line + i * x_row, mask=inside & is_own, other=0.0),)
        for i in tl.static_range(TOKENS):
            sum = start
            for j in tl.static_range(WIDTH):
                sum += values[i + j].to(tl.float32) * weights[j]
            is_alone = (begin + i >= alone) & (begin + i < end)
            tl.store(goal + i * CHANNELS, _activated(sum, SILU).to(out.dtype.element_ty), mask=inside & is_alone)

    for at in range(tl.maximum(begin, computed), tl.minimum(last, alone)):
        total = start
        for j in tl.static_range(WIDTH):
            seen = at - (WIDTH - 1) + j
            own = tl.load(line + (seen - begin) * x_row, mask=inside & (seen >= computed), other=0.0)
            is_old = inside & (seen < computed)
            own += _brought(told, seen, channel, is_old, CHANNELS, WIDTH, CHUNK, BLOCK, STATE_FORM, INPUT_FORM)
            total += own.to(tl.float32) * weights[j]
        tl.store(goal + (at - begin) * CHANNELS, _activated(total, SILU).to(out.dtype.element_ty), mask=inside)
    if begin >= (end - 1) // CHUNK * CHUNK - CHUNK:  # chunks before are kept by no table
        if INPUT_FORM[4] == 1:  # what a token brings is one line
            for at in range(begin, last, 8):
                goals = ()
                for i in tl.static_range(8):  # all entries are asked for at once
                    is_own = (at + i >= computed) & (at + i < last)
                    goals += (
                        place(inputs, input_first, (at + i) // BLOCK, (at + i) % BLOCK, 0, is_own, INPUT_FORM, 1),
                    )
                for i in tl.static_range(8):
                    where, is_there = goals[i]
                    value = tl.load(line + (at + i - begin) * x_row, mask=inside & is_there, other=0.0)
                    tl.store(input_kept + where + channel, value, mask=inside & is_there)
        else:
            for at in range(tl.maximum(begin, computed), last):
                brought = tl.load(line + (at - begin) * x_row, mask=inside, other=0.0)
                at_channels, are_there = place(
                    inputs, input_first, at // BLOCK, at % BLOCK, channel, inside, INPUT_FORM, 1
                )
                tl.store(input_kept + at_channels, brought, mask=are_there)
    if (behind % CHUNK == 0) & (behind <= end):  # the inputs that the next token sees are the state
        for j in tl.static_range(WIDTH - 1):
            past = behind - (WIDTH - 1) + j
            new = tl.load(line + (past - begin) * x_row, mask=inside & (past >= computed), other=0.0)
            is_past = inside & (past < computed)
            new += _brought(told, past, channel, is_past, CHANNELS, WIDTH, CHUNK, BLOCK, STATE_FORM, INPUT_FORM)
            run = j * CHANNELS + channel
            there, is_asked = place(states, state_first, behind // CHUNK - 1, 0, run, inside, STATE_FORM, 1)
            tl.store(state_kept + there, new, mask=is_asked)
