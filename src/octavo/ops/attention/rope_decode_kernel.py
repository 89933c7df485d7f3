"""q/k norm, rotation, store and attention of few decoding rows on a GPU, in one kernel.

Owns that kernel: what `octavo.ops.rope.qk_norm_rope_store` and `octavo.ops.attention.paged` compute for a few rows of
one query. Does not know plans or layers. Invariant: the bits are theirs: the operations on a (query, head) are those of
`octavo.ops.rope.gpu._rotated` and of `paged_kernels`, in the same order. K and V of earlier steps, lengths and tables
are read before the kernel ahead is done: the first kernel of a step is behind all that writes them.

A program takes a leaf of a (row, KV head), in halves of four tiles whose scores are found together. Warp w has tile w:
token 64 w + 16 r + i of a half is line 16 w + i of piece r in shared memory. The newest token's K and V come from the
projection: V is put in its place there, K is multiplied beside the others. What can be done before the projection is
there is done before.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.attention.paged_kernels import exp2_from
from octavo.ops.attention.paged_plan import Heads, Plan, Scratch, num_processors, shared_bytes
from octavo.ops.attention.paged_workload import leaf_of, leaf_start
from octavo.ops.compile.launch import chained, launched
from octavo.ops.compile.repeated_rows import repeated
from octavo.ops.rope import Rotation
from octavo.ops.rope.heads import rope_heads

HALF = gl.constexpr(256)  # tokens that are in shared memory
HEAD_SIZE = 128
_MAX_GROUP = 7  # its queries and K have a line of a matrix instruction each
WARPS = 4
LOG2_E = math.log2(math.e)
SCORES = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, SCORES.value, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, SCORES.value, 2))
COLUMN, LINE = gl.constexpr(gl.SliceLayout(0, SCORES.value)), gl.constexpr(gl.SliceLayout(1, SCORES.value))
# [tile, tile, line]: all tiles in each thread, lines as in `SCORES`
_ALL = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0]],
        [[0, 0, 2], [0, 0, 4], [0, 0, 0], [0, 0, 0], [0, 0, 0]],
        [[0, 0, 0], [0, 0, 0]],
        [],
        [4, 4, 8],
    )
)
# Of a copy [64, 128]: a warp has the lines of a tile.
_LINES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [2, 0], [4, 0], [8, 0]],
        [[0, 8], [0, 16], [0, 32], [0, 64], [1, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)
PIECE = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # 16 lines of a tile
_WIDE = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0]))
SWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def row_length(row, query_start, seq_lens):
    """Tokens of a row; 0 if it has no query."""
    there = gl.load(query_start + row + 1) > gl.load(query_start + row)
    return gl.where(there, gl.load(seq_lens + row), 0)


@gluon.jit
def next_busy(place, limit, num_pairs, query_start, seq_lens, KV_HEADS: gl.constexpr):
    """The first of this program's places, from `place` on, at which a row has tokens; none: `limit` or more."""
    while (place < limit) and (
        leaf_start(place // num_pairs) >= row_length(place % num_pairs // KV_HEADS, query_start, seq_lens)
    ):
        place += gl.num_programs(0)
    return place


@gluon.jit
def fold(total, total_sum, total_max, leaf, leaf_sum, leaf_max):
    """As `paged_kernels.fold`; lines are axis 0."""
    top = gl.maximum(total_max, leaf_max)
    keep, add = exp2_from(total_max, top), exp2_from(leaf_max, top)
    total_sum = gl.fma(total_sum, keep, leaf_sum * add)
    total = gl.fma(total, keep[:, None], leaf * add[:, None])
    return total, total_sum, top


@gluon.jit
def _place(line, token, end, kv_block, kv_token: gl.constexpr, BLOCK: gl.constexpr):
    """Where a token lies in the cache; anywhere if it is not before `end`."""
    block = gl.load(line + token // BLOCK, mask=token < end, other=0).to(gl.int64)
    return block * kv_block + token % BLOCK * kv_token


@gluon.jit
def ask_half(
    ring,
    kv,
    line,
    kv_index,
    start,
    end,
    kv_block,
    kv_head,
    kv_token: gl.constexpr,
    HEAD: gl.constexpr,
    BLOCK: gl.constexpr,
):
    """Ask for K, or V, of the tokens of a half that are before `end`; zeros behind."""
    row = gl.arange(0, 64, gl.SliceLayout(1, _LINES))
    within = (row % 16 * kv_token)[:, None] + gl.arange(0, HEAD, gl.SliceLayout(0, _LINES))[None, :]
    kv += kv_index * kv_head
    for piece in gl.static_range(4):
        if piece == 0 or BLOCK % 64 != 0:
            p0 = _place(line, start + piece * 16, end, kv_block, kv_token, BLOCK)
            p1 = _place(line, start + (64 + piece * 16), end, kv_block, kv_token, BLOCK)
            p2 = _place(line, start + (128 + piece * 16), end, kv_block, kv_token, BLOCK)
            p3 = _place(line, start + (192 + piece * 16), end, kv_block, kv_token, BLOCK)
        tile = row // 16
        place = gl.where(tile < 2, gl.where(tile == 0, p0, p1), gl.where(tile == 2, p2, p3))
        at = kv + (place[:, None] + within)
        if BLOCK % 64 == 0:
            at += piece * 16 * kv_token
        there = start + tile * 64 + piece * 16 + row % 16 < end
        async_copy.async_copy_global_to_shared(ring.index(piece), at, mask=there[:, None])


@constexpr_function
def _lines(group):
    """How many lines the heads that are rotated together take: those of Q, and K."""
    return 4 if group < 4 else 8


@constexpr_function
def layout_of_heads(lines):
    """Of halves of heads [lines, 64]: no thread has more than it must."""
    return gl.BlockedLayout([1, lines // 2], [lines // 4, 128 // lines], [4, 1], [1, 0])


@gluon.jit
def piece_of(ring, token, HEAD: gl.constexpr):
    """The 16 lines of a half among which a token's is."""
    pieces = ring._reinterpret(ring.dtype, [16, 16, HEAD], SWIZZLED)
    return pieces.index(token // 16 % 4 * 4 + token // 64 % 4)


@gluon.jit
def half_tokens():
    """The token of each line of a half's scores: [256, 1]."""
    j = gl.arange(0, HALF, LINE)[:, None]
    return j // 16 % 4 * 64 + j // 64 * 16 + j % 16


@gluon.jit
def _of_tile(x, tile: gl.constexpr):
    """Line `tile` of x [4, 8]: [8]."""
    index = gl.arange(0, 4, gl.SliceLayout(1, x.type.layout))[:, None]
    return gl.convert_layout(gl.max(gl.where(index == tile, x, float("-inf")), 0), COLUMN)


@gluon.jit
def _weights(scores, leaf_max, score_scale, dtype: gl.constexpr):
    """(weights of a half [256, 8], what each tile's sums before it keep [4, 8], maxima with each tile [4, 8]).

    As `paged_kernels._step` for one tile after another. Of tokens that are not seen, scores are -inf.
    """
    tile = gl.arange(0, HALF, LINE)[:, None] // 16 % 4
    tops = gl.max(gl.max(gl.reshape(scores, [4, 4, 16, 8]), 2), 0) * score_scale
    tops = gl.convert_layout(tops, gl.SliceLayout(0, _ALL))[None, :, :]
    # [tile, tile before or itself, line]
    one = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, _ALL)))[:, None, None]
    other = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, _ALL)))[None, :, None]
    carried = gl.convert_layout(leaf_max, gl.SliceLayout(0, gl.SliceLayout(1, _ALL)))[None, :]
    top = gl.maximum(gl.max(gl.where(other <= one, tops, float("-inf")), 1), carried)
    before = gl.maximum(gl.max(gl.where(other < one, tops, float("-inf")), 1), carried)
    safe = gl.where(top == float("-inf"), 0.0, top)
    first, second = _of_tile(safe, 0)[None, :], _of_tile(safe, 1)[None, :]
    third, fourth = _of_tile(safe, 2)[None, :], _of_tile(safe, 3)[None, :]
    mine = gl.where(tile < 2, gl.where(tile == 0, first, second), gl.where(tile == 2, third, fourth))
    return gl.exp2(gl.fma(scores, score_scale, -mine)).to(dtype), gl.exp2(before - safe), top


