"""q/k norm, rotation, store and attention of few rows that verify drafts on a GPU, in one kernel.

Owns that kernel: `octavo.ops.attention.rope_decode_kernel`'s for rows of several queries. Does not know plans or
layers. Invariant: the bits are those of `octavo.ops.rope.qk_norm_rope_store` and `octavo.ops.attention.paged`. K and V
of earlier steps, lengths and tables are read before the kernel ahead is done, as there.

A row's queries with the heads of a KV head are columns of the matrix unit. The step's K and V come from the projection:
they lie among at most two pieces of 16 tokens, and are put into them in shared memory.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from octavo.ops.attention import rope_decode_kernel as one
from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.attention.paged_kernels import exp2_from
from octavo.ops.attention.paged_plan import Heads, Plan, RowsLaunch, Scratch, num_processors
from octavo.ops.attention.paged_workload import leaf_of, leaf_start
from octavo.ops.attention.rope_decode_kernel import (
    _COLUMN,
    _HALF,
    _LEFT,
    _LINE,
    _PLAIN,
    _RIGHT,
    _S,
    _SWIZZLED,
    _WIDE,
    _ask,
    _busy,
    _fold_stored,
    _length,
    _of_tile,
    _piece_of,
    _tokens,
)
from octavo.ops.compile.launch import chained, launched
from octavo.ops.compile.repeated_rows import repeated
from octavo.ops.rope import Rotation
from octavo.ops.rope.heads import rope_heads, rotated_halves

_MAX_COLUMNS = 32  # of queries by heads of a KV head
_HEADS = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # of halves of 16 heads


@constexpr_function
def _all_tiles(columns):
    """[tile, tile, column]: all tiles in each thread, columns as in a product."""
    further = [[0, 0, 8 << i] for i in range((columns // 8).bit_length() - 1)]
    lanes = [[0, 0, 2], [0, 0, 4], [0, 0, 0], [0, 0, 0], [0, 0, 0]]
    registers = [[0, 0, 1], *further, [0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0, 0], [0, 0, 0]], [], [4, 4, columns])


@gluon.jit
def _weights(scores, leaf_max, score_scale, dtype: gl.constexpr, COLUMNS: gl.constexpr):
    """(weights of a half [256, COLUMNS], what each tile's sums before it keep, maxima with each tile [4, COLUMNS]).

    As `paged_kernels._step` for one tile after another. Of tokens that are not seen, scores are -inf.
    """
    ALL: gl.constexpr = _all_tiles(COLUMNS)
    tile = gl.arange(0, _HALF, _LINE)[:, None] // 16 % 4
    tops = gl.max(gl.max(gl.reshape(scores, [4, 4, 16, COLUMNS]), 2), 0) * score_scale
    tops = gl.convert_layout(tops, gl.SliceLayout(0, ALL))[None, :, :]
    one = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, ALL)))[:, None, None]
    other = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, ALL)))[None, :, None]
    carried = gl.convert_layout(leaf_max, gl.SliceLayout(0, gl.SliceLayout(1, ALL)))[None, :]
    top = gl.maximum(gl.max(gl.where(other <= one, tops, float("-inf")), 1), carried)
    before = gl.maximum(gl.max(gl.where(other < one, tops, float("-inf")), 1), carried)
    safe = gl.where(top == float("-inf"), 0.0, top)
    first, second = _of_tile(safe, 0)[None, :], _of_tile(safe, 1)[None, :]
    third, fourth = _of_tile(safe, 2)[None, :], _of_tile(safe, 3)[None, :]
    mine = gl.where(tile < 2, gl.where(tile == 0, first, second), gl.where(tile == 2, third, fourth))
    return gl.exp2(gl.fma(scores, score_scale, -mine)).to(dtype), gl.exp2(before - safe), top


@gluon.jit
def _attend_half(
    keys, values, kv, after, queries, last, score_scale, weights_at, leaf, leaf_sum, leaf_max, kv_token: gl.constexpr,
    HEAD: gl.constexpr, BLOCK: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """One half, whose K is there: the online softmax over its tiles. `after`: what to ask for when it is done with.

    last [1, COLUMNS]: of a column's tokens in the half.
    """
    dtype: gl.constexpr = queries.dtype
    whole = keys._reinterpret(dtype, [_HALF, HEAD], _SWIZZLED)
    scores = mma_v2(whole.load(_LEFT), queries, gl.zeros([_HALF, COLUMNS], gl.float32, _S))
    line, kv_index, start, end, kv_block, kv_head = after
    if end > 0:
        tl.debug_barrier()
        _ask(keys, kv, line, kv_index, start, end, kv_block, kv_head, kv_token, HEAD, BLOCK)
    async_copy.commit_group()
    scores = gl.where(_tokens() <= last, scores, float("-inf"))
    weights, keep, top = _weights(scores, leaf_max, score_scale, dtype, COLUMNS)
    weights_at.store(weights)
    async_copy.wait_group(1)
    tl.debug_barrier()
    ones = gl.full([64, 16], 1.0, dtype, _LEFT)
    for tile in gl.static_range(4):
        rest = _of_tile(keep, tile)[None, :]
        leaf, leaf_sum = leaf * rest, leaf_sum * rest
        for piece in gl.static_range(4):
            w = weights_at.slice(piece * 64 + tile * 16, 16).load(_RIGHT)
            v = values.index(piece).slice(tile * 16, 16).permute((1, 0)).load(_LEFT)
            leaf = mma_v2(v, w, leaf)
            leaf_sum = mma_v2(ones, w, leaf_sum)
    if end > 0:
        tl.debug_barrier()
        _ask(values, kv + HEAD, line, kv_index, start, end, kv_block, kv_head, kv_token, HEAD, BLOCK)
    async_copy.commit_group()
    return leaf, leaf_sum, _of_tile(top, 3)


@gluon.jit
def _finish(
    leaf, leaf_sum, leaf_max, out, out_token, parts, stats, counter, index, leaves, num_lines, GROUP: gl.constexpr,
    LINES: gl.constexpr, COLUMNS: gl.constexpr, HEAD: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """Write a row's results, if its leaf is all of it or the last to be there; else leave the leaf to others."""
    channel, line = gl.arange(0, HEAD, _LINE)[:, None], gl.arange(0, COLUMNS, _COLUMN)
    is_there, first = line < num_lines, gl.arange(0, 64, _LINE)[:, None]
    if leaves == 1:
        add = exp2_from(leaf_max, leaf_max)[None, :]
        whole_sum = leaf_sum * add
        whole = leaf * add * repeated(gl.where(whole_sum == 0.0, 0.0, 1.0 / whole_sum), HEAD // 64)
        at = out + line // GROUP * out_token + line % GROUP * HEAD
        gl.store(at[None, :] + channel, whole.to(out.dtype.element_ty), mask=is_there[None, :])
    else:
        part = parts + index * (LINES * HEAD) + line[None, :] * HEAD + channel
        gl.store(part, leaf, mask=is_there[None, :])
        stat = stats + index * (2 * LINES) + line
        gl.store(stat, leaf_max, mask=is_there)
        gl.store(stat[None, :] + LINES + first * 0, leaf_sum, mask=is_there[None, :] & (first == 0))
        tl.debug_barrier()
        before = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if before == leaves - 1:
            gl.store(counter, 0)
            total, total_sum, _ = _fold_stored(parts, stats, leaves, LINES, HEAD, GATHER)
            inverse = gl.where(total_sum == 0.0, 0.0, 1.0 / total_sum)
            lines = gl.arange(0, LINES, gl.SliceLayout(1, _WIDE))
            channels = gl.arange(0, HEAD, gl.SliceLayout(0, _WIDE))
            result = (total * inverse[:, None]).to(out.dtype.element_ty)
            of_line = out + lines // GROUP * out_token + lines % GROUP * HEAD
            gl.store(of_line[:, None] + channels[None, :], result, mask=(lines < num_lines)[:, None])


@gluon.jit
def _halves(at, mask, HEAD: gl.constexpr):
    """Both halves [N, HEAD / 2] of what is at [N, 1] pointers; zeros where the mask is not."""
    at += gl.arange(0, HEAD // 2, gl.SliceLayout(0, _HEADS))[None, :]
    return gl.load(at, mask=mask, other=0.0), gl.load(at + HEAD // 2, mask=mask, other=0.0)


@gluon.jit
def _put(keys, values, token, kv, key, value, old_k, old_v, of_piece, HEAD: gl.constexpr):
    """Put what is new of K and V of a piece, in halves, beside what is old, and into a head's cache.

    token: of the half, of the piece; of_piece: see `_places`.
    """
    _, is_new, _, _, at, stored = of_piece
    channel = gl.arange(0, HEAD // 2, gl.SliceLayout(0, _HEADS))[None, :]
    k, v = _piece_of(keys, token, HEAD), _piece_of(values, token, HEAD)
    for half in gl.static_range(2):
        k.slice(half * (HEAD // 2), HEAD // 2, dim=1).store(gl.where(is_new, key[half], old_k[half]))
        v.slice(half * (HEAD // 2), HEAD // 2, dim=1).store(gl.where(is_new, value[half], old_v[half]))
        gl.store(kv + (at + half * (HEAD // 2) + channel), key[half], mask=stored)
        gl.store(kv + (at + half * (HEAD // 2) + HEAD + channel), value[half], mask=stored)


@gluon.jit
def _old(piece, HEAD: gl.constexpr):
    """What a piece holds, in halves."""
    first = piece.slice(0, HEAD // 2, dim=1).load(_HEADS)
    return first, piece.slice(HEAD // 2, HEAD // 2, dim=1).load(_HEADS)


@gluon.jit
def _places(of_row, first, new, num_queries, kv_block, kv_token, HEAD: gl.constexpr, BLOCK: gl.constexpr):
    """(a row's token of the step, whether it is there, cosines, sines, its place in the cache, whether it has one).

    Of 16 places from `first` on. of_row: positions and slots of the row's tokens of the step, and the angles.
    """
    positions, slots, cos_sin = of_row
    index = first + gl.arange(0, 16, gl.SliceLayout(1, _HEADS))[:, None] - new
    is_new = (index >= 0) & (index < num_queries)
    token = gl.minimum(gl.maximum(index, 0), num_queries - 1)
    cosine, sine = _halves(cos_sin + gl.load(positions + token).to(gl.int64) * HEAD, index == index, HEAD)
    slot = gl.load(slots + token).to(gl.int64)
    at = slot // BLOCK * kv_block + slot % BLOCK * kv_token
    return token.to(gl.int64), is_new, cosine, sine, at, is_new & (slot >= 0)


@launched(gluon.jit(do_not_specialize=["num_rows", "max_leaves", "table_row"]))
def _rotate_and_attend_several(
    qkv, positions, cos_sin, q_norm, k_norm, slots, kv, out, query_start, seq_lens, table, parts, stats, counters,
    qkv_token, out_token, kv_block, kv_head, table_row, eps, score_scale, num_rows, max_leaves,
    kv_token: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, LINES: gl.constexpr, COLUMNS: gl.constexpr,
    HEAD: gl.constexpr, LEVELS: gl.constexpr, BLOCK: gl.constexpr, NORM: gl.constexpr, GATHER: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Grid: any. Leaf by leaf, in a leaf row by row, in a row KV head by KV head: each program takes every so many."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: gl.constexpr = out.dtype.element_ty
    keys = gl.allocate_shared_memory(dtype, [4, 64, HEAD], _SWIZZLED)
    values = gl.allocate_shared_memory(dtype, [4, 64, HEAD], _SWIZZLED)
    rotated = gl.allocate_shared_memory(dtype, [COLUMNS, HEAD], _SWIZZLED)
    weights_at = gl.allocate_shared_memory(dtype, [_HALF, COLUMNS], _PLAIN)
    num_pairs, place = num_rows * KV_HEADS, gl.program_id(0)
    longest = 0
    for row in range(num_rows):
        longest = gl.maximum(longest, _length(row, query_start, seq_lens))
    limit = gl.where(longest > 0, leaf_of(longest - 1) + 1, 0) * num_pairs
    place = _busy(place, limit, num_pairs, query_start, seq_lens, KV_HEADS)
    start = leaf_start(place // num_pairs)
    if place < limit:
        row = place % num_pairs // KV_HEADS
        num_queries = gl.load(query_start + row + 1) - gl.load(query_start + row)
        end = _length(row, query_start, seq_lens) - num_queries
        line = table + row.to(gl.int64) * table_row
        _ask(keys, kv, line, place % KV_HEADS, start, end, kv_block, kv_head, kv_token, HEAD, BLOCK)
        async_copy.commit_group()
        _ask(values, kv + HEAD, line, place % KV_HEADS, start, end, kv_block, kv_head, kv_token, HEAD, BLOCK)
        async_copy.commit_group()
    elif PDL and gl.program_id(0) == 0:  # the kernel does not end before the one ahead
        tl.extra.cuda.gdc_wait()
    channel = gl.arange(0, HEAD // 2, gl.SliceLayout(0, _HEADS))[None, :]
    q_weights, k_weights = (channel, channel), (channel, channel)
    if NORM:
        q_weights = (gl.load(q_norm + channel), gl.load(q_norm + HEAD // 2 + channel))
        k_weights = (gl.load(k_norm + channel), gl.load(k_norm + HEAD // 2 + channel))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(1, _HEADS))[:, None]
    leaf = gl.zeros([HEAD, COLUMNS], gl.float32, _S)
    leaf_sum = gl.zeros([64, COLUMNS], gl.float32, _S)
    leaf_max = gl.full([COLUMNS], float("-inf"), gl.float32, _COLUMN)
    while place < limit:
        pair = place % num_pairs
        row, kv_index, index = pair // KV_HEADS, pair % KV_HEADS, place // num_pairs
        seq_len = _length(row, query_start, seq_lens)
        row_start = gl.load(query_start + row)
        num_queries = gl.load(query_start + row + 1) - row_start
        leaf_end = gl.minimum(leaf_start(index + 1), seq_len)
        new = seq_len - num_queries  # the first token of the step
        # Places and angles of the queries, and of the two pieces that hold the step's tokens.
        of_query = gl.minimum(column // GROUP, num_queries - 1)
        position = gl.load(positions + row_start + of_query).to(gl.int64)
        q_cosine, q_sine = _halves(cos_sin + position * HEAD, column >= 0, HEAD)
        first, second = new // 16 * 16, new // 16 * 16 + 16
        of_row = (positions + row_start, slots + row_start, cos_sin)
        of0 = _places(of_row, first, new, num_queries, kv_block, kv_token, HEAD, BLOCK)
        of1 = _places(of_row, second, new, num_queries, kv_block, kv_token, HEAD, BLOCK)
        has_first = (first >= start) & (first < start + _HALF) & (first < leaf_end)
        has_second = (second >= start) & (second < start + _HALF) & (second < leaf_end)
        # What comes next.
        is_done = start + _HALF >= leaf_end
        next_place = gl.where(is_done, place + gl.num_programs(0), place)
        next_place = _busy(next_place, limit, num_pairs, query_start, seq_lens, KV_HEADS)
        next_start = gl.where(is_done, leaf_start(next_place // num_pairs), start + _HALF)
        next_row = next_place % num_pairs // KV_HEADS
        next_end = 0
        if next_place < limit:
            next_queries = gl.load(query_start + next_row + 1) - gl.load(query_start + next_row)
            next_end = gl.maximum(_length(next_row, query_start, seq_lens) - next_queries, 1)  # 0 is: no place
        next_line = table + next_row.to(gl.int64) * table_row
        after = (next_line, next_place % KV_HEADS, next_start, next_end, kv_block, kv_head)
        none = gl.zeros([16, HEAD // 2], dtype, _HEADS)
        old_k, old_v = (none, none), (none, none)
        if has_first | has_second:  # K and V are there, among which the step's are put
            async_copy.wait_group(0)
            tl.debug_barrier()
        piece0 = (first - start) % _HALF
        if has_first:
            old_k, old_v = _old(_piece_of(keys, piece0, HEAD), HEAD), _old(_piece_of(values, piece0, HEAD), HEAD)
        tl.debug_barrier()
        if PDL:
            tl.extra.cuda.gdc_wait()
        # The projection is there.
        source = qkv + row_start.to(gl.int64) * qkv_token
        of_head = of_query.to(gl.int64) * qkv_token + (kv_index * GROUP + column % GROUP) * HEAD
        low, high = _halves(source + of_head, column < num_queries * GROUP, HEAD)
        of_key = source + (KV_HEADS * GROUP + kv_index) * HEAD
        key0 = _halves(of_key + of0[0] * qkv_token, has_first & of0[1], HEAD)
        value0 = _halves(of_key + KV_HEADS * HEAD + of0[0] * qkv_token, has_first & of0[1], HEAD)
        key1 = _halves(of_key + of1[0] * qkv_token, has_second & of1[1], HEAD)
        value1 = _halves(of_key + KV_HEADS * HEAD + of1[0] * qkv_token, has_second & of1[1], HEAD)
        rotated.store(rope_heads(low, high, q_weights, q_cosine, q_sine, eps, LEVELS, NORM))
        new_kv = kv + kv_index.to(gl.int64) * kv_head
        if has_first:
            key = rotated_halves(key0[0], key0[1], k_weights, of0[2], of0[3], eps, LEVELS, NORM)
            _put(keys, values, piece0, new_kv, key, value0, old_k, old_v, of0, HEAD)
        if has_second:  # which holds nothing old
            key = rotated_halves(key1[0], key1[1], k_weights, of1[2], of1[3], eps, LEVELS, NORM)
            _put(keys, values, second - start, new_kv, key, value1, (none, none), (none, none), of1, HEAD)
        async_copy.wait_group(1)
        tl.debug_barrier()
        queries = rotated.permute((1, 0)).load(_RIGHT)
        last = new + gl.minimum(gl.arange(0, COLUMNS, _COLUMN) // GROUP, num_queries - 1) - start
        leaf, leaf_sum, leaf_max = _attend_half(
            keys, values, kv, after, queries, gl.minimum(last, leaf_end - start - 1)[None, :], score_scale, weights_at,
            leaf, leaf_sum, leaf_max, kv_token, HEAD, BLOCK, COLUMNS,
        )  # fmt: skip
        if is_done:
            leaves = leaf_of(seq_len - 1) + 1
            slot_at = (row * max_leaves * KV_HEADS + kv_index * leaves).to(gl.int64)
            _finish(
                leaf, leaf_sum, leaf_max, out + row_start.to(gl.int64) * out_token + kv_index * (GROUP * HEAD),
                out_token, parts + slot_at * (LINES * HEAD), stats + slot_at * (2 * LINES), counters + pair, index,
                leaves, num_queries * GROUP, GROUP, LINES, COLUMNS, HEAD, GATHER,
            )  # fmt: skip
            leaf = gl.zeros([HEAD, COLUMNS], gl.float32, _S)
            leaf_sum = gl.zeros([64, COLUMNS], gl.float32, _S)
            leaf_max = gl.full([COLUMNS], float("-inf"), gl.float32, _COLUMN)
        place, start = next_place, next_start


def serves(heads: Heads, mask_spec: MaskSpec, rows: RowsLaunch, kv: Tensor) -> bool:
    """Whether few rows may run here: see `rope_decode_kernel.serves`; queries by heads of a KV head are up to 32."""
    return rows.max_queries > 1 and rows.lines <= _MAX_COLUMNS and one.serves(heads, mask_spec, kv)


def fused_rope_verify(
    projected: Tensor,
    rotation: Rotation,
    kv: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    out: Tensor,
    *,
    mask_spec: MaskSpec,
    plan: Plan,
    scratch: Scratch,
) -> None:
    """See `octavo.ops.attention.rope_decode.fused_rope_decode`; all tensors of channels are bfloat16."""
    rows, (_, kv_heads, block_size, _) = plan.rows, kv.shape
    assert rows is not None, "rows are few"
    head = out.shape[2]
    assert projected.stride(1) == out.stride(2) == kv.stride(3) == 1 and out.stride(1) == head, "last axes"
    group, norm = out.shape[1] // kv_heads, rotation.q_norm
    parts = scratch.parts(plan.capacity * kv_heads, rows.lines, head)
    programs = min(rows.num_rows * kv_heads * rows.max_leaves, num_processors(kv.device))
    _rotate_and_attend_several[(programs,)](
        projected, rotation.positions, rotation.cos_sin, rotation.cos_sin if norm is None else norm,
        rotation.cos_sin if rotation.k_norm is None else rotation.k_norm, rotation.slot_mapping, kv, out, query_start,
        seq_lens, block_table, *parts, projected.stride(0), out.stride(0), kv.stride(0), kv.stride(1),
        block_table.stride(0), rotation.eps, mask_spec.scale * one.LOG2_E, rows.num_rows, rows.max_leaves,
        kv_token=kv.stride(2), KV_HEADS=kv_heads, GROUP=group, LINES=rows.lines, COLUMNS=max(rows.lines, 8),
        HEAD=head, LEVELS=6, BLOCK=block_size, NORM=norm is not None, GATHER=2, num_warps=one.WARPS,
        enable_fp_fusion=False, **chained(kv.device),
    )  # fmt: skip
