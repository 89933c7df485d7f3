"""The gated delta rule over the open chunk, on a GPU: prefill, decode and verification are one kernel.

Owns the kernel and its order: within a chunk tokens are taken in blocks of 16, from the chunk's begin. Of a block b,
with S the state at the border, G the summed logarithms of what is left, and r its right-hand side,

    r = beta (v - exp(G) k S) - sum over blocks c before it of (beta exp(G - G_c) k k_c') u_c
    u = (I + tril(beta exp(G - G') k k', -1))^-1 r
    o = exp(G) q S + sum over blocks c up to it of (exp(G - G_c) q k_c') u_c

so that a row of a block needs the rows up to it alone: a decoded token computes its block again from what is kept, and
reads u of the blocks before. The state is read once, and written at a chunk's end. Products are of the model's type
with float32 sums, but for the inverse, which is float32 (tf32 for 16-bit models). Invariants: a block's products are of
one shape, whatever the step has of it; rows beyond the step's end change none before them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.compile.launch import launched
from octavo.ops.scan.kept import keep, numbers, state_at, tokens


@triton.jit
def unit_inverse(below):
    """(I + below)^-1 of a strictly lower triangle [16, 16] float32: column after column, by exact selections."""
    place = tl.arange(0, 16)
    inverse = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
    for i in range(15):
        column = tl.sum(tl.where(place[None, :] == i, below, 0.0), 1)
        row = tl.sum(tl.where(place[:, None] == i, inverse, 0.0), 0)
        inverse -= column[:, None] * row[None, :]
    return inverse


@launched(triton.jit)
def delta_scan(
    query,  # [T, KEY_HEADS, KEY_SIZE], normed; key too
    key,
    value,  # [T, HEADS * VALUE_SIZE] within rows of qkv
    value_row,
    total,  # [T, HEADS] float32; rate too
    rate,
    update,  # [T, HEADS, VALUE_SIZE]: written and read again
    out,  # [T, HEADS, VALUE_SIZE]
    rows,
    query_start,
    seq_lens,
    state_table,
    state_columns,
    input_table,
    input_columns,
    state_kept,
    key_kept,
    value_kept,
    update_kept,
    total_kept,
    rate_kept,
    state_first,
    input_first,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    STATE_FORM: tl.constexpr,
    KEY_FORM: tl.constexpr,
    VALUE_FORM: tl.constexpr,
    UPDATE_FORM: tl.constexpr,
    TOTAL_FORM: tl.constexpr,
    RATE_FORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One row of the step, one head, TILE channels of the values."""
    row, tiles = tl.program_id(1), tl.cdiv(VALUE_SIZE, TILE)
    head = tl.program_id(0) // tiles
    token, end = tl.load(query_start + row), tl.load(seq_lens + row)
    computed = end - (tl.load(query_start + row + 1) - token)
    if (computed >= end) | (computed < 0):  # nothing, or a row of padding
        return
    table_row = tl.load(rows + row)
    states = state_table + table_row * state_columns
    of_row = (input_table + table_row * input_columns, input_first, token, computed, end, BLOCK)
    key_head = head // (HEADS // KEY_HEADS)
    keeps_key = (tl.program_id(0) % tiles == 0) & (head % (HEADS // KEY_HEADS) == 0)  # the first of those that share it
    channel = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    inside = channel < VALUE_SIZE
    width, here = tl.arange(0, KEY_PADDED), tl.arange(0, 16)
    within = width < KEY_SIZE
    keys = (key, KEY_HEADS * KEY_SIZE, key_head * KEY_SIZE, key_kept)
    values = (value, value_row, head * VALUE_SIZE, value_kept)
    updates = (update, HEADS * VALUE_SIZE, head * VALUE_SIZE, update_kept)
    totals, rates = (total, HEADS, head, total_kept), (rate, HEADS, head, rate_kept)
    kind = key.dtype.element_ty
    runs = head * KEY_SIZE + width
    border = computed // CHUNK * CHUNK
    source, is_there = state_at(
        state_kept, states, state_first, border, runs, channel, within, inside, STATE_FORM, VALUE_SIZE, CHUNK
    )
    state = tl.load(source, mask=is_there, other=0.0).to(tl.float32)
    for begin in range(computed // 16 * 16, end, 16):
        at = begin + here
        k = tokens(keys, of_row, at, key_head, width, within, KEY_FORM, KEY_SIZE)
        v = tokens(values, of_row, at, head, channel, inside, VALUE_FORM, VALUE_SIZE)
        own = numbers(totals, of_row, at, head, TOTAL_FORM)
        beta = numbers(rates, of_row, at, head, RATE_FORM)[:, None]
        is_new = (at >= computed) & (at < end)
        fresh = (token + at - computed).to(tl.int64)
        asked = query + ((fresh * KEY_HEADS + key_head) * KEY_SIZE)[:, None] + width[None, :]
        q = tl.load(asked, mask=is_new[:, None] & within[None, :], other=0.0)
        rounded = state.to(kind)
        begun = tl.exp(own)[:, None]
        right = beta * (v.to(tl.float32) - begun * tl.dot(k, rounded, input_precision=PRECISION))
        result = begun * tl.dot(q, rounded, input_precision=PRECISION)
        for before in range(begin // CHUNK * CHUNK, begin, 16):
            k_then = tokens(keys, of_row, before + here, key_head, width, within, KEY_FORM, KEY_SIZE)
            u_then = tokens(updates, of_row, before + here, head, channel, inside, UPDATE_FORM, VALUE_SIZE)
            left = tl.exp(own[:, None] - numbers(totals, of_row, before + here, head, TOTAL_FORM)[None, :])
            factor = beta * left * tl.dot(k, tl.trans(k_then), input_precision=PRECISION)
            right -= tl.dot(factor.to(kind), u_then, input_precision=PRECISION)
            factor = left * tl.dot(q, tl.trans(k_then), input_precision=PRECISION)
            result += tl.dot(factor.to(kind), u_then, input_precision=PRECISION)
        is_before, is_seen = here[:, None] > here[None, :], here[:, None] >= here[None, :]
        left = tl.exp(tl.where(is_seen, own[:, None] - own[None, :], 0.0))
        right = tl.where((at < end)[:, None], right, 0.0)
        below = beta * left * tl.dot(k, tl.trans(k), input_precision=PRECISION)
        inverse = unit_inverse(tl.where(is_before, below, 0.0))
        u = tl.dot(inverse, right, input_precision="ieee" if PRECISION == "ieee" else "tf32").to(kind)
        factor = tl.where(is_seen, left * tl.dot(q, tl.trans(k), input_precision=PRECISION), 0.0)
        result += tl.dot(factor.to(kind), u, input_precision=PRECISION)
        mask = is_new[:, None] & inside[None, :]
        target = ((fresh * HEADS + head) * VALUE_SIZE)[:, None] + channel[None, :]
        tl.store(out + target, result.to(out.dtype.element_ty), mask=mask)
        tl.store(update + target, u, mask=mask)
        keep(values, of_row, at, head, channel, v, mask, VALUE_FORM, VALUE_SIZE)
        keep(updates, of_row, at, head, channel, u, mask, UPDATE_FORM, VALUE_SIZE)
        keep(keys, of_row, at, key_head, width, k, is_new[:, None] & within[None, :] & keeps_key, KEY_FORM, KEY_SIZE)
        tl.debug_barrier()  # all threads read what each wrote
        after = begin + 16
        if (after % CHUNK == 0) & (after <= end):
            last = tl.sum(tl.where(here == 15, own, 0.0), 0)
            state = tl.exp(last) * state
            for before in range(after - CHUNK, after, 16):
                k_then = tokens(keys, of_row, before + here, key_head, width, within, KEY_FORM, KEY_SIZE)
                u_then = tokens(updates, of_row, before + here, head, channel, inside, UPDATE_FORM, VALUE_SIZE)
                rest = tl.exp(last - numbers(totals, of_row, before + here, head, TOTAL_FORM))
                weighted = (k_then.to(tl.float32) * rest[:, None]).to(kind)
                state += tl.dot(tl.trans(weighted), u_then, input_precision=PRECISION)
            state = state.to(state_kept.dtype.element_ty).to(tl.float32)
            goal, is_there = state_at(
                state_kept, states, state_first, after, runs, channel, within, inside, STATE_FORM, VALUE_SIZE, CHUNK
            )
            tl.store(goal, state.to(state_kept.dtype.element_ty), mask=is_there)
