"""The gated delta rule over the open chunk, on a GPU: two kernels for any step, whose formula others share.

Owns the kernels and their order. A chunk's tokens are taken in blocks of 16, from the chunk's begin. With S the state
at the border, G the summed logarithms of what is left, and U the updates of the chunk's blocks before block b,

    M = beta exp(G - G') k K', of the blocks before; T = (I + tril(beta exp(G - G') k k', -1))^-1, of the block itself
    u = T (beta (v - exp(G) k S) - M U)
    o = exp(G) q S + tril(exp(G - G') q K') [U; u]

so that a row needs the rows up to it alone: a decoded token computes its block again from what is kept, and reads U.
`delta_blocks` makes M, T and the factors of o, for all blocks side by side; `delta_scan` walks the chunks. The state is
read once, and written at a chunk's end: by `delta_advance` where every row decodes one token, since `delta_scan` with
that takes twice the registers. Products are of the model's type with float32 sums, but for T's, which is float32 (tf32
for 16-bit models), and takes 16 rows: on a Hopper a product of 64 rows in tf32 has other bits now and then. Where rows
decode, `octavo.ops.scan.delta.decode_gpu` does the same, for prompts from a border on `octavo.ops.scan.delta.walk_gpu`.
Invariants: a factor of 0 adds nothing, and rows beyond the end change none before.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.compile.launch import launched, wait_before
from octavo.ops.scan.kept import PLACES, keep, numbers, read_state, row_of, state_at, tokens, turned, write_state


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


@triton.jit
def inverse_rows(below, column, is_there):
    """The 16 rows of (I + below)^-1, [lanes] each, where a lane has one column of one triangle [16, 16] float32.

    below: [lanes], where a lane's triangle begins in memory. The order of sums is `unit_inverse`'s, whose other
    subtractions are of 0.
    """
    rows = (tl.where(column == 0, 1.0, 0.0),)
    for line in tl.static_range(1, 16):
        row = tl.where(column == line, 1.0, 0.0)
        for other in tl.static_range(0, line):
            row -= tl.load(below + line * 16 + other, mask=is_there, other=0.0) * rows[other]
        rows = rows + (row,)  # noqa: RUF005 - Triton knows no stars
    return rows


@launched(triton.jit(do_not_specialize=["num_rows", "input_columns", "input_first"]))
def delta_blocks(
    query,  # [T, KEY_HEADS, KEY_SIZE], normed; key too
    key,
    total,  # [T, HEADS] float32; rate too
    rate,
    before,  # [blocks, HEADS, 16, CHUNK], as key: M
    factor,  # the same: of o
    inverse,  # [blocks, HEADS, 16, 16] float32: T
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
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    KEY_FORM: tl.constexpr,
    TOTAL_FORM: tl.constexpr,
    RATE_FORM: tl.constexpr,
    PRECISION: tl.constexpr,
    ONE: tl.constexpr,
):
    """One block of 16 tokens and one head: the factors of o, M, or T. ONE: every row has one token."""
    slot, head = tl.program_id(0), tl.program_id(1)
    row = slot if ONE else row_of(query_start, num_rows, slot, 16, 2)
    token, end = tl.load(query_start + row), tl.load(seq_lens + row)
    computed = end - (tl.load(query_start + row + 1) - token)
    begin = computed // 16 * 16
    if not ONE:
        begin += (slot - token // 16 - 2 * row) * 16
    if (begin >= end) | (computed < 0):
        return
    inputs = input_table + tl.load(rows + row) * input_columns
    of_row = (inputs, input_first, token, computed, end, BLOCK)
    key_head = head // (HEADS // KEY_HEADS)
    width, here = tl.arange(0, KEY_PADDED), tl.arange(0, 16)
    within = width < KEY_SIZE
    keys = (key, KEY_HEADS * KEY_SIZE, key_head * KEY_SIZE, key_kept)
    totals, rates = (total, HEADS, head, total_kept), (rate, HEADS, head, rate_kept)
    at = begin + here
    own = numbers(totals, of_row, begin, here, head, TOTAL_FORM)
    beta = numbers(rates, of_row, begin, here, head, RATE_FORM)[:, None]
    line = ((slot.to(tl.int64) * HEADS + head) * 16 + here)[:, None]
    part = tl.program_id(2)
    # Keys come turned from memory, and each product stands alone: else Triton turns them in registers, warp by warp.
    if part < 2:
        first, place = begin // CHUNK * CHUNK, tl.arange(0, CHUNK)
        then = first + place
        of_chunk = (inputs, input_first, token, computed, tl.minimum(end, begin + 16), BLOCK)
        k_then = turned(keys, of_chunk, first, place, key_head, width, within, KEY_FORM, KEY_SIZE)
        own_then = numbers(totals, of_chunk, first, place, head, TOTAL_FORM)
        if part == 0:
            asked = (token + at - computed).to(tl.int64) * KEY_HEADS + key_head
            mask = ((at >= computed) & (at < end))[:, None] & within[None, :]
            x = tl.load(query + (asked * KEY_SIZE)[:, None] + width[None, :], mask=mask, other=0.0)
        else:
            x = tokens(keys, of_row, begin, here, key_head, width, within, KEY_FORM, KEY_SIZE)
        is_seen = (at[:, None] >= then[None, :]) & (at < end)[:, None]
        left = tl.exp(tl.where(is_seen, own[:, None] - own_then[None, :], 0.0))
        product = tl.where(part == 0, 1.0, beta) * left * tl.dot(x, k_then, input_precision=PRECISION)
        taken = tl.where(is_seen & ((part == 0) | (then < begin)[None, :]), product, 0.0)
        made = factor if part == 0 else before
        tl.store(made + line * CHUNK + place[None, :], taken.to(factor.dtype.element_ty))
    else:
        k = tokens(keys, of_row, begin, here, key_head, width, within, KEY_FORM, KEY_SIZE)
        k_here = turned(keys, of_row, begin, here, key_head, width, within, KEY_FORM, KEY_SIZE)
        is_before = (here[:, None] > here[None, :]) & (at < end)[:, None]
        left_here = tl.exp(tl.where(is_before, own[:, None] - own[None, :], 0.0))
        below = beta * left_here * tl.dot(k, k_here, input_precision=PRECISION)
        tl.store(inverse + line * 16 + here[None, :], unit_inverse(tl.where(is_before, below, 0.0)))


@triton.jit
def of_blocks(before, factor, inverse, line, is_made, here, place, CHUNK: tl.constexpr):
    """M and the factors of o, [rows, CHUNK], and T, [rows, rows], of rows that `delta_blocks` wrote at `line`."""
    asked = line[:, None] * CHUNK + place[None, :]
    m = tl.load(before + asked, mask=is_made[:, None], other=0.0)
    f = tl.load(factor + asked, mask=is_made[:, None], other=0.0)
    is_own = is_made[:, None] & (here[:, None] // 16 == here[None, :] // 16)
    return m, f, tl.load(inverse + line[:, None] * 16 + here[None, :] % 16, mask=is_own, other=0.0)


@triton.jit
def substitute(
    right,
    m,
    t,
    u_all,
    begin,
    known,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The chunk's updates [CHUNK, TILE] with those of the block at `begin`; blocks before `known` are there."""
    place, first = tl.arange(0, CHUNK), begin // CHUNK * CHUNK
    rest = right - tl.dot(m, u_all, input_precision=PRECISION)
    u = tl.dot(t, rest, input_precision=PRECISION).to(u_all.dtype)
    wide = tl.reshape(tl.broadcast_to(u[None, :, :], (CHUNK // 16, 16, TILE)), (CHUNK, TILE))
    is_block = (place // 16 == begin % CHUNK // 16) & (first + place // 16 * 16 >= known)
    return tl.where(is_block[:, None], wide, u_all)


@triton.jit
def advanced(state, k, u, sums, PRECISION: tl.constexpr):
    """The state behind a whole chunk, not rounded."""
    place = tl.arange(0, sums.shape[0])
    last = tl.sum(tl.where(place == sums.shape[0] - 1, sums, 0.0), 0)
    weighted = (k.to(tl.float32) * tl.exp(last - sums)[:, None]).to(k.dtype)
    return tl.exp(last) * state + tl.dot(tl.trans(weighted), u, input_precision=PRECISION)


@launched(triton.jit(do_not_specialize=["num_rows", *PLACES]))
def delta_scan(
    query,  # [T, KEY_HEADS, KEY_SIZE], normed; key too
    key,
    value,  # [T, HEADS * VALUE_SIZE] within rows of qkv
    value_row,
    total,  # [T, HEADS] float32; rate too
    rate,
    before,  # of `delta_blocks`
    factor,
    inverse,
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
    ADVANCE: tl.constexpr,
    WALKED: tl.constexpr,
):
    """One row behind the first `num_ahead`, one head, TILE channels of the values; a block of 16 tokens at a time.

    ADVANCE: write states, too; without, every row has one token. WALKED: rows that begin at a border are another's.
    """
    row, tiles = tl.program_id(1) + tl.load(num_ahead), tl.cdiv(VALUE_SIZE, TILE)
    is_row, head = row < num_rows, tl.program_id(0) // tiles
    token, end = tl.load(query_start + row, mask=is_row, other=0), tl.load(seq_lens + row, mask=is_row, other=0)
    computed = end - (tl.load(query_start + row + 1, mask=is_row, other=0) - token)
    if (computed >= end) | (computed < 0) | (WALKED & (computed % CHUNK == 0)):  # nothing, padding, or another's
        return
    table_row = tl.load(rows + row)
    states = state_table + table_row * state_columns
    of_row = (input_table + table_row * input_columns, input_first, token, computed, end, BLOCK)
    key_head = head // (HEADS // KEY_HEADS)
    keeps_key = (tl.program_id(0) % tiles == 0) & (head % (HEADS // KEY_HEADS) == 0)  # the first of those that share it
    channel = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    width, here, place = tl.arange(0, KEY_PADDED), tl.arange(0, 16), tl.arange(0, CHUNK)
    inside, within = channel < VALUE_SIZE, width < KEY_SIZE
    keys = (key, KEY_HEADS * KEY_SIZE, key_head * KEY_SIZE, key_kept)
    values = (value, value_row, head * VALUE_SIZE, value_kept)
    updates = (out, HEADS * VALUE_SIZE, head * VALUE_SIZE, update_kept)
    totals, rates = (total, HEADS, head, total_kept), (rate, HEADS, head, rate_kept)
    kind = key.dtype.element_ty
    border = computed // CHUNK * CHUNK
    kept_states = (state_kept, states, state_first, head * KEY_SIZE + width, channel, within, inside)
    source, is_there = state_at(kept_states, border, STATE_FORM, VALUE_SIZE, CHUNK)
    if ADVANCE:
        state = tl.load(source, mask=is_there, other=0.0).to(tl.float32)
    known = computed // 16 * 16  # the blocks before are not computed again
    slot = (token // 16 + 2 * row if ADVANCE else row) - computed // 16
    of_known = (of_row[0], input_first, token, known, known, BLOCK)
    u_all = tokens(updates, of_known, border, place, head, channel, inside, UPDATE_FORM, VALUE_SIZE).to(kind)
    count = tl.cdiv(end - known, 16) if ADVANCE else 1  # no loop: all is asked for before anything is waited for
    for index in tl.range(0, count, disable_licm=True):  # what moved out of it would spill
        begin = known + index * 16
        at = begin + here
        k = tokens(keys, of_row, begin, here, key_head, width, within, KEY_FORM, KEY_SIZE)
        v = tokens(values, of_row, begin, here, head, channel, inside, VALUE_FORM, VALUE_SIZE)
        own = numbers(totals, of_row, begin, here, head, TOTAL_FORM)
        beta = numbers(rates, of_row, begin, here, head, RATE_FORM)[:, None]
        is_new = (at >= computed) & (at < end)
        fresh = (token + at - computed).to(tl.int64)
        asked = query + ((fresh * KEY_HEADS + key_head) * KEY_SIZE)[:, None] + width[None, :]
        q = tl.load(asked, mask=is_new[:, None] & within[None, :], other=0.0)
        is_made = (at >= known) & (begin + here // 16 * 16 < end)
        line = ((slot + at // 16).to(tl.int64) * HEADS + head) * 16 + at % 16
        m, f, t = of_blocks(before, factor, inverse, line, is_made, here, place, CHUNK)
        if not ADVANCE:
            state = tl.load(source, mask=is_there, other=0.0).to(tl.float32)
        rounded, begun = state.to(kind), tl.exp(own)[:, None]
        right = beta * (v.to(tl.float32) - begun * tl.dot(k, rounded, input_precision=PRECISION))
        right = tl.where((at < end)[:, None], right, 0.0)
        u_all = substitute(right, m, t, u_all, begin, known, CHUNK, TILE, PRECISION)
        result = begun * tl.dot(q, rounded, input_precision=PRECISION)
        result += tl.dot(f, u_all, input_precision=PRECISION)
        mask = is_new[:, None] & inside[None, :]
        target = ((fresh * HEADS + head) * VALUE_SIZE)[:, None] + channel[None, :]
        tl.store(out + target, result.to(out.dtype.element_ty), mask=mask)
        keeps = begin >= (end - 1) // CHUNK * CHUNK - CHUNK  # chunks before are kept by no table
        if keeps:
            keep(values, of_row, at, head, channel, v, mask, VALUE_FORM, VALUE_SIZE)
            shared = is_new[:, None] & within[None, :] & keeps_key
            keep(keys, of_row, at, key_head, width, k, shared, KEY_FORM, KEY_SIZE)
        after, first = begin + 16, begin // CHUNK * CHUNK
        chunk = first + place
        if ((after % CHUNK == 0) | (after >= end)) & keeps:
            stored = ((chunk >= computed) & (chunk < end))[:, None] & inside[None, :]
            keep(updates, of_row, chunk, head, channel, u_all, stored, UPDATE_FORM, VALUE_SIZE)
        if ADVANCE & (after % CHUNK == 0) & (after <= end):
            k_all = tokens(keys, of_row, first, place, key_head, width, within, KEY_FORM, KEY_SIZE)
            sums = numbers(totals, of_row, first, place, head, TOTAL_FORM)
            state = advanced(state, k_all, u_all, sums, PRECISION)
            state = write_state(kept_states, after, state, STATE_FORM, VALUE_SIZE, CHUNK)
            u_all = tl.zeros((CHUNK, TILE), kind)


@launched(triton.jit(do_not_specialize=["num_rows", *PLACES]))
def delta_advance(
    rows,
    query_start,
    seq_lens,
    num_rows,
    state_table,
    state_columns,
    input_table,
    input_columns,
    state_kept,
    key_kept,
    update_kept,
    total_kept,
    state_first,
    input_first,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    STATE_FORM: tl.constexpr,
    KEY_FORM: tl.constexpr,
    UPDATE_FORM: tl.constexpr,
    TOTAL_FORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Every PARTS-th head of GROUP rows, of those of one token: of those that end a chunk, the state behind it."""
    wait_before(PDL)
    tiles, group = tl.cdiv(VALUE_SIZE, TILE), tl.program_id(1) * GROUP + tl.arange(0, GROUP)
    is_row = group < num_rows
    began = tl.load(query_start + group, mask=is_row, other=0)
    is_row = is_row & (tl.load(query_start + group + 1, mask=is_row, other=0) == began + 1)
    is_asked = is_row & (tl.load(seq_lens + group, mask=is_row, other=1) % CHUNK == 0)
    rank = tl.cumsum(is_asked.to(tl.int32), 0)
    width, place = tl.arange(0, KEY_PADDED), tl.arange(0, CHUNK)
    within, count = width < KEY_SIZE, tl.sum(is_asked.to(tl.int32), 0)
    for part in range(tl.program_id(0), count * HEADS * tiles, PARTS):  # of two loops ptxas leaves registers unset
        row = tl.sum(tl.where(is_asked & (rank == part // (HEADS * tiles) + 1), group, 0), 0)
        end, table_row = tl.load(seq_lens + row), tl.load(rows + row)
        states, begin = state_table + table_row * state_columns, end - CHUNK
        of_row = (input_table + table_row * input_columns, input_first, 0, end, end, BLOCK)  # all of the chunk is kept
        head, channel = part // tiles % HEADS, part % tiles * TILE + tl.arange(0, TILE)
        key_head, inside = head // (HEADS // KEY_HEADS), channel < VALUE_SIZE
        kept_states = (state_kept, states, state_first, head * KEY_SIZE + width, channel, within, inside)
        state = read_state(kept_states, begin, STATE_FORM, VALUE_SIZE, CHUNK)
        k = tokens((key_kept, 0, 0, key_kept), of_row, begin, place, key_head, width, within, KEY_FORM, KEY_SIZE)
        u = tokens(
            (update_kept, 0, 0, update_kept), of_row, begin, place, head, channel, inside, UPDATE_FORM, VALUE_SIZE
        )
        sums = numbers((total_kept, 0, 0, total_kept), of_row, begin, place, head, TOTAL_FORM)
        state = advanced(state, k, u, sums, PRECISION)
        write_state(kept_states, end, state, STATE_FORM, VALUE_SIZE, CHUNK)
