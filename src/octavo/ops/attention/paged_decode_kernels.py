"""The Triton kernels for rows of few queries: for a batch of them, for few of them, and the fold of long rows.

Owns how such rows' leaves spread over programs; the arithmetic is `paged_kernels`', the order of the sums
`paged_attention`'s. Few rows may be rotated and stored in their kernel, by the operations of `octavo.ops.rope.gpu`.
Does not know launch sizes. Invariant: who computes a leaf, and who folds, moves no bit. Leaves that programs share are
written down, and the last program to arrive folds all of them, in order, or `merge` does.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.attention.paged_kernels import (
    exp2_from,
    fold_stored,
    is_last,
    lines_of,
    scales_of,
    seen_by,
    walk,
    write_lines,
)
from octavo.ops.attention.paged_workload import BN, EVERYTHING, leaf_of, leaf_start, row_extent
from octavo.ops.compile.launch import begin_after, end_before, launched, wait_before
from octavo.ops.compile.row_sum import row_sums

_EVERYTHING, _BN = tl.constexpr(EVERYTHING), tl.constexpr(BN)
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend_leaves(
    queries, query, head, valid, row_start, num_queries, seq_len, low, leaves, kv, out, table, parts, part_stats,
    counters, key_scale, value_scale, sinks, slopes, out_token, out_head, kv_block, kv_head, kv_token, table_row, reach,
    score_scale, cap_scale, row, kv_index, pair, begin_leaf, stop_leaf, row_base, is_held, fold_limit,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, SEES: tl.constexpr, CAUSAL: tl.constexpr, SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr,
    LINES: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Leaves `begin_leaf` to `stop_leaf` - 1, at least one, for the lines of a tile [PADDED, BM]: see `_attend`."""
    slope = head.to(tl.float32)
    if slopes is not None:
        slope = tl.load(slopes + head, mask=valid, other=0.0).to(tl.float32) * _LOG2_E
    factor, cap, result_scale = scales_of(key_scale, value_scale, kv_index, score_scale, cap_scale, SOFT_CAP)
    first, last, position = seen_by(seq_len, num_queries, query, reach, SEES, CAUSAL)
    row_leaf = leaf_of(low)
    begin = tl.maximum(leaf_start(row_leaf + begin_leaf), low // _BN * _BN)
    end = tl.minimum(leaf_start(row_leaf + stop_leaf), seq_len)
    slot = row_base.to(tl.int64) * KV_HEADS + kv_index * leaves
    is_left = (leaves > fold_limit) & is_held  # for `merge`
    is_split = (stop_leaf - begin_leaf < leaves) | is_left
    total, total_sum, total_max = walk(
        queries, kv + kv_index.to(tl.int64) * kv_head, table + row.to(tl.int64) * table_row, parts, part_stats,
        slot - row_leaf, valid, is_split, begin, begin, end, low, seq_len, first, last, position, slope, factor,
        cap, kv_block, kv_token, BLOCK, HEAD, PADDED, STAGES, SEES, SOFT_CAP, slopes is not None, PRECISION, True,
        LINES, True, 64,
    )  # fmt: skip
    if not is_split:
        write_lines(
            out,
            tl.trans(total),
            total_sum,
            total_max,
            row_start,
            query,
            head,
            valid,
            sinks,
            result_scale,
            out_token,
            out_head,
            HEAD,
        )
    elif not is_left and is_last(counters + pair, stop_leaf - begin_leaf, leaves):
        line_query, line_head, is_line = lines_of(0, num_queries, kv_index, LINES, GROUP)
        folded, folded_sum, folded_max = fold_stored(parts, part_stats, slot, leaves, LINES, PADDED, GATHER)
        write_lines(
            out,
            folded,
            folded_sum,
            folded_max,
            row_start,
            line_query,
            line_head,
            is_line,
            sinks,
            result_scale,
            out_token,
            out_head,
            HEAD,
        )


@triton.jit
def _attend(
    q, kv, out, query_start, seq_lens, table, parts, part_stats, counters, key_scale, value_scale, sinks, slopes,
    q_token, q_head, out_token, out_head, kv_block, kv_head, kv_token, table_row, short, reach, score_scale, cap_scale,
    row, kv_index, pair, begin_leaf, stop_leaf, row_base, is_held, fold_limit, KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr,
    STAGES: tl.constexpr, SEES: tl.constexpr, CAUSAL: tl.constexpr, SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr,
    LINES: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """Leaves `begin_leaf` to `stop_leaf` - 1 of a row's queries with the GROUP heads of a KV head.

    All of the row's that are left, if it has fewer. `row_base`: leaves before the row's in `parts`, which is
    [.., LINES, PADDED], `part_stats` [.., 2, LINES]; LINES: how many of the tile's BM lines can be there. is_held:
    whether `parts` holds the row; if so, `merge` folds one of more than `fold_limit` leaves.
    """
    row_start = tl.load(query_start + row)
    num_queries = tl.load(query_start + row + 1) - row_start
    seq_len, low, leaves = row_extent(query_start, seq_lens, row, True, short, reach, SEES)
    stop_leaf = tl.minimum(stop_leaf, leaves)
    if begin_leaf < stop_leaf:
        query, head, valid = lines_of(0, num_queries, kv_index, BM, GROUP)
        channel = tl.arange(0, PADDED)
        q_at = q + (row_start + query).to(tl.int64) * q_token + head * q_head
        queries = tl.load(q_at[None, :] + channel[:, None], mask=valid[None, :] & (channel < HEAD)[:, None], other=0.0)
        _attend_leaves(
            queries, query, head, valid, row_start, num_queries, seq_len, low, leaves, kv, out, table, parts,
            part_stats, counters, key_scale, value_scale, sinks, slopes, out_token, out_head, kv_block, kv_head,
            kv_token, table_row, reach, score_scale, cap_scale, row, kv_index, pair, begin_leaf, stop_leaf, row_base,
            is_held, fold_limit, KV_HEADS, GROUP, HEAD, PADDED, BLOCK, STAGES, SEES, CAUSAL, SOFT_CAP, PRECISION,
            LINES, GATHER,
        )  # fmt: skip


@launched(triton.jit(do_not_specialize=["short", "reach", "table_row", "capacity", "fold_limit"]))
def attend_rows(
    q, kv, out, query_start, seq_lens, table, work, leaf_base, parts, part_stats, counters, key_scale, value_scale,
    sinks, slopes, q_token, q_head, out_token, out_head, kv_block, kv_head, kv_token: tl.constexpr, table_row, short,
    reach, score_scale, cap_scale, capacity, fold_limit, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    HEAD: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
    SEES: tl.constexpr, CAUSAL: tl.constexpr, SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr, LINES: tl.constexpr,
    GATHER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (programs of the division). Each takes its part of the leaves."""
    wait_before(PDL)
    start_pair, start_leaf = tl.load(work + tl.program_id(0) * 2), tl.load(work + tl.program_id(0) * 2 + 1)
    end_pair, end_leaf = tl.load(work + tl.program_id(0) * 2 + 2), tl.load(work + tl.program_id(0) * 2 + 3)
    count = end_pair - start_pair + (end_leaf > 0).to(tl.int32)
    for step in range(count):
        # What is shared with the next program comes first and what is shared with the one before second: folds are done
        # early, beside other programs' loads.
        pair = start_pair + tl.where(step == 0, count, step) - 1
        row = pair // KV_HEADS
        _, _, leaves = row_extent(query_start, seq_lens, row, True, short, reach, SEES)
        row_base = tl.load(leaf_base + row)
        _attend(
            q, kv, out, query_start, seq_lens, table, parts, part_stats, counters, key_scale, value_scale, sinks,
            slopes, q_token, q_head, out_token, out_head, kv_block, kv_head, kv_token, table_row, short, reach,
            score_scale, cap_scale, row, pair % KV_HEADS, pair, tl.where(pair == start_pair, start_leaf, 0),
            tl.where(pair == end_pair, end_leaf, leaves), row_base, row_base + leaves <= capacity, fold_limit, KV_HEADS,
            GROUP, HEAD, PADDED, BLOCK, BM, STAGES, SEES, CAUSAL, SOFT_CAP, PRECISION, LINES, GATHER,
        )  # fmt: skip
    end_before(PDL)


@launched(triton.jit(do_not_specialize=["short", "reach", "table_row", "num_rows", "max_leaves"]))
def attend_few(
    q, kv, out, query_start, seq_lens, table, parts, part_stats, counters, key_scale, value_scale, sinks, slopes,
    q_token, q_head, out_token, out_head, kv_block, kv_head, kv_token: tl.constexpr, table_row, short, reach,
    score_scale, cap_scale, num_rows, max_leaves, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr,
    PADDED: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, SEES: tl.constexpr,
    CAUSAL: tl.constexpr, SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr, LINES: tl.constexpr, GATHER: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: any. Leaf by leaf, in a leaf row by row, in a row KV head by KV head: each program takes every so many.

    No division is loaded: what a program waits for is short. ROWS: at least num_rows; max_leaves: of a row, bounds.
    """
    begin_after(PDL)
    num_pairs = num_rows * KV_HEADS
    place = tl.program_id(0)
    longest = place // num_pairs + 1  # the first is attended before the lengths are known
    while place // num_pairs < longest:
        rows = tl.arange(0, ROWS)
        _, _, leaves = row_extent(query_start, seq_lens, rows, rows < num_rows, short, reach, SEES)
        longest = tl.max(leaves, 0)
        leaf, pair = place // num_pairs, place % num_pairs
        row = pair // KV_HEADS
        _attend(
            q, kv, out, query_start, seq_lens, table, parts, part_stats, counters, key_scale, value_scale, sinks,
            slopes, q_token, q_head, out_token, out_head, kv_block, kv_head, kv_token, table_row, short, reach,
            score_scale, cap_scale, row, pair % KV_HEADS, pair, leaf, leaf + 1, row * max_leaves, False, 0, KV_HEADS,
            GROUP, HEAD, PADDED, BLOCK, BM, STAGES, SEES, CAUSAL, SOFT_CAP, PRECISION, LINES, GATHER,
        )  # fmt: skip
        place += tl.num_programs(0)


@triton.jit
def _prefetch(at):
    """Ask for lines of memory in the L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _prefetch_leaf(kv, table, begin, end, kv_block, kv_token, HEAD: tl.constexpr, BLOCK: tl.constexpr):
    """Ask for K and V of the first tokens of a leaf, up to `end`, in the L2: lines of 128 bytes."""
    WIDE: tl.constexpr = 2 * HEAD // 64
    lane, line = tl.arange(0, _BN), tl.arange(0, WIDE) * 64
    for tile in tl.static_range(4):
        token = tl.minimum(begin + tile * _BN + lane, tl.maximum(end - 1, begin))
        place = tl.load(table + token // BLOCK).to(tl.int64) * kv_block + token % BLOCK * kv_token
        _prefetch(kv + (place[:, None] + line[None, :]))


@triton.jit
def _angles(cos_sin, positions, token, HEAD: tl.constexpr):
    """(cosines, sines) [N, HEAD] of tokens [N]."""
    channel = tl.arange(0, HEAD)[None, :] % (HEAD // 2)
    at = (cos_sin + tl.load(positions + token).to(tl.int64) * HEAD)[:, None] + channel
    return tl.load(at), tl.load(at + HEAD // 2)


@triton.jit
def _heads(at, valid, HEAD: tl.constexpr):
    """Heads at [N] pointers: whole, with their halves changed, and each half; zeros where they are not valid."""
    HALF: tl.constexpr = HEAD // 2
    channel, half = tl.arange(0, HEAD)[None, :], tl.arange(0, HALF)[None, :]
    there = valid[:, None]
    own = tl.load(at[:, None] + channel, mask=there, other=0.0).to(tl.float32)
    other = tl.load(at[:, None] + (channel + HALF) % HEAD, mask=there, other=0.0).to(tl.float32)
    first = tl.load(at[:, None] + half, mask=there, other=0.0).to(tl.float32)
    second = tl.load(at[:, None] + HALF + half, mask=there, other=0.0).to(tl.float32)
    return own, other, first, second


@triton.jit
def _rotated(
    heads, weights, angles, eps, HEAD: tl.constexpr, LEVELS: tl.constexpr, NORM: tl.constexpr, DTYPE: tl.constexpr
):
    """Heads [N, HEAD], normed, rotated and rounded, as by `octavo.ops.rope.gpu._rotated`.

    Halves are nowhere joined: Triton multiplies what was joined in another order of k.
    """
    own, other, first, second = heads
    if NORM:
        squares = row_sums(first * first + second * second, LEVELS)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, HEAD * 1.0) + eps))[:, None]
        own = (own * inverse * weights[0]).to(DTYPE).to(tl.float32)
        other = (other * inverse * weights[1]).to(DTYPE).to(tl.float32)
    turned, beside = own * angles[0], other * angles[1]
    is_first = tl.arange(0, HEAD)[None, :] < HEAD // 2
    return tl.where(is_first, turned - beside, turned + beside).to(DTYPE)


@launched(triton.jit(do_not_specialize=["short", "table_row", "num_rows", "max_leaves"]))
def rotate_and_attend_few(
    qkv, positions, cos_sin, q_norm, k_norm, slots, kv, out, query_start, seq_lens, table, parts, part_stats, counters,
    qkv_token, out_token, out_head, kv_block, kv_head, kv_token: tl.constexpr, table_row, short, eps, score_scale,
    num_rows, max_leaves, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr,
    BM: tl.constexpr, STAGES: tl.constexpr, LINES: tl.constexpr, GATHER: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, LEVELS: tl.constexpr, NORM: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`attend_few` of rows that see all before them, from their projections: K and V of the step are stored as well.

    TOKENS: at least as many as a row has queries. A program stores those of its leaf, which no other one reads.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    num_pairs = num_rows * KV_HEADS
    place = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    _, _, leaves = row_extent(query_start, seq_lens, rows, rows < num_rows, short, 0, _EVERYTHING)
    limit = tl.max(leaves, 0) * num_pairs
    DTYPE: tl.constexpr = out.dtype.element_ty
    channel = tl.arange(0, HEAD)[None, :]
    q_weights, k_weights = (channel, channel), (channel, channel)
    if NORM:
        other = (channel + HEAD // 2) % HEAD
        q_weights = (tl.load(q_norm + channel), tl.load(q_norm + other))
        k_weights = (tl.load(k_norm + channel), tl.load(k_norm + other))
    while place < limit:
        leaf, pair = place // num_pairs, place % num_pairs
        row, kv_index = pair // KV_HEADS, pair % KV_HEADS
        seq_len, low, row_leaves = row_extent(query_start, seq_lens, row, True, short, 0, _EVERYTHING)
        if leaf < row_leaves:
            row_start = tl.load(query_start + row)
            num_queries = tl.load(query_start + row + 1) - row_start
            begin, end = leaf_start(leaf), tl.minimum(leaf_start(leaf + 1), seq_len)
            head_kv = kv + kv_index.to(tl.int64) * kv_head
            if PDL:
                line = table + row.to(tl.int64) * table_row
                _prefetch_leaf(head_kv, line, begin, end - num_queries, kv_block, kv_token, HEAD, BLOCK)
            index = tl.arange(0, TOKENS)
            query, head, valid = lines_of(0, num_queries, kv_index, BM, GROUP)
            there = seq_len - num_queries + index
            there = (index < num_queries) & (there >= begin) & (there < end)
            token = (row_start + tl.minimum(index, num_queries - 1)).to(tl.int64)
            line_token = (row_start + tl.minimum(query, num_queries - 1)).to(tl.int64)
            slot = tl.load(slots + token).to(tl.int64)
            k_angles = _angles(cos_sin, positions, token, HEAD)
            q_angles = _angles(cos_sin, positions, line_token, HEAD)
            wait_before(PDL)
            # The projection is there.
            of_key = qkv + token * qkv_token + (KV_HEADS * GROUP + kv_index) * HEAD
            heads = _heads(of_key, there, HEAD)
            values = tl.load((of_key + KV_HEADS * HEAD)[:, None] + channel, mask=there[:, None], other=0.0)
            of_lines = _heads(qkv + line_token * qkv_token + head * HEAD, valid, HEAD)
            keys = _rotated(heads, k_weights, k_angles, eps, HEAD, LEVELS, NORM, DTYPE)
            stored = (head_kv + (slot // BLOCK * kv_block + slot % BLOCK * kv_token))[:, None] + channel
            is_stored = (there & (slot >= 0))[:, None]
            tl.store(stored, keys, mask=is_stored)
            tl.store(stored + HEAD, values, mask=is_stored)
            queries = _rotated(of_lines, q_weights, q_angles, eps, HEAD, LEVELS, NORM, DTYPE)
            tl.debug_barrier()  # what was stored is read
            _attend_leaves(
                tl.trans(queries), query, head, valid, row_start, num_queries, seq_len, low, row_leaves, kv, out,
                table, parts, part_stats, counters, None, None, None, None, out_token, out_head, kv_block, kv_head,
                kv_token, table_row, 0, score_scale, 0.0, row, kv_index, pair, leaf, leaf + 1, row * max_leaves, False,
                0, KV_HEADS, GROUP, HEAD, HEAD, BLOCK, STAGES, _EVERYTHING, True, False, PRECISION, LINES, GATHER,
            )  # fmt: skip
        place += tl.num_programs(0)
    if tl.program_id(0) == 0:  # without work too: the kernel does not end before the one ahead
        wait_before(PDL)


@triton.jit
def _larger(left, right):
    return tl.maximum(left, right)


@launched(triton.jit(do_not_specialize=["short", "reach"]))
def merge(
    out, query_start, seq_lens, leaf_base, long_rows, parts, part_stats, value_scale, sinks, out_token, out_head,
    short, reach, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr,
    LINES: tl.constexpr, SEES: tl.constexpr, GATHER: tl.constexpr, CHANNELS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (KV heads * LINES, PADDED / CHANNELS, any). Fold the leaves of long rows, as `fold` does; write `out`.

    GATHER: leaves whose loads are issued together.
    """
    begin_after(PDL)
    kv_index, line = tl.program_id(0) // LINES, tl.program_id(0) % LINES
    query, head = line // GROUP, kv_index * GROUP + line % GROUP
    lane = tl.arange(0, CHANNELS)
    channel = tl.program_id(1) * CHANNELS + lane
    for index in range(tl.program_id(2), tl.load(long_rows), tl.num_programs(2)):
        row = tl.load(long_rows + 1 + index)
        row_start = tl.load(query_start + row)
        _, _, leaves = row_extent(query_start, seq_lens, row, True, short, reach, SEES)
        if query < tl.load(query_start + row + 1) - row_start and line < LINES // GROUP * GROUP:
            slot = tl.load(leaf_base + row).to(tl.int64) * KV_HEADS + kv_index * leaves
            stats, part = part_stats + slot * (2 * LINES) + line, parts + (slot * LINES + line) * PADDED + channel
            top = float("-inf")
            total = tl.zeros((CHANNELS,), tl.float32)
            total_sum = tl.zeros((CHANNELS,), tl.float32)
            for base in range(0, leaves, GATHER):
                loaded, maxima, sums, factors = (), (), (), ()
                for step in tl.static_range(0, GATHER, CHANNELS):
                    leaf = base + step + lane
                    at = stats + leaf * (2 * LINES)
                    maxima = maxima + (tl.load(at, mask=leaf < leaves, other=float("-inf")),)  # noqa: RUF005
                    sums = sums + (tl.load(at + LINES, mask=leaf < leaves, other=0.0),)  # noqa: RUF005
                for step in tl.static_range(GATHER):
                    one = tl.load(part + (base + step) * (LINES * PADDED), mask=base + step < leaves, other=0.0)
                    loaded = loaded + (one,)  # noqa: RUF005  (Triton has no starred tuples)
                # What `fold` multiplies with follows from the maxima alone: all of it first, so that the fold is one
                # chain of multiply-adds.
                for group in tl.static_range(GATHER // CHANNELS):
                    after = tl.maximum(tl.associative_scan(maxima[group], 0, _larger), top)
                    before = tl.where(lane == 0, top, tl.gather(after, tl.maximum(lane - 1, 0), 0))
                    add = exp2_from(maxima[group], after)
                    factors = factors + (exp2_from(before, after), add, sums[group] * add)  # noqa: RUF005
                    top = tl.maximum(top, tl.max(maxima[group], 0))
                for step in tl.static_range(GATHER):
                    at_lane = tl.full((CHANNELS,), step % CHANNELS, tl.int32)
                    keep = tl.gather(factors[step // CHANNELS * 3], at_lane, 0)
                    total_sum = tl.fma(total_sum, keep, tl.gather(factors[step // CHANNELS * 3 + 2], at_lane, 0))
                    add = tl.gather(factors[step // CHANNELS * 3 + 1], at_lane, 0)
                    total = tl.fma(total, keep, loaded[step] * add)
            if sinks is not None:  # as in `write_lines`
                sink = tl.load(sinks + head).to(tl.float32) * _LOG2_E
                end = tl.maximum(top, sink)
                total_sum = tl.fma(total_sum, exp2_from(top, end), exp2_from(sink, end))
                total = tl.fma(total, exp2_from(top, end), total * 0.0)
            result_scale = 1.0
            if value_scale is not None:
                result_scale = tl.load(value_scale + kv_index)
            inverse = tl.where(total_sum == 0.0, 0.0, 1.0 / total_sum) * result_scale
            at = out + (row_start + query).to(tl.int64) * out_token + head * out_head
            tl.store(at + channel, (total * inverse).to(out.dtype.element_ty), mask=channel < HEAD)
