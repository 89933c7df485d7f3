"""The gated delta rule over prompts, on a GPU: chunks made ready side by side, then walked one behind the other.

Owns two kernels. Their formula, roundings and order of sums are those of `octavo.ops.scan.delta.scan_gpu`, bit for bit:
products of the model's type take a chunk's 64 rows at once, those of T and of M the 16 of a block, for in tf32 more
rows have other bits. `delta_chunks` makes what `delta_blocks` does, a chunk a program. In `delta_walk` one has the
state of a head in registers, and asks for the next chunk's inputs ahead: it serves rows whose step begins at a border,
whose tokens are the step's own, so that it reads no table of inputs.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.compile.launch import launched
from octavo.ops.scan.delta.scan_gpu import inverse_rows
from octavo.ops.scan.kept import PLACES, keep, numbers, place, row_of, tokens


@launched(triton.jit(do_not_specialize=["num_rows", "input_columns", "input_first"]))
def delta_chunks(
    query,  # [T, KEY_HEADS, KEY_SIZE], normed; key too
    key,
    total,  # [T, HEADS] float32; rate too
    rate,
    before,  # [blocks, HEADS, 16, CHUNK], as key: M
    factor,  # the same: of o
    inverse,  # [blocks, HEADS, 16, 16] float32: T
    below,  # the same, in between
    rows,
    query_start,
    seq_lens,
    num_rows,
    input_table,
    input_columns,
    key_kept,
    total_kept,
    rate_kept,
    input_first,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_FORM: tl.constexpr,
    TOTAL_FORM: tl.constexpr,
    RATE_FORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of one chunk and one head of the keys, with those of the values that share it: the factors of o, or M and T."""
    slot, key_head, per = tl.program_id(0), tl.program_id(1), HEADS // KEY_HEADS
    row = row_of(query_start, num_rows, slot, CHUNK, 2)
    token, end = tl.load(query_start + row), tl.load(seq_lens + row)
    computed = end - (tl.load(query_start + row + 1) - token)
    begin = computed // CHUNK * CHUNK + (slot - token // CHUNK - 2 * row) * CHUNK
    if (begin >= end) | (computed < 0):
        return
    of_row = (input_table + tl.load(rows + row) * input_columns, input_first, token, computed, end, BLOCK)
    width, places = tl.arange(0, KEY_PADDED), tl.arange(0, CHUNK)
    within, at = width < KEY_SIZE, begin + places
    keys = (key, KEY_HEADS * KEY_SIZE, key_head * KEY_SIZE, key_kept)
    is_factor = tl.program_id(2) == 0
    k = tokens(keys, of_row, begin, places, key_head, width, within, KEY_FORM, KEY_SIZE)
    x = k
    if is_factor:
        is_new = (at >= computed) & (at < end)
        fresh = (token + at - computed).to(tl.int64) * KEY_HEADS + key_head
        x = tl.load(
            query + (fresh * KEY_SIZE)[:, None] + width[None, :], mask=is_new[:, None] & within[None, :], other=0.0
        )
    alike = tl.dot(x, tl.trans(k), input_precision=PRECISION)
    is_seen = (places[:, None] >= places[None, :]) & (at < end)[:, None]
    is_own = places[:, None] // 16 == places[None, :] // 16
    is_below = is_seen & is_own & (places[:, None] > places[None, :])
    known = computed // 16 * 16
    first = token // 16 + 2 * row + (begin - known) // 16  # of the chunk's blocks, where those before `known` are none
    in_chunk = (places // 16 * (HEADS * 16) + places % 16)[:, None]  # lines, of which other heads' lie between blocks
    made = (at >= known) & (begin + places // 16 * 16 < end)
    taken, goal = is_seen & (is_factor | ~is_own), factor if is_factor else before
    for own in tl.range(per, disable_licm=True, loop_unroll_factor=1):  # what moved out of it would spill
        head = key_head * per + own
        sums = numbers((total, HEADS, head, total_kept), of_row, begin, places, head, TOTAL_FORM)
        rates = numbers((rate, HEADS, head, rate_kept), of_row, begin, places, head, RATE_FORM)
        left = tl.exp(tl.where(is_seen, sums[:, None] - sums[None, :], 0.0))
        scaled = tl.where(is_factor, 1.0, rates)[:, None] * left * alike
        line = (first.to(tl.int64) * HEADS + head) * 16
        made_of = tl.where(taken, scaled, 0.0).to(factor.dtype.element_ty)
        tl.store(goal + line * CHUNK + in_chunk * CHUNK + places[None, :], made_of, mask=made[:, None])
        triangle = below + line * 16 + in_chunk * 16 + places[None, :] % 16
        tl.store(triangle, tl.where(is_below, scaled, 0.0), mask=is_own & made[:, None] & (not is_factor))
    if is_factor:
        return
    tl.debug_barrier()  # the triangles are there
    lane = tl.arange(0, LANES)
    block, triangle = lane // 16 % (CHUNK // 16), (first.to(tl.int64) * HEADS + key_head * per) * 256
    is_there = (lane < per * CHUNK) & (begin + block * 16 >= known) & (begin + block * 16 < end)
    of_lane = (block * HEADS + lane // CHUNK) * 256
    lines = inverse_rows(below + triangle + of_lane, lane % 16, is_there)
    for line in tl.static_range(16):
        tl.store(inverse + triangle + of_lane + lane % 16 + line * 16, lines[line], mask=is_there)


@triton.jit
def _state_of(told, border, is_asked, FORM: tl.constexpr, SIZE: tl.constexpr, RUNS: tl.constexpr, CHUNK: tl.constexpr):
    """(where the state of a head behind `border` tokens begins, whether it is kept)."""
    kept, table, first_part, head = told
    tl.static_assert(FORM[5] % RUNS == 0, "a head's state lies in one line")
    entry = tl.maximum(border // CHUNK - 1, 0)
    where, is_there = place(table, first_part, entry, 0, head * RUNS, is_asked, FORM, SIZE)
    return kept + where, is_there


@triton.jit
def _four(x):
    """The four blocks of 16 rows of x [64, channels]."""
    blocks = tl.permute(tl.reshape(x, (2, 2, 16, x.shape[1])), (2, 3, 0, 1))
    even, odd = tl.split(blocks)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _one(first, second, third, fourth):
    """[64, channels], of four blocks of 16 rows."""
    blocks = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(tl.permute(blocks, (2, 3, 0, 1)), (64, first.shape[1]))


@triton.jit
def _square(source, line: tl.constexpr, then: tl.constexpr, BLOCKS: tl.constexpr, ROW: tl.constexpr, left):
    """The [16, 16] of block row `line` and block column `then`; BLOCKS: from block row to block row."""
    here = tl.arange(0, 16)
    at = line * BLOCKS + here[:, None] * ROW + (then * 16 + here)[None, :]
    return tl.load(source + at, mask=(line * 16 + 0 * at) < left, other=0.0)


@triton.jit
def _updates(right, m, t, left, kind: tl.constexpr, LINES: tl.constexpr, PRECISION: tl.constexpr):
    """A chunk's updates [64, channels], in its four blocks one behind the other.

    right: [64, channels] float32, beta (v - exp(G) k S). m, t: where M and T of the first block begin, LINES of 64 or
    of 16 before the next one's. left: tokens that are there.
    """
    r0, r1, r2, r3 = _four(right)
    u0 = tl.dot(_square(t, 0, 0, LINES * 16, 16, left), r0, input_precision=PRECISION).to(kind)
    rest = tl.dot(_square(m, 1, 0, LINES * 64, 64, left), u0, input_precision=PRECISION)
    u1 = tl.dot(_square(t, 1, 0, LINES * 16, 16, left), r1 - rest, input_precision=PRECISION).to(kind)
    rest = tl.dot(_square(m, 2, 0, LINES * 64, 64, left), u0, input_precision=PRECISION)
    rest = tl.dot(_square(m, 2, 1, LINES * 64, 64, left), u1, rest, input_precision=PRECISION)
    u2 = tl.dot(_square(t, 2, 0, LINES * 16, 16, left), r2 - rest, input_precision=PRECISION).to(kind)
    rest = tl.dot(_square(m, 3, 0, LINES * 64, 64, left), u0, input_precision=PRECISION)
    rest = tl.dot(_square(m, 3, 1, LINES * 64, 64, left), u1, rest, input_precision=PRECISION)
    rest = tl.dot(_square(m, 3, 2, LINES * 64, 64, left), u2, rest, input_precision=PRECISION)
    u3 = tl.dot(_square(t, 3, 0, LINES * 16, 16, left), r3 - rest, input_precision=PRECISION).to(kind)
    return _one(u0, u1, u2, u3)


@launched(triton.jit(do_not_specialize=["num_rows", *PLACES]))
def delta_walk(
    query,  # [T, KEY_HEADS, KEY_SIZE], normed; key too
    key,
    value,  # [T, HEADS * VALUE_SIZE] within rows of qkv
    value_row,
    total,  # [T, HEADS] float32; rate too
    rate,
    before,  # [blocks, HEADS, 16, CHUNK], of `delta_blocks`; factor too
    factor,
    inverse,  # [blocks, HEADS, 16, 16] float32
    out,  # [T, HEADS, VALUE_SIZE]
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
    key_kept,
    value_kept,
    update_kept,
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
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One row behind the first `num_ahead` whose step begins at a border, one head and TILE channels of its values."""
    tl.static_assert(CHUNK == 64, "a chunk has four blocks")
    row, tiles, per = tl.program_id(1) + tl.load(num_ahead), tl.cdiv(VALUE_SIZE, TILE), HEADS // KEY_HEADS
    head, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    if row >= num_rows:
        return
    token, end = tl.load(query_start + row), tl.load(seq_lens + row)
    computed = end - (tl.load(query_start + row + 1) - token)
    if (computed >= end) | (computed < 0) | (computed % CHUNK > 0):  # nothing, padding, or begun within a chunk
        return
    table_row, key_head = tl.load(rows + row), head // per
    told = (state_kept, state_table + table_row * state_columns, state_first, head)
    of_row = (input_table + table_row * input_columns, input_first, token, computed, end, BLOCK)
    channel, width, places = tile * TILE + tl.arange(0, TILE), tl.arange(0, KEY_PADDED), tl.arange(0, CHUNK)
    inside, within = channel < VALUE_SIZE, width < KEY_SIZE
    keys, values = (key, 0, 0, key_kept), (value, 0, 0, value_kept)
    updates = (out, 0, 0, update_kept)
    kind = key.dtype.element_ty
    at_state, in_state = width[:, None] * VALUE_SIZE + channel[None, :], within[:, None] & inside[None, :]
    source, is_stored = _state_of(told, computed, computed > 0, STATE_FORM, VALUE_SIZE, KEY_SIZE, CHUNK)
    state = tl.load(source + at_state, mask=in_state & is_stored, other=0.0).to(tl.float32)

    # The inputs of the last two chunks, of which the last may be open: those before are kept by no table.
    kept_from = tl.maximum(computed, (end - 1) // CHUNK * CHUNK - CHUNK)
    for begin in range(kept_from, end, CHUNK):
        at = begin + places
        fresh = (token + at - computed).to(tl.int64)[:, None]
        mask = (at < end)[:, None] & inside[None, :]
        v = tl.load(value + fresh * value_row + (head * VALUE_SIZE + channel)[None, :], mask=mask, other=0.0)
        keep(values, of_row, at, head, channel, v, mask, VALUE_FORM, VALUE_SIZE)
        if (head % per == 0) & (tile == 0):  # of those that share the key
            of_key = (at < end)[:, None] & within[None, :]
            own_k = tl.load(key + (fresh * KEY_HEADS + key_head) * KEY_SIZE + width[None, :], mask=of_key, other=0.0)
            keep(keys, of_row, at, key_head, width, own_k, of_key, KEY_FORM, KEY_SIZE)

    first_slot = (token // 16 + 2 * row).to(tl.int64)
    for begin in tl.range(computed, end, CHUNK, num_stages=STAGES):
        left = end - begin
        fresh = (token + begin - computed).to(tl.int64)
        here = tl.minimum(places, left - 1)  # of tokens that are not there nothing comes into a result
        is_there = places < left
        at_key = (fresh * KEY_HEADS + key_head) * KEY_SIZE + here[:, None] * (KEY_HEADS * KEY_SIZE) + width[None, :]
        k = tl.load(key + at_key, mask=within[None, :], other=0.0)
        q = tl.load(query + at_key, mask=within[None, :], other=0.0)
        at_value = fresh * value_row + here[:, None] * value_row + (head * VALUE_SIZE + channel)[None, :]
        v = tl.load(value + at_value, mask=inside[None, :], other=0.0)
        sums = tl.load(total + fresh * HEADS + head + here * HEADS)
        rates = tl.load(rate + fresh * HEADS + head + here * HEADS)
        last = tl.load(total + fresh * HEADS + head + tl.minimum(CHUNK - 1, left - 1) * HEADS)
        line = ((first_slot + (begin - computed) // 16) * HEADS + head) * 16
        of_blocks = (places // 16 * (HEADS * 16) + places % 16)[:, None]  # other heads lie between two blocks
        f_at = factor + line * CHUNK + of_blocks * CHUNK + places[None, :]
        f = tl.load(f_at, mask=is_there[:, None], other=0.0)
        m, t = before + line * CHUNK, inverse + line * 16

        rounded, begun = state.to(kind), tl.exp(sums)[:, None]
        right = rates[:, None] * (v.to(tl.float32) - begun * tl.dot(k, rounded, input_precision=PRECISION))
        result = begun * tl.dot(q, rounded, input_precision=PRECISION)
        u = _updates(right, m, t, left, kind, HEADS * 16, PRECISION)
        result += tl.dot(f, u, input_precision=PRECISION)

        goal = out + (fresh * HEADS + head) * VALUE_SIZE + (places * (HEADS * VALUE_SIZE))[:, None] + channel[None, :]
        asked = is_there[:, None] & inside[None, :]
        tl.store(goal, result.to(out.dtype.element_ty), mask=asked)
        if begin >= kept_from:
            keep(updates, of_row, begin + places, head, channel, u, asked, UPDATE_FORM, VALUE_SIZE)
        weighted = (k.to(tl.float32) * tl.exp(last - sums)[:, None]).to(kind)
        state = tl.exp(last) * state + tl.dot(tl.trans(weighted), u, input_precision=PRECISION)
        goal, is_stored = _state_of(told, begin + CHUNK, left >= CHUNK, STATE_FORM, VALUE_SIZE, KEY_SIZE, CHUNK)
        kept_state = state.to(state_kept.dtype.element_ty)
        tl.store(goal + at_state, kept_state, mask=in_state & is_stored)
        state = kept_state.to(tl.float32)  # of an open chunk nobody reads it
