"""On a GPU, ahead of a scan: how fast a state is forgotten, summed within chunks; and q and k of norm 1.

Owns two kernels. Invariant: a sum is a chain from the chunk's begin, so it does not depend on where a step begins.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment, unreachable"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.compile.launch import launched
from octavo.ops.compile.row_sum import row_sums
from octavo.ops.scan.kept import place, row_of


@triton.jit
def softplus(x):
    """log(1 + e^x); see octavo.ops.scan.softplus."""
    y = tl.exp(-tl.abs(x))
    s = y / (y + 2.0)
    square = s * s
    p = square * (1.0 / 17.0) + (1.0 / 15.0)
    p = p * square + (1.0 / 13.0)
    p = p * square + (1.0 / 11.0)
    p = p * square + (1.0 / 9.0)
    p = p * square + (1.0 / 7.0)
    p = p * square + (1.0 / 5.0)
    p = p * square + (1.0 / 3.0)
    return tl.maximum(x, 0.0) + (p * square + 1.0) * (s + s)


@launched(triton.jit(do_not_specialize=["num_rows", "input_columns", "first_part"]))
def scan_gates(
    a,  # [T, H]: a of the delta rule, dt of Mamba-2
    b,  # [T, H]: b of the delta rule
    a_row,
    b_row,
    decay,
    dt_bias,
    total,  # [T, H] float32: the summed logarithms of what is left
    second,  # [T, H] float32: the rate of the delta rule, dt of Mamba-2
    rows,
    query_start,
    seq_lens,
    num_rows,
    input_table,
    input_columns,
    total_kept,
    second_kept,
    first_part,
    dt_min,
    dt_max,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TOTAL_FORM: tl.constexpr,
    SECOND_FORM: tl.constexpr,
    DELTA: tl.constexpr,
    ONE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """One row's chunk of the step, and TILE heads; AHEAD tokens are asked for at once. ONE: every row has one token."""
    slot = tl.program_id(0)
    row = slot if ONE else row_of(query_start, num_rows, slot, CHUNK, 2)
    token, end = tl.load(query_start + row), tl.load(seq_lens + row)
    computed = end - (tl.load(query_start + row + 1) - token)
    border = computed // CHUNK * CHUNK
    if not ONE:
        border += (slot - token // CHUNK - 2 * row) * CHUNK
    if (border >= end) | (computed < 0):
        return
    table = input_table + tl.load(rows + row) * input_columns
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = head < HEADS
    rate, bias = tl.load(decay + head, mask=inside), tl.load(dt_bias + head, mask=inside)
    first = tl.maximum(border, computed)
    last = tl.minimum(border + CHUNK, end)
    before = first - 1
    is_open = (head < HEADS) & (first > border)
    where, _ = place(table, first_part, before // BLOCK, before % BLOCK, head, is_open, TOTAL_FORM, 1)
    sum = tl.load(total_kept + where, mask=is_open, other=0.0)
    is_last = border >= (end - 1) // CHUNK * CHUNK - CHUNK  # chunks before are kept by no table
    for begin in range(first, last, AHEAD):
        given, rates = (), ()
        for i in tl.static_range(AHEAD):  # all are on their way at once
            at = (token + begin + i - computed).to(tl.int64)
            is_here = inside & (begin + i < last)
            given += (tl.load(a + at * a_row + head, mask=is_here, other=0.0),)
            if DELTA:
                rates += (tl.load(b + at * b_row + head, mask=is_here, other=0.0),)
        for i in tl.static_range(AHEAD):
            position = begin + i
            is_here = inside & (position < last)
            x = softplus(given[i].to(tl.float32) + bias)
            if DELTA:
                sum += rate * x
                x = 1.0 / (1.0 + tl.exp(-rates[i].to(tl.float32)))
            else:
                x = tl.minimum(tl.maximum(x, dt_min), dt_max)
                sum += x * rate
            at = (token + position - computed).to(tl.int64)
            tl.store(total + at * HEADS + head, sum, mask=is_here)
            tl.store(second + at * HEADS + head, x, mask=is_here)
            if is_last:
                entry, offset = position // BLOCK, position % BLOCK
                where, is_there = place(table, first_part, entry, offset, head, is_here, TOTAL_FORM, 1)
                tl.store(total_kept + where, sum, mask=is_there)
                goal, is_asked = place(table, first_part, entry, offset, head, is_here, SECOND_FORM, 1)
                tl.store(second_kept + goal, x, mask=is_asked)


@launched(triton.jit(do_not_specialize=["count"]))
def normalize_keys(
    qkv,
    qkv_row,
    query,  # [T, heads, SIZE], as qkv
    key,
    scale,
    count,  # T * heads
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    LEVELS: tl.constexpr,
    LINES: tl.constexpr,
):
    """q and k of LINES heads, one behind the other, of a token's first and so on."""
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    channel = tl.arange(0, PADDED)
    inside = (line < count)[:, None] & (channel < SIZE)[None, :]
    token, head = (line // HEADS).to(tl.int64), line % HEADS
    source = qkv + (token * qkv_row + head * SIZE)[:, None] + channel[None, :]
    q = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(source + HEADS * SIZE, mask=inside, other=0.0).to(tl.float32)
    q *= (tl.div_rn(1.0, tl.sqrt_rn(row_sums(q * q, LEVELS) + 1e-6)) * scale)[:, None]
    k *= tl.div_rn(1.0, tl.sqrt_rn(row_sums(k * k, LEVELS) + 1e-6))[:, None]
    at = line.to(tl.int64)[:, None] * SIZE + channel[None, :]
    tl.store(query + at, q.to(query.dtype.element_ty), mask=inside)
    tl.store(key + at, k.to(key.dtype.element_ty), mask=inside)
