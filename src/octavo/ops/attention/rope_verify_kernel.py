"""q/k norm, rotation, store and attention of few rows of several queries on a GPU, in one kernel: they verify drafts.

Owns that kernel: `rope_decode_kernel`'s for rows of one query, whose copies, scores and sums it shares. Does not know
plans or layers. Invariant: the bits are those of `octavo.ops.rope.qk_norm_rope_store` and `octavo.ops.attention.paged`,
one behind the other. No row reads what another one stores.

A program takes a leaf of a (row, KV head) for up to 8 of its (query, head)s, a column of the matrix unit each: others
read the same K and V for the next ones, so that the way from the projection to the first product is as short as that of
one query. Each program turns K of all the step's tokens. Token t is line t % 16 of what they are multiplied from, which
is the line that it has in any tile, so that its scores need no way to their place.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.attention.paged_kernels import exp2_from
from octavo.ops.attention.paged_plan import Plan, RowsLaunch, Scratch, num_processors
from octavo.ops.attention.paged_workload import leaf_of, leaf_start
from octavo.ops.attention.rope_decode_kernel import (
    COLUMN,
    HALF,
    HEAD_SIZE,
    LEFT,
    LINE,
    LOG2_E,
    PIECE,
    PLAIN,
    RIGHT,
    SCORES,
    SWIZZLED,
    WARPS,
    ask_half,
    fold,
    half_tokens,
    layout_of_heads,
    next_busy,
    piece_of,
    row_length,
    sum_half,
)
from octavo.ops.compile.launch import chained, launched
from octavo.ops.compile.repeated_rows import repeated
from octavo.ops.rope import Rotation
from octavo.ops.rope.heads import heads_by_squares, squares_of

_COLUMNS = 8  # of the matrix unit
_FOLDED = gl.constexpr(gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0]))  # of the totals [8, HEAD]


@gluon.jit
def _num_queries(row, query_start):
    return gl.load(query_start + row + 1) - gl.load(query_start + row)


@gluon.jit
def _halves(at, is_there, channel, HEAD: gl.constexpr):
    """Halves of heads at pointers [N, 1]; zeros where there is none."""
    low = gl.load(at + channel, mask=is_there, other=0.0)
    return low, gl.load(at + HEAD // 2 + channel, mask=is_there, other=0.0)


@gluon.jit
def _rotated(q, k, q_turn, k_turn, eps, LEVELS: gl.constexpr, NORM: gl.constexpr):
    """Heads of q and k [N, HEAD] from their halves, normed, rotated and rounded. turns: (weights, angles) of each.

    Both sums of squares come before either root: that has ways apart, past which no instruction is moved.
    """
    q_squares, k_squares = q[0], k[0]
    if NORM:
        q_squares, k_squares = squares_of(q[0], q[1], LEVELS), squares_of(k[0], k[1], LEVELS)
    own_q = heads_by_squares(q[0], q[1], q_squares, q_turn[0], q_turn[1][0], q_turn[1][1], eps, NORM)
    return own_q, heads_by_squares(k[0], k[1], k_squares, k_turn[0], k_turn[1][0], k_turn[1][1], eps, NORM)


@gluon.jit
def _angles(cos_sin, positions, token, channel, HEAD: gl.constexpr):
    """(cosines, sines) of tokens [N, 1]."""
    at = cos_sin + gl.load(positions + token).to(gl.int64) * HEAD + channel
    return gl.load(at), gl.load(at + HEAD // 2)


@gluon.jit
def _old_end(row, query_start, seq_lens):
    """Tokens of a row before the step's."""
    return row_length(row, query_start, seq_lens) - _num_queries(row, query_start)


