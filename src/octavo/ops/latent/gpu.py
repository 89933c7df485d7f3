"""Latent attention's passes on a GPU: `latent_rope_store` of `octavo.ops.latent`, `head_linear`, and attention itself.

Owns the kernels and the canonical order of attention over states: absolute leaves of LEAF tokens from position 0;
inside a leaf an online softmax, from scratch, over tiles of BN tokens; leaves folded in ascending order with one
formula, in registers or from scratch memory. One query's heads share a program. Does not know layers or backends.
Invariant: the bits of a (query, head) depend on its own q and on the states of its tokens in logical order only.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cache_write.quantize import LIMITS
from octavo.ops.compile.row_sum import padded_length, row_sums
from octavo.ops.latent.state import LatentState
from octavo.ops.rope.gpu import store_rounded

BN = 32  # tokens per step of the online softmax
LEAF = 512  # tokens per independent partial result
_LEVELS = BN.bit_length() - 1
_HEADS = 16  # of a program that turns queries
_LOG2_E = math.log2(math.e)


@triton.jit
def _turn(
    source,
    out,
    scale,
    cos_sin,
    inside,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """Rotate rows of 2 * HALF channels: source, out [N] pointers; inside [N, PADDED_HALF]."""
    channel = tl.arange(0, PADDED_HALF)
    if INTERLEAVED:
        first_at, second_at = 2 * channel, 2 * channel + 1
    else:
        first_at, second_at = channel, channel + HALF
    first = tl.load(source[:, None] + first_at[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source[:, None] + second_at[None, :], mask=inside, other=0.0).to(tl.float32)
    cosine = tl.load(cos_sin + channel, mask=channel < HALF, other=0.0)[None, :]
    sine = tl.load(cos_sin + HALF + channel, mask=channel < HALF, other=0.0)[None, :]
    dtype: tl.constexpr = source.dtype.element_ty
    store_rounded(out[:, None] + channel[None, :], first * cosine - second * sine, scale, inside, dtype, QUANTIZED)
    rotated = second * cosine + first * sine
    store_rounded(out[:, None] + HALF + channel[None, :], rotated, scale, inside, dtype, QUANTIZED)


@triton.jit
def _latent_rope_store(
    query, state, positions, cos_sin, weight, rotated, kv, slots, key_scale, query_token, query_head, state_token,
    rotated_token, rotated_head, kv_block, kv_token, block_size, eps,
    NUM_HEADS: tl.constexpr, LATENT: tl.constexpr, PADDED: tl.constexpr, LEVELS: tl.constexpr, HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr, HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
    QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Program (token, part): part 0 is the state, the others are HEADS heads of the query each."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table = cos_sin + tl.load(positions + token).to(tl.int64) * (2 * HALF)
    turns = tl.arange(0, PADDED_HALF) < HALF
    if part > 0:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)
        inside = (head < NUM_HEADS)[:, None] & turns[None, :]
        _turn(
            query + token * query_token + head * query_head,
            rotated + token * rotated_token + head * rotated_head,
            1.0,
            table,
            inside,
            HALF,
            PADDED_HALF,
            INTERLEAVED,
            False,
        )
    else:
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            stored = kv + slot // block_size * kv_block + slot % block_size * kv_token
            channel = tl.arange(0, PADDED)
            source = state + token * state_token
            value = tl.load(source + channel, mask=channel < LATENT, other=0.0).to(tl.float32)
            gain = tl.load(weight + channel, mask=channel < LATENT, other=0.0).to(tl.float32)
            square = row_sums(tl.reshape(value * value, (1, PADDED)), LEVELS)
            inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square, LATENT * 1.0) + eps))
            scale = 1.0
            if key_scale is not None:
                scale = tl.load(key_scale)
            normed = value * inverse * gain
            store_rounded(stored + channel, normed, scale, channel < LATENT, state.dtype.element_ty, QUANTIZED)
            one = tl.zeros((1,), tl.int64)
            _turn(
                source + LATENT + one,
                stored + LATENT + one,
                scale,
                table,
                turns[None, :],
                HALF,
                PADDED_HALF,
                INTERLEAVED,
                QUANTIZED,
            )


def latent_rope_store(
    layer: LatentState,
    query: Tensor,
    state: Tensor,
    positions: Tensor,
    rotated: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
) -> None:
    """See `octavo.ops.latent.latent_rope_store`."""
    assert kv.dtype not in LIMITS or layer.key_scale is not None, "a quantized cache has a scale"
    num_tokens, num_heads, rope_size = query.shape
    latent_size, half = layer.weight.shape[0], rope_size // 2
    padded = padded_length(latent_size)
    if num_tokens:
        _latent_rope_store[(num_tokens, 1 + triton.cdiv(num_heads, _HEADS))](
            query, state, positions, layer.cos_sin, layer.weight, rotated, kv, slot_mapping, layer.key_scale,
            query.stride(0), query.stride(1), state.stride(0), rotated.stride(0), rotated.stride(1), kv.stride(0),
            kv.stride(2), kv.shape[2], layer.eps, NUM_HEADS=num_heads, LATENT=latent_size, PADDED=padded,
            LEVELS=padded.bit_length() - 1, HALF=half, PADDED_HALF=triton.next_power_of_2(half), HEADS=_HEADS,
            INTERLEAVED=layer.interleaved, QUANTIZED=kv.dtype in LIMITS, num_warps=2, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def _head_product(
    x,
    weight,
    out,
    num_tokens,
    x_token,
    x_head,
    out_token,
    out_head,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (rows, channels, head): one float32 accumulator walks K in order."""
    row, channel = tl.program_id(0) * BM + tl.arange(0, BM), tl.program_id(1) * BN + tl.arange(0, BN)
    head = tl.program_id(2).to(tl.int64)
    x_at = x + head * x_head + row.to(tl.int64)[:, None] * x_token
    weight_at = weight + head * (N * K) + channel.to(tl.int64)[None, :] * K
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(x_at + k[None, :], mask=(row < num_tokens)[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(weight_at + k[:, None], mask=(channel < N)[None, :] & (k < K)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    at = out + head * out_head + row.to(tl.int64)[:, None] * out_token + channel[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row < num_tokens)[:, None] & (channel < N)[None, :])


def head_linear(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """x [tokens, heads, K], weight [heads, N, K] contiguous -> out [tokens, heads, N]."""
    num_tokens, num_heads, k = x.shape
    n = weight.shape[1]
    rows = 16 if num_tokens <= 16 else 64
    if num_tokens:
        _head_product[(triton.cdiv(num_tokens, rows), triton.cdiv(n, 64), num_heads)](
            x, weight, out, num_tokens, x.stride(0), x.stride(1), out.stride(0), out.stride(1), N=n, K=k, BM=rows,
            BN=64, BK=32, PRECISION="ieee", num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _above(x, top):
    """2 ** (x - top), and 0 where x is -inf, even if top is too."""
    return tl.exp2(x - tl.where(top == float("-inf"), 0.0, top))


@triton.jit
def _fold(total, total_sum, total_max, leaf, leaf_sum, leaf_max):
    """The totals of some leaves, with the next leaf. An empty one (0, 0, -inf) changes nothing, on either side."""
    top = tl.maximum(total_max, leaf_max)
    keep, add = _above(total_max, top), _above(leaf_max, top)
    total_sum = tl.fma(total_sum, keep, leaf_sum * add)
    total = tl.fma(total, tl.expand_dims(keep, -1), leaf * tl.expand_dims(add, -1))
    return total, total_sum, top


@triton.jit
def _leaf(
    q, q_rope, kv, table, begin, high, score_scale, kv_block, kv_token, STATE: tl.constexpr, LATENT: tl.constexpr,
    PADDED: tl.constexpr, PADDED_ROPE: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    LEVELS: tl.constexpr, LEAF: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums, the sum of weights and the maximum of the leaf that begins at `begin`, of tokens before `high`."""
    channel, rope = tl.arange(0, PADDED), tl.arange(0, PADDED_ROPE)
    acc = tl.zeros((BM, PADDED), tl.float32)
    weight_sum = tl.zeros((BM,), tl.float32)
    largest = tl.full((BM,), float("-inf"), tl.float32)
    for start in range(begin, tl.minimum(begin + LEAF, high), BN):
        token = start + tl.arange(0, BN)
        there = token < high
        block = tl.load(table + token // BLOCK, mask=there, other=0).to(tl.int64)
        at = kv + block * kv_block + (token % BLOCK) * kv_token
        latent_mask = there[:, None] & (channel < LATENT)[None, :]
        latent = tl.load(at[:, None] + channel[None, :], mask=latent_mask, other=0.0).to(q.dtype)
        rope_mask = there[:, None] & (rope < STATE - LATENT)[None, :]
        key = tl.load(at[:, None] + LATENT + rope[None, :], mask=rope_mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(latent), input_precision=PRECISION)
        scores = tl.dot(q_rope, tl.trans(key), scores, input_precision=PRECISION)
        scores = tl.where(there[None, :], scores * score_scale, float("-inf"))
        top = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - top[:, None])
        keep = _above(largest, top)
        weight_sum = tl.fma(weight_sum, keep, row_sums(weights, LEVELS))
        acc = tl.dot(weights.to(q.dtype), latent, acc * keep[:, None], input_precision=PRECISION)
        largest = top
    return acc, weight_sum, largest


@triton.jit
def _row_and_seen(query_start, seq_lens, num_rows, token):
    """The last row that begins at `token` or before, and how many of the row's tokens this one sees."""
    count = 0
    for base in range(0, num_rows, 128):
        row = base + tl.arange(0, 128)
        begin = tl.load(query_start + row, mask=row < num_rows, other=2147483647)
        count += tl.sum(((begin <= token) & (row < num_rows)).to(tl.int32), 0)
    last = count - 1
    row_start, row_end = tl.load(query_start + last), tl.load(query_start + last + 1)
    seq_len = tl.load(seq_lens + last)
    return last, tl.maximum(tl.minimum(seq_len - (row_end - row_start) + token - row_start + 1, seq_len), 0)


@triton.jit(do_not_specialize=["num_rows", "splits", "max_leaves"])
def _attend(
    q, kv, out, query_start, seq_lens, table, parts, stats, key_scale, q_token, q_head, out_token, out_head, kv_block,
    kv_token, table_row, num_rows, splits, max_leaves, score_scale,
    NUM_HEADS: tl.constexpr, STATE: tl.constexpr, LATENT: tl.constexpr, PADDED: tl.constexpr,
    PADDED_ROPE: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, LEVELS: tl.constexpr,
    LEAF: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Programs: a token's splits, head tile by head tile; all on one axis, for the others of a grid end at 65,535.

    SPLIT: each takes a run of leaves and writes them apart, for `_merge`.
    """
    HEAD_TILES: tl.constexpr = (NUM_HEADS + BM - 1) // BM
    split, place = tl.program_id(0) % splits, tl.program_id(0) // splits
    token = tl.num_programs(0) // splits // HEAD_TILES - 1 - place // HEAD_TILES  # the longest first
    if token >= tl.load(query_start + num_rows):
        return
    row, high = _row_and_seen(query_start, seq_lens, num_rows, token)
    num_leaves = tl.cdiv(high, LEAF)
    run = tl.cdiv(num_leaves, splits)
    first = split * run
    last = tl.minimum(first + run, num_leaves)
    if SPLIT and first >= last:
        return
    head = place % HEAD_TILES * BM + tl.arange(0, BM)
    channel, rope = tl.arange(0, PADDED), tl.arange(0, PADDED_ROPE)
    live = (head < NUM_HEADS)[:, None]
    at = (q + tl.cast(token, tl.int64) * q_token + head * q_head)[:, None]
    queries = tl.load(at + channel[None, :], mask=live & (channel < LATENT)[None, :], other=0.0)
    rotated = tl.load(at + LATENT + rope[None, :], mask=live & (rope < STATE - LATENT)[None, :], other=0.0)
    table += row.to(tl.int64) * table_row
    if key_scale is not None:
        score_scale *= tl.load(key_scale)
    total = tl.zeros((BM, PADDED), tl.float32)
    total_sum = tl.zeros((BM,), tl.float32)
    total_max = tl.full((BM,), float("-inf"), tl.float32)
    for index in range(first, last):
        leaf, leaf_sum, leaf_max = _leaf(
            queries, rotated, kv, table, index * LEAF, high, score_scale, kv_block, kv_token, STATE, LATENT, PADDED,
            PADDED_ROPE, BLOCK, BM, BN, LEVELS, LEAF, PRECISION,
        )  # fmt: skip
        if SPLIT:
            part = (tl.cast(token, tl.int64) * NUM_HEADS + head) * max_leaves + index
            tl.store(parts + part[:, None] * PADDED + channel[None, :], leaf, mask=live)
            tl.store(stats + part * 2, leaf_max, mask=head < NUM_HEADS)
            tl.store(stats + part * 2 + 1, leaf_sum, mask=head < NUM_HEADS)
        else:
            total, total_sum, total_max = _fold(total, total_sum, total_max, leaf, leaf_sum, leaf_max)
    if not SPLIT:
        result = total * tl.where(total_sum == 0.0, 0.0, 1.0 / total_sum)[:, None]
        if key_scale is not None:
            result *= tl.load(key_scale)
        at = (out + tl.cast(token, tl.int64) * out_token + head * out_head)[:, None]
        tl.store(at + channel[None, :], result.to(out.dtype.element_ty), mask=live & (channel < LATENT)[None, :])


@triton.jit(do_not_specialize=["num_rows", "max_leaves"])
def _merge(
    out,
    query_start,
    seq_lens,
    parts,
    stats,
    key_scale,
    out_token,
    out_head,
    num_rows,
    max_leaves,
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    PADDED: tl.constexpr,
    LEAF: tl.constexpr,
):
    """Program (head, token): fold the leaves that `_attend` wrote apart, in order."""
    head, token = tl.program_id(0), tl.program_id(1)
    if token >= tl.load(query_start + num_rows):
        return
    _, high = _row_and_seen(query_start, seq_lens, num_rows, token)
    channel = tl.arange(0, PADDED)
    first = (tl.cast(token, tl.int64) * NUM_HEADS + head) * max_leaves
    total = tl.zeros((1, PADDED), tl.float32)
    total_sum = tl.zeros((1,), tl.float32)
    total_max = tl.full((1,), float("-inf"), tl.float32)
    one = tl.arange(0, 1)
    for index in range(tl.cdiv(high, LEAF)):
        leaf = tl.load(parts + (first + index) * PADDED + channel)[None, :]
        leaf_max = tl.load(stats + (first + index) * 2 + one)
        leaf_sum = tl.load(stats + (first + index) * 2 + 1 + one)
        total, total_sum, total_max = _fold(total, total_sum, total_max, leaf, leaf_sum, leaf_max)
    result = total * tl.where(total_sum == 0.0, 0.0, 1.0 / total_sum)[:, None]
    if key_scale is not None:
        result *= tl.load(key_scale)
    at = out + tl.cast(token, tl.int64) * out_token + head * out_head + channel
    tl.store(at[None, :], result.to(out.dtype.element_ty), mask=(channel < LATENT)[None, :])


def part_floats(num_tokens: int, num_heads: int, latent_size: int, max_leaves: int) -> int:
    """Scratch memory of a split call, in float32 elements."""
    return num_tokens * num_heads * max_leaves * (triton.next_power_of_2(max(latent_size, 16)) + 2)


def latent_attention(
    q: Tensor,
    kv: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    out: Tensor,
    *,
    scale: float,
    splits: int,
    max_leaves: int,
    scratch: Tensor,
    key_scale: Tensor | None = None,
) -> None:
    """Causal attention of each row's queries over the states of its tokens, written to `out`.

    q: [tokens, heads, latent + rope]; kv: [blocks, 1, block_size, latent + rope]; out: [tokens, heads, latent]; any
    strides but a contiguous last axis; query_start [rows + 1], seq_lens [rows], block_table [rows, width], all int32.
    Tokens of a row with seq_len 0 become 0, those beyond `query_start[-1]` stay. splits: programs that share a query's
    leaves; more than one needs scratch of `part_floats`, for at most `max_leaves` leaves: no bit depends on it.
    key_scale: [1] float32, what a quantized cache's states are multiplied with.
    """
    num_tokens, num_heads, state_size = q.shape
    latent_size, num_rows = out.shape[2], seq_lens.shape[0]
    padded = triton.next_power_of_2(max(latent_size, 16))
    parts, stats = scratch, scratch[num_tokens * num_heads * max_leaves * padded :]
    heads = 16 if num_heads <= 16 else 64
    if not num_tokens:
        return
    _attend[(splits * triton.cdiv(num_heads, heads) * num_tokens,)](
        q, kv, out, query_start, seq_lens, block_table, parts, stats, key_scale, q.stride(0), q.stride(1),
        out.stride(0), out.stride(1), kv.stride(0), kv.stride(2), block_table.stride(0), num_rows, splits, max_leaves,
        scale * _LOG2_E, NUM_HEADS=num_heads, STATE=state_size, LATENT=latent_size, PADDED=padded,
        PADDED_ROPE=triton.next_power_of_2(max(state_size - latent_size, 16)), BLOCK=kv.shape[2], BM=heads, BN=BN,
        LEVELS=_LEVELS, LEAF=LEAF, SPLIT=splits > 1, PRECISION="ieee", num_warps=4 if heads == 16 else 8, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _merge[(num_heads, num_tokens)](
            out, query_start, seq_lens, parts, stats, key_scale, out.stride(0), out.stride(1), num_rows, max_leaves,
            NUM_HEADS=num_heads, LATENT=latent_size, PADDED=padded, LEAF=LEAF, num_warps=4,
        )  # fmt: skip
