"""The Gluon kernel of `octavo.ops.gpu.row_attention`: rows of few queries, fed by Hopper's copy engine.

Owns that kernel: how its warps share the work. Does not know which calls it serves. Invariant: the operations on a
(query, head) are those of `octavo.ops.paged_attention_rows.attend_rows`, in the same order, and so are what it leaves
in `parts` and how the programs that share a row fold it.

A program takes its part of the leaves, as `octavo.ops.paged_attention_work` divides them. One warp, the producer, finds
the (row, KV head)s of the part and copies their tiles of 64 tokens of K and V into shared memory, stage after stage, on
past the end of each (row, head) to the next: memory never waits for the facts of a row. Four warps, the consumer,
compute. Sums are transposed, so that few lines take little of the matrix units.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from octavo.ops.paged_attention_kernels import exp2_from
from octavo.ops.paged_attention_work import BN, EVERYTHING, first_seen, leaf_of, leaf_start

LINES = 8  # of a tile, queries x heads of a KV head: what the matrix units take at least
PIECE = 16  # tokens: divides every block size
_BN, _PIECE, _PIECES, _LINES = gl.constexpr(BN), gl.constexpr(PIECE), gl.constexpr(BN // PIECE), gl.constexpr(LINES)
_EVERYTHING = gl.constexpr(EVERYTHING)
_LOG2_E = gl.constexpr(1.4426950408889634)
_GATHER = gl.constexpr(4)  # leaves whose loads a folding program has in flight
_TURNS = gl.constexpr(2)  # (row, head)s that the consumer is told of ahead
# What the producer tells of each; of the last two words, what is to be done, and nothing more to come.
_WORDS = gl.constexpr(12)
_WHOLE, _FOLDED, _LEFT, _END = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
_S = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))  # scores [tokens, lines], sums [channels, lines]
_LINE = gl.constexpr(gl.SliceLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])))
_A = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2))
_B = gl.constexpr(gl.DotOperandLayout(1, gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]), 2))
_TOPS = gl.constexpr(  # [warps, lines]: each thread has all warps' maxima of its lines
    gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [2, 0]], [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [4, 8]
    )
)
_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
_WORD = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton renamed it


@gluon.jit
def _copy_pieces(start, pieces, k, v, arrived, HEAD: gl.constexpr, BLOCK: gl.constexpr):
    """Ask for the pieces of a tile that may be read; the others arrive at once."""
    piece_desc, line, low, high, channel, head_row, block_rows = pieces
    for part in gl.static_range(_PIECES):
        token = start + part * _PIECE
        if (token < high) & (token + _PIECE > low):
            mbarrier.expect(arrived, 2 * _PIECE * HEAD * 2)
            row = gl.load(line + token // BLOCK) * block_rows + head_row + token % BLOCK
            tma.async_copy_global_to_shared(piece_desc, [row, channel], arrived, k.slice(part * _PIECE, _PIECE, 0))
            piece = v.slice(part * _PIECE, _PIECE, 0)
            tma.async_copy_global_to_shared(piece_desc, [row, channel + HEAD], arrived, piece)
        else:
            mbarrier.arrive(arrived, count=1)


@gluon.jit
def _copy(
    start, step, descs, ring, line, low, high, kv_index, block_rows, head_rows, head_channels, HEAD: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for the tile at `start`: whole, or those of its pieces that may be read. A stage has an arrival of each."""
    k_smem, v_smem, full, empty = ring
    stage = step % STAGES
    k, v, arrived = k_smem.index(stage), v_smem.index(stage), full.index(stage)
    channel, head_row = kv_index * head_channels, kv_index * head_rows
    mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
    pieces = descs[1], line, low, high, channel, head_row, block_rows
    if BLOCK % _BN == 0:
        if (start + _BN <= high) & (start >= low):
            mbarrier.expect(arrived, 2 * _BN * HEAD * 2)
            mbarrier.arrive(arrived, count=_PIECES - 1)
            row = gl.load(line + start // BLOCK) * block_rows + head_row + start % BLOCK
            tma.async_copy_global_to_shared(descs[0], [row, channel], arrived, k)
            tma.async_copy_global_to_shared(descs[0], [row, channel + HEAD], arrived, v)
        else:
            _copy_pieces(start, pieces, k, v, arrived, HEAD, BLOCK)
    else:
        _copy_pieces(start, pieces, k, v, arrived, HEAD, BLOCK)
    return step + 1


@gluon.jit
def _find(
    index, division, query_start, seq_lens, leaf_base, short, reach, KV_HEADS: gl.constexpr, SEES: gl.constexpr,
):  # fmt: skip
    """(row, KV head, row's first token, queries, length, leaves, those of rows before, the part's first and end).

    index: of the (row, head)s that the division gives this program, in the order of `attend_rows`; the last one's for
    those behind it, and anything if there is none.
    """
    start_pair, start_leaf, end_pair, end_leaf, count = division
    index = gl.minimum(index, count - 1)
    pair = gl.maximum(start_pair + gl.where(index <= 0, count, index) - 1, 0)
    row = pair // KV_HEADS
    row_start, row_end, seq_len = gl.load(query_start + row), gl.load(query_start + row + 1), gl.load(seq_lens + row)
    row_base = gl.load(leaf_base + row)
    num_queries = row_end - row_start
    leaves = leaf_of(seq_len - 1) - leaf_of(first_seen(seq_len - num_queries, reach, SEES)) + 1
    leaves = gl.where((num_queries > 0) & (num_queries <= short), gl.where(seq_len > 0, leaves, 1), 0)
    begin = gl.where(pair == start_pair, start_leaf, 0)
    stop = gl.minimum(gl.where(pair == end_pair, end_leaf, leaves), leaves)
    return row, pair % KV_HEADS, row_start, num_queries, seq_len, leaves, row_base, begin, stop


@gluon.jit
def _tell(words, index, value):
    words.index(index).store(gl.full([1], value, gl.int32, _ONE))


@gluon.jit
def _produce(
    q_desc, descs, query_start, seq_lens, table, work, leaf_base, words, q_smem, q_full, q_empty, ring, table_row,
    short, reach, capacity, fold_limit, block_rows, head_rows, head_channels, KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, HEAD: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, SEES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Find what the division gives this program, tell the consumer, and copy it.

    The division and the lengths are constants of a forward pass, see `octavo.ops.gpu.launch`. No K and V is read before
    the wait, not even of tokens that are old to their row: another row of the step may be writing them.
    """
    part = work + gl.program_id(0) * 2
    start_pair, start_leaf, end_pair, end_leaf = gl.load(part), gl.load(part + 1), gl.load(part + 2), gl.load(part + 3)
    count = end_pair - start_pair + (end_leaf > 0).to(gl.int32)
    division = (start_pair, start_leaf, end_pair, end_leaf, count)
    step, turn = 0, 0
    found = _find(0, division, query_start, seq_lens, leaf_base, short, reach, KV_HEADS, SEES)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for index in range(count):
        row, kv_index, row_start, num_queries, seq_len, leaves, row_base, begin_leaf, stop_leaf = found
        found = _find(index + 1, division, query_start, seq_lens, leaf_base, short, reach, KV_HEADS, SEES)
        if begin_leaf < stop_leaf:
            low = first_seen(seq_len - num_queries, reach, SEES)
            row_leaf = leaf_of(low)
            begin = gl.maximum(leaf_start(row_leaf + begin_leaf), low // _BN * _BN)
            end = gl.minimum(leaf_start(row_leaf + stop_leaf), seq_len)
            line = table + row.to(gl.int64) * table_row
            is_left = (leaves > fold_limit) & (row_base + leaves <= capacity)
            is_split = stop_leaf - begin_leaf < leaves
            slot = turn % _TURNS
            told = slot * _WORDS
            mbarrier.wait(q_empty.index(slot), (turn // _TURNS & 1) ^ 1)
            _tell(words, told + 0, row_start)
            _tell(words, told + 1, num_queries)
            _tell(words, told + 2, seq_len)
            _tell(words, told + 3, kv_index)
            _tell(words, told + 4, begin)
            _tell(words, told + 5, end)
            _tell(words, told + 6, row_base * KV_HEADS + kv_index * leaves - row_leaf)
            _tell(words, told + 7, gl.where(is_left, _LEFT, gl.where(is_split, _FOLDED, _WHOLE)))
            _tell(words, told + 8, leaves)
            _tell(words, told + 9, stop_leaf - begin_leaf)
            _tell(words, told + 10, row * KV_HEADS + kv_index)
            _tell(words, told + 11, low)
            mbarrier.expect(q_full.index(slot), _LINES * HEAD * 2)
            where = [row_start, kv_index * GROUP, 0]
            tma.async_copy_global_to_shared(q_desc, where, q_full.index(slot), q_smem.index(slot))
            turn += 1
            for start in range(begin, end, _BN):
                step = _copy(
                    start, step, descs, ring, line, low, seq_len, kv_index, block_rows, head_rows, head_channels,
                    HEAD, BLOCK, STAGES,
                )  # fmt: skip
    slot = turn % _TURNS
    mbarrier.wait(q_empty.index(slot), (turn // _TURNS & 1) ^ 1)
    _tell(words, slot * _WORDS + 7, _END)
    mbarrier.arrive(q_full.index(slot), count=1)


@gluon.jit
def _fold(total, total_sum, total_max, leaf, leaf_sum, leaf_max):
    """As `octavo.ops.paged_attention_kernels.fold`; channels are axis 0."""
    OUT: gl.constexpr = total.type.layout
    top = gl.maximum(total_max, leaf_max)
    keep = exp2_from(total_max, top)
    add = exp2_from(leaf_max, top)
    total_sum = gl.fma(total_sum, keep, leaf_sum * add)
    wide = gl.zeros(total.shape, gl.float32, OUT) + keep[None, :]
    return gl.fma(total, wide, leaf * add[None, :]), total_sum, top


@gluon.jit
def _weights(
    scores, start, first, last, leaf_max, tops, score_scale, cap_scale, SEES: gl.constexpr, SOFT_CAP: gl.constexpr,
):  # fmt: skip
    """(weights, maximum, what sums before shrink by) of a tile of scores."""
    if SOFT_CAP:
        scores = 1.0 - 2.0 / (gl.exp2(scores * cap_scale) + 1.0)  # tanh
    token = start + gl.arange(0, _BN, gl.SliceLayout(1, _S))[:, None]
    seen = token <= last[None, :]
    if SEES != _EVERYTHING:
        seen = seen & (token >= first[None, :])
    scores = gl.where(seen, scores, float("-inf"))
    tops.store(gl.max(gl.reshape(scores, (4, _BN // 4, _LINES)), 1))
    _barrier()
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
    total_sum = gl.zeros([_LINES], gl.float32, gl.SliceLayout(0, F))
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
                total, total_sum, total_max, loaded[3 * step], loaded[3 * step + 1], loaded[3 * step + 2]
            )
    return total, total_sum, total_max


@gluon.jit
def _write(
    out, sinks, total, total_sum, total_max, row_start, num_queries, kv_index, out_token, out_head,
    GROUP: gl.constexpr,
):  # fmt: skip
    """The results of the lines, from the totals of all their leaves."""
    HEAD: gl.constexpr = total.shape[0]
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [HEAD // 8, 256 // HEAD], [1, 4], [0, 1])
    if sinks is not None:  # one more leaf, of weight 1 at the sink's score and of value 0
        SUMS: gl.constexpr = gl.SliceLayout(0, total.type.layout)
        head = gl.arange(0, _LINES, SUMS) % GROUP
        sink = gl.load(sinks + kv_index * GROUP + head).to(gl.float32) * _LOG2_E
        total, total_sum, total_max = _fold(total, total_sum, total_max, total * 0.0, total_sum * 0.0 + 1.0, sink)
    inverse = gl.where(total_sum == 0.0, 0.0, 1.0 / total_sum)
    result = gl.convert_layout((total * inverse[None, :]).to(out.dtype.element_ty), OUT)
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
    gl.store(stats + LINES, leaf_sum, mask=line < LINES)


@gluon.jit
def _word(words, index):
    return gl.max(words.index(index).load(_WORD), 0)


@gluon.jit
def _consume(
    out, sinks, parts, part_stats, counters, words, q_smem, q_full, q_empty, ring, tops, weight_smem, out_token,
    out_head, reach, score_scale, cap_scale, GROUP: gl.constexpr, LINES: gl.constexpr, HEAD: gl.constexpr,
    STAGES: gl.constexpr, SEES: gl.constexpr, SOFT_CAP: gl.constexpr,
):  # fmt: skip
    """Whatever the producer copies."""
    k_smem, v_smem, full, empty = ring
    dtype: gl.constexpr = q_smem.dtype
    ones = gl.full([_BN, _BN], 1.0, dtype, _A)
    step, turn = 0, 0
    mbarrier.wait(q_full.index(0), 0)
    task = _word(words, 7)
    while task != _END:
        at = turn % _TURNS * _WORDS
        row_start, num_queries, seq_len = _word(words, at), _word(words, at + 1), _word(words, at + 2)
        kv_index, begin, end = _word(words, at + 3), _word(words, at + 4), _word(words, at + 5)
        slot, leaves, mine = _word(words, at + 6), _word(words, at + 8), _word(words, at + 9)
        pair, low = _word(words, at + 10), _word(words, at + 11)
        q = q_smem.index(turn % _TURNS).reshape([_LINES, HEAD]).permute((1, 0)).load(_B)
        _barrier()
        mbarrier.arrive(q_empty.index(turn % _TURNS), count=1)
        turn += 1
        position = gl.minimum(seq_len - num_queries + gl.arange(0, _LINES, _LINE) // GROUP, seq_len - 1)
        first = first_seen(position, reach, SEES)
        leaf = gl.zeros([HEAD, _LINES], gl.float32, _S)
        leaf_sum = gl.zeros([_BN, _LINES], gl.float32, _S)
        leaf_max = gl.full([_LINES], float("-inf"), gl.float32, _LINE)
        total, total_sum, total_max = leaf, gl.zeros([_LINES], gl.float32, _LINE), leaf_max
        for start in range(begin, end, _BN):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            k = k_smem.index(stage).load(_A)
            v = v_smem.index(stage).permute((1, 0)).load(_A)
            scores = mma_v2(k, q, gl.zeros([_BN, _LINES], gl.float32, _S))
            exact, top, keep = _weights(
                scores, start, first, position, leaf_max, tops, score_scale, cap_scale, SEES, SOFT_CAP
            )
            weight_smem.store(exact.to(dtype))
            _barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            weights = weight_smem.load(_B)
            if (start + _BN > seq_len) | (start < low):  # what was not copied may not be finite
                token = start + gl.arange(0, _BN, gl.SliceLayout(0, _A))
                v = gl.where(((token < seq_len) & (token >= low))[None, :], v, gl.zeros_like(v))
            leaf_sum = mma_v2(ones, weights, leaf_sum * keep[None, :])
            leaf = mma_v2(v, weights, leaf * keep[None, :])
            leaf_max = top
            step += 1
            if (leaf_of(start + _BN) > leaf_of(start)) | (start + _BN >= end):
                one_sum = gl.convert_layout(gl.max(leaf_sum, 0), _LINE)
                if task != _WHOLE:
                    _keep(parts, part_stats, slot + leaf_of(start), leaf, one_sum, leaf_max, LINES)
                total, total_sum, total_max = _fold(total, total_sum, total_max, leaf, one_sum, leaf_max)
                leaf = gl.zeros([HEAD, _LINES], gl.float32, _S)
                leaf_sum = gl.zeros([_BN, _LINES], gl.float32, _S)
                leaf_max = gl.full([_LINES], float("-inf"), gl.float32, _LINE)
        if task == _WHOLE:
            _write(
                out, sinks, total, total_sum, total_max, row_start, num_queries, kv_index, out_token, out_head, GROUP
            )
        elif task == _FOLDED:
            _barrier()
            before = gl.atomic_add(counters + pair, mine, sem="acq_rel", scope="gpu")
            if before + mine == leaves:  # the last to arrive
                gl.store(counters + pair, 0)
                folded, folded_sum, folded_max = _fold_stored(
                    parts, part_stats, slot + leaf_of(low), leaves, LINES, HEAD
                )
                _write(
                    out, sinks, folded, folded_sum, folded_max, row_start, num_queries, kv_index, out_token, out_head,
                    GROUP,
                )  # fmt: skip
        mbarrier.wait(q_full.index(turn % _TURNS), turn // _TURNS & 1)
        task = _word(words, turn % _TURNS * _WORDS + 7)


@gluon.jit(
    do_not_specialize=[
        "table_row", "short", "reach", "capacity", "fold_limit", "block_rows", "head_rows", "head_channels",
    ]
)  # fmt: skip
def attend_rows_copied(
    q_desc, kv_desc, piece_desc, out, query_start, seq_lens, table, work, leaf_base, parts, part_stats, counters, sinks,
    out_token, out_head, table_row, short, reach, capacity, fold_limit, block_rows, head_rows, head_channels,
    score_scale, cap_scale, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, LINES: gl.constexpr, HEAD: gl.constexpr,
    BLOCK: gl.constexpr, STAGES: gl.constexpr, SEES: gl.constexpr, SOFT_CAP: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid: (programs of the division). Each takes its part of the leaves.

    A token of block b and KV head h is in row b * `block_rows` + h * `head_rows` + its place in the block of the
    cache's descriptors, from channel h * `head_channels` on. `parts` and `counters` are as in `attend_rows`.
    """
    dtype: gl.constexpr = kv_desc.dtype
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    q_smem = gl.allocate_shared_memory(dtype, [_TURNS, _LINES // GROUP, GROUP, HEAD], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, _BN, HEAD], kv_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, _BN, HEAD], kv_desc.layout)
    tops = gl.allocate_shared_memory(gl.float32, [4, _LINES], SWIZZLED)
    weight_smem = gl.allocate_shared_memory(dtype, [_BN, _LINES], gl.SwizzledSharedLayout(8, 1, 1, [1, 0]))
    words = gl.allocate_shared_memory(gl.int32, [_TURNS * _WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [_TURNS, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [_TURNS, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for turn in gl.static_range(_TURNS):
        mbarrier.init(q_full.index(turn), 1)
        mbarrier.init(q_empty.index(turn), 1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), _PIECES)
        mbarrier.init(empty.index(stage), 1)
    fence_async_shared()
    ring = (k_smem, v_smem, full, empty)
    gl.warp_specialize(
        [
            (_consume, (
                out, sinks, parts, part_stats, counters, words, q_smem, q_full, q_empty, ring, tops, weight_smem,
                out_token, out_head, reach, score_scale, cap_scale, GROUP, LINES, HEAD, STAGES, SEES, SOFT_CAP,
            )),
            (_produce, (
                q_desc, (kv_desc, piece_desc), query_start, seq_lens, table, work, leaf_base, words, q_smem, q_full,
                q_empty, ring, table_row, short, reach, capacity, fold_limit, block_rows, head_rows, head_channels,
                KV_HEADS, GROUP, HEAD, BLOCK, STAGES, SEES, PDL,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
