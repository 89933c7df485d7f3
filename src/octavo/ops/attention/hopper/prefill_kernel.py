"""The Gluon kernel of `octavo.ops.attention.prefill`: tiles of many queries on Hopper's asynchronous units.

Owns that kernel: how its warps share the work. Does not know which calls it serves. Invariant: the operations on a
(query, head) are those of `octavo.ops.attention.paged_kernels` (`_step`, `_fold`, `_write`), in the same order.

A tile is two parts of 64 lines, a line being one query with one head of a KV head. Three groups of warps work on it, in
the manner of FlashAttention-3: a producer copies Q and tiles of 64 tokens of K and V into shared memory, which is
divided into stages; two consumers, with a part each, take them in turn. Tiles of 8 bits a number come into stages of
their own, out of which a fourth group widens them; `prefill_feed` has both that feed. The copy engine reads blocks
through one descriptor over the whole cache; what may not be read is asked for outside of it, which makes zeros. A
consumer has the products of one tile with V and the scores of the next in flight while it makes weights of the last.
Programs stay, and draw tiles from a counter, the longest first; a consumer asks for the first scores of its next tile
before it writes the results of the last.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from octavo.ops.attention.hopper.prefill_feed import LINES, WORD, barrier, produce, widen, word
from octavo.ops.attention.paged_kernels import exp2_from, scales_of
from octavo.ops.attention.paged_workload import BN, EVERYTHING, FIRST_LEAF, FIRST_TOKENS, LEAF, first_seen

_LINES, _BN = gl.constexpr(LINES // 2), gl.constexpr(BN)
_EVERYTHING = gl.constexpr(EVERYTHING)
_FIRST_TOKENS, _FIRST_LEAF, _LEAF = gl.constexpr(FIRST_TOKENS), gl.constexpr(FIRST_LEAF), gl.constexpr(LEAF)
_LOG2_E = gl.constexpr(1.4426950408889634)
_S = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16]))  # of scores
_SUM = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))  # of a leaf's sums of weights
_LINE = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])))


@gluon.jit
def _weights(
    scores,
    start,
    first,
    last,
    leaf_max,
    score_scale,
    cap_scale,
    SEES: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    MASK: gl.constexpr,
):
    """(weights, maximum, what sums before shrink by) of a tile of scores."""
    if SOFT_CAP:
        scores = 1.0 - 2.0 / (gl.exp2(scores * cap_scale) + 1.0)  # tanh
    if MASK:
        column = gl.arange(0, _BN, gl.SliceLayout(0, _S))[None, :]
        seen = column <= (last - start)[:, None]
        if SEES != _EVERYTHING:
            seen = seen & (column >= (first - start)[:, None])
        scores = gl.where(seen, scores, float("-inf"))
    top = gl.maximum(leaf_max, gl.max(scores, 1) * score_scale)
    safe = gl.where(top == float("-inf"), 0.0, top)
    wide = gl.zeros(scores.shape, gl.float32, _S)
    weights = gl.exp2(gl.fma(scores, wide + score_scale, wide - safe[:, None]))
    return weights, top, gl.exp2(leaf_max - safe)


@gluon.jit
def _fold(total, total_sum, total_max, leaf, leaf_sum, leaf_max):
    OUT: gl.constexpr = total.type.layout
    CHANNELS: gl.constexpr = gl.SliceLayout(1, OUT)
    top = gl.maximum(total_max, leaf_max)
    keep = exp2_from(total_max, top)
    add = exp2_from(leaf_max, top)
    total_sum = gl.fma(total_sum, keep, leaf_sum * add)
    wide = gl.zeros(total.shape, gl.float32, OUT) + gl.convert_layout(keep, CHANNELS, assert_trivial=True)[:, None]
    leaf = leaf * gl.convert_layout(add, CHANNELS, assert_trivial=True)[:, None]
    return gl.fma(total, wide, leaf), total_sum, top


@gluon.jit
def _scores(q, k_smem):
    """The scores of a tile, in flight."""
    empty = gl.zeros((_LINES, _BN), gl.float32, _S)
    return warpgroup_mma(q, k_smem.permute((1, 0)), empty, use_acc=False, is_async=True)


@gluon.jit
def _add(weights, v_smem, ones, leaf, leaf_sum):
    """A leaf and its sums of weights with one more tile, in flight. The matrix units add both up alike."""
    OUT: gl.constexpr = leaf.type.layout
    leaf = warpgroup_mma(gl.convert_layout(weights, gl.DotOperandLayout(0, OUT, 2)), v_smem, leaf, is_async=True)
    weights = gl.convert_layout(weights, gl.DotOperandLayout(0, _SUM, 2))
    return leaf, warpgroup_mma(weights, ones, leaf_sum, is_async=True)


@gluon.jit
def _sum_of(leaf_sum):
    return gl.convert_layout(gl.max(leaf_sum, 1), _LINE, assert_trivial=True)


@gluon.jit
def _steps(
    count, at, end, step, q, weights, leaf, leaf_sum, leaf_max, total, total_sum, total_max, first, last, ring, ones,
    score_scale, cap_scale, SEES: gl.constexpr, SOFT_CAP: gl.constexpr, STAGES: gl.constexpr, MASK: gl.constexpr,
):  # fmt: skip
    """`count` more tiles behind tile `at`, whose weights wait for their products, as do at last those of the last."""
    k_smem, v_smem, full, empty = ring
    OUT: gl.constexpr = leaf.type.layout
    for _ in range(count):
        before = step % STAGES
        at += 1
        step += 1
        stage = step % STAGES
        token = _scores(q, k_smem.index(stage))
        leaf_token, sum_token = _add(weights, v_smem.index(before), ones, leaf, leaf_sum)
        scores = warpgroup_mma_wait(2, deps=[token])
        is_new = (at * _BN) % gl.where(at * _BN < _FIRST_TOKENS, _FIRST_LEAF, _LEAF) == 0
        exact, top, keep = _weights(
            scores,
            at * _BN,
            first,
            last,
            gl.where(is_new, float("-inf"), leaf_max),
            score_scale,
            cap_scale,
            SEES,
            SOFT_CAP,
            MASK,
        )
        # A loop ends a basic block: without it all of the above would be scheduled behind the wait for the products.
        mbarrier.wait(full.index((step + 1) % STAGES), (step + 1) // STAGES & 1, pred=at + 1 < end)
        leaf, leaf_sum, exact = warpgroup_mma_wait(0, deps=[leaf_token, sum_token, exact])
        weights = exact.to(weights.dtype)
        mbarrier.arrive(empty.index(before), count=1)
        if is_new:
            total, total_sum, total_max = _fold(total, total_sum, total_max, leaf, _sum_of(leaf_sum), leaf_max)
            leaf = gl.zeros(leaf.shape, gl.float32, OUT)
            leaf_sum = gl.zeros(leaf_sum.shape, gl.float32, _SUM)
        else:
            leaf = leaf * gl.convert_layout(keep, gl.SliceLayout(1, OUT), assert_trivial=True)[:, None]
            leaf_sum = leaf_sum * gl.convert_layout(keep, gl.SliceLayout(1, _SUM), assert_trivial=True)[:, None]
        leaf_max = top
    return at, step, weights, leaf, leaf_sum, leaf_max, total, total_sum, total_max


@gluon.jit
def _begin(part, words, q_smem, q_empty, QUERIES: gl.constexpr, HEAD: gl.constexpr):
    """What there is to know of an item, and the part's Q in registers."""
    skipped = part * (QUERIES // 2)
    item = (
        word(words, 0) + skipped,
        word(words, 1) - skipped,
        word(words, 2) + skipped,
        word(words, 3),
        word(words, 4),
        word(words, 5),
        word(words, 6),
    )
    q = q_smem.index(part).reshape([_LINES, HEAD]).load(gl.DotOperandLayout(0, _S, 2))
    mbarrier.arrive(q_empty, count=1)
    return item, q


@gluon.jit
def _write(
    out,
    sinks,
    total,
    total_sum,
    total_max,
    token,
    num_queries,
    kv_index,
    result_scale,
    out_token,
    out_head,
    GROUP: gl.constexpr,
    PADDED_GROUP: gl.constexpr,
):
    """The results of a part, from the totals of all its leaves."""
    HEAD: gl.constexpr = total.shape[1]
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [4, 1], [1, 0])
    if sinks is not None:  # one more leaf, of weight 1 at the sink's score and of value 0
        head = gl.arange(0, _LINES, _LINE) % PADDED_GROUP
        sink = gl.load(sinks + kv_index * GROUP + head, mask=head < GROUP, other=0.0).to(gl.float32) * _LOG2_E
        total, total_sum, total_max = _fold(total, total_sum, total_max, total * 0.0, total_sum * 0.0 + 1.0, sink)
    inverse = gl.where(total_sum == 0.0, 0.0, 1.0 / total_sum) * result_scale
    wide = gl.convert_layout(inverse, gl.SliceLayout(1, total.type.layout), assert_trivial=True)[:, None]
    result = gl.convert_layout((total * wide).to(out.dtype.element_ty), STORE)
    line = gl.arange(0, _LINES, gl.SliceLayout(1, STORE))
    query, head = line // PADDED_GROUP, line % PADDED_GROUP
    at = out + (token + query).to(gl.int64) * out_token + (kv_index * GROUP + head) * out_head
    channel = gl.arange(0, HEAD, gl.SliceLayout(0, STORE))
    gl.store(at[:, None] + channel[None, :], result, mask=((query < num_queries) & (head < GROUP))[:, None])


