"""FlexAttention over the paged cache: mask rows from block tables, lines of queries, folding of partial results.

Owns the form in which a batch is handed to `flex_attention`: a mask row is one tile of a request's queries and one leaf
of its keys, with its own list of mask blocks, so that a row walks only its own and rows fill the processors. Does not
know mods: it is given tests of rectangles of positions. Nothing here waits for the device. Invariants: a mask row's
list depends on its own request; mask blocks stand at logical positions, so which there are, and of which kind, does not
depend on the cache's block size; the shapes of lists do not depend on the pool or on the batch's lengths; every list
ends in a safe entry, since the kernel loads one beyond the last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.ops.flex.mask_rows import MERGE_LEVELS, NOWHERE, NULL_BLOCK, Geometry, Kind, MaskRows, Reach

# (table rows, first and last query position, first and last key position), broadcasting -> bool
RectangleTest = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
# (mask row, KV head, line, logical key) -> bool, and (score, ...) -> score
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def max_tiles(num_rows: int, num_tokens: int, max_query_len: int, tokens: int) -> int:
    """Most tiles of `tokens` queries that so many rows can have: an upper bound from what the host knows."""
    if max_query_len <= 1:
        return num_rows
    each = (max_query_len + tokens - 2) // tokens + 1  # a row's queries may start within a tile
    return min(num_rows * each, num_tokens // tokens + 2 * num_rows)


def plan_mask_rows(
    rows: MaskRows,
    shape: Geometry,
    *,
    num_tiles: int,
    num_leaves: int,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    table_rows: Tensor,
    kind: Kind,
    some: RectangleTest,
    every: RectangleTest,
    reach: Reach | None = None,
) -> int:
    """Fill the first `num_tiles * num_leaves` mask rows, leaves of a tile side by side; gives how many there are.

    query_start [R + 1] (from any token on), seq_lens [R], block_table [R, width] int32, table_rows [R] int64.
    kind: of which rows; those of one query stand before those of several, and are tiles in their order. Of other rows
    the last tile comes first, since it walks most. num_tiles and num_leaves are upper bounds; mask rows beyond what the
    batch has are empty. A mask block is listed as full if `every` pair of it and the query block around the tile is
    visible, as partial if `some` may be and the cache has any of it. reach: the two tests in a form that one kernel
    takes, on a GPU.
    """
    count = num_tiles * num_leaves
    rows.check(max(count, len(seq_lens)))
    if reach is not None and seq_lens.is_cuda:
        from octavo.ops.flex import gpu

        gpu.plan_mask_rows(
            rows,
            shape,
            reach,
            num_tiles=num_tiles,
            num_leaves=num_leaves,
            query_start=query_start,
            seq_lens=seq_lens,
            block_table=block_table,
            table_rows=table_rows,
            kind=kind,
        )
        return count
    size, tests = (num_tiles, num_leaves), (some, every)
    _plan_in_torch(rows, shape, size, query_start, seq_lens, block_table, table_rows, kind, tests)
    return count


def _plan_in_torch(
    rows: MaskRows,
    shape: Geometry,
    size: tuple[int, int],
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    table_rows: Tensor,
    kind: Kind,
    tests: tuple[RectangleTest, RectangleTest],
) -> None:
    (num_tiles, num_leaves), (some, every) = size, tests
    count = num_tiles * num_leaves
    device, tokens = seq_lens.device, shape.tokens
    num_queries = query_start[1:] - query_start[:-1]
    start = seq_lens - num_queries
    mine = num_queries == 1 if kind is Kind.SINGLE else num_queries >= (2 if kind is Kind.LONG else 1)
    tiles = torch.where(mine, (seq_lens - 1) // tokens - start // tokens + 1, 0)
    ends = tiles.cumsum(0)
    slot = torch.arange(num_tiles, device=device)
    entry = torch.searchsorted(ends, slot, right=True).clamp(max=len(seq_lens) - 1)
    there, behind = slot < ends[-1], ends[entry] - 1 - slot
    length, before = seq_lens[entry], start[entry]
    first = ((before // tokens + behind) * tokens).to(torch.int32)
    low, high = torch.maximum(first, before), torch.minimum(first + tokens, length) - 1
    high = torch.where(there, high, low - 1)
    token = torch.where(there, query_start[entry] + low - before, 0)
    values = {
        rows.row: table_rows[entry],
        rows.first: first,
        rows.low: low,
        rows.high: high,
        rows.token: token,
        rows.length: length,
    }
    for buffer, value in values.items():
        buffer[:count].view(num_tiles, num_leaves).copy_(value[:, None])
    column = torch.arange(num_leaves * shape.columns, dtype=torch.int32, device=device)
    kv_first, kv_last = (column * shape.kv_block)[None, :], (column * shape.kv_block + shape.kv_block - 1)[None, :]
    b, q_low, q_high = table_rows[entry][:, None], low[:, None], high[:, None]
    units = _units(shape, column, block_table[entry], length)  # [tiles, columns of all leaves, units], -1: none
    live = (kv_first < length[:, None]) & (q_low <= q_high)
    key_first, key_last = (torch.minimum(end, length[:, None] - 1) for end in (kv_first, kv_last))
    live = live & some(b, q_low, q_high, key_first, key_last)
    live = live & (units >= 0).any(2)
    span = max(shape.q_block, tokens)
    q_first, q_last = low // span * span, high // span * span + span - 1
    whole = live & every(b, q_first[:, None], q_last[:, None], key_first, key_last)
    whole = whole & (kv_last < length[:, None]) & (units >= 0).all(2)
    instead = ~units.amax(2, keepdim=True)  # what may be read in the stead of a unit that is not there
    entries = torch.cat([column.expand(num_tiles, -1)[..., None], torch.where(units < 0, instead, units)], 2)
    entries = entries.view(count, shape.columns, shape.entry)
    for chosen, indices, num in ((live & ~whole, rows.partial, rows.partial_num), (whole, rows.full, rows.full_num)):
        _pack(chosen.view(count, shape.columns), entries, indices, num)


def _units(shape: Geometry, column: Tensor, table: Tensor, length: Tensor) -> Tensor:
    """[tiles, columns, units of a mask block] int32: where each lies in the layer's token axis; -1: nowhere."""
    inside = torch.arange(0, shape.kv_block, shape.unit, dtype=torch.int32, device=column.device)
    at = column[:, None] * shape.kv_block + inside
    ids = table[:, (at // shape.block).clamp(max=table.shape[1] - 1).long()]
    there = (at < length[:, None, None]) & (ids != NULL_BLOCK)
    return torch.where(there, ids * shape.units + at % shape.block // shape.unit, -1)


def _pack(chosen: Tensor, entries: Tensor, indices: Tensor, num: Tensor) -> None:
    """Write the chosen entries of each line to the left of its list, in order; what is left over stays safe."""
    count, columns, width = entries.shape
    place = torch.where(chosen, chosen.cumsum(1) - 1, columns)
    lists = torch.zeros((count, columns + 1, width), dtype=torch.int32, device=entries.device)
    lists.scatter_(1, place[..., None].expand_as(entries), entries)
    lists[:, columns] = NULL_BLOCK
    indices[:count, 0, 0].copy_(lists.flatten(1))
    num[:count, 0, 0].copy_(chosen.sum(1))


def gather_lines(q: Tensor, rows: MaskRows, shape: Geometry, start: int, count: int) -> Tensor:
    """The queries of mask rows start .. start + count - 1 as lines [count, kv_heads, lines, head_size].

    q: [tokens, heads, head_size]. Lines without a query repeat another one of the row's; on a GPU, those of a row
    without blocks are left as they are.
    """
    if q.is_cuda:
        from octavo.ops.flex import gpu

        return gpu.gather_lines(q, rows, shape, start, count)
    return gather_lines_reference(q, rows, shape, start, count)


def gather_lines_reference(q: Tensor, rows: MaskRows, shape: Geometry, start: int, count: int) -> Tensor:
    """The reference implementation of `gather_lines`."""
    part = slice(start, start + count)
    offset = torch.arange(shape.lines, device=q.device) // shape.group  # [lines]
    position = rows.first[part, None] + offset
    low, high = rows.low[part, None], torch.maximum(rows.low[part], rows.high[part])[:, None]
    token = rows.token[part, None] + position.clamp(low, high) - low
    head = torch.arange(shape.lines, device=q.device) % shape.group
    grouped = q.unflatten(1, (-1, shape.group))  # [tokens, kv_heads, group, head_size]
    token = token.clamp(max=len(q) - 1).long()
    return grouped[token, :, head.expand_as(token)].transpose(1, 2).contiguous()


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
    """Fold the leaves of each tile in the order of MERGE_LEVELS; write its queries to `out` [tokens, heads, head_size].

    parts [count, kv_heads, lines, head_size] and lse [count, kv_heads, lines] (natural logarithm, -inf where nothing
    was seen) are those of the mask rows from `start` on. sinks: [heads], logits that join the softmax without a value.
    value_scale: [kv_heads], results are multiplied with it. Of a leaf that is alone, without sinks, lse is not read:
    its lines that saw nothing are 0, and others keep their bits.
    """
    if parts.is_cuda:
        from octavo.ops.flex import gpu

        gpu.merge_lines(
            parts, lse, rows, shape, out, start=start, num_leaves=num_leaves, sinks=sinks, value_scale=value_scale
        )
        return
    merge_lines_reference(
        parts, lse, rows, shape, out, start=start, num_leaves=num_leaves, sinks=sinks, value_scale=value_scale
    )


def merge_lines_reference(
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
    """The reference implementation of `merge_lines`. Waits for the device."""
    tiles, used = len(parts) // num_leaves, shape.tokens * shape.group
    parts = parts.float().unflatten(0, (tiles, num_leaves))[..., :used, :]
    lse = lse.unflatten(0, (tiles, num_leaves))[..., :used]
    most = lse.amax(1)  # [tiles, kv_heads, lines]
    if sinks is not None:
        sink = sinks.float().view(1, -1, 1, shape.group).expand(-1, -1, shape.tokens, -1).flatten(2)
        most = torch.maximum(most, sink)
    most = torch.where(most == float("-inf"), 0.0, most)
    weights = torch.exp(lse - most[:, None])
    total, result = _fold(weights), _fold(weights[..., None] * parts)
    if sinks is not None:
        total = total + torch.exp(sink - most)
    result = result / torch.where(total == 0.0, 1.0, total)[..., None]
    if value_scale is not None:
        result = result * value_scale[:, None, None]
    result = result.unflatten(2, (shape.tokens, shape.group)).transpose(1, 2).flatten(2, 3)  # [tiles, tokens, heads, D]
    at = slice(start, start + tiles * num_leaves, num_leaves)
    position = rows.first[at, None] + torch.arange(shape.tokens, device=out.device)
    valid = (position >= rows.low[at, None]) & (position <= rows.high[at, None])
    token = rows.token[at, None] + position - rows.low[at, None]
    out[token[valid].long()] = result[valid].to(out.dtype)


def _fold(x: Tensor) -> Tensor:
    """The sum over leaves, axis 1, in the order of MERGE_LEVELS."""
    lanes = 1 << min((x.shape[1] - 1).bit_length(), MERGE_LEVELS)
    sums = [
        functools.reduce(torch.add, x[:, lane::lanes].unbind(1), torch.zeros_like(x[:, 0])) for lane in range(lanes)
    ]
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [low + high for low, high in zip(sums[:half], sums[half:], strict=True)]
    return sums[0]


def token_axis(kv: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of a layer's view [blocks, kv_heads, block, 2 * head_size] with its blocks end to end.

    Each [1, kv_heads, tokens, head_size], the same bytes; token t of block b is b * stride * block + t, with the
    stride of `block_stride`.
    """
    blocks, heads, block, channels = kv.shape
    step, head, token, _ = kv.stride()
    num_tokens = ((blocks - 1) * block_stride(kv) + 1) * block
    size = (1, heads, num_tokens, channels // 2)
    strides = (step * blocks, head, token, 1)
    start = kv.storage_offset()
    return kv.as_strided(size, strides, start), kv.as_strided(size, strides, start + channels // 2)


def block_stride(kv: Tensor) -> int:
    """Blocks' worth of the token axis from one block to the next: more than 1 where other layers lie between."""
    stride, rest = divmod(kv.stride(0), kv.shape[2] * kv.stride(2))
    assert rest == 0, "blocks lie at multiples of their tokens"
    return stride


def attend_lines_reference(
    lines: Tensor,
    key: Tensor,
    value: Tensor,
    rows: MaskRows,
    shape: Geometry,
    mask: MaskMod,
    score: ScoreMod,
    *,
    start: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """What the compiled kernel computes, in plain torch: partial blocks, then full ones, with a running softmax.

    lines [count, kv_heads, lines, head_size]; key, value: see `token_axis`. Gives outputs in the shape of lines and the
    logarithms of the sums. Waits for the device.
    """
    count, heads, num_lines, _ = lines.shape
    part = slice(start, start + count)
    most = torch.full((count, heads, num_lines), float("-inf"), device=lines.device)
    total, result = torch.zeros_like(most), torch.zeros(lines.shape, device=lines.device)
    over = (
        torch.arange(start, start + count, device=lines.device),
        torch.arange(heads, device=lines.device),
        torch.arange(num_lines, device=lines.device),
    )
    q, scored, masked = lines.float(), _per_pair(score, 1), _per_pair(mask, 0)
    for indices, num, is_full in ((rows.partial, rows.partial_num, False), (rows.full, rows.full_num, True)):
        counts, lists = num[part, 0, 0], indices[part, 0, 0].unflatten(1, (-1, shape.entry))
        for column in range(int(counts.max()) if count else 0):
            at, positions = _keys(lists[:, column], shape)
            k, v = (x[0][:, at].transpose(0, 1).float() for x in (key, value))  # [count, kv_heads, keys, head_size]
            scores = scored(torch.matmul(q, k.transpose(2, 3)) * scale, *over, positions)
            seen = (column < counts)[:, None, None, None].expand_as(scores)
            if not is_full:
                seen = seen & masked(*over, positions)
            scores = torch.where(seen, scores, float("-inf"))
            higher = torch.maximum(most, scores.amax(-1))
            base = torch.where(higher == float("-inf"), 0.0, higher)
            weights, keep = torch.exp(scores - base[..., None]), torch.exp(most - base)
            v = torch.where(seen.any(2)[..., None], v, 0.0)  # what no line sees may hold anything
            total = total * keep + weights.sum(-1)
            result = result * keep[..., None] + torch.matmul(weights, v)
            most = higher
    total = torch.where(total == 0.0, 1.0, total)
    return (result / total[..., None]).to(lines.dtype), most + torch.log(total)


def _keys(entry: Tensor, shape: Geometry) -> tuple[Tensor, Tensor]:
    """Of mask blocks [count, entry]: their keys' places in the token axis and logical positions, [count, keys]."""
    inside, units = torch.arange(shape.unit, device=entry.device), entry[:, 1:, None].long()
    at = torch.where(units < 0, ~units, units) * shape.unit + inside
    start = torch.arange(0, shape.kv_block, shape.unit, device=entry.device)[:, None]
    positions = torch.where(units < 0, NOWHERE, entry[:, :1, None] * shape.kv_block + start + inside)
    return at.flatten(1), positions.flatten(1)


def _per_pair(function: Callable[..., Tensor], scores: int) -> Callable[..., Tensor]:
    """`function` for all (mask row, head, line, key): `scores` arguments of that shape, then the four."""
    inner = function
    for level in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, 0)):
        inner = torch.vmap(inner, (*(0,) * scores, *level))
    return inner
