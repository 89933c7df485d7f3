"""Mask rows, lines of queries and the folding of partial results on a GPU; `octavo.ops.flex` says what they give.

Owns the kernels around torch's own. Invariant: leaves are added in float32 in one order, by their numbers alone, and
one that a query sees nothing of adds exactly 0: so its bits do not depend on how many leaves its neighbours have.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.compile.launch import begin_after, chained, launched
from octavo.ops.flex.mask_rows import MERGE_LEVELS, NULL_BLOCK, Geometry, Kind, MaskRows, Reach

_MERGE_ELEMENTS = 4096  # of partial results that a program of `_merge` has in flight


@launched(triton.jit(do_not_specialize=["num_rows"]))
def _count_tiles(ends, query_start, seq_lens, num_rows, TOKENS: tl.constexpr, LEAST: tl.constexpr, ROWS: tl.constexpr):
    total = 0
    for begin in range(0, num_rows, ROWS):
        row = begin + tl.arange(0, ROWS)
        inside = row < num_rows
        queries = tl.load(query_start + row + 1, mask=inside, other=0) - tl.load(
            query_start + row, mask=inside, other=0
        )
        length = tl.load(seq_lens + row, mask=inside, other=0)
        tiles = (length - 1) // TOKENS - (length - queries) // TOKENS + 1
        tiles = tl.where(inside & (queries >= LEAST), tiles, 0)
        tl.store(ends + row, total + tl.cumsum(tiles, 0), mask=inside)
        total += tl.sum(tiles, 0)


@launched(triton.jit(do_not_specialize=["num_rows", "num_leaves", "width"]))
def _plan(
    prompts,
    partial, partial_num, full, full_num, rows, firsts, lows, highs, tokens, lengths, ends, query_start, seq_lens,
    table, table_rows, table_row, num_rows, num_leaves, width, window, chunk, block_units,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, MASK_BLOCK: tl.constexpr, UNIT: tl.constexpr, COLUMNS: tl.constexpr,
    PADDED: tl.constexpr, SPAN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    EXACT: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    slot, leaf = tl.program_id(0), tl.program_id(1)
    behind = 0
    if DIRECT:  # one query each: tiles are rows
        entry = tl.minimum(slot, num_rows - 1)
        there = slot < num_rows
    else:
        entry, last = 0, num_rows - 1
        there = slot < tl.load(ends + last)
        while entry < last:  # the first row whose tiles end behind the slot
            middle = (entry + last) // 2
            beyond = tl.load(ends + middle) > slot
            last = tl.where(beyond, middle, last)
            entry = tl.where(beyond, entry, middle + 1)
        behind = tl.load(ends + entry) - 1 - slot
    token = tl.load(query_start + entry)
    queries, length = tl.load(query_start + entry + 1) - token, tl.load(seq_lens + entry)
    start = length - queries
    there = there & (queries == 1 if DIRECT else queries > 0)
    first = (start // TOKENS + behind) * TOKENS
    low = tl.maximum(first, start)
    high = tl.where(there, tl.minimum(first + TOKENS, length) - 1, low - 1)
    z = (slot * num_leaves + leaf).to(tl.int64)
    tl.store(rows + z, tl.load(table_rows + entry).to(tl.int32))
    tl.store(firsts + z, first)
    tl.store(lows + z, low)
    tl.store(highs + z, high)
    tl.store(tokens + z, tl.where(there, token + low - start, 0))
    tl.store(lengths + z, length)
    place = tl.arange(0, PADDED)
    column = leaf * COLUMNS + place
    kv_first, kv_last = column * MASK_BLOCK, column * MASK_BLOCK + MASK_BLOCK - 1
    kv_there = tl.minimum(kv_last, length - 1)
    live = there & (place < COLUMNS) & (kv_first < length)
    q_first, q_last = low // SPAN * SPAN, high // SPAN * SPAN + SPAN - 1
    whole = kv_last < length
    if CAUSAL:
        live = live & (kv_first <= high)
        whole = whole & (kv_last <= q_first)
    if prompts is not None:
        prompt = tl.load(prompts + tl.load(table_rows + entry))
        live = live & ((kv_first <= high) | (kv_first < prompt))
        whole = whole & ((kv_last <= q_first) | (kv_last < prompt))
    if WINDOW:
        live = live & (low - kv_there < window)
        whole = whole & (q_last - kv_first < window)
    if CHUNK:
        live = live & (low // chunk <= kv_there // chunk) & (kv_first // chunk <= high // chunk)
        own = q_first // chunk
        whole = whole & (q_last // chunk == own) & (kv_first // chunk == own) & (kv_last // chunk == own)
    table += entry.to(tl.int64) * table_row
    most, least = tl.full((PADDED,), -1, tl.int32), tl.full((PADDED,), 2147483647, tl.int32)
    for unit in tl.static_range(MASK_BLOCK // UNIT):
        one = _unit_at(table, kv_first + unit * UNIT, length, width, live, block_units, BLOCK, UNIT)
        most, least = tl.maximum(most, one), tl.minimum(least, one)
    live = live & (most >= 0)
    whole = whole & (least >= 0)
    if not EXACT:
        whole = kv_last < 0
    partly, wholly = live & (whole == 0), live & whole
    at_partial = _pack(partial, partial_num, z, partly, column, place, COLUMNS, MASK_BLOCK // UNIT)
    at_full = _pack(full, full_num, z, wholly, column, place, COLUMNS, MASK_BLOCK // UNIT)
    for unit in tl.static_range(MASK_BLOCK // UNIT):
        one = _unit_at(table, kv_first + unit * UNIT, length, width, live, block_units, BLOCK, UNIT)
        one = tl.where(one < 0, -1 - most, one)  # what may be read in its stead
        tl.store(partial + at_partial + (1 + unit), one, mask=partly)
        tl.store(full + at_full + (1 + unit), one, mask=wholly)


@triton.jit
def _unit_at(table, token, length, width, live, block_units, BLOCK: tl.constexpr, UNIT: tl.constexpr):
    """Where the units that begin at such tokens lie; -1: nowhere."""
    column = token // BLOCK
    ids = tl.load(table + column, mask=live & (token < length) & (column < width), other=0)
    return tl.where(ids != 0, ids * block_units + token % BLOCK // UNIT, -1)


@triton.jit
def _pack(lists, nums, z, chosen, column, place, COLUMNS: tl.constexpr, UNITS: tl.constexpr):
    """The chosen mask blocks to the left, in order; the rest of the list is safe. Gives where their entries are."""
    count = chosen.to(tl.int32)
    at, num = tl.cumsum(count, 0) - count, tl.sum(count, 0)
    base = z * ((COLUMNS + 1) * (1 + UNITS))
    own = base + at * (1 + UNITS)
    tl.store(lists + own, column, mask=chosen)
    for part in tl.static_range(1 + UNITS):
        tl.store(lists + (base + place * (1 + UNITS) + part), 0, mask=(place >= num) & (place <= COLUMNS))
    tl.store(nums + z, num)
    return own


@launched(triton.jit(do_not_specialize=["start"]))
def _gather(
    q, out, first, low, high, token, partial_num, full_num, start, q_token, q_head,
    GROUP: tl.constexpr, LINES: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_after(PDL)
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    if tl.load(partial_num + start + row) + tl.load(full_num + start + row) == 0:
        return  # what has no keys to walk has no use for its queries
    line, channel = tl.arange(0, LINES), tl.arange(0, PADDED)
    lowest = tl.load(low + start + row)
    highest = tl.maximum(tl.load(high + start + row), lowest)
    position = tl.load(first + start + row) + line // GROUP
    at = tl.load(token + start + row) + tl.minimum(tl.maximum(position, lowest), highest) - lowest
    head = kv_head * GROUP + line % GROUP
    inside = (channel < HEAD)[None, :]
    source = q + at.to(tl.int64)[:, None] * q_token + head[:, None] * q_head + channel[None, :]
    target = out + ((row * num_kv_heads + kv_head) * LINES + line)[:, None] * HEAD + channel[None, :]
    tl.store(target, tl.load(source, mask=inside), mask=inside)


@launched(triton.jit(do_not_specialize=["start"]))
def _scatter(
    parts, out, value_scale, first, low, high, token, start, out_token, out_head,
    GROUP: tl.constexpr, LINES: tl.constexpr, PART: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """What `_merge` does with a leaf that is alone: no sum."""
    begin_after(PDL)
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line, channel = tl.program_id(2) * PART + tl.arange(0, PART), tl.arange(0, PADDED)
    lowest, highest = tl.load(low + start + row), tl.load(high + start + row)
    position = tl.load(first + start + row) + line // GROUP
    query = tl.load(token + start + row) + position - lowest
    valid = (position >= lowest) & (position <= highest) & (line < LINES // GROUP * GROUP)
    mask = valid[:, None] & (channel < HEAD)[None, :]
    source = parts + ((row * tl.num_programs(1) + kv_head) * LINES + line)[:, None] * HEAD + channel[None, :]
    part = tl.load(source, mask=mask, other=0.0)
    if value_scale is not None:
        part = part.to(tl.float32) * tl.load(value_scale + kv_head)
    head = kv_head * GROUP + line % GROUP
    target = out + query.to(tl.int64)[:, None] * out_token + head[:, None] * out_head + channel[None, :]
    tl.store(target, part.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _fold(x, LEVELS: tl.constexpr):
    """The sum over the first axis, of 2 ** LEVELS, halves upon each other: one order, however it is computed."""
    for _ in tl.static_range(LEVELS):
        halves = tl.reshape(x, [2, x.shape[0] // 2, x.shape[1], x.shape[2]])
        low, high = tl.split(tl.permute(halves, (1, 2, 3, 0)))
        x = low + high
    return tl.reshape(x, [x.shape[1], x.shape[2]])


@launched(triton.jit(do_not_specialize=["start", "num_leaves"]))
def _merge(
    parts, lse, out, sinks, value_scale, first, low, high, token, length, start, num_leaves, out_token, out_head,
    GROUP: tl.constexpr, LINES: tl.constexpr, PART: tl.constexpr, HEAD: tl.constexpr, CHANNELS: tl.constexpr,
    LEAF: tl.constexpr, LEVELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_after(PDL)
    LANES: tl.constexpr = 1 << LEVELS
    tile = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    row = tile * num_leaves
    line = tl.program_id(2) // tl.cdiv(HEAD, CHANNELS) * PART + tl.arange(0, PART)
    channel = tl.program_id(2) % tl.cdiv(HEAD, CHANNELS) * CHANNELS + tl.arange(0, CHANNELS)
    lowest, highest = tl.load(low + start + row), tl.load(high + start + row)
    first_token = tl.load(token + start + row)
    leaves = tl.minimum(num_leaves, tl.cdiv(tl.load(length + start + row), LEAF))
    position = tl.load(first + start + row) + line // GROUP
    valid = (position >= lowest) & (position <= highest) & (line < LINES // GROUP * GROUP)
    if tl.max(valid.to(tl.int32), 0) > 0:
        head = kv_head * GROUP + line % GROUP
        lane = tl.arange(0, LANES)
        place = (row * tl.num_programs(1) + kv_head) * LINES + line
        stride = tl.num_programs(1) * LINES  # lines of a leaf
        most = tl.full((LANES, PART), float("-inf"), tl.float32)
        for begin in range(0, leaves, LANES):
            at = begin + lane
            there = valid[None, :] & (at < leaves)[:, None]
            one = tl.load(lse + place[None, :] + (at * stride)[:, None], mask=there, other=float("-inf"))
            most = tl.maximum(most, one)
        most = tl.max(most, 0)
        if sinks is not None:
            sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32)
            most = tl.maximum(most, sink)
        most = tl.where(most == float("-inf"), 0.0, most)
        inside = (channel < HEAD)[None, None, :]
        totals = tl.zeros((LANES, PART, 1), tl.float32)
        results = tl.zeros((LANES, PART, CHANNELS), tl.float32)
        for begin in range(0, leaves, LANES):
            at = begin + lane
            there = valid[None, :] & (at < leaves)[:, None]
            source = place[None, :] + (at * stride)[:, None]
            part = tl.load(
                parts + source[:, :, None] * HEAD + channel[None, None, :], mask=there[:, :, None] & inside, other=0.0
            )
            one = tl.load(lse + source, mask=there, other=float("-inf"))
            weight = tl.exp(one - most[None, :])[:, :, None]
            part = tl.where((one > float("-inf"))[:, :, None], part.to(tl.float32), 0.0)
            totals += weight
            results = tl.fma(part, weight, results)
        total, result = tl.reshape(_fold(totals, LEVELS), [PART]), _fold(results, LEVELS)
        if sinks is not None:
            total += tl.exp(sink - most)
        result = result / tl.where(total == 0.0, 1.0, total)[:, None]
        if value_scale is not None:
            result *= tl.load(value_scale + kv_head)
        query = first_token + position - lowest
        target = out + query.to(tl.int64)[:, None] * out_token + head[:, None] * out_head + channel[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=valid[:, None] & (channel < HEAD)[None, :])


def plan_mask_rows(
    rows: MaskRows,
    shape: Geometry,
    reach: Reach,
    *,
    num_tiles: int,
    num_leaves: int,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    table_rows: Tensor,
    kind: Kind,
) -> None:
    """See `octavo.ops.flex.plan_mask_rows`."""
    assert NULL_BLOCK == 0, "lists end in the null block"
    num_rows, width = block_table.shape
    if kind is not Kind.SINGLE:
        _count_tiles[(1,)](
            rows.ends,
            query_start,
            seq_lens,
            num_rows,
            TOKENS=shape.tokens,
            LEAST=2 if kind is Kind.LONG else 1,
            ROWS=1024,
            num_warps=4,
        )
    _plan[(num_tiles, num_leaves)](
        reach.prompts,
        rows.partial, rows.partial_num, rows.full, rows.full_num, rows.row, rows.first, rows.low, rows.high, rows.token,
        rows.length, rows.ends, query_start, seq_lens, block_table, table_rows, block_table.stride(0), num_rows,
        num_leaves, width, reach.window, max(reach.chunk, 1), shape.units, TOKENS=shape.tokens, BLOCK=shape.block,
        MASK_BLOCK=shape.kv_block, UNIT=shape.unit, COLUMNS=shape.columns,
        PADDED=triton.next_power_of_2(shape.columns + 1), SPAN=max(shape.q_block, shape.tokens), CAUSAL=reach.causal,
        WINDOW=reach.window > 0, CHUNK=reach.chunk > 0, EXACT=reach.exact, DIRECT=kind is Kind.SINGLE,
        num_warps=1 if shape.columns < 64 else 4,
    )  # fmt: skip


def gather_lines(q: Tensor, rows: MaskRows, shape: Geometry, start: int, count: int) -> Tensor:
    """See `octavo.ops.flex.gather_lines`."""
    _, heads, size = q.shape
    kv_heads = heads // shape.group
    out = torch.empty((count, kv_heads, shape.lines, size), dtype=q.dtype, device=q.device)
    _gather[(count, kv_heads)](
        q, out, rows.first, rows.low, rows.high, rows.token, rows.partial_num, rows.full_num, start, q.stride(0),
        q.stride(1), GROUP=shape.group, LINES=shape.lines, HEAD=size, PADDED=triton.next_power_of_2(size), num_warps=4,
        **chained(q.device),
    )  # fmt: skip
    return out


def merge_lines(
    parts: Tensor,
    lse: Tensor,
    rows: MaskRows,
    shape: Geometry,
    out: Tensor,
    *,
    start: int,
    num_leaves: int,
    sinks: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> None:
    """See `octavo.ops.flex.merge_lines`."""
    count, kv_heads, lines, size = parts.shape
    assert parts.is_contiguous() and lse.is_contiguous(), "the kernel's own outputs"
    if num_leaves == 1 and sinks is None:
        part = min(16, lines)
        _scatter[(count, kv_heads, lines // part)](
            parts, out, value_scale, rows.first, rows.low, rows.high, rows.token, start, out.stride(0), out.stride(1),
            GROUP=shape.group, LINES=lines, PART=part, HEAD=size, PADDED=triton.next_power_of_2(size), num_warps=2,
            **chained(out.device),
        )  # fmt: skip
        return
    levels = min((num_leaves - 1).bit_length(), MERGE_LEVELS)
    channels = min(64, triton.next_power_of_2(size), _MERGE_ELEMENTS >> levels + 2)
    part = min(16, lines, _MERGE_ELEMENTS // channels >> levels)
    _merge[(count // num_leaves, kv_heads, lines // part * triton.cdiv(size, channels))](
        parts, lse, out, sinks, value_scale, rows.first, rows.low, rows.high, rows.token, rows.length, start,
        num_leaves, out.stride(0), out.stride(1), GROUP=shape.group, LINES=lines, PART=part, HEAD=size,
        CHANNELS=channels, LEAF=shape.leaf, LEVELS=levels, num_warps=4, **chained(out.device),
    )  # fmt: skip
