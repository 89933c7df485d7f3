"""q/k norm, rotation and the store of K and V on a GPU: `qk_norm_rope_store` of `octavo.ops.rope`.

Owns the kernel: one launch for all heads of q, k and v, a few heads of a token in each program. Invariant: squares of a
head are summed by `tree.row_sums` (the rotated halves added first, channels that do not turn last), nothing is
contracted, so a head's bits depend on its own channels, the position and the constants only.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cache_write.quantize import LIMITS
from octavo.ops.compile.launch import begin_after, chained, launched
from octavo.ops.compile.row_sum import padded_length, row_sums

# Tokens that are few; then channels of a program, in whole heads, and its warps, for few and for more: the best of a
# sweep on an H200. They move no bit.
_FEW_TOKENS, _FEW, _MORE = 64, (1024, 4), (2048, 2)


@triton.jit
def _divided(x, scale):
    """x / scale, rounded once, as `tl.div_rn` has it but that a branch is taken once, and not for each number.

    Twice what is left is divided by the rounded inverse (Markstein 1990, IBM J. Res. Dev. 34). A quotient of 2^60 and
    more is cut behind this, and one that is less than 2^-60 is 0, so neither must be exact. What is left of a zero
    would take its sign. scale: a number, or one for some of x.
    """
    is_usual = (scale > 2.0**-60) & (scale < 2.0**60)
    if tl.min(tl.ravel(tl.zeros((1,), tl.int32) + is_usual.to(tl.int32)), 0) > 0:
        inverse = tl.div_rn(1.0, scale)
        near = x * inverse
        quotient = tl.fma(tl.fma(-scale, near, x), inverse, near)
        quotient = tl.fma(tl.fma(-scale, quotient, x), inverse, quotient)
        quotient = tl.where((tl.abs(near) < 2.0**60) & (near != 0.0), quotient, near)
    else:
        quotient = tl.div_rn(x, scale)
    return quotient


@triton.jit
def store_rounded(place, x, scale, mask, DTYPE: tl.constexpr, QUANTIZED: tl.constexpr):
    """Store x as DTYPE, or in a quantized cache as what that is, divided by the scale, cut and rounded.

    The reference is `octavo.ops.cache_write.quantize.quantize`.
    """
    x = x.to(DTYPE)
    if QUANTIZED:
        LIMIT: tl.constexpr = 127.0 if place.dtype.element_ty == tl.int8 else 448.0
        x = tl.clamp(_divided(x.to(tl.float32), scale), -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        if place.dtype.element_ty == tl.int8:
            x = tl.where(x == x, (x + 12582912.0) - 12582912.0, 0.0)  # 1.5 * 2^23 leaves no bits of a fraction
    tl.store(place, x.to(place.dtype.element_ty), mask=mask)


@triton.jit
def _store_rotated(
    heads,
    first,
    second,
    rest,
    scale,
    valid,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    DTYPE: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """Store what `_rotated` gives. heads: [N] pointers; valid: which to write."""
    channel, other = tl.arange(0, first.shape[1]), tl.arange(0, rest.shape[1])
    mask = valid[:, None] & (channel < HALF)[None, :]
    store_rounded(heads[:, None] + channel[None, :], first, scale, mask, DTYPE, QUANTIZED)
    store_rounded(heads[:, None] + HALF + channel[None, :], second, scale, mask, DTYPE, QUANTIZED)
    if HEAD > 2 * HALF:
        mask = valid[:, None] & (other < HEAD - 2 * HALF)[None, :]
        store_rounded(heads[:, None] + 2 * HALF + other[None, :], rest, scale, mask, DTYPE, QUANTIZED)


@triton.jit
def _rotated(
    source,
    norm,
    cos_sin,
    valid,
    eps,
    scale,
    HEAD: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    REST: tl.constexpr,
    HALF_LEVELS: tl.constexpr,
    REST_LEVELS: tl.constexpr,
    NORM: tl.constexpr,
):
    """Some heads, normed and rotated, in float32: the first half, the second half, the channels that do not turn.

    source: [N] pointers to heads; valid: which are there; cos_sin: pointer to the position's row.
    """
    channel, other = tl.arange(0, PADDED_HALF), tl.arange(0, REST)
    half = valid[:, None] & (channel < HALF)[None, :]
    rest_mask = valid[:, None] & (other < HEAD - 2 * HALF)[None, :]
    dtype: tl.constexpr = source.dtype.element_ty
    first = tl.load(source[:, None] + channel[None, :], mask=half, other=0.0).to(tl.float32)
    second = tl.load(source[:, None] + HALF + channel[None, :], mask=half, other=0.0).to(tl.float32)
    if HEAD > 2 * HALF:
        rest = tl.load(source[:, None] + 2 * HALF + other[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    else:
        rest = tl.zeros((source.shape[0], REST), tl.float32)
    cosine = tl.load(cos_sin + channel, mask=channel < HALF, other=0.0)[None, :]
    sine = tl.load(cos_sin + HALF + channel, mask=channel < HALF, other=0.0)[None, :]
    if NORM:
        squares = row_sums(first * first + second * second, HALF_LEVELS)
        if HEAD > 2 * HALF:
            squares += row_sums(rest * rest, REST_LEVELS)
            rest_weight = tl.load(norm + 2 * HALF + other, mask=other < HEAD - 2 * HALF, other=0.0)
            rest_weight = rest_weight.to(tl.float32)[None, :]
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(squares, HEAD * 1.0) + eps))[:, None]
        first_weight = tl.load(norm + channel, mask=channel < HALF, other=0.0).to(tl.float32)[None, :]
        second_weight = tl.load(norm + HALF + channel, mask=channel < HALF, other=0.0).to(tl.float32)[None, :]
        first = (first * inverse * first_weight).to(dtype).to(tl.float32)
        second = (second * inverse * second_weight).to(dtype).to(tl.float32)
        if HEAD > 2 * HALF:
            rest = (rest * inverse * rest_weight).to(dtype).to(tl.float32)
    return (first * cosine - second * sine) * scale, (second * cosine + first * sine) * scale, rest * scale


@launched(triton.jit)
def _qk_norm_rope_store(
    qkv, positions, cos_sin, q_norm, k_norm, kv, q_out, slots, qkv_token, kv_block, kv_head, kv_token, block_size,
    key_scale, value_scale, eps, q_scale,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD: tl.constexpr, PADDED: tl.constexpr,
    HALF: tl.constexpr, PADDED_HALF: tl.constexpr, REST: tl.constexpr, HALF_LEVELS: tl.constexpr,
    REST_LEVELS: tl.constexpr, HEADS: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
    QUANTIZED: tl.constexpr, SCALED: tl.constexpr, GROUP: tl.constexpr, LINES: tl.constexpr, TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, part): `HEADS` heads of q, of k or of v. GROUP, LINES, TOKENS: see `Tile`."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin_after(PDL)
    Q_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    qkv += token * qkv_token
    position = tl.load(positions + token).to(tl.int64)
    table = cos_sin + position * (2 * HALF)
    if part < Q_PARTS:
        head = part * HEADS + tl.arange(0, HEADS)
        first, second, rest = _rotated(
            qkv + head * HEAD,
            q_norm,
            table,
            head < NUM_HEADS,
            eps,
            q_scale,
            HEAD,
            HALF,
            PADDED_HALF,
            REST,
            HALF_LEVELS,
            REST_LEVELS,
            Q_NORM,
        )
        line = head // GROUP * LINES + position % TOKENS * GROUP + head % GROUP
        q = q_out + (token * (NUM_HEADS // GROUP * LINES) + line) * HEAD
        _store_rotated(q, first, second, rest, 1.0, head < NUM_HEADS, HEAD, HALF, DTYPE, False)
    else:
        slot = tl.load(slots + token).to(tl.int64)
        place = slot // block_size * kv_block + slot % block_size * kv_token
        group = (part - Q_PARTS) % KV_PARTS * HEADS + tl.arange(0, HEADS)
        valid = (group < NUM_KV_HEADS) & (slot >= 0)
        stored = kv + place + group.to(tl.int64) * kv_head
        source = qkv + NUM_HEADS * HEAD + group * HEAD
        is_key = part < Q_PARTS + KV_PARTS
        scale = tl.full((HEADS,), 1.0, tl.float32)
        if SCALED:
            of_key = tl.load(key_scale + group, mask=group < NUM_KV_HEADS, other=1.0)
            scale = tl.where(is_key, of_key, tl.load(value_scale + group, mask=group < NUM_KV_HEADS, other=1.0))
        scale = scale[:, None]
        if is_key:
            first, second, rest = _rotated(
                source,
                k_norm,
                table,
                valid,
                eps,
                1.0,
                HEAD,
                HALF,
                PADDED_HALF,
                REST,
                HALF_LEVELS,
                REST_LEVELS,
                K_NORM,
            )
            _store_rotated(stored, first, second, rest, scale, valid, HEAD, HALF, DTYPE, QUANTIZED)
        else:
            channel = tl.arange(0, PADDED)
            inside = valid[:, None] & (channel < HEAD)[None, :]
            value = tl.load(source[:, None] + NUM_KV_HEADS * HEAD + channel[None, :], mask=inside, other=0.0)
            store_rounded(stored[:, None] + HEAD + channel[None, :], value, scale, inside, DTYPE, QUANTIZED)


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Lines of a token's queries: line p % tokens * group + g is that of head g of a KV head, at position p."""

    group: int = 1
    lines: int = 1
    tokens: int = 1
    num: int = 0  # tiles that there are at least, those of no token last