@gluon.jit
def _next(place, start, is_done, limit, num_pairs, rows, strides, SHARES: gl.constexpr, SPLITS: gl.constexpr):
    """(the place, and the first token, of what a program does behind this half, what `sum_half` asks for there).

    rows: their query starts, lengths and tables, and how far apart these are; strides: of blocks and heads.
    """
    query_start, seq_lens, table, table_row = rows
    next_place = gl.where(is_done, place + gl.num_programs(0), place)
    next_place = next_busy(next_place, limit, num_pairs, query_start, seq_lens, SHARES)
    next_start = gl.where(is_done, leaf_start(next_place // num_pairs), start + HALF)
    row, end = next_place % num_pairs // SHARES, -1
    if next_place < limit:
        end = _old_end(row, query_start, seq_lens)
    line = table + row.to(gl.int64) * table_row
    return next_place, next_start, (line, next_place % SHARES // SPLITS, next_start, end, strides[0], strides[1])


@gluon.jit
def _places_in_v(values, begin, end, token, is_here, HEAD: gl.constexpr):
    """Where V of the step's tokens from `begin` to `end` - 1 of a half belongs: its first and last 16 lines.

    Of both the lines, what they hold, and which of them are of tokens [16, 1] that are there. V, and so K, is waited
    for here: the places are filled while scores are on their way.
    """
    has_any = begin < end
    first, last = gl.where(has_any, begin, 0), gl.where(has_any, end - 1, 0)
    first_lines, last_lines = piece_of(values, first, HEAD), piece_of(values, last, HEAD)
    first_old = gl.zeros([16, HEAD], values.dtype, PIECE)
    last_old = first_old
    if has_any:
        async_copy.wait_group(0)
        tl.debug_barrier()
        first_old, last_old = first_lines.load(PIECE), last_lines.load(PIECE)
    is_first, is_last = is_here & (token // 16 == first // 16), is_here & (token // 16 == last // 16)
    return first_lines, first_old, is_first, last_lines, last_old, is_last


@gluon.jit
def _attend_half(
    keys, values, kv, after, queries, of_step, places, own_v, fresh, last, score_scale, weights_at, leaf, leaf_sum,
    leaf_max, kv_token: gl.constexpr, HEAD: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """One half, whose K is there. `after`: see `sum_half`.

    fresh: the first of the step's tokens in this half, and the end; their K is in of_step [16, HEAD] alone. places: see
    `_places_in_v`; own_v: their V. last: the last token that a column sees.
    """
    dtype: gl.constexpr = queries.dtype
    whole = keys._reinterpret(dtype, [HALF, HEAD], SWIZZLED)
    scores = mma_v2(whole.load(LEFT), queries, gl.zeros([HALF, 8], gl.float32, SCORES))
    own = mma_v2(of_step.load(LEFT), queries, gl.zeros([16, 8], gl.float32, SCORES))
    begin, end = fresh
    if begin < end:
        first_lines, first_old, is_first, last_lines, last_old, is_last = places
        first_lines.store(gl.where(is_first, own_v, first_old))
        last_lines.store(gl.where(is_last, own_v, last_old))
    token = half_tokens()
    scores = gl.where((token >= begin) & (token < end), repeated(own, HALF // 16), scores)
    return sum_half(
        keys,
        values,
        kv,
        after,
        scores,
        token <= last[None, :],
        score_scale,
        weights_at,
        leaf,
        leaf_sum,
        leaf_max,
        kv_token,
        HEAD,
        BLOCK,
    )


@gluon.jit
def _fold_stored(parts, stats, leaves, there, LINES: gl.constexpr, HEAD: gl.constexpr, GATHER: gl.constexpr):
    """The totals of leaves for 8 lines, whoever wrote them: [8, HEAD] each. there: which lines there are."""
    line = gl.arange(0, 8, gl.SliceLayout(1, _FOLDED))
    part = parts + line[:, None] * HEAD + gl.arange(0, HEAD, gl.SliceLayout(0, _FOLDED))[None, :]
    total = gl.zeros([8, HEAD], gl.float32, _FOLDED)
    total_sum = gl.zeros([8], gl.float32, gl.SliceLayout(1, _FOLDED))
    total_max = gl.full([8], float("-inf"), gl.float32, gl.SliceLayout(1, _FOLDED))
    for base in range(0, leaves, GATHER):
        loaded = ()
        for step in gl.static_range(GATHER):
            at, is_leaf = base + step, there & (base + step < leaves)
            loaded = loaded + (  # noqa: RUF005
                gl.load(part + at * (LINES * HEAD), mask=is_leaf[:, None], other=0.0, cache_modifier=".cg"),
                gl.load(stats + at * (2 * LINES) + LINES + line, mask=is_leaf, other=0.0, cache_modifier=".cg"),
                gl.load(stats + at * (2 * LINES) + line, mask=is_leaf, other=float("-inf"), cache_modifier=".cg"),
            )
        for step in gl.static_range(GATHER):
            total, total_sum, total_max = fold(
                total, total_sum, total_max, loaded[3 * step], loaded[3 * step + 1], loaded[3 * step + 2]
            )
    return total, total_sum


@gluon.jit
def _place_of(column, first_query, num_queries, out_token, GROUP: gl.constexpr, HEAD: gl.constexpr):
    """(where a column's result lies behind the row's first, whether there is one)."""
    query = first_query + column // GROUP
    at = query.to(gl.int64) * out_token + column % GROUP * HEAD
    return at, (column < 8 // GROUP * GROUP) & (query < num_queries)


@gluon.jit
def _finish(
    leaf, leaf_sum, leaf_max, out, parts, stats, counter, index, leaves, first_query, num_queries, out_token,
    GROUP: gl.constexpr, LINES: gl.constexpr, HEAD: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """Write the columns' results, if their leaf is all of the row or the last to be there; else leave it to others."""
    channel, column = gl.arange(0, HEAD, LINE)[:, None], gl.arange(0, 8, COLUMN)
    at, there = _place_of(column, first_query, num_queries, out_token, GROUP, HEAD)
    if leaves == 1:
        add = exp2_from(leaf_max, leaf_max)[None, :]
        whole_sum = leaf_sum * add
        whole = leaf * add * repeated(gl.where(whole_sum == 0.0, 0.0, 1.0 / whole_sum), HEAD // 64)
        gl.store(out + at[None, :] + channel, whole.to(out.dtype.element_ty), mask=there[None, :])
    else:
        gl.store(parts + index * (LINES * HEAD) + column[None, :] * HEAD + channel, leaf, mask=there[None, :])
        of_leaf = stats + index * (2 * LINES) + column
        gl.store(of_leaf, leaf_max, mask=there)
        first = gl.arange(0, 64, LINE)[:, None]
        gl.store(of_leaf[None, :] + LINES + first * 0, leaf_sum, mask=there[None, :] & (first == 0))
        tl.debug_barrier()
        before = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if before == leaves - 1:
            gl.store(counter, 0)
            line, channels = gl.arange(0, 8, gl.SliceLayout(1, _FOLDED)), gl.arange(0, HEAD, gl.SliceLayout(0, _FOLDED))
            to, is_line = _place_of(line, first_query, num_queries, out_token, GROUP, HEAD)
            total, total_sum = _fold_stored(parts, stats, leaves, is_line, LINES, HEAD, GATHER)
            inverse = gl.where(total_sum == 0.0, 0.0, 1.0 / total_sum)
            result = (total * inverse[:, None]).to(out.dtype.element_ty)
            gl.store(out + to[:, None] + channels[None, :], result, mask=is_line[:, None])


@launched(gluon.jit(do_not_specialize=["num_rows", "max_leaves", "table_row"]))
def _rotate_and_attend_columns(
    qkv, positions, cos_sin, q_norm, k_norm, slots, kv, out, query_start, seq_lens, table, parts, stats, counters,
    qkv_token, out_token, kv_block, kv_head, table_row, eps, score_scale, num_rows, max_leaves,
    kv_token: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, SPLITS: gl.constexpr, FRESH: gl.constexpr,
    LINES: gl.constexpr, HEAD: gl.constexpr, LEVELS: gl.constexpr, BLOCK: gl.constexpr, NORM: gl.constexpr,
    GATHER: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid: any. Leaf by leaf, in a leaf row by row, then KV head by KV head, then queries by 8 // GROUP.

    Each program takes every so many. SPLITS: how often a row has so many queries, at most; FRESH: how many queries a
    row has at most, as a power of two from 8 to 16.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: gl.constexpr = out.dtype.element_ty
    SHARES: gl.constexpr = KV_HEADS * SPLITS
    QUERIES: gl.constexpr = 8 // GROUP
    keys = gl.allocate_shared_memory(dtype, [4, 64, HEAD], SWIZZLED)
    values = gl.allocate_shared_memory(dtype, [4, 64, HEAD], SWIZZLED)
    turned = gl.allocate_shared_memory(dtype, [8, HEAD], SWIZZLED)
    of_step = gl.allocate_shared_memory(dtype, [16, HEAD], SWIZZLED)
    weights_at = gl.allocate_shared_memory(dtype, [HALF, 8], PLAIN)
    num_pairs, place = num_rows * SHARES, gl.program_id(0)
    longest = 0
    for row in range(num_rows):
        longest = gl.maximum(longest, row_length(row, query_start, seq_lens))
    limit = gl.where(longest > 0, leaf_of(longest - 1) + 1, 0) * num_pairs
    place = next_busy(place, limit, num_pairs, query_start, seq_lens, SHARES)
    start = leaf_start(place // num_pairs)
    if place < limit:
        row, kv_index = place % num_pairs // SHARES, place % SHARES // SPLITS
        end = _old_end(row, query_start, seq_lens)
        line = table + row.to(gl.int64) * table_row
        ask_half(keys, kv, line, kv_index, start, end, kv_block, kv_head, kv_token, HEAD, BLOCK)
        async_copy.commit_group()
        ask_half(values, kv + HEAD, line, kv_index, start, end, kv_block, kv_head, kv_token, HEAD, BLOCK)
        async_copy.commit_group()
    elif PDL and gl.program_id(0) == 0:  # the kernel does not end before the one ahead
        tl.extra.cuda.gdc_wait()
    OF_Q: gl.constexpr = layout_of_heads(8)
    OF_K: gl.constexpr = layout_of_heads(FRESH)
    q_channel = gl.arange(0, HEAD // 2, gl.SliceLayout(0, OF_Q))[None, :]
    k_channel = gl.arange(0, HEAD // 2, gl.SliceLayout(0, OF_K))[None, :]
    q_line = gl.arange(0, 8, gl.SliceLayout(1, OF_Q))[:, None]
    k_line = gl.arange(0, FRESH, gl.SliceLayout(1, OF_K))[:, None]
    v_line = gl.arange(0, 16, gl.SliceLayout(1, PIECE))[:, None]
    whole = gl.arange(0, HEAD, gl.SliceLayout(0, PIECE))[None, :]
    q_weights, k_weights = (q_channel, q_channel), (k_channel, k_channel)
    if NORM:
        q_weights = (gl.load(q_norm + q_channel), gl.load(q_norm + HEAD // 2 + q_channel))
        k_weights = (gl.load(k_norm + k_channel), gl.load(k_norm + HEAD // 2 + k_channel))
    leaf = gl.zeros([HEAD, 8], gl.float32, SCORES)
    leaf_sum = gl.zeros([64, 8], gl.float32, SCORES)
    leaf_max = gl.full([8], float("-inf"), gl.float32, COLUMN)
    while place < limit:
        pair, index = place % num_pairs, place // num_pairs
        row, kv_index, first_query = pair // SHARES, pair % SHARES // SPLITS, pair % SPLITS * QUERIES
        seq_len, num_queries = row_length(row, query_start, seq_lens), _num_queries(row, query_start)
        leaf_end, first = gl.minimum(leaf_start(index + 1), seq_len), seq_len - num_queries
        row_start = gl.load(query_start + row).to(gl.int64)
        # What the lines are: a query with a head, and the step's tokens for K and for V.
        query = first_query + q_line // GROUP
        is_query = (q_line < QUERIES * GROUP) & (query < num_queries)
        k_age, v_age = (k_line - first) & (FRESH - 1), (v_line - first) & 15
        q_token = row_start + gl.minimum(query, num_queries - 1)
        k_token, v_token = (
            row_start + gl.minimum(k_age, num_queries - 1),
            row_start + gl.minimum(v_age, num_queries - 1),
        )
        q_angles = _angles(cos_sin, positions, q_token, q_channel, HEAD)
        k_angles = _angles(cos_sin, positions, k_token, k_channel, HEAD)
        slot = gl.load(slots + v_token).to(gl.int64)
        v_place = first + v_age - start
        is_here = (v_age < num_queries) & (v_place >= 0) & (v_place < HALF)
        is_done = start + HALF >= leaf_end
        rows, strides = (query_start, seq_lens, table, table_row), (kv_block, kv_head)
        next_place, next_start, after = _next(place, start, is_done, limit, num_pairs, rows, strides, SHARES, SPLITS)
        fresh_begin, fresh_end = gl.maximum(first - start, 0), gl.minimum(seq_len - start, HALF)
        places = _places_in_v(values, fresh_begin, fresh_end, v_place, is_here, HEAD)
        tl.debug_barrier()
        if PDL:
            tl.extra.cuda.gdc_wait()
        # The projection is there.
        q_at = qkv + q_token * qkv_token + (kv_index * GROUP + q_line % GROUP) * HEAD
        k_at = qkv + k_token * qkv_token + (KV_HEADS * GROUP + kv_index) * HEAD
        v_at = qkv + v_token * qkv_token + (KV_HEADS * (GROUP + 1) + kv_index) * HEAD + whole
        q, k = _halves(q_at, is_query, q_channel, HEAD), _halves(k_at, k_age < num_queries, k_channel, HEAD)
        own_v = gl.load(v_at, mask=is_here, other=0.0)
        own_q, own_k = _rotated(q, k, (q_weights, q_angles), (k_weights, k_angles), eps, LEVELS, NORM)
        turned.store(own_q)
        for again in gl.static_range(16 // FRESH):
            of_step.slice(again * FRESH, FRESH).store(own_k)
        async_copy.wait_group(1)
        tl.debug_barrier()
        column = gl.arange(0, 8, COLUMN)
        last = gl.minimum(first + first_query + column // GROUP, seq_len - 1) - start
        leaf, leaf_sum, leaf_max = _attend_half(
            keys, values, kv, after, turned.permute((1, 0)).load(RIGHT), of_step, places, own_v,
            (fresh_begin, fresh_end), last, score_scale, weights_at, leaf, leaf_sum, leaf_max, kv_token, HEAD, BLOCK,
        )  # fmt: skip
        if (fresh_begin < fresh_end) & (first_query == 0):
            stored = kv + (slot // BLOCK * kv_block + kv_index * kv_head + slot % BLOCK * kv_token) + whole
            gl.store(stored, of_step.load(PIECE), mask=is_here & (slot >= 0))
            gl.store(stored + HEAD, own_v, mask=is_here & (slot >= 0))
        if is_done:
            leaves = leaf_of(seq_len - 1) + 1
            slot_at = (row * max_leaves * KV_HEADS + kv_index * leaves).to(gl.int64)
            _finish(
                leaf, leaf_sum, leaf_max, out + row_start * out_token + kv_index * (GROUP * HEAD),
                parts + slot_at * (LINES * HEAD) + first_query * (GROUP * HEAD),
                stats + slot_at * (2 * LINES) + first_query * GROUP, counters + pair, index, leaves, first_query,
                num_queries, out_token, GROUP, LINES, HEAD, GATHER,
            )  # fmt: skip
            leaf = gl.zeros([HEAD, 8], gl.float32, SCORES)
            leaf_sum = gl.zeros([64, 8], gl.float32, SCORES)
            leaf_max = gl.full([8], float("-inf"), gl.float32, COLUMN)
        place, start = next_place, next_start


def fused_rope_decode(
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
    """See `octavo.ops.attention.rope_decode.fused_rope_decode`; of layers that `rope_decode_kernel` serves."""
    rows, (_, kv_heads, block_size, _) = plan.rows, kv.shape
    assert rows is not None, "rows are few"
    assert projected.stride(1) == out.stride(2) == kv.stride(3) == 1 and out.stride(1) == HEAD_SIZE, "last axes"
    group, norm = out.shape[1] // kv_heads, rotation.q_norm
    parts = scratch.parts(plan.capacity * kv_heads, rows.lines, HEAD_SIZE)
    splits = splits_of(rows, group)
    programs = min(rows.num_rows * kv_heads * splits * rows.max_leaves, num_processors(kv.device))
    _rotate_and_attend_columns[(programs,)](
        projected, rotation.positions, rotation.cos_sin, rotation.cos_sin if norm is None else norm,
        rotation.cos_sin if rotation.k_norm is None else rotation.k_norm, rotation.slot_mapping, kv, out, query_start,
        seq_lens, block_table, *parts, projected.stride(0), out.stride(0), kv.stride(0), kv.stride(1),
        block_table.stride(0), rotation.eps, mask_spec.scale * LOG2_E, rows.num_rows, rows.max_leaves,
        kv_token=kv.stride(2), KV_HEADS=kv_heads, GROUP=group, SPLITS=splits, FRESH=8 if rows.max_queries <= 8 else 16,
        LINES=rows.lines, HEAD=HEAD_SIZE, LEVELS=6, BLOCK=block_size, NORM=norm is not None, GATHER=4, num_warps=WARPS,
        enable_fp_fusion=False, **chained(kv.device),
    )  # fmt: skip


def splits_of(rows: RowsLaunch, group: int) -> int:
    """How many programs share the queries of a (row, KV head, leaf)."""
    return -(-rows.max_queries // (_COLUMNS // group))
