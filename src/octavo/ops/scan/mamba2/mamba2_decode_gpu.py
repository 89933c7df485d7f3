"""Mamba-2 where every row decodes one token, on a GPU: a program streams the states of several heads.

Owns the kernel. Its formula, roundings and order of sums are those of `octavo.ops.scan.mamba2.mamba2_gpu`, bit for
bit, and its gates those of `octavo.ops.scan.gates_gpu`. What the heads of a group share (B, C, their product, and where
the tokens of the open chunk lie) is found once for those of a program; where it has one head, what earlier steps kept
is read before the kernel ahead ends.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import functools

import triton
import triton.language as tl

from octavo.ops.compile.launch import begin_after, launched
from octavo.ops.scan.gates_gpu import softplus
from octavo.ops.scan.kept import PLACES, place
from octavo.ops.scan.mamba2.mamba2_states import head_block, rounded, upper_in

# Heads of a step below which each has a program; what a program costs beside its heads, in heads.
_FEW_HEADS, _TURN = 2048, 1


@functools.lru_cache(maxsize=4096)
def programs_of(num_heads: int, num_rows: int, room: int, num_tiles: int = 1) -> int:
    """How many programs share the heads of a row that decodes, where `room` run at once: those that are done first.

    num_tiles: of a head's channels, each of which has such programs of its own.
    """
    if num_rows * num_heads * num_tiles < _FEW_HEADS:
        return num_heads

    def cost(programs: int) -> int:
        waves = -(-num_rows * programs * num_tiles // room)
        return waves * (-(-num_heads // programs) + _TURN)

    return min(range(num_heads, 0, -1), key=cost)


@triton.jit
def _begins(of_row, position, kept, FORM: tl.constexpr, WIDTH: tl.constexpr):
    """Where what the tokens at `position` brought for run 0 begins, of those before the last one."""
    table, first_part, last, block = of_row
    tl.static_assert(FORM[4] == 1, "what a token brings is one line")
    where, _ = place(table, first_part, position // block, position % block, 0, position < last, FORM, WIDTH)
    return kept + where


@triton.jit
def _asked(sources, head, is_later):
    """Of a head: its step of time as it is given, bias, rate, sum of gates before if the token `is_later`, skip."""
    dt, bias, decay, before, skip = sources
    old = tl.load(before + head, mask=is_later, other=0.0)
    return tl.load(dt + head), tl.load(bias + head), tl.load(decay + head), old, tl.load(skip + head)


@triton.jit
def _lines(begins, run, inside, asked, SIZE: tl.constexpr):
    """[places, padded]: run `run` of what tokens brought that is at `begins`, of those that are asked for."""
    channel = run * SIZE + tl.arange(0, inside.shape[0])
    return tl.load(begins[:, None] + channel[None, :], mask=asked[:, None] & inside[None, :], other=0.0)


@triton.jit
def _decode_heads(
    group, first, behind, tile, step, inputs, given, HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr, STATES: tl.constexpr, STATES_PADDED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    STATE_FORM: tl.constexpr, X_FORM: tl.constexpr, B_FORM: tl.constexpr, TOTAL_FORM: tl.constexpr,
    DT_FORM: tl.constexpr, PRECISION: tl.constexpr, PARTED: tl.constexpr, STAGES: tl.constexpr, ONE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Of the program's heads, `first` up to `behind`, those of a group.

    Where the row's tokens lie is asked for each group: what is not asked again would be held in registers.
    """
    rows, query_start, seq_lens, state_table, state_columns, state_first, state_kept = step
    input_table, input_columns, input_first, x_kept, b_kept, total_kept, dt_kept = inputs
    xbc, xbc_row, dt, dt_row, decay, dt_bias, dt_min, dt_max, skip, out = given
    row, PER = tl.program_id(1), HEADS // GROUPS
    token, last, table_row = tl.load(query_start + row).to(tl.int64), tl.load(seq_lens + row) - 1, tl.load(rows + row)
    table = input_table + table_row * input_columns
    of_row = (table, input_first, last, BLOCK)
    border = last // CHUNK * CHUNK
    own_entry, own_offset = last // BLOCK, last % BLOCK
    states = state_table + table_row * state_columns
    channel, width, here = tile * WIDE + tl.arange(0, WIDE), tl.arange(0, STATES_PADDED), tl.arange(0, 16)
    inside, within, at = channel < SIZE, width < STATES, border + tl.arange(0, CHUNK)
    in_state = within[:, None] & inside[None, :]
    is_seen, is_old = at <= last, at < last
    b_at = _begins(of_row, at, b_kept, B_FORM, STATES)
    x_at = _begins(of_row, at, x_kept, X_FORM, SIZE)
    total_at = _begins(of_row, at, total_kept, TOTAL_FORM, 1)
    dt_at = _begins(of_row, at, dt_kept, DT_FORM, 1)
    before_at = _begins(of_row, last - 1, total_kept, TOTAL_FORM, 1)
    goal_at, has_goal = place(table, input_first, own_entry, own_offset, 0, True, X_FORM, SIZE)
    sum_at, is_stored = place(table, input_first, own_entry, own_offset, 0, True, TOTAL_FORM, 1)
    step_at, _ = place(table, input_first, own_entry, own_offset, 0, True, DT_FORM, 1)
    fresh, own_dt = xbc + token * xbc_row, dt + token * dt_row
    begin, end = tl.maximum(first, group * PER), tl.minimum(behind, (group + 1) * PER)
    b_channel, c_channel = HEADS * SIZE + group * STATES + width, HEADS * SIZE + (GROUPS + group) * STATES + width
    holds_b = (group * PER >= first) & (tile == 0)  # the first of those that share B
    if ONE:  # all that earlier steps kept of the one head is on its way, or there, when the kernel before ends
        told = (state_kept, states, state_first, first)
        block = head_block(told, border, STATE_FORM, STATES, CHUNK)
        early_state = upper_in(told, block, width, channel, in_state, STATE_FORM, SIZE, STATES, PARTED)
        early_x = _lines(x_at + tile * WIDE, first, inside, is_old, SIZE)
        early_b = _lines(b_at, group, within, is_old, STATES)
        early_sums = tl.load(total_at + first, mask=is_old, other=0.0)
        early_steps = tl.load(dt_at + first, mask=is_old, other=0.0)
    begin_after(PDL)  # of later groups it waits for nothing
    own_b = tl.load(fresh + b_channel, mask=within, other=0.0)
    if ONE:
        b = tl.where((at == last)[:, None], own_b[None, :], early_b)
    else:
        b_at = tl.where(is_old, b_at, fresh + HEADS * SIZE) + group * STATES
        b = tl.load(b_at[:, None] + width[None, :], mask=is_seen[:, None] & within[None, :], other=0.0)
    if holds_b:
        where, is_there = place(table, input_first, own_entry, own_offset, group, True, B_FORM, STATES)
        tl.store(b_kept + where + width, own_b, mask=within & is_there)
    x_begins = tl.where(is_old, x_at, fresh)[:, None] + channel[None, :]
    c = tl.load(fresh + c_channel[None, :] + 0 * here[:, None], mask=within[None, :], other=0.0)  # 16 equal rows
    alike = tl.dot(c, tl.trans(b), input_precision=PRECISION)
    sources, is_later = (own_dt, dt_bias, decay, before_at, skip), last > border
    asked, fresh_x = _asked(sources, begin, is_later), tl.load(fresh + begin * SIZE + channel, mask=inside, other=0.0)
    if not ONE:
        block = head_block((state_kept, states, state_first, begin), border, STATE_FORM, STATES, CHUNK)
    for head in tl.range(begin, end, num_stages=STAGES):
        given_dt, bias, rate, before, own_skip = asked
        own_x = fresh_x
        if ONE:
            state, sums, steps = early_state, early_sums, early_steps
            x = tl.where((at == last)[:, None], own_x[None, :], early_x)
        else:
            told = (state_kept, states, state_first, head)
            state = upper_in(told, block, width, channel, in_state, STATE_FORM, SIZE, STATES, PARTED)
            x = tl.load(x_begins + head * SIZE, mask=is_seen[:, None] & inside[None, :], other=0.0)
            sums = tl.load(total_at + head, mask=is_old, other=0.0)
            steps = tl.load(dt_at + head, mask=is_old, other=0.0)
            next = tl.minimum(head + 1, end - 1)  # what little the next head needs is on its way meanwhile
            block = head_block((state_kept, states, state_first, next), border, STATE_FORM, STATES, CHUNK)
            asked, fresh_x = (
                _asked(sources, next, is_later),
                tl.load(fresh + next * SIZE + channel, mask=inside, other=0.0),
            )
        own_step = tl.minimum(tl.maximum(softplus(given_dt.to(tl.float32) + bias), dt_min), dt_max)
        own_sum = before + own_step * rate  # see `scan_gates`
        sums, steps = tl.where(at == last, own_sum, sums), tl.where(at == last, own_step, steps)
        tl.store(total_kept + sum_at + head, own_sum, mask=is_stored & (tile == 0))
        tl.store(dt_kept + step_at + head, own_step, mask=is_stored & (tile == 0))
        left = tl.exp(tl.where(is_seen, own_sum - sums, 0.0))
        weight = tl.where(is_seen[None, :], left[None, :] * alike * steps[None, :], 0.0).to(x.dtype)
        result = tl.exp(own_sum) * tl.dot(c, rounded(state, c.dtype), input_precision=PRECISION)
        result += tl.dot(weight, x, input_precision=PRECISION)
        result += own_skip * own_x.to(tl.float32)[None, :]
        target = out + (token * HEADS + head) * SIZE + channel[None, :] + 0 * here[:, None]
        tl.store(target, result.to(out.dtype.element_ty), mask=(here == 0)[:, None] & inside[None, :])
        tl.store(x_kept + goal_at + head * SIZE + channel, own_x, mask=inside & has_goal)


