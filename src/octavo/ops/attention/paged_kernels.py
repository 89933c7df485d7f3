"""The Triton kernels of `octavo.ops.attention.paged`: one for rows of few queries, one for tiles of many.

Owns the arithmetic of the canonical order that `paged_attention` states. Does not know launch sizes: tile height,
splits and grids are free, for no bit depends on them. Invariant: a (query, head) is one row of a tile, every operation
on a row is the same in every tile, and what a row does not see adds exactly 0 to it. Where several programs share the
leaves of a (tile, KV head), each writes its leaves down and the last to arrive folds all of them, in order.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.attention.paged_workload import BN, EVERYTHING, WINDOW, first_seen, leaf_of, leaf_start
from octavo.ops.compile.launch import begin_after, launched

_EVERYTHING, _WINDOW, _BN = tl.constexpr(EVERYTHING), tl.constexpr(WINDOW), tl.constexpr(BN)
_LOG2_E = tl.constexpr(1.4426950408889634)
_QUARTER = tl.constexpr(BN // 4)  # divides every block size


@triton.jit
def _row_of(query_start, num_rows, tile, QUERIES: tl.constexpr):
    """The row of a tile: row r has its first one at query_start[r] // QUERIES + r.

    The loads wait for nothing, unlike a binary search's.
    """
    count = 0
    for base in range(0, num_rows, 128):
        row = base + tl.arange(0, 128)
        begin = tl.load(query_start + row, mask=row < num_rows, other=0) // QUERIES + row
        count += tl.sum(((begin <= tile) & (row < num_rows)).to(tl.int32), 0)
    return count - 1


@triton.jit
def exp2_from(x, top):
    """2 ** (x - top), and 0 where x is -inf, even if top is too."""
    return tl.exp2(x - tl.where(top == float("-inf"), 0.0, top))


@triton.jit
def fold(total, total_sum, total_max, leaf, leaf_sum, leaf_max, AXIS: tl.constexpr):
    """The totals of some leaves, with the next leaf. An empty one (0, 0, -inf) changes nothing, on either side.

    AXIS: of the channels.
    """
    top = tl.maximum(total_max, leaf_max)
    keep = exp2_from(total_max, top)
    add = exp2_from(leaf_max, top)
    total_sum = tl.fma(total_sum, keep, leaf_sum * add)
    total = tl.fma(total, tl.expand_dims(keep, AXIS), leaf * tl.expand_dims(add, AXIS))
    return total, total_sum, top


@triton.jit
def _blocks_of(table, start, low, high, BLOCK: tl.constexpr):
    """The blocks of a tile's quarters; 0 where none of it is read."""
    ONE_BLOCK: tl.constexpr = BLOCK // _BN * _BN == BLOCK
    WIDTH: tl.constexpr = _BN if ONE_BLOCK else _QUARTER
    blocks = ()
    for quarter in tl.static_range(4):
        token = start + quarter * _QUARTER
        if quarter == 0 or not ONE_BLOCK:
            block = tl.load(table + token // BLOCK, mask=(token < high) & (token + WIDTH > low), other=0)
        blocks = blocks + (block,)  # noqa: RUF005  (Triton has no starred tuples)
    return blocks


@triton.jit
def _load_tile(
    kv,
    blocks,
    start,
    low,
    high,
    kv_block,
    kv_token,
    BLOCK: tl.constexpr,
    HEAD: tl.constexpr,
    PADDED: tl.constexpr,
    SEES: tl.constexpr,
    MASK: tl.constexpr,
    TURNED: tl.constexpr,
):
    """K [BN, PADDED] and V, transposed if TURNED, of BN tokens. blocks: see `_blocks_of`.

    MASK: those that may not be read (only `low` to `high` - 1 may) are 0, so that a weight of 0 makes 0 of their V.
    """
    at, channel = tl.arange(0, _BN), tl.arange(0, PADDED)
    ONE_BLOCK: tl.constexpr = BLOCK // _BN * _BN == BLOCK
    V_LINES: tl.constexpr = 0 if TURNED else 1
    line = at * kv_token if ONE_BLOCK else at % _QUARTER * kv_token
    keys = kv + (line[:, None] + channel[None, :])
    values = kv + HEAD + (tl.expand_dims(line, V_LINES) + tl.expand_dims(channel, 1 - V_LINES))
    place = blocks[0].to(tl.int64) * kv_block + (start % BLOCK) * kv_token
    if ONE_BLOCK:
        keys += place
        values += place
    else:
        for quarter in tl.static_range(1, 4):
            token = start + quarter * _QUARTER
            other = blocks[quarter].to(tl.int64) * kv_block + (token % BLOCK) * kv_token
            place = tl.where(at >= quarter * _QUARTER, other, place)
        keys += place[:, None]
        values += tl.expand_dims(place, V_LINES)
    token = start + at
    if HEAD == PADDED and not MASK:
        return tl.load(keys), tl.load(values)
    is_there, is_channel = token < high, channel < HEAD
    if SEES != _EVERYTHING:
        is_there = is_there & (token >= low)
    key_mask, value_mask = is_channel[None, :], tl.expand_dims(is_channel, 1 - V_LINES)
    if MASK:
        key_mask, value_mask = is_there[:, None] & key_mask, tl.expand_dims(is_there, V_LINES) & value_mask
    return tl.load(keys, mask=key_mask, other=0.0), tl.load(values, mask=value_mask, other=0.0)


@triton.jit
def _widened(x, dtype: tl.constexpr):
    """What the cache holds, as what is computed with."""
    if x.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        x = x.to(tl.float16).to(tl.float32)  # exact, and eight times as fast as the direct way
    return x.to(dtype)


@triton.jit
def _scored(
    scores,
    token,
    line_first,
    line_last,
    line_position,
    line_slope,
    low,
    score_scale,
    cap_scale,
    SEES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
    MASK: tl.constexpr,
):
    """Scores times the scale that is left to apply, and that scale. `token` and what is of a line: broadcast already.

    MASK: a line sees tokens from `line_first` to `line_last`; the others' scores are -inf.
    """
    if SOFT_CAP:
        scores = 1.0 - 2.0 / (tl.exp2(scores * cap_scale) + 1.0)  # tanh
    if ALIBI:
        distance = (token - line_position).to(tl.float32)
        scores = tl.fma(scores, score_scale, line_slope * distance)
        score_scale = 1.0
    if MASK:
        seen = token <= line_last
        if SEES != _EVERYTHING:
            seen = seen & (token >= line_first) & (token >= low)
        scores = tl.where(seen, scores, float("-inf"))
    return scores, score_scale


@triton.jit
def _step(
    q, leaf, leaf_sum, leaf_max, kv, blocks, start, low, high, first, last, position, slope, score_scale, cap_scale,
    kv_block, kv_token, BLOCK: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr,
    SEES: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """One tile of BN tokens of the online softmax.

    q: [lines, PADDED], leaf likewise, leaf_sum: [lines, 8] (all alike: the matrix units add it up as they do a
    channel of V that is 1). TURNED: all of them are transposed, so that few lines take little of the matrix units.
    Tokens from `low` to `high` - 1 may be read; MASK: not every line sees every token. blocks: see `_blocks_of`.
    """
    AXIS: tl.constexpr = 0 if TURNED else 1  # of tokens in scores, of channels in sums
    LINES: tl.constexpr = 1 - AXIS
    k, v = _load_tile(kv, blocks, start, low, high, kv_block, kv_token, BLOCK, HEAD, PADDED, SEES, MASK, TURNED)
    if TURNED:
        scores = tl.dot(_widened(k, q.dtype), q, input_precision=PRECISION)
    else:
        scores = tl.dot(q, tl.trans(_widened(k, q.dtype)), input_precision=PRECISION)
    scores, score_scale = _scored(
        scores,
        tl.expand_dims(start + tl.arange(0, _BN), LINES),
        tl.expand_dims(first, AXIS),
        tl.expand_dims(last, AXIS),
        tl.expand_dims(position, AXIS),
        tl.expand_dims(slope, AXIS),
        low,
        score_scale,
        cap_scale,
        SEES,
        SOFT_CAP,
        ALIBI,
        MASK,
    )
    top = tl.maximum(leaf_max, tl.max(scores, AXIS) * score_scale)
    safe = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(tl.fma(scores, score_scale, -tl.expand_dims(safe, AXIS))).to(q.dtype)
    keep = tl.expand_dims(tl.exp2(leaf_max - safe), AXIS)
    if TURNED:
        ones = tl.full((leaf_sum.shape[0], _BN), 1.0, q.dtype)
        leaf_sum = tl.dot(ones, weights, leaf_sum * keep, input_precision=PRECISION)
        leaf = tl.dot(_widened(v, q.dtype), weights, leaf * keep, input_precision=PRECISION)
    else:
        ones = tl.full((_BN, leaf_sum.shape[1]), 1.0, q.dtype)
        leaf_sum = tl.dot(weights, ones, leaf_sum * keep, input_precision=PRECISION)
        leaf = tl.dot(weights, _widened(v, q.dtype), leaf * keep, input_precision=PRECISION)
    return leaf, leaf_sum, top


@triton.jit
def walk(
    q, kv, table, parts, part_stats, slot, stored, is_split, begin, unmasked, end, low, high, first, last, position,
    slope, score_scale, cap_scale, kv_block, kv_token, BLOCK: tl.constexpr, HEAD: tl.constexpr,
    PADDED: tl.constexpr, STAGES: tl.constexpr, SEES: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr,
    PRECISION: tl.constexpr, FOLD: tl.constexpr, LINES: tl.constexpr, TURNED: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Tokens from `begin` (a tile's first) to `end` - 1 of a row, for the lines of a tile: the totals of their leaves.

    Before `unmasked`, every line sees every token. FOLD: leaves are folded into the totals. is_split: those of lines
    that are `stored` are written to slot `slot` + leaf. TURNED, SUMS: how tiles and their sums lie, see `_step`; if
    TURNED, all tiles are masked, which costs less than a second loop's start.
    """
    AXIS: tl.constexpr = 0 if TURNED else 1
    BM: tl.constexpr = q.shape[1] if TURNED else q.shape[0]
    leaf = tl.zeros((PADDED, BM) if TURNED else (BM, PADDED), tl.float32)
    leaf_sum = tl.zeros((SUMS, BM) if TURNED else (BM, SUMS), tl.float32)
    leaf_max = tl.full((BM,), float("-inf"), tl.float32)
    total, total_sum, total_max = leaf, tl.zeros((BM,), tl.float32), leaf_max
    # The table is read a tile ahead, so that a tile's loads wait for nothing.
    blocks = _blocks_of(table, begin, low, high, BLOCK)
    for masked in tl.static_range(1 if TURNED else 0, 2):
        for start in tl.range(
            begin if TURNED or not masked else unmasked, end if masked else unmasked, _BN, num_stages=STAGES
        ):
            leaf, leaf_sum, leaf_max = _step(
                q, leaf, leaf_sum, leaf_max, kv, blocks, start, low, high, first, last, position, slope, score_scale,
                cap_scale, kv_block, kv_token, BLOCK, HEAD, PADDED, SEES, SOFT_CAP, ALIBI, masked, PRECISION,
                TURNED,
            )  # fmt: skip
            blocks = _blocks_of(table, start + _BN, low, high, BLOCK)
            if leaf_of(start + _BN) > leaf_of(start) or start + _BN >= end:
                one_sum = tl.max(leaf_sum, AXIS)
                if is_split:
                    at = slot + leaf_of(start)
                    line, channel = tl.arange(0, BM), tl.arange(0, PADDED)
                    where = tl.expand_dims(line * PADDED, AXIS) + tl.expand_dims(channel, 1 - AXIS)
                    tl.store(parts + at * (LINES * PADDED) + where, leaf, mask=tl.expand_dims(stored, AXIS))
                    tl.store(part_stats + at * (2 * LINES) + line, leaf_max, mask=stored)
                    tl.store(part_stats + at * (2 * LINES) + LINES + line, one_sum, mask=stored)
                if FOLD:
                    total, total_sum, total_max = fold(total, total_sum, total_max, leaf, one_sum, leaf_max, AXIS)
                leaf = tl.zeros(leaf.shape, tl.float32)
                leaf_sum = tl.zeros(leaf_sum.shape, tl.float32)
                leaf_max = tl.full(leaf_max.shape, float("-inf"), tl.float32)
    return total, total_sum, total_max


@triton.jit
def is_last(counter, mine, whole):
    """Whether this program brought the last of `whole` leaves; the counter is 0 again then."""
    tl.debug_barrier()
    before = tl.atomic_add(counter, mine, sem="acq_rel", scope="gpu")
    is_last = before + mine == whole
    if is_last:
        tl.store(counter, 0)
    return is_last


@triton.jit
def fold_stored(parts, part_stats, slot, leaves, LINES: tl.constexpr, PADDED: tl.constexpr, GATHER: tl.constexpr):
    """The totals of the leaves at `slot` and behind, whoever wrote them. GATHER: leaves whose loads are in flight."""
    line, channel = tl.arange(0, LINES), tl.arange(0, PADDED)
    total = tl.zeros((LINES, PADDED), tl.float32)
    total_sum = tl.zeros((LINES,), tl.float32)
    total_max = tl.full((LINES,), float("-inf"), tl.float32)
    part = parts + slot * (LINES * PADDED) + line[:, None] * PADDED + channel[None, :]
    stats = part_stats + slot * (2 * LINES) + line
    for base in range(0, leaves, GATHER):
        loaded = ()
        for step in tl.static_range(GATHER):
            at, there = base + step, base + step < leaves
            loaded = loaded + (  # noqa: RUF005  (Triton has no starred tuples)
                tl.load(part + at * (LINES * PADDED), mask=there, other=0.0, cache_modifier=".cg"),
                tl.load(stats + at * (2 * LINES) + LINES, mask=there, other=0.0, cache_modifier=".cg"),
                tl.load(stats + at * (2 * LINES), mask=there, other=float("-inf"), cache_modifier=".cg"),
            )
        for step in tl.static_range(GATHER):
            total, total_sum, total_max = fold(
                total, total_sum, total_max, loaded[3 * step], loaded[3 * step + 1], loaded[3 * step + 2], 1
            )
    return total, total_sum, total_max


@triton.jit
def write_lines(
    out,
    total,
    total_sum,
    total_max,
    row_start,
    query,
    head,
    is_stored,
    sinks,
    result_scale,
    out_token,
    out_head,
    HEAD: tl.constexpr,
):
    """The results of a tile's lines, from the totals of all their leaves."""
    if sinks is not None:  # one more leaf, of weight 1 at the sink's score and of value 0
        sink = tl.load(sinks + head, mask=is_stored, other=0.0).to(tl.float32) * _LOG2_E
        total, total_sum, total_max = fold(total, total_sum, total_max, total * 0.0, total_sum * 0.0 + 1.0, sink, 1)
    inverse = tl.where(total_sum == 0.0, 0.0, 1.0 / total_sum) * result_scale
    channel = tl.arange(0, total.shape[1])
    at = out + (row_start + query).to(tl.int64) * out_token + head * out_head
    result = (total * inverse[:, None]).to(out.dtype.element_ty)
    tl.store(at[:, None] + channel[None, :], result, mask=is_stored[:, None] & (channel < HEAD)[None, :])


@triton.jit
def lines_of(first_query, num_queries, kv_index, LINES: tl.constexpr, GROUP: tl.constexpr):
    """(query in its row, head, whether there is one) of each line of a tile."""
    line = tl.arange(0, LINES)
    query = first_query + line // GROUP
    return query, kv_index * GROUP + line % GROUP, (line < LINES // GROUP * GROUP) & (query < num_queries)


@triton.jit
def scales_of(key_scale, value_scale, kv_index, score_scale, cap_scale, SOFT_CAP: tl.constexpr):
    """What scores are multiplied with, what the soft cap's tanh is, and what results are: for one KV head's cache."""
    result_scale = 1.0
    if key_scale is not None:
        stored_scale = tl.load(key_scale + kv_index)
        if SOFT_CAP:
            cap_scale *= stored_scale
        else:
            score_scale *= stored_scale
    if value_scale is not None:
        result_scale = tl.load(value_scale + kv_index)
    return score_scale, cap_scale, result_scale


@triton.jit
def seen_by(seq_len, num_queries, query, reach, SEES: tl.constexpr, CAUSAL: tl.constexpr):
    """(first token, last token, position) of each query. One beyond the row's is like the row's last one."""
    position = tl.minimum(seq_len - num_queries + query, seq_len - 1)
    last = position
    if not CAUSAL:
        last = position * 0 + seq_len - 1
        if SEES == _WINDOW:
            last = tl.minimum(position + reach - 1, last)
    return first_seen(position, reach, SEES), last, position


@launched(triton.jit(do_not_specialize=["num_rows", "short", "splits", "max_leaves", "table_row", "reach"]))
def attend_tiles(
    q, kv, out, query_start, seq_lens, table, parts, part_stats, counters, key_scale, value_scale, sinks, slopes,
    q_token, q_head, out_token, out_head, kv_block, kv_head, kv_token, table_row, num_rows, short, splits, max_leaves,
    reach, score_scale, cap_scale, GROUP: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr,
    BLOCK: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
    SEES: tl.constexpr, CAUSAL: tl.constexpr, SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
    GATHER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (KV heads, tiles, splits), for rows of more than `short` queries.

    A tile is BM // GROUP queries of a row with the GROUP heads of one KV head. SPLIT: each program takes a run of
    whole leaves of `max_leaves` at most.
    """
    begin_after(PDL)
    QUERIES: tl.constexpr = BM // GROUP
    kv_index = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first
    row = _row_of(query_start, num_rows, tile, QUERIES)
    row_start = tl.load(query_start + row)
    first_query = (tile - row_start // QUERIES - row) * QUERIES
    num_queries = tl.load(query_start + row + 1) - row_start
    if num_queries <= short or first_query >= num_queries:
        return
    seq_len = tl.load(seq_lens + row)
    query, head, valid = lines_of(first_query, num_queries, kv_index, BM, GROUP)
    channel = tl.arange(0, PADDED)
    q_at = q + (row_start + query).to(tl.int64) * q_token + head * q_head
    queries = tl.load(q_at[:, None] + channel[None, :], mask=valid[:, None] & (channel < HEAD)[None, :], other=0.0)
    slope = head.to(tl.float32)
    if slopes is not None:
        slope = tl.load(slopes + head, mask=valid, other=0.0).to(tl.float32) * _LOG2_E
    factor, cap, result_scale = scales_of(key_scale, value_scale, kv_index, score_scale, cap_scale, SOFT_CAP)
    first, last, position = seen_by(seq_len, num_queries, query, reach, SEES, CAUSAL)

    first_position = seq_len - num_queries + first_query
    low = first_seen(first_position, reach, SEES)
    high = seq_len
    unmasked = seq_len
    if CAUSAL:
        high = tl.minimum(seq_len, first_position + QUERIES)
        unmasked = first_position + 1
    elif SEES == _WINDOW:
        high = tl.minimum(seq_len, first_position + QUERIES - 1 + reach)
    row_leaf = leaf_of(low)
    leaves = tl.where(high > 0, leaf_of(high - 1) - row_leaf + 1, 1)
    run = (leaves + splits - 1) // splits
    begin_leaf = tl.program_id(2) * run
    stop_leaf = tl.minimum(begin_leaf + run, leaves)
    if SPLIT and begin_leaf >= stop_leaf:
        return
    begin = tl.maximum(leaf_start(row_leaf + begin_leaf), low // _BN * _BN)
    end = tl.minimum(leaf_start(row_leaf + stop_leaf), high)
    unmasked = begin if SEES != _EVERYTHING else tl.maximum(tl.minimum(unmasked // _BN * _BN, end), begin)
    place = tile.to(tl.int64) * tl.num_programs(0) + kv_index
    slot = place * max_leaves
    total, total_sum, total_max = walk(
        queries, kv + kv_index.to(tl.int64) * kv_head, table + row.to(tl.int64) * table_row, parts, part_stats,
        slot - row_leaf, valid, SPLIT, begin, unmasked, end, low, high, first, last, position, slope, factor, cap,
        kv_block, kv_token, BLOCK, HEAD, PADDED, STAGES, SEES, SOFT_CAP, slopes is not None, PRECISION, not SPLIT,
        BM, False, 8,
    )  # fmt: skip
    if SPLIT:
        if not is_last(counters + place, stop_leaf - begin_leaf, leaves):
            return
        total, total_sum, total_max = fold_stored(parts, part_stats, slot, leaves, BM, PADDED, GATHER)
    write_lines(
        out, total, total_sum, total_max, row_start, query, head, valid, sinks, result_scale, out_token, out_head, HEAD
    )