@gluon.jit
def sum_half(
    keys,
    values,
    kv,
    after,
    scores,
    seen,
    score_scale,
    weights_at,
    leaf,
    leaf_sum,
    leaf_max,
    kv_token: gl.constexpr,
    HEAD: gl.constexpr,
    BLOCK: gl.constexpr,
):
    """The online softmax over the tiles of a half, from its scores [256, 8] and what of them is seen.

    `after`: what to ask for when this half is done with; its end is negative where there is nothing.
    """
    dtype: gl.constexpr = keys.dtype
    line, kv_index, start, end, kv_block, kv_head = after
    if end >= 0:
        tl.debug_barrier()
        ask_half(keys, kv, line, kv_index, start, end, kv_block, kv_head, kv_token, HEAD, BLOCK)
    async_copy.commit_group()
    scores = gl.where(seen, scores, float("-inf"))
    weights, keep, top = _weights(scores, leaf_max, score_scale, dtype)
    weights_at.store(weights)
    async_copy.wait_group(1)
    tl.debug_barrier()
    ones = gl.full([64, 16], 1.0, dtype, LEFT)
    for tile in gl.static_range(4):
        rest = _of_tile(keep, tile)[None, :]
        leaf, leaf_sum = leaf * rest, leaf_sum * rest
        for piece in gl.static_range(4):
            w = weights_at.slice(piece * 64 + tile * 16, 16).load(RIGHT)
            v = values.index(piece).slice(tile * 16, 16).permute((1, 0)).load(LEFT)
            leaf = mma_v2(v, w, leaf)
            leaf_sum = mma_v2(ones, w, leaf_sum)
    if end >= 0:
        tl.debug_barrier()
        ask_half(values, kv + HEAD, line, kv_index, start, end, kv_block, kv_head, kv_token, HEAD, BLOCK)
    async_copy.commit_group()
    return leaf, leaf_sum, _of_tile(top, 3)


