"""The Gluon kernel of `octavo.ops.attention.decode`: rows of few queries, fed by Hopper's copy engine.

Owns that kernel: how its warps share the work. Does not know which calls it serves. Invariant: the operations on a
(query, head) are those of `octavo.ops.attention.paged_decode_kernels.attend_rows`, in the same order, and so are what
it leaves in `parts` and how the programs that share a row fold it.

A program takes its part of the leaves, as `octavo.ops.attention.paged_workload` divides them. One warp, the producer,
finds the (row, KV head)s of the part and copies their tiles of 64 tokens of K and V into shared memory, stage after
stage, on past the end of each (row, head) to the next: memory never waits for the facts of a row. Four warps, the
consumer, compute. Sums are transposed, so that few lines take little of the matrix units. Both are told by
`octavo.ops.attention.hopper.decode_feed`, which may turn Q and store the newest K and V as well.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from octavo.ops.attention.hopper.decode_feed import (
    END,
    FOLDED,
    PIECES,
    TILE,
    TURNS,
    WHOLE,
    WORDS,
    barrier,
    produce,
    rotate,
)
from octavo.ops.attention.hopper.decode_feed import LINES as _LINES
from octavo.ops.attention.hopper.narrow_tiles import keys_of, queries_of, values_of, whole
from octavo.ops.attention.paged_kernels import exp2_from, scales_of
from octavo.ops.attention.paged_workload import EVERYTHING, first_seen, leaf_of
from octavo.ops.compile.repeated_rows import repeated

_EVERYTHING = gl.constexpr(EVERYTHING)
_LOG2_E = gl.constexpr(1.4426950408889634)
_GATHER = gl.constexpr(4)  # leaves whose loads a folding program has in flight
_S = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))  # scores [tokens, lines], sums [channels, lines]
_LINE = gl.constexpr(gl.SliceLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])))
_A = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2))
_B = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2))
_TOPS = gl.constexpr(  # [warps, lines]: each thread has all warps' maxima of its lines
    gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [2, 0]], [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [4, 8]
    )
)
_ROTATED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
_WORD = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_Q = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))


@gluon.jit
def _fold(total, total_sum, total_max, leaf, leaf_sum, leaf_max):
    """As `octavo.ops.attention.paged_kernels.fold`; channels are axis 0, and sums are rows that are alike."""
    OUT: gl.constexpr = total.type.layout
    top = gl.maximum(total_max, leaf_max)
    keep, add = exp2_from(total_max, top)[None, :], exp2_from(leaf_max, top)[None, :]
    total_sum = gl.fma(total_sum, gl.zeros(total_sum.shape, gl.float32, OUT) + keep, leaf_sum * add)
    return gl.fma(total, gl.zeros(total.shape, gl.float32, OUT) + keep, leaf * add), total_sum, top


@gluon.jit
def _weights(
    scores,
    start,
    first,
    last,
    leaf_max,
    tops,
    read,
    score_scale,
    cap_scale,
    SEES: gl.constexpr,
    SOFT_CAP: gl.constexpr,
):
    """(weights, maximum, what sums before shrink by) of a tile of scores. `read`: of its stage, which is free now."""
    if SOFT_CAP:
        scores = 1.0 - 2.0 / (gl.exp2(scores * cap_scale) + 1.0)  # tanh
    token = start + gl.arange(0, TILE, gl.SliceLayout(1, _S))[:, None]
    seen = token <= last[None, :]
    if SEES != _EVERYTHING:
        seen = seen & (token >= first[None, :])
    scores = gl.where(seen, scores, float("-inf"))
    tops.store(gl.max(gl.reshape(scores, (4, TILE // 4, _LINES)), 1))
    barrier()
    mbarrier.arrive(read, count=1)  # all warps have K and V in registers
    top = gl.convert_layout(gl.max(tops.load(_TOPS), 0), _LINE, assert_trivial=True)
    top = gl.maximum(leaf_max, top * score_scale)
    safe = gl.where(top == float("-inf"), 0.0, top)
    wide = gl.zeros(scores.shape, gl.float32, _S)
    weights = gl.exp2(gl.fma(scores, wide + score_scale, wide - safe[None, :]))
    return weights, top, gl.exp2(leaf_max - safe)


@gluon.jit
def _fold_stored(parts, part_stats, slot, leaves, LINES: gl.constexpr, HEAD: gl.constexpr):
    """The totals of the leaves at `slot` and behind, whoever wrote them."""
    F: gl.constexpr = gl.BlockedLayout([8, 1], [HEAD // 8, 256 // HEAD], [1, 4], [0, 1])
    line, channel = gl.arange(0, _LINES, gl.SliceLayout(0, F)), gl.arange(0, HEAD, gl.SliceLayout(1, F))
    is_line = line < LINES
    total = gl.zeros([HEAD, _LINES], gl.float32, F)
    total_sum = gl.zeros([1, _LINES], gl.float32, F)
    total_max = gl.full([_LINES], float("-inf"), gl.float32, gl.SliceLayout(0, F))
    part = parts + slot.to(gl.int64) * (LINES * HEAD) + line[None, :] * HEAD + channel[:, None]
    stats = part_stats + slot.to(gl.int64) * (2 * LINES) + line
    for base in range(0, leaves, _GATHER):
        loaded = ()
        for step in gl.static_range(_GATHER):
            at, there = base + step, is_line & (base + step < leaves)
            loaded = loaded + (  # noqa: RUF005  (Triton has no starred tuples)
                gl.load(part + at * (LINES * HEAD), mask=there[None, :], other=0.0, cache_modifier=".cg"),
                gl.load(stats + at * (2 * LINES) + LINES, mask=there, other=0.0, cache_modifier=".cg"),
                gl.load(stats + at * (2 * LINES), mask=there, other=float("-inf"), cache_modifier=".cg"),
            )
        for step in gl.static_range(_GATHER):
            total, total_sum, total_max = _fold(
                total, total_sum, total_max, loaded[3 * step], loaded[3 * step + 1][None, :], loaded[3 * step + 2]
            )
    return total, total_sum, total_max


@gluon.jit
def _write(
    out,
    sinks,
    total,
    total_sum,
    total_max,
    row_start,
    num_queries,
    kv_index,
    result_scale,
    out_token,
    out_head,
    GROUP: gl.constexpr,
):
    """The results of the lines, from the totals of all their leaves."""
    HEAD: gl.constexpr = total.shape[0]
    OUT: gl.constexpr = total.type.layout
    if sinks is not None:  # one more leaf, of weight 1 at the sink's score and of value 0
        head = gl.arange(0, _LINES, gl.SliceLayout(0, OUT)) % GROUP
        sink = gl.load(sinks + kv_index * GROUP + head).to(gl.float32) * _LOG2_E
        total, total_sum, total_max = _fold(total, total_sum, total_max, total * 0.0, total_sum * 0.0 + 1.0, sink)
    inverse = gl.where(total_sum == 0.0, 0.0, 1.0 / total_sum) * result_scale
    if total_sum.shape[0] > 1:
        inverse = repeated(inverse, HEAD // TILE)
    result = (total * inverse).to(out.dtype.element_ty)
    line, channel = gl.arange(0, _LINES, gl.SliceLayout(0, OUT)), gl.arange(0, HEAD, gl.SliceLayout(1, OUT))
    query, head = line // GROUP, kv_index * GROUP + line % GROUP
    at = out + (row_start + query).to(gl.int64) * out_token + head * out_head
    gl.store(at[None, :] + channel[:, None], result, mask=(query < num_queries)[None, :] & (channel < HEAD)[:, None])


@gluon.jit
def _keep(parts, part_stats, at, leaf, leaf_sum, leaf_max, LINES: gl.constexpr):
    """Write a leaf down."""
    HEAD: gl.constexpr = leaf.shape[0]
    F: gl.constexpr = gl.BlockedLayout([8, 1], [HEAD // 8, 256 // HEAD], [1, 4], [0, 1])
    line, channel = gl.arange(0, _LINES, gl.SliceLayout(0, F)), gl.arange(0, HEAD, gl.SliceLayout(1, F))
    part = parts + at.to(gl.int64) * (LINES * HEAD) + line[None, :] * HEAD + channel[:, None]
    gl.store(part, gl.convert_layout(leaf, F), mask=(line < LINES)[None, :] & (channel < HEAD)[:, None])
    line = gl.arange(0, _LINES, _LINE)
    stats = part_stats + at.to(gl.int64) * (2 * LINES) + line
    gl.store(stats, leaf_max, mask=line < LINES)
    row = gl.arange(0, TILE, gl.SliceLayout(1, _S))[:, None]
    gl.store(stats[None, :] + LINES + row * 0, leaf_sum, mask=(line < LINES)[None, :] & (row == 0))


@gluon.jit
def _word(words, index):
    return gl.max(words.index(index).load(_WORD), 0)


@gluon.jit
def _queries(tile, NARROW: gl.constexpr):
    """Q of a tile in shared memory [lines, HEAD] as the second operand of the scores."""
    if NARROW == "":
        q = tile.permute((1, 0)).load(_B)
    else:
        q = queries_of(tile.load(_Q), tile.shape[1])
    return q


@gluon.jit
def _consume(
    out, scales, sinks, parts, part_stats, counters, words, q_smem, q_full, q_empty, ring, tops, weight_smem, out_token,
    out_head, reach, score_scale, cap_scale, GROUP: gl.constexpr, LINES: gl.constexpr, HEAD: gl.constexpr,
    STAGES: gl.constexpr, SEES: gl.constexpr, SOFT_CAP: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """Whatever the producer copies."""
    k_smem, v_smem, full, empty = ring
    WORDS_OF_V: gl.constexpr = v_smem.shape[2]
    dtype: gl.constexpr = q_smem.dtype
    ones = gl.full([TILE, TILE], 1.0, dtype, _A)
    step, turn = 0, 0
    mbarrier.wait(q_full.index(0), 0)
    task = _word(words, 7)
    while task != END:
        at = turn % TURNS * WORDS
        row_start, num_queries, seq_len = _word(words, at), _word(words, at + 1), _word(words, at + 2)
        kv_index, begin, end = _word(words, at + 3), _word(words, at + 4), _word(words, at + 5)
        slot, leaves, mine = _word(words, at + 6), _word(words, at + 8), _word(words, at + 9)
        pair, low = _word(words, at + 10), _word(words, at + 11)
        q = _queries(q_smem.index(turn % TURNS).reshape([_LINES, HEAD]), NARROW)
        factor, cap, result_scale = scales_of(*scales, kv_index, score_scale, cap_scale, SOFT_CAP)
        barrier()
        mbarrier.arrive(q_empty.index(turn % TURNS), count=1)
        turn += 1
        position = gl.minimum(seq_len - num_queries + gl.arange(0, _LINES, _LINE) // GROUP, seq_len - 1)
        first = first_seen(position, reach, SEES)
        leaf = gl.zeros([WORDS_OF_V, _LINES], gl.float32, _S)
        odd_leaf = leaf
        leaf_sum = gl.zeros([TILE, _LINES], gl.float32, _S)
        leaf_max = gl.full([_LINES], float("-inf"), gl.float32, _LINE)
        total, total_sum, total_max = gl.zeros([HEAD, _LINES], gl.float32, _S), leaf_sum, leaf_max
        for start in range(begin, end, TILE):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            k = k_smem.index(stage).load(_A) if NARROW == "" else keys_of(k_smem.index(stage), dtype, NARROW)
            v = v_smem.index(stage).permute((1, 0)).load(_A)
            scores = mma_v2(k, q, gl.zeros([TILE, _LINES], gl.float32, _S))
            exact, top, keep = _weights(
                scores,
                start,
                first,
                position,
                leaf_max,
                tops,
                empty.index(stage),
                factor,
                cap,
                SEES,
                SOFT_CAP,
            )
            weight_smem.store(exact.to(dtype))
            barrier()
            weights = weight_smem.load(_B)
            if (start + TILE > seq_len) | (start < low):  # what was not copied may not be finite
                token = start + gl.arange(0, TILE, gl.SliceLayout(0, _A))
                v = gl.where(((token < seq_len) & (token >= low))[None, :], v, gl.zeros_like(v))
            leaf_sum = mma_v2(ones, weights, leaf_sum * keep[None, :])
            if NARROW == "":
                leaf = mma_v2(v, weights, leaf * keep[None, :])
            else:
                even, odd = values_of(v, dtype, NARROW)
                leaf = mma_v2(even, weights, leaf * keep[None, :])
                odd_leaf = mma_v2(odd, weights, odd_leaf * keep[None, :])
            leaf_max = top
            step += 1
            if (leaf_of(start + TILE) > leaf_of(start)) | (start + TILE >= end):
                ended = leaf if NARROW == "" else whole(leaf, odd_leaf)
                if task != WHOLE:
                    _keep(parts, part_stats, slot + leaf_of(start), ended, leaf_sum, leaf_max, LINES)
                total, total_sum, total_max = _fold(total, total_sum, total_max, ended, leaf_sum, leaf_max)
                leaf = gl.zeros([WORDS_OF_V, _LINES], gl.float32, _S)
                odd_leaf = leaf
                leaf_sum = gl.zeros([TILE, _LINES], gl.float32, _S)
                leaf_max = gl.full([_LINES], float("-inf"), gl.float32, _LINE)
        if task == WHOLE:
            _write(
                out,
                sinks,
                total,
                total_sum,
                total_max,
                row_start,
                num_queries,
                kv_index,
                result_scale,
                out_token,
                out_head,
                GROUP,
            )
        elif task == FOLDED:
            barrier()
            before = gl.atomic_add(counters + pair, mine, sem="acq_rel", scope="gpu")
            if before + mine == leaves:  # the last to arrive
                gl.store(counters + pair, 0)
                folded, folded_sum, folded_max = _fold_stored(
                    parts, part_stats, slot + leaf_of(low), leaves, LINES, HEAD
                )
                _write(
                    out,
                    sinks,
                    folded,
                    folded_sum,
                    folded_max,
                    row_start,
                    num_queries,
                    kv_index,
                    result_scale,
                    out_token,
                    out_head,
                    GROUP,
                )
        mbarrier.wait(q_full.index(turn % TURNS), turn // TURNS & 1)
        task = _word(words, turn % TURNS * WORDS + 7)


@gluon.jit(
    do_not_specialize=[
        "table_row",
        "short",
        "reach",
        "capacity",
        "fold_limit",
        "block_rows",
        "head_rows",
        "head_channels",
    ]
)
def attend_rows_copied(
    q_desc, kv_desc, piece_desc, out, query_start, seq_lens, table, work, leaf_base, parts, part_stats, counters,
    key_scale, value_scale, sinks, out_token, out_head, table_row, short, reach, capacity, fold_limit, block_rows,
    head_rows, head_channels, score_scale, cap_scale, source, positions, cos_sin, q_norm, k_norm, slots, kv,
    source_token, kv_block, kv_head, kv_token, eps, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, LINES: gl.constexpr,
    HEAD: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, SEES: gl.constexpr, SOFT_CAP: gl.constexpr,
    ROTATES: gl.constexpr, MERGED: gl.constexpr, NARROW: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid: (programs of the division). Each takes its part of the leaves.

    A token of block b and KV head h is in row b * `block_rows` + h * `head_rows` + its place in the block of the
    cache's descriptors, from channel h * `head_channels` on. `parts` and `counters` are as in `attend_rows`. MERGED:
    behind it a kernel folds what is left, which is slower if it finds place beside this one's programs only.
    """
    if PDL and not MERGED:  # the next kernel reads its weights while the last programs of this one end
        tl.extra.cuda.gdc_launch_dependents()
    dtype: gl.constexpr = out.dtype.element_ty
    WIDTH: gl.constexpr = HEAD if NARROW == "" else HEAD // 2  # of a token's K in the cache's descriptors
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if ROTATES:
        q_smem = gl.allocate_shared_memory(dtype, [TURNS, _LINES, HEAD], _ROTATED)
    else:
        q_smem = gl.allocate_shared_memory(dtype, [TURNS, _LINES // GROUP, GROUP, HEAD], q_desc.layout)
    k_smem = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, TILE, WIDTH], kv_desc.layout)
    v_smem = gl.allocate_shared_memory(kv_desc.dtype, [STAGES, TILE, WIDTH], kv_desc.layout)
    tops = gl.allocate_shared_memory(gl.float32, [4, _LINES], SWIZZLED)
    weight_smem = gl.allocate_shared_memory(dtype, [TILE, _LINES], gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
    words = gl.allocate_shared_memory(gl.int32, [TURNS * WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [TURNS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [TURNS, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for turn in gl.static_range(TURNS):
        mbarrier.init(q_full.index(turn), 1 + ROTATES)
        mbarrier.init(q_empty.index(turn), 1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), PIECES)
        mbarrier.init(empty.index(stage), 1)
    fence_async_shared()
    ring = (k_smem, v_smem, full, empty)
    if ROTATES:
        gl.warp_specialize(
            [
                (_consume, (
                    out, (key_scale, value_scale), sinks, parts, part_stats, counters, words, q_smem, q_full, q_empty,
                    ring, tops, weight_smem, out_token, out_head, reach, score_scale, cap_scale, GROUP, LINES, HEAD,
                    STAGES, SEES, SOFT_CAP, NARROW,
                )),
                (produce, (
                    q_desc, (kv_desc, piece_desc), query_start, seq_lens, table, work, leaf_base, words, q_smem, q_full,
                    q_empty, ring, table_row, short, reach, capacity, fold_limit, block_rows, head_rows, head_channels,
                    KV_HEADS, GROUP, HEAD, WIDTH, BLOCK, STAGES, SEES, ROTATES, PDL,
                )),
                (rotate, (
                    (
                        source, positions, cos_sin, q_norm, k_norm, slots, kv, source_token, kv_block, kv_head,
                        kv_token, eps,
                    ),
                    (key_scale, value_scale), query_start, seq_lens, work, leaf_base, q_smem, q_full, q_empty, short,
                    reach, KV_HEADS, GROUP, HEAD, BLOCK, SEES, NARROW, PDL,
                )),
            ],
            [1, 1],
            [24, 96],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    out, (key_scale, value_scale), sinks, parts, part_stats, counters, words, q_smem, q_full, q_empty,
                    ring, tops, weight_smem, out_token, out_head, reach, score_scale, cap_scale, GROUP, LINES, HEAD,
                    STAGES, SEES, SOFT_CAP, NARROW,
                )),
                (produce, (
                    q_desc, (kv_desc, piece_desc), query_start, seq_lens, table, work, leaf_base, words, q_smem, q_full,
                    q_empty, ring, table_row, short, reach, capacity, fold_limit, block_rows, head_rows, head_channels,
                    KV_HEADS, GROUP, HEAD, WIDTH, BLOCK, STAGES, SEES, ROTATES, PDL,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip
    if PDL and MERGED:
        tl.extra.cuda.gdc_launch_dependents()