_HEADS = Tile()


def qk_norm_rope_store(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    kv: Tensor,
    slot_mapping: Tensor,
    q_scale: float,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    tile: Tile = _HEADS,
) -> Tensor:
    """See `octavo.ops.rope.qk_norm_rope_store`; float16 too, and weights of norms of any of these types.

    tile: q has the shape [tiles, num_heads // group * lines, head_size]; lines without a query are left as they are.
    """
    assert qkv.stride(1) == 1 and kv.stride(3) == 1, "channels are contiguous"
    assert (key_scale is None) == (value_scale is None), "both scales or none"
    num_tokens, half = qkv.shape[0], cos_sin.shape[1] // 2
    lines = num_heads // tile.group * tile.lines
    q = torch.empty((max(num_tokens, tile.num), lines, head_size), dtype=qkv.dtype, device=qkv.device)
    if not num_tokens:
        return q
    padded, padded_half = 1 << (head_size - 1).bit_length(), padded_length(half)
    rest = padded_length(max(head_size - 2 * half, 1))
    channels, warps = _FEW if num_tokens <= _FEW_TOKENS else _MORE
    heads = max(channels // padded, 1)
    parts = -(-num_heads // heads) + 2 * -(-num_kv_heads // heads)
    _qk_norm_rope_store[(num_tokens, parts)](
        qkv, positions, cos_sin, cos_sin if q_norm is None else q_norm, cos_sin if k_norm is None else k_norm, kv, q,
        slot_mapping, qkv.stride(0), kv.stride(0), kv.stride(1), kv.stride(2), kv.shape[2],
        cos_sin if key_scale is None else key_scale, cos_sin if value_scale is None else value_scale, eps, q_scale,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD=head_size, PADDED=padded, HALF=half,
        PADDED_HALF=padded_half, REST=rest, HALF_LEVELS=padded_half.bit_length() - 1,
        REST_LEVELS=rest.bit_length() - 1, HEADS=heads, Q_NORM=q_norm is not None, K_NORM=k_norm is not None,
        QUANTIZED=kv.dtype in LIMITS, SCALED=key_scale is not None,
        GROUP=tile.group, LINES=tile.lines, TOKENS=tile.tokens,
        num_warps=warps, enable_fp_fusion=False, **chained(qkv.device),
    )  # fmt: skip
    return q
