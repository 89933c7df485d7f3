"""The gated delta rule where every row decodes one token, on a GPU: all that needs no state, then the states' stream.

Owns two kernels. Their formula, roundings and order of sums are those of `octavo.ops.scan.delta.scan_gpu`, bit for bit:
`delta_ready` makes a row's query and key, gates, M, one row of T and one row of the factors of o; `delta_decode` reads
states, of which the next one is on its way while one is used, and the updates of the chunk's tokens before, as kept.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment, var-annotated, unreachable"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.compile.launch import begin_after, end_before, launched, wait_before
from octavo.ops.compile.row_sum import row_sums
from octavo.ops.scan.delta.scan_gpu import inverse_rows
from octavo.ops.scan.gates_gpu import softplus
from octavo.ops.scan.kept import PLACES, place


@triton.jit
def _kept(of_row, position, asked, kept, FORM: tl.constexpr, WIDTH: tl.constexpr):
    """(addresses of what the tokens at `position` brought for run 0, whether the table keeps it)."""
    table, first_part, block = of_row
    tl.static_assert(FORM[4] == 1, "what a token brings is one line")
    where, is_there = place(table, first_part, position // block, position % block, 0, asked, FORM, WIDTH)
    return kept + where, is_there


@triton.jit
def _one_over_norm(x, LEVELS: tl.constexpr):
    """[1], of x [PADDED] float32."""
    return tl.div_rn(1.0, tl.sqrt_rn(row_sums(tl.reshape(x * x, (1, x.shape[0])), LEVELS) + 1e-6))


@triton.jit
def _inverse_row(below, column, is_there, asked):
    """Row `asked` of what `inverse_rows` gives."""
    lines = inverse_rows(below, column, is_there)
    found = lines[0]
    for line in tl.static_range(1, 16):
        found = tl.where(asked == line, lines[line], found)
    return found


@launched(triton.jit(do_not_specialize=["input_columns", "input_first"]))
def delta_ready(
    qkv,
    qkv_row,
    a,
    a_row,
    b,
    b_row,
    decay,
    dt_bias,
    scale,
    query,  # [rows, KEY_HEADS, KEY_SIZE], normed; key too
    key,
    before,  # [rows, HEADS, 16, CHUNK], as key: M
    factor,  # [rows, HEADS, CHUNK], the same: of o
    factors,  # [rows, HEADS, 3, 16] float32: exp(G), beta, T's row of the token
    below,  # [rows, HEADS, 16, 16] float32, in between
    rows,
    query_start,
    seq_lens,
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
    LEVELS: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_FORM: tl.constexpr,
    TOTAL_FORM: tl.constexpr,
    RATE_FORM: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row and one head of the keys, with those of the values that share it."""
    begin_after(PDL)
    row, key_head = tl.program_id(1), tl.program_id(0)
    per: tl.constexpr = HEADS // KEY_HEADS
    token, end = tl.load(query_start + row).to(tl.int64), tl.load(seq_lens + row)
    table_row = tl.load(rows + row)
    if tl.load(query_start + row + 1) != token + 1:  # a row of padding, or another kernel's
        return
    of_row = (input_table + table_row * input_columns, input_first, BLOCK)
    last = end - 1
    border, begin = last // CHUNK * CHUNK, last // 16 * 16
    width, here, place_of = tl.arange(0, KEY_PADDED), tl.arange(0, 16), tl.arange(0, CHUNK)
    within = width < KEY_SIZE
    at, then = begin + here, border + place_of
    kind = key.dtype.element_ty

    brought = (row * KEY_HEADS + key_head) * KEY_SIZE
    k_at, _ = _kept(of_row, at, at < last, key_kept + key_head * KEY_SIZE, KEY_FORM, KEY_SIZE)
    then_at, _ = _kept(of_row, then, then < last, key_kept + key_head * KEY_SIZE, KEY_FORM, KEY_SIZE)
    total_at, _ = _kept(of_row, at, at < last, total_kept, TOTAL_FORM, 1)
    then_total_at, _ = _kept(of_row, then, then < last, total_kept, TOTAL_FORM, 1)
    rate_at, _ = _kept(of_row, at, at < last, rate_kept, RATE_FORM, 1)
    above_at, _ = _kept(of_row, last - 1, last > border, total_kept, TOTAL_FORM, 1)
    of_heads = ()
    for own in tl.static_range(per):  # all is asked for before anything is waited for
        head = key_head * per + own
        sum = tl.load(above_at + head, mask=last > border, other=0.0)
        x, rate = tl.load(a + token * a_row + head), tl.load(b + token * b_row + head)
        sums = tl.load(total_at + head, mask=at < last, other=0.0)
        sums_then = tl.load(then_total_at + head, mask=then < last, other=0.0)
        beta = tl.load(rate_at + head, mask=at < last, other=0.0)
        of_head = (sum, x, tl.load(dt_bias + head), tl.load(decay + head), rate, sums, sums_then, beta)
        of_heads = of_heads + (of_head,)  # noqa: RUF005 - Triton knows no stars
    source = qkv + token * qkv_row + key_head * KEY_SIZE + width
    own_q = tl.load(source, mask=within, other=0.0).to(tl.float32)
    own_k = tl.load(source + KEY_HEADS * KEY_SIZE, mask=within, other=0.0).to(tl.float32)
    own_q = (own_q * (_one_over_norm(own_q, LEVELS) * scale)).to(kind)
    own_k = (own_k * _one_over_norm(own_k, LEVELS)).to(kind)
    tl.store(query + brought + width, own_q, mask=within)
    tl.store(key + brought + width, own_k, mask=within)
    tl.debug_barrier()  # both are there
    goal, is_there = _kept(of_row, last, True, key_kept + key_head * KEY_SIZE, KEY_FORM, KEY_SIZE)
    tl.store(goal + width, own_k.to(key_kept.dtype.element_ty), mask=within & is_there)

    k_at = tl.where(at < last, k_at, key + brought)[:, None] + width[None, :]
    k = tl.load(k_at, mask=(at < end)[:, None] & within[None, :], other=0.0)
    then_at = tl.where(then < last, then_at, key + brought)[None, :] + width[:, None]
    k_then = tl.load(then_at, mask=(then < end)[None, :] & within[:, None], other=0.0)
    alike = tl.dot(k, k_then, input_precision=PRECISION)
    q = tl.load(query + brought + width[None, :] + 0 * here[:, None], mask=within[None, :], other=0.0)
    asked = tl.dot(q, k_then, input_precision=PRECISION)  # 16 equal rows
    is_own, is_m = (then >= begin) & (then < begin + 16), (at < end)[:, None] & (then < begin)[None, :]
    is_below = (at < end)[:, None] & is_own[None, :] & (at[:, None] > then[None, :])
    total_goal, has_place = _kept(of_row, last, True, total_kept, TOTAL_FORM, 1)
    rate_goal, _ = _kept(of_row, last, True, rate_kept, RATE_FORM, 1)
    first = row.to(tl.int64) * HEADS + key_head * per
    for own in tl.static_range(per):
        head, line = key_head * per + own, first + own
        sum, x, bias, decayed, rate, sums, sums_then, beta = of_heads[own]
        sum += decayed * softplus(x.to(tl.float32) + bias)
        rate = 1.0 / (1.0 + tl.exp(-rate.to(tl.float32)))
        tl.store(total_goal + head, sum, mask=has_place)
        tl.store(rate_goal + head, rate, mask=has_place)
        sums, sums_then = tl.where(at == last, sum, sums), tl.where(then == last, sum, sums_then)
        beta = tl.where(at == last, rate, beta)
        left = tl.exp(tl.where(is_m | is_below, sums[:, None] - sums_then[None, :], 0.0))
        scaled = beta[:, None] * left * alike
        m = tl.where(is_m, scaled, 0.0).to(before.dtype.element_ty)
        tl.store(before + line * 16 * CHUNK + here[:, None] * CHUNK + place_of[None, :], m)
        triangle = below + line * 256 + here[:, None] * 16 + (then - begin)[None, :]
        tl.store(triangle, tl.where(is_below, scaled, 0.0), mask=is_own[None, :] & (here >= 0)[:, None])
        left = tl.exp(tl.where(then < end, sum - sums_then, 0.0))
        f = tl.where((then < end)[None, :], left[None, :] * asked, 0.0).to(factor.dtype.element_ty)
        tl.store(factor + line * CHUNK + place_of[None, :] + 0 * here[:, None], f, mask=(here == 0)[:, None])
        tl.store(factors + line * 48 + here, tl.exp(sums))
        tl.store(factors + line * 48 + 16 + here, beta)
    tl.debug_barrier()  # the triangles are there
    lane = tl.arange(0, LANES)
    is_there = lane < 16 * per
    found = _inverse_row(below + (first + lane // 16) * 256, lane % 16, is_there, last - begin)
    tl.store(factors + (first + lane // 16) * 48 + 32 + lane % 16, found, mask=is_there)


@triton.jit
def _state_of(
    kept, table, first_part, entry, item, tiles, FORM: tl.constexpr, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr
):
    """Where the state of a head begins."""
    tl.static_assert(FORM[5] % KEY_SIZE == 0, "a head's state lies in one line")
    where, _ = place(table, first_part, entry, 0, item // tiles * KEY_SIZE, True, FORM, VALUE_SIZE)
    return kept + where


@launched(triton.jit(do_not_specialize=PLACES))
def delta_decode(
    query,  # of `delta_ready`, as the next four
    key,
    before,
    factor,
    factors,
    value,  # [T, HEADS * VALUE_SIZE] within rows of qkv
    value_row,
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
    PDL: tl.constexpr,
):
    """One row, and as many tiles of TILE channels, of heads of one key, as share the launch's programs evenly."""
    end_before(PDL)
    row, tiles = tl.program_id(1), tl.cdiv(VALUE_SIZE, TILE)
    part = HEADS * tiles // tl.num_programs(0)
    first = tl.program_id(0) * part
    token, end = tl.load(query_start + row).to(tl.int64), tl.load(seq_lens + row)
    is_row = tl.load(query_start + row + 1) == token + 1  # else it is of padding, or another kernel's
    end, table_row = tl.where(is_row, end, 1), tl.where(is_row, tl.load(rows + row), 0)
    states = state_table + table_row * state_columns
    of_row = (input_table + table_row * input_columns, input_first, BLOCK)
    last = end - 1
    border, begin = last // CHUNK * CHUNK, last // 16 * 16
    width, here, place_of = tl.arange(0, KEY_PADDED), tl.arange(0, 16), tl.arange(0, CHUNK)
    within, wide = width < KEY_SIZE, tl.arange(0, TILE)
    entry, is_open = tl.maximum(border // CHUNK - 1, 0), is_row & (border > 0)
    at_state = width[:, None] * VALUE_SIZE + wide[None, :]
    wait_before(PDL)
    if not is_row:
        return
    at, then, key_head = begin + here, border + place_of, first // tiles // (HEADS // KEY_HEADS)
    is_old, was = at < last, then < last
    brought = (row * KEY_HEADS + key_head) * KEY_SIZE
    k_at, _ = _kept(of_row, at, is_old, key_kept + key_head * KEY_SIZE, KEY_FORM, KEY_SIZE)
    k_at = tl.where(is_old, k_at, key + brought)
    k = tl.load(k_at[:, None] + width[None, :], mask=(at < end)[:, None] & within[None, :], other=0.0)
    q_at = query + brought + width[None, :] + 0 * here[:, None]
    q = tl.load(q_at, mask=within[None, :], other=0.0)  # 16 equal rows
    v_at, _ = _kept(of_row, at, is_old, value_kept, VALUE_FORM, VALUE_SIZE)
    v_at = tl.where(is_old, v_at, value + token * value_row)
    u_at, _ = _kept(of_row, then, was, update_kept, UPDATE_FORM, VALUE_SIZE)
    value_goal, has_place = _kept(of_row, last, True, value_kept, VALUE_FORM, VALUE_SIZE)
    update_goal, _ = _kept(of_row, last, True, update_kept, UPDATE_FORM, VALUE_SIZE)
    kind = key.dtype.element_ty
    for item in tl.range(first, first + part, num_stages=STAGES):
        head, channel = item // tiles, item % tiles * TILE + wide
        inside = channel < VALUE_SIZE
        source = _state_of(state_kept, states, state_first, entry, item, tiles, STATE_FORM, KEY_SIZE, VALUE_SIZE)
        mask = within[:, None] & inside[None, :] & is_open
        state = tl.load(source + item % tiles * TILE + at_state, mask=mask, other=0.0)
        rounded = state.to(tl.float32).to(kind)
        of_head = head * VALUE_SIZE + channel
        v = tl.load(v_at[:, None] + of_head[None, :], mask=(at < end)[:, None] & inside[None, :], other=0.0)
        u = tl.load(u_at[:, None] + of_head[None, :], mask=was[:, None] & inside[None, :], other=0.0).to(kind)
        line = row.to(tl.int64) * HEADS + head
        m = tl.load(before + line * 16 * CHUNK + here[:, None] * CHUNK + place_of[None, :])
        f = tl.load(factor + line * CHUNK + place_of[None, :] + 0 * here[:, None])  # 16 equal rows, and so of t
        begun = tl.load(factors + line * 48 + here)
        own_begun = tl.load(factors + line * 48 + last - begin)
        beta = tl.load(factors + line * 48 + 16 + here)
        t = tl.load(factors + line * 48 + 32 + here[None, :] + 0 * here[:, None])
        asked = tl.dot(q, rounded, input_precision=PRECISION)
        right = beta[:, None] * (v.to(tl.float32) - begun[:, None] * tl.dot(k, rounded, input_precision=PRECISION))
        right = tl.where((at < end)[:, None], right, 0.0)
        rest = right - tl.dot(m, u, input_precision=PRECISION)  # of the token's own block m is 0
        own_u = tl.dot(t, rest, input_precision=PRECISION).to(kind)
        updates = tl.reshape(tl.broadcast_to(own_u[None, :, :], (CHUNK // 16, 16, TILE)), (CHUNK, TILE))
        updates = tl.where((then == last)[:, None], updates, u)
        result = own_begun * asked
        result += tl.dot(f, updates, input_precision=PRECISION)
        one = (here == 0)[:, None] & inside[None, :]
        to = of_head[None, :] + 0 * here[:, None]
        tl.store(out + token * (HEADS * VALUE_SIZE) + to, result.to(out.dtype.element_ty), mask=one)
        tl.store(update_goal + to, own_u.to(update_kept.dtype.element_ty), mask=one & has_place)
        own_v = tl.load(value + token * value_row + of_head, mask=inside, other=0.0)
        tl.store(value_goal + of_head, own_v.to(value_kept.dtype.element_ty), mask=inside & has_place)