@gluon.jit
def _consume(
    part: gl.constexpr, out, scales, sinks, words, q_smem, q_full, q_empty, ring, cleared, ones, out_token, out_head,
    reach, score_scale, cap_scale, GROUP: gl.constexpr, PADDED_GROUP: gl.constexpr, QUERIES: gl.constexpr,
    HEAD: gl.constexpr, STAGES: gl.constexpr, SEES: gl.constexpr, SOFT_CAP: gl.constexpr,
):  # fmt: skip
    """The lines of one part of every item that the producer draws."""
    k_smem, v_smem, full, empty = ring
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    VALUES: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_smem.dtype
    step, clears = 0, 0
    mbarrier.wait(q_full, 0)
    item, q = _begin(part, words, q_smem, q_empty, QUERIES, HEAD)
    turn = 1
    mbarrier.wait(full.index(0), 0)
    scores = warpgroup_mma_wait(0, deps=[_scores(q, k_smem.index(0))])
    while item[6] >= 0:
        token, num_queries, first_position, seq_len, kv_index, at, end = item
        factor, cap, result_scale = scales_of(*scales, kv_index, score_scale, cap_scale, SOFT_CAP)
        position = gl.minimum(first_position + gl.arange(0, _LINES, _LINE) // PADDED_GROUP, seq_len - 1)
        first = first_seen(position, reach, SEES)
        total = gl.zeros((_LINES, HEAD), gl.float32, OUT)
        total_sum = gl.zeros((_LINES,), gl.float32, _LINE)
        total_max = gl.full((_LINES,), float("-inf"), gl.float32, _LINE)
        leaf, leaf_sum = total, gl.zeros((_LINES, 8), gl.float32, _SUM)
        exact, leaf_max, _ = _weights(scores, at * _BN, first, position, total_max, factor, cap, SEES, SOFT_CAP, True)
        weights = exact.to(dtype)
        mbarrier.wait(full.index((step + 1) % STAGES), (step + 1) // STAGES & 1, pred=at + 1 < end)
        count = end - at - 1
        if SEES == _EVERYTHING:  # tiles that every line sees whole
            whole = gl.maximum(gl.minimum((first_position + 1) // _BN - at - 1, count), 0)
            count -= whole
            at, step, weights, leaf, leaf_sum, leaf_max, total, total_sum, total_max = _steps(
                whole, at, end, step, q, weights, leaf, leaf_sum, leaf_max, total, total_sum, total_max, first,
                position, ring, ones, factor, cap, SEES, SOFT_CAP, STAGES, False,
            )  # fmt: skip
        at, step, weights, leaf, leaf_sum, leaf_max, total, total_sum, total_max = _steps(
            count, at, end, step, q, weights, leaf, leaf_sum, leaf_max, total, total_sum, total_max, first, position,
            ring, ones, factor, cap, SEES, SOFT_CAP, STAGES, True,
        )  # fmt: skip
        last = step % STAGES
        if seq_len < (at + 1) * _BN:  # what lies behind the row may not be finite: each consumer clears a half
            half = v_smem.index(last).slice(part * (_BN // 2), _BN // 2, 0)
            place = at * _BN + part * (_BN // 2) + gl.arange(0, _BN // 2, gl.SliceLayout(1, VALUES))
            values = half.load(VALUES)
            half.store(gl.where((place < seq_len)[:, None], values, gl.zeros_like(values)))
            fence_async_shared()
            barrier()
            mbarrier.arrive(cleared, count=1)
            mbarrier.wait(cleared, clears & 1)
            clears += 1
        leaf_token, sum_token = _add(weights, v_smem.index(last), ones, leaf, leaf_sum)
        leaf, leaf_sum = warpgroup_mma_wait(0, deps=[leaf_token, sum_token])
        mbarrier.arrive(empty.index(last), count=1)
        total, total_sum, total_max = _fold(total, total_sum, total_max, leaf, _sum_of(leaf_sum), leaf_max)
        step += 1
        mbarrier.wait(q_full, turn & 1)
        turn += 1
        item, q = _begin(part, words, q_smem, q_empty, QUERIES, HEAD)
        mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
        next_token = _scores(q, k_smem.index(step % STAGES))
        _write(
            out,
            sinks,
            total,
            total_sum,
            total_max,
            token,
            num_queries,
            kv_index,
            result_scale,
            out_token,
            out_head,
            GROUP,
            PADDED_GROUP,
        )
        scores = warpgroup_mma_wait(0, deps=[next_token])


@gluon.jit(
    do_not_specialize=[
        "table_row",
        "num_rows",
        "reach",
        "block_rows",
        "head_rows",
        "head_channels",
        "outside",
    ]
)
def attend_prompts(
    q_desc, kv_desc, out, query_start, seq_lens, table, tile_start, counter, key_scale, value_scale, sinks, out_token,
    out_head, table_row, num_rows, reach, block_rows, head_rows, head_channels, outside, score_scale, cap_scale,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, PADDED_GROUP: gl.constexpr, HEAD: gl.constexpr, BLOCK: gl.constexpr,
    PIECE: gl.constexpr, STAGES: gl.constexpr, STAGED: gl.constexpr, SEES: gl.constexpr, SOFT_CAP: gl.constexpr,
    NARROW: gl.constexpr,
):  # fmt: skip
    """Grid: (any number of programs), for the rows that have tiles: see `count_tiles`.

    A token of block b and KV head h is in row b * `block_rows` + h * `head_rows` + its place in the block of the
    cache's descriptor, from channel h * `head_channels` on; row `outside` does not exist. `counter`: 0, and then again.
    """
    QUERIES: gl.constexpr = 2 * _LINES // PADDED_GROUP
    dtype: gl.constexpr = out.dtype.element_ty
    TILES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_smem = gl.allocate_shared_memory(dtype, [2, QUERIES // 2, PADDED_GROUP, HEAD], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, _BN, HEAD], TILES)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, _BN, HEAD], TILES)
    one = gl.full((_BN, 8), 1.0, dtype, gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0]))
    ones = gl.allocate_shared_memory(dtype, [_BN, 8], gl.NVMMASharedLayout(0, 16, 2), one)
    words = gl.allocate_shared_memory(gl.int32, [8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    cleared = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(q_full, 1)
    mbarrier.init(q_empty, 2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(empty.index(stage), 2)
    mbarrier.init(cleared, 2)
    fence_async_shared()
    ring = (k_smem, v_smem, full, empty)
    if NARROW == "":
        gl.warp_specialize(
            [
                (_consume, (
                    0, out, (None, None), sinks, words, q_smem, q_full, q_empty, ring, cleared, ones, out_token,
                    out_head, reach, score_scale, cap_scale, GROUP, PADDED_GROUP, QUERIES, HEAD, STAGES, SEES, SOFT_CAP,
                )),
                (_consume, (
                    1, out, (None, None), sinks, words, q_smem, q_full, q_empty, ring, cleared, ones, out_token,
                    out_head, reach, score_scale, cap_scale, GROUP, PADDED_GROUP, QUERIES, HEAD, STAGES, SEES, SOFT_CAP,
                )),
                (produce, (
                    q_desc, kv_desc, query_start, seq_lens, table, tile_start, counter, words, q_smem, q_full, q_empty,
                    ring, table_row, num_rows, reach, block_rows, head_rows, head_channels, outside, KV_HEADS,
                    GROUP, QUERIES, HEAD, BLOCK, PIECE, STAGES, SEES, NARROW,
                )),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        k_staged = gl.allocate_shared_memory(kv_desc.dtype, [STAGED, _BN, HEAD // 2], kv_desc.layout)
        v_staged = gl.allocate_shared_memory(kv_desc.dtype, [STAGED, _BN, HEAD // 2], kv_desc.layout)
        staged_full = gl.allocate_shared_memory(gl.int64, [STAGED, 1], BARRIER)
        staged_empty = gl.allocate_shared_memory(gl.int64, [STAGED, 1], BARRIER)
        for stage in gl.static_range(STAGED):
            mbarrier.init(staged_full.index(stage), 1)
            mbarrier.init(staged_empty.index(stage), 1)
        words.index(7).store(gl.full([1], -1, gl.int32, WORD))
        fence_async_shared()
        staged = (k_staged, v_staged, staged_full, staged_empty)
        gl.warp_specialize(
            [
                (_consume, (
                    0, out, (key_scale, value_scale), sinks, words, q_smem, q_full, q_empty, ring, cleared, ones,
                    out_token, out_head, reach, score_scale, cap_scale, GROUP, PADDED_GROUP, QUERIES, HEAD, STAGES,
                    SEES, SOFT_CAP,
                )),
                (_consume, (
                    1, out, (key_scale, value_scale), sinks, words, q_smem, q_full, q_empty, ring, cleared, ones,
                    out_token, out_head, reach, score_scale, cap_scale, GROUP, PADDED_GROUP, QUERIES, HEAD, STAGES,
                    SEES, SOFT_CAP,
                )),
                (produce, (
                    q_desc, kv_desc, query_start, seq_lens, table, tile_start, counter, words, q_smem, q_full, q_empty,
                    staged, table_row, num_rows, reach, block_rows, head_rows, head_channels, outside, KV_HEADS,
                    GROUP, QUERIES, HEAD, BLOCK, PIECE, STAGED, SEES, NARROW,
                )),
                (widen, (words, staged, ring, NARROW)),
            ],
            [4, 1, 4],
            [232, 24, 24],
        )  # fmt: skip