@gluon.jit
def _attend_half(
    keys, values, kv, after, queries, fresh_k, fresh_v, place, limit, score_scale, weights_at, leaf, leaf_sum,
    leaf_max, kv_token: gl.constexpr, HEAD: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """One half, whose K is there. `after`: see `sum_half`.

    place: of the newest token, if it is in this half. Its K is in fresh_k [1, HEAD] alone; fresh_v: the lines in shared
    memory among which its V belongs, what they hold, and V.
    """
    dtype: gl.constexpr = queries.dtype
    whole = keys._reinterpret(dtype, [HALF, HEAD], SWIZZLED)
    scores = mma_v2(whole.load(LEFT), queries, gl.zeros([HALF, 8], gl.float32, SCORES))
    fresh = gl.broadcast(fresh_k.load(LEFT), gl.zeros([64, HEAD], dtype, LEFT))[0]
    fresh = mma_v2(fresh, queries, gl.zeros([64, 8], gl.float32, SCORES))
    if place < HALF:
        lines, old, new = fresh_v
        is_place = gl.arange(0, 16, gl.SliceLayout(1, PIECE))[:, None] == place % 16
        lines.store(gl.where(is_place, gl.broadcast(new, old)[0], old))
    token = half_tokens()
    scores = gl.where(token == place, repeated(fresh, 4), scores)
    return sum_half(
        keys,
        values,
        kv,
        after,
        scores,
        token < limit,
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
def _fold_stored(parts, stats, leaves, LINES: gl.constexpr, HEAD: gl.constexpr, GATHER: gl.constexpr):
    """The totals of leaves, whoever wrote them: [LINES, HEAD] each, and maxima and sums."""
    line = gl.arange(0, LINES, gl.SliceLayout(1, _WIDE))
    part = parts + line[:, None] * HEAD + gl.arange(0, HEAD, gl.SliceLayout(0, _WIDE))[None, :]
    total = gl.zeros([LINES, HEAD], gl.float32, _WIDE)
    total_sum = gl.zeros([LINES], gl.float32, gl.SliceLayout(1, _WIDE))
    total_max = gl.full([LINES], float("-inf"), gl.float32, gl.SliceLayout(1, _WIDE))
    for base in range(0, leaves, GATHER):
        loaded = ()
        for step in gl.static_range(GATHER):
            at, there = base + step, base + step < leaves
            loaded = loaded + (  # noqa: RUF005
                gl.load(part + at * (LINES * HEAD), mask=there, other=0.0, cache_modifier=".cg"),
                gl.load(stats + at * (2 * LINES) + LINES + line, mask=there, other=0.0, cache_modifier=".cg"),
                gl.load(stats + at * (2 * LINES) + line, mask=there, other=float("-inf"), cache_modifier=".cg"),
            )
        for step in gl.static_range(GATHER):
            total, total_sum, total_max = fold(
                total, total_sum, total_max, loaded[3 * step], loaded[3 * step + 1], loaded[3 * step + 2]
            )
    return total, total_sum, total_max


@gluon.jit
def _finish(
    sums, out, held, index, leaves, GROUP: gl.constexpr, LINES: gl.constexpr, HEAD: gl.constexpr, GATHER: gl.constexpr
):
    """Write a row's results, if its leaf is all of it or the last to be there; else leave the leaf to others."""
    leaf, leaf_sum, leaf_max = sums
    parts, stats, counter = held
    channel, line = gl.arange(0, HEAD, LINE)[:, None], gl.arange(0, 8, COLUMN)
    if leaves == 1:
        add = exp2_from(leaf_max, leaf_max)[None, :]
        whole_sum = leaf_sum * add
        whole = leaf * add * repeated(gl.where(whole_sum == 0.0, 0.0, 1.0 / whole_sum), HEAD // 64)
        gl.store(out + line[None, :] * HEAD + channel, whole.to(out.dtype.element_ty), mask=(line < GROUP)[None, :])
    else:
        at = parts + index * (LINES * HEAD) + line[None, :] * HEAD + channel
        gl.store(at, leaf, mask=(line < GROUP)[None, :])
        at = stats + index * (2 * LINES) + line
        gl.store(at, leaf_max, mask=line < GROUP)
        first = gl.arange(0, 64, LINE)[:, None]
        gl.store(at[None, :] + LINES + first * 0, leaf_sum, mask=(line < GROUP)[None, :] & (first == 0))
        tl.debug_barrier()
        before = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if before == leaves - 1:
            gl.store(counter, 0)
            total, total_sum, _ = _fold_stored(parts, stats, leaves, LINES, HEAD, GATHER)
            inverse = gl.where(total_sum == 0.0, 0.0, 1.0 / total_sum)
            lines = gl.arange(0, LINES, gl.SliceLayout(1, _WIDE))
            channels = gl.arange(0, HEAD, gl.SliceLayout(0, _WIDE))
            result = (total * inverse[:, None]).to(out.dtype.element_ty)
            gl.store(out + lines[:, None] * HEAD + channels[None, :], result, mask=(lines < GROUP)[:, None])


@launched(gluon.jit(do_not_specialize=["num_rows", "max_leaves", "table_row"]))
def _rotate_and_attend(
    qkv, positions, cos_sin, q_norm, k_norm, slots, kv, out, query_start, seq_lens, table, parts, stats, counters,
    qkv_token, out_token, kv_block, kv_head, table_row, eps, score_scale, num_rows, max_leaves,
    kv_token: gl.constexpr, KV_HEADS: gl.constexpr, GROUP: gl.constexpr, LINES: gl.constexpr, HEAD: gl.constexpr,
    LEVELS: gl.constexpr, BLOCK: gl.constexpr, NORM: gl.constexpr, GATHER: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Grid: any. Leaf by leaf, in a leaf row by row, in a row KV head by KV head: each program takes every so many."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: gl.constexpr = out.dtype.element_ty
    keys = gl.allocate_shared_memory(dtype, [4, 64, HEAD], SWIZZLED)
    values = gl.allocate_shared_memory(dtype, [4, 64, HEAD], SWIZZLED)
    rotated = gl.allocate_shared_memory(dtype, [8, HEAD], SWIZZLED)
    heads = gl.allocate_shared_memory(dtype, [8, HEAD], PLAIN)
    weights_at = gl.allocate_shared_memory(dtype, [HALF, 8], PLAIN)
    num_pairs, place = num_rows * KV_HEADS, gl.program_id(0)
    longest = 0
    for row in range(num_rows):
        longest = gl.maximum(longest, row_length(row, query_start, seq_lens))
    limit = gl.where(longest > 0, leaf_of(longest - 1) + 1, 0) * num_pairs
    place = next_busy(place, limit, num_pairs, query_start, seq_lens, KV_HEADS)
    start = leaf_start(place // num_pairs)
    if place < limit:
        row = place % num_pairs // KV_HEADS
        end = row_length(row, query_start, seq_lens) - 1
        line = table + row.to(gl.int64) * table_row
        ask_half(keys, kv, line, place % KV_HEADS, start, end, kv_block, kv_head, kv_token, HEAD, BLOCK)
        async_copy.commit_group()
        ask_half(values, kv + HEAD, line, place % KV_HEADS, start, end, kv_block, kv_head, kv_token, HEAD, BLOCK)
        async_copy.commit_group()
    elif PDL and gl.program_id(0) == 0:  # the kernel does not end before the one ahead
        tl.extra.cuda.gdc_wait()
    USED: gl.constexpr = _lines(GROUP)  # of the lines of a matrix instruction
    HEADS: gl.constexpr = layout_of_heads(USED)
    channel = gl.arange(0, HEAD // 2, gl.SliceLayout(0, HEADS))
    head = gl.arange(0, USED, gl.SliceLayout(1, HEADS))[:, None]  # of Q in the group, then that of K
    weights = (channel, channel)
    if NORM:
        norm = gl.where(head == GROUP, k_norm, q_norm) + channel[None, :]
        weights = (gl.load(norm), gl.load(norm + HEAD // 2))
    leaf = gl.zeros([HEAD, 8], gl.float32, SCORES)
    leaf_sum = gl.zeros([64, 8], gl.float32, SCORES)
    leaf_max = gl.full([8], float("-inf"), gl.float32, COLUMN)
    while place < limit:
        pair = place % num_pairs
        row, kv_index, index = pair // KV_HEADS, pair % KV_HEADS, place // num_pairs
        seq_len = row_length(row, query_start, seq_lens)
        leaf_end = gl.minimum(leaf_start(index + 1), seq_len)
        token = gl.load(query_start + row).to(gl.int64)
        angles = cos_sin + gl.load(positions + token).to(gl.int64) * HEAD
        cosine, sine = gl.load(angles + channel)[None, :], gl.load(angles + HEAD // 2 + channel)[None, :]
        slot = gl.load(slots + token).to(gl.int64)
        # What comes next.
        is_done = start + HALF >= leaf_end
        next_place = gl.where(is_done, place + gl.num_programs(0), place)
        next_place = next_busy(next_place, limit, num_pairs, query_start, seq_lens, KV_HEADS)
        next_start = gl.where(is_done, leaf_start(next_place // num_pairs), start + HALF)
        next_row = next_place % num_pairs // KV_HEADS
        next_end = 0
        if next_place < limit:
            next_end = row_length(next_row, query_start, seq_lens)
        next_line = table + next_row.to(gl.int64) * table_row
        after = (next_line, next_place % KV_HEADS, next_start, next_end - 1, kv_block, kv_head)
        is_new = seq_len <= leaf_end
        newest = gl.where(is_new, seq_len - 1 - start, 1 << 20)
        of_newest = piece_of(values, newest, HEAD)
        old_v = gl.zeros([16, HEAD], dtype, PIECE)
        if newest < HALF:  # V, and so K, is there: its place in V is filled while scores are on their way
            async_copy.wait_group(0)
            tl.debug_barrier()
            old_v = of_newest.load(PIECE)
        tl.debug_barrier()
        if PDL:
            tl.extra.cuda.gdc_wait()
        # The projection is there.
        source = qkv + token * qkv_token
        of_heads = gl.where(head == GROUP, KV_HEADS * GROUP + kv_index, kv_index * GROUP + head) * HEAD
        at = source + of_heads + channel[None, :]
        low, high = gl.load(at, mask=head <= GROUP, other=0.0), gl.load(at + HEAD // 2, mask=head <= GROUP, other=0.0)
        whole = gl.arange(0, HEAD, gl.SliceLayout(0, PIECE))[None, :]
        new_v = gl.load(source + (KV_HEADS * (GROUP + 1) + kv_index) * HEAD + whole)
        both = rope_heads(low, high, weights, cosine, sine, eps, LEVELS, NORM)
        if USED < 8:  # the others are zeros
            both = gl.reshape(gl.permute(gl.join(both, gl.zeros_like(both)), (2, 0, 1)), [8, HEAD])
        rotated.store(both)
        heads.store(both)
        async_copy.wait_group(1)
        tl.debug_barrier()
        queries, fresh_k = rotated.permute((1, 0)).load(RIGHT), heads.slice(GROUP, 1)
        leaf, leaf_sum, leaf_max = _attend_half(
            keys, values, kv, after, queries, fresh_k, (of_newest, old_v, new_v), newest, leaf_end - start, score_scale,
            weights_at, leaf, leaf_sum, leaf_max, kv_token, HEAD, BLOCK,
        )  # fmt: skip
        if is_new & is_done & (slot >= 0):
            stored = kv + (slot // BLOCK * kv_block + kv_index * kv_head + slot % BLOCK * kv_token) + whole
            gl.store(stored, fresh_k.load(PIECE))
            gl.store(stored + HEAD, new_v)
        if is_done:
            leaves = leaf_of(seq_len - 1) + 1
            slot_at = (row * max_leaves * KV_HEADS + kv_index * leaves).to(gl.int64)
            held = parts + slot_at * (LINES * HEAD), stats + slot_at * (2 * LINES), counters + pair
            to = out + token * out_token + kv_index * (GROUP * HEAD)
            _finish((leaf, leaf_sum, leaf_max), to, held, index, leaves, GROUP, LINES, HEAD, GATHER)
            leaf = gl.zeros([HEAD, 8], gl.float32, SCORES)
            leaf_sum = gl.zeros([64, 8], gl.float32, SCORES)
            leaf_max = gl.full([8], float("-inf"), gl.float32, COLUMN)
        place, start = next_place, next_start


_SHARED_BYTES = 140 << 10  # that a program takes, at most


def serves(heads: Heads, mask_spec: MaskSpec, kv: Tensor) -> bool:
    """Whether few rows may run here: of heads of 128 that see all before them."""
    is_plain = not mask_spec.reach and mask_spec.causal and not mask_spec.soft_cap
    fits = heads.size == HEAD_SIZE and heads.group <= _MAX_GROUP and kv.dtype == torch.bfloat16
    return is_plain and fits and _takes(kv)


def _takes(kv: Tensor) -> bool:
    """Of a device that launches early and has the room; copies to shared memory are 16 bytes wide."""
    aligned = kv.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in kv.stride()[:3])
    return aligned and "launch_pdl" in chained(kv.device) and shared_bytes(kv.device) >= _SHARED_BYTES


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
    """See `octavo.ops.attention.rope_decode.fused_rope_decode`; all tensors of channels are bfloat16."""
    rows, (_, kv_heads, block_size, _) = plan.rows, kv.shape
    assert rows is not None, "rows are few"
    assert projected.stride(1) == out.stride(2) == kv.stride(3) == 1 and out.stride(1) == HEAD_SIZE, "last axes"
    group, norm = out.shape[1] // kv_heads, rotation.q_norm
    parts = scratch.parts(plan.capacity * kv_heads, rows.lines, HEAD_SIZE)
    programs = min(rows.num_rows * kv_heads * rows.max_leaves, num_processors(kv.device))
    _rotate_and_attend[(programs,)](
        projected, rotation.positions, rotation.cos_sin, rotation.cos_sin if norm is None else norm,
        rotation.cos_sin if rotation.k_norm is None else rotation.k_norm, rotation.slot_mapping, kv, out, query_start,
        seq_lens, block_table, *parts, projected.stride(0), out.stride(0), kv.stride(0), kv.stride(1),
        block_table.stride(0), rotation.eps, mask_spec.scale * LOG2_E, rows.num_rows, rows.max_leaves,
        kv_token=kv.stride(2), KV_HEADS=kv_heads, GROUP=group, LINES=rows.lines,
        HEAD=HEAD_SIZE, LEVELS=6, BLOCK=block_size, NORM=norm is not None, GATHER=4, num_warps=WARPS,
        enable_fp_fusion=False, **chained(kv.device),
    )  # fmt: skip
