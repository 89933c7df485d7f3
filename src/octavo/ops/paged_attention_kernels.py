"""The Triton kernels of `octavo.ops.paged_attention`: one that attends, one that merges what programs left apart.

Owns the arithmetic of the canonical order that `paged_attention` states. Does not know launch sizes: tile height,
splits and grids are free, for no bit depends on them. Invariant: a (query, head) is one row of a tile, every operation
on a row is the same in every tile, and what a row does not see adds exactly 0 to it.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _row_of(query_start, num_rows, place, TILE_QUERIES: tl.constexpr):
    """The last row that begins at `place` or before.

    TILE_QUERIES: places are tiles, and row r has its first one at query_start[r] // TILE_QUERIES + r; or 0: places are
    tokens. The loads wait for nothing, unlike a binary search's.
    """
    count = 0
    for base in range(0, num_rows, 128):
        row = base + tl.arange(0, 128)
        begin = tl.load(query_start + row, mask=row < num_rows, other=2147483647 // 2)
        if TILE_QUERIES > 0:
            begin = begin // TILE_QUERIES + row
        count += tl.sum(((begin <= place) & (row < num_rows)).to(tl.int32), 0)
    return count - 1


@triton.jit
def _larger(left, right):
    return tl.maximum(left, right)


@triton.jit
def _exp2_from(x, top):
    """2 ** (x - top), and 0 where x is -inf, even if top is too."""
    return tl.exp2(x - tl.where(top == float("-inf"), 0.0, top))


@triton.jit
def _row_sum(x, BM: tl.constexpr, BN: tl.constexpr):
    """The sum of each line as one fixed binary tree.

    `tl.sum` alone adds in an order that follows the tile's layout in registers; a sum of two has one order only.
    """
    tl.static_assert(BN == 64, "the tree has one level per bit of the column")
    x = tl.reshape(x, (BM, 2, 2, 2, 2, 2, 2))
    # Bits 0 and 5, 4, 3 are a thread's own columns in most layouts of the matrix units, bits 2 and 1 its neighbours'.
    x = tl.sum(tl.sum(tl.sum(tl.sum(x, 6), 1), 1), 1)
    return tl.sum(tl.sum(x, 1), 1)


@triton.jit
def _fold(total, total_sum, total_max, leaf, leaf_sum, leaf_max):
    """The totals of some leaves, with the next leaf. An empty one (0, 0, -inf) changes nothing, on either side."""
    top = tl.maximum(total_max, leaf_max)
    keep = _exp2_from(total_max, top)
    add = _exp2_from(leaf_max, top)
    total_sum = tl.fma(total_sum, keep, leaf_sum * add)
    total = tl.fma(total, tl.expand_dims(keep, -1), leaf * tl.expand_dims(add, -1))
    return total, total_sum, top


@triton.jit
def _step(
    q, leaf, leaf_sum, leaf_max, kv, table, start, low, high, position, window, score_scale, cap_scale,
    kv_block, kv_token, BLOCK: tl.constexpr, BN: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of BN tokens of the online softmax.

    Tokens from `low` to `high` - 1 may be read; `position`: the last token that a line sees. MASK: not every line sees
    every token.
    """
    token = start + tl.arange(0, BN)
    channel = tl.arange(0, PADDED)
    readable = (token >= low) & (token < high)
    if MASK:
        block = tl.load(table + token // BLOCK, mask=readable, other=0)
    else:
        block = tl.load(table + token // BLOCK)
    place = block.to(tl.int64) * kv_block + (token % BLOCK) * kv_token
    at = kv + place[:, None] + channel[None, :]
    # What may not be read: K is any stored value, for its score is hidden below; V is 0, for 0 times NaN is NaN.
    if HEAD == PADDED:
        k = tl.load(at)
        v = tl.load(at + HEAD, mask=readable[:, None], other=0.0) if MASK else tl.load(at + HEAD)
    else:
        k = tl.load(at, mask=(channel < HEAD)[None, :], other=0.0)
        if MASK:
            v = tl.load(at + HEAD, mask=readable[:, None] & (channel < HEAD)[None, :], other=0.0)
        else:
            v = tl.load(at + HEAD, mask=(channel < HEAD)[None, :], other=0.0)
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
    if SOFT_CAP:
        scores = 1.0 - 2.0 / (tl.exp2(scores * cap_scale) + 1.0)  # tanh
    if MASK:
        seen = token[None, :] <= position[:, None]
        if WINDOW:
            seen = seen & (token[None, :] > position[:, None] - window) & (token >= low)[None, :]
        scores = tl.where(seen, scores, float("-inf"))
    top = tl.maximum(leaf_max, tl.max(scores, 1) * score_scale)
    safe = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(tl.fma(scores, score_scale, -safe[:, None]))
    keep = tl.exp2(leaf_max - safe)
    leaf_sum = tl.fma(leaf_sum, keep, _row_sum(weights, weights.shape[0], BN))
    leaf = tl.dot(weights.to(q.dtype), v.to(q.dtype), leaf * keep[:, None], input_precision=PRECISION)
    return leaf, leaf_sum, top


@triton.jit
def _end_leaf(
    total, total_sum, total_max, leaf, leaf_sum, leaf_max, parts, part_stats, index, valid, SPLIT: tl.constexpr
):
    """Fold the finished leaf into the totals, or write it down where others of its row are elsewhere."""
    if SPLIT:
        channel = tl.arange(0, leaf.shape[1])
        where = parts + index * leaf.shape[1]
        tl.store(where[:, None] + channel[None, :], leaf, mask=valid[:, None])
        tl.store(part_stats + index * 4, leaf_max, mask=valid)
        tl.store(part_stats + index * 4 + 1, leaf_sum, mask=valid)
    else:
        total, total_sum, total_max = _fold(total, total_sum, total_max, leaf, leaf_sum, leaf_max)
    leaf = tl.zeros(leaf.shape, tl.float32)
    leaf_sum = tl.zeros(leaf_sum.shape, tl.float32)
    leaf_max = tl.full(leaf_max.shape, float("-inf"), tl.float32)
    return total, total_sum, total_max, leaf, leaf_sum, leaf_max


@triton.jit(do_not_specialize=["num_rows", "short", "width", "splits", "max_leaves", "table_row", "window"])
def attend(
    q, kv, out, query_start, seq_lens, table, parts, part_stats,
    q_token, q_head, out_token, out_head, kv_block, kv_head, kv_token, table_row,
    num_rows, short, width, splits, max_leaves, window, score_scale, cap_scale, value_scale,
    GROUP: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, LEAF: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    SHORT: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (KV heads, tiles, splits). A tile is BM // GROUP queries of a row with the GROUP heads of one KV head.

    SHORT: tile i is row i, and rows of more than `short` queries are left out; otherwise the others are.
    SPLIT: each program takes a run of whole leaves and writes each one to `parts` [lines, heads, max_leaves, PADDED]
    and its maximum and sum to `part_stats` [.., 4], where a line is a token, or with SHORT row * width + query;
    otherwise it takes all, folds them and writes `out`.
    """
    QUERIES: tl.constexpr = BM // GROUP
    kv_index = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first
    if SHORT:
        row = tile
        first_query = 0
    else:
        row = _row_of(query_start, num_rows, tile, QUERIES)
        first_query = (tile - tl.load(query_start + row) // QUERIES - row) * QUERIES
    row_start = tl.load(query_start + row)
    num_queries = tl.load(query_start + row + 1) - row_start
    if SHORT:
        if num_queries > short or num_queries == 0:
            return
    else:
        if num_queries <= short or first_query >= num_queries:
            return
    seq_len = tl.load(seq_lens + row)

    line = tl.arange(0, BM)
    query = first_query + line // GROUP
    head = kv_index * GROUP + line % GROUP
    valid = (line < QUERIES * GROUP) & (query < num_queries)
    channel = tl.arange(0, PADDED)
    stored = valid[:, None] & (channel < HEAD)[None, :]
    token = (row_start + query).to(tl.int64)
    q_at = q + token * q_token + head * q_head
    queries = tl.load(q_at[:, None] + channel[None, :], mask=stored, other=0.0)

    first_position = seq_len - num_queries + first_query
    position = tl.minimum(seq_len - num_queries + query, seq_len - 1)
    high = tl.minimum(seq_len, first_position + QUERIES)
    low = 0
    row_leaf = 0  # the first leaf that the row needs
    if WINDOW:
        low = tl.maximum(first_position - window + 1, 0)
        row_leaf = tl.maximum(seq_len - num_queries - window + 1, 0) // LEAF
    first_leaf = low // LEAF
    part = (tl.cdiv(high, LEAF) - first_leaf + splits - 1) // splits
    begin = (first_leaf + tl.program_id(2) * part) * LEAF
    end = tl.minimum(begin + part * LEAF, high)
    begin = tl.maximum(begin, low // BN * BN)
    if SPLIT and begin >= end:
        return
    place = token
    if SHORT:
        place = row.to(tl.int64) * width + query
    index = (place * (tl.num_programs(0) * GROUP) + head) * max_leaves - row_leaf

    kv = kv + kv_index.to(tl.int64) * kv_head
    table = table + row.to(tl.int64) * table_row
    leaf = tl.zeros((BM, PADDED), tl.float32)
    leaf_sum = tl.zeros((BM,), tl.float32)
    leaf_max = tl.full((BM,), float("-inf"), tl.float32)
    total, total_sum, total_max = leaf, leaf_sum, leaf_max
    masked = begin
    if not WINDOW:
        masked = tl.maximum(tl.minimum((first_position + 1) // BN * BN, end), begin)  # all lines see what is before
        for start in tl.range(begin, masked, BN, num_stages=STAGES):
            leaf, leaf_sum, leaf_max = _step(
                queries, leaf, leaf_sum, leaf_max, kv, table, start, low, high, position, window, score_scale,
                cap_scale, kv_block, kv_token, BLOCK, BN, HEAD, PADDED, WINDOW, SOFT_CAP, False, PRECISION,
            )  # fmt: skip
            if (start + BN) % LEAF == 0:
                total, total_sum, total_max, leaf, leaf_sum, leaf_max = _end_leaf(
                    total, total_sum, total_max, leaf, leaf_sum, leaf_max, parts, part_stats, index + start // LEAF,
                    valid, SPLIT,
                )  # fmt: skip
    for start in tl.range(masked, end, BN, num_stages=STAGES):
        leaf, leaf_sum, leaf_max = _step(
            queries, leaf, leaf_sum, leaf_max, kv, table, start, low, high, position, window, score_scale, cap_scale,
            kv_block, kv_token, BLOCK, BN, HEAD, PADDED, WINDOW, SOFT_CAP, True, PRECISION,
        )  # fmt: skip
        if (start + BN) % LEAF == 0:
            total, total_sum, total_max, leaf, leaf_sum, leaf_max = _end_leaf(
                total, total_sum, total_max, leaf, leaf_sum, leaf_max, parts, part_stats, index + start // LEAF,
                valid, SPLIT,
            )  # fmt: skip
    if tl.cdiv(end, BN) * BN % LEAF != 0:
        total, total_sum, total_max, leaf, leaf_sum, leaf_max = _end_leaf(
            total, total_sum, total_max, leaf, leaf_sum, leaf_max, parts, part_stats, index + end // LEAF, valid, SPLIT
        )
    if not SPLIT:
        inverse = tl.where(total_sum == 0.0, 0.0, 1.0 / total_sum) * value_scale
        out_at = out + token * out_token + head * out_head
        result = (total * inverse[:, None]).to(out.dtype.element_ty)
        tl.store(out_at[:, None] + channel[None, :], result, mask=stored)


@triton.jit
def _gather(part, stats, PADDED: tl.constexpr, GATHER: tl.constexpr):
    """The sums of GATHER leaves, then their weights, then the factors of what is before and of themselves.

    All loads stand before the first use, so that they are in flight together.
    """
    loaded = ()
    for step in tl.static_range(GATHER):
        loaded = loaded + (tl.load(part + step * PADDED),)  # noqa: RUF005  (Triton has no starred tuples)
    for field in tl.static_range(1, 4):
        for step in tl.static_range(GATHER):
            loaded = loaded + (tl.load(stats + (step * 4 + field)),)  # noqa: RUF005
    return loaded


@triton.jit(do_not_specialize=["num_rows", "short", "width", "max_leaves", "window"])
def merge(
    out, query_start, seq_lens, parts, part_stats, out_token, out_head, num_rows, short, width, max_leaves,
    window, value_scale, HEAD: tl.constexpr, PADDED: tl.constexpr, LEAF: tl.constexpr, GATHER: tl.constexpr,
    CHUNK: tl.constexpr, CHANNELS: tl.constexpr, SHORT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid: (heads, lines, PADDED / CHANNELS). Fold the leaves that `attend` wrote, in order; write `out`.

    GATHER: leaves whose loads are issued together. CHUNK: leaves whose factors are.
    """
    head = tl.program_id(0)
    line = tl.program_id(1)
    if SHORT:
        row = line // width
        query = line % width
        row_start = tl.load(query_start + row)
        num_queries = tl.load(query_start + row + 1) - row_start
        if query >= num_queries or num_queries > short:
            return
    else:
        row = _row_of(query_start, num_rows, line, 0)
        row_start = tl.load(query_start + row)
        num_queries = tl.load(query_start + row + 1) - row_start
        query = line - row_start
        if query >= num_queries or num_queries <= short:
            return
    seq_len = tl.load(seq_lens + row)
    high = seq_len - num_queries + query + 1
    first, row_leaf = 0, 0
    if WINDOW:
        first = tl.maximum(high - window, 0) // LEAF
        row_leaf = tl.maximum(seq_len - num_queries - window + 1, 0) // LEAF
    last = tl.cdiv(high, LEAF)

    index = (line.to(tl.int64) * tl.num_programs(0) + head) * max_leaves - row_leaf
    # What `_fold` multiplies with depends on the maxima alone: all of it at once, so that the fold is one chain of fma.
    top = float("-inf")
    for base in range(first, last, CHUNK):
        leaf = base + tl.arange(0, CHUNK)
        at = part_stats + (index + leaf) * 4
        leaf_max = tl.load(at, mask=leaf < last, other=float("-inf"))
        before = tl.load(at - 4, mask=(leaf > base) & (leaf < last), other=float("-inf"))
        before = tl.maximum(tl.associative_scan(before, 0, _larger), top)
        after = tl.maximum(before, leaf_max)
        tl.store(at + 2, _exp2_from(before, after), mask=leaf < last)
        tl.store(at + 3, _exp2_from(leaf_max, after), mask=leaf < last)
        top = tl.max(after, 0)
    tl.debug_barrier()
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros((CHANNELS,), tl.float32)
    total_sum = 0.0
    whole = first + (last - first) // GATHER * GATHER
    for base in range(first, whole, GATHER):
        loaded = _gather(parts + (index + base) * PADDED + channel, part_stats + (index + base) * 4, PADDED, GATHER)
        for step in tl.static_range(GATHER):
            total_sum = tl.fma(total_sum, loaded[2 * GATHER + step], loaded[GATHER + step] * loaded[3 * GATHER + step])
            total = tl.fma(total, loaded[2 * GATHER + step], loaded[step] * loaded[3 * GATHER + step])
    for base in range(whole, last, 8):
        for step in tl.static_range(8):
            there = base + step < last
            stats = part_stats + (index + base) * 4 + step * 4
            leaf_sum = tl.load(stats + 1, mask=there, other=0.0)
            keep = tl.load(stats + 2, mask=there, other=1.0)
            add = tl.load(stats + 3, mask=there, other=0.0)
            leaf = tl.load(parts + (index + base + step) * PADDED + channel, mask=there, other=0.0)
            total_sum = tl.fma(total_sum, keep, leaf_sum * add)
            total = tl.fma(total, keep, leaf * add)
    inverse = tl.where(total_sum == 0.0, 0.0, 1.0 / total_sum) * value_scale
    result = (total * inverse).to(out.dtype.element_ty)
    at = out + (row_start + query).to(tl.int64) * out_token + head * out_head
    tl.store(at + channel, result, mask=channel < HEAD)