@launched(triton.jit(do_not_specialize=PLACES))
def mamba2_decode(
    xbc,  # [T, channels of x, B and C]
    xbc_row,
    dt,  # [T, HEADS], as the projection gives it
    dt_row,
    decay,
    dt_bias,
    dt_min,
    dt_max,
    skip,
    out,  # [T, HEADS, SIZE]
    rows,
    query_start,
    seq_lens,
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
    ONE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of one token, WIDE channels, and as many heads as share the launch's programs evenly: ONE, or a run."""
    row, tiles = tl.program_id(1), tl.cdiv(SIZE, WIDE)
    part, parts = tl.program_id(0) // tiles, tl.num_programs(0) // tiles
    first, behind, tile = HEADS * part // parts, HEADS * (part + 1) // parts, tl.program_id(0) % tiles
    if tl.load(query_start + row + 1) - tl.load(query_start + row) != 1:  # another kernel's, or padding
        begin_after(PDL)
        return
    tl.static_assert(STATE_FORM[5] % STATES == 0, "a head's state lies in one line")
    step = (rows, query_start, seq_lens, state_table, state_columns, state_first, state_kept)
    inputs = (input_table, input_columns, input_first, x_kept, b_kept, total_kept, dt_kept)
    given = (xbc, xbc_row, dt, dt_row, decay, dt_bias, dt_min, dt_max, skip, out)
    if ONE:
        _decode_heads(
            first // (HEADS // GROUPS), first, behind, tile, step, inputs, given, HEADS, GROUPS, SIZE, WIDE, STATES,
            STATES_PADDED, CHUNK, BLOCK, STATE_FORM, X_FORM, B_FORM, TOTAL_FORM, DT_FORM, PRECISION, PARTED, STAGES,
            ONE, PDL,
        )  # fmt: skip
    else:
        for group in range(first // (HEADS // GROUPS), (behind - 1) // (HEADS // GROUPS) + 1):
            _decode_heads(
                group, first, behind, tile, step, inputs, given, HEADS, GROUPS, SIZE, WIDE, STATES, STATES_PADDED,
                CHUNK, BLOCK, STATE_FORM, X_FORM, B_FORM, TOTAL_FORM, DT_FORM, PRECISION, PARTED, STAGES, ONE, PDL,
            )  # fmt: skip
