"""Rotary position embedding, fused with q/k norm and the store of K and V into the paged cache.

Owns the table of angles (Hugging Face's formulas, in float64) and the one pass from the qkv projection to rotated
queries and filled cache slots. Does not know layers, requests or block tables: a token has a position and a slot.
Invariant: a token's results depend on its own row of qkv, its position and its slot only; slot -1 writes nothing.

Rotation is the neox form: channel i of the first half turns with channel i of the second half. Arithmetic is float32,
products are rounded before they are added (no fused multiply-add), so that native code and the reference implementation
agree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from octavo.ops import native
from octavo.ops.cache_write.quantize import quantize, store
from octavo.ops.native import F32, I32, I64, PTR

_KINDS = ("none", "default", "linear", "proportional", "dynamic", "llama3", "yarn", "longrope")
_NARROW = (torch.bfloat16, torch.float8_e4m3fn, torch.int8)  # caches that native code rounds to

native.declare("octavo_qk_norm_rope_store", [PTR] * 8 + [I64] * 10 + [F32] * 2 + [PTR] * 2 + [I32] * 2)


def _yarn_inverse_frequencies(
    exponents: torch.Tensor, theta: float, factor: float, original: int, betas: tuple[float, float], truncate: bool
) -> torch.Tensor:
    """YaRN (Peng et al. 2023, arXiv 2309.00071). betas: rotations at the ends of the ramp, 32 and 1 in the paper."""
    rotary_size = 2 * exponents.numel()

    def channel_of(num_rotations: float) -> float:
        return rotary_size * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = map(channel_of, betas)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_size - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(rotary_size // 2, dtype=torch.float64) - low) / width).clamp(0, 1)
    frequencies = theta**-exponents
    return frequencies / factor * ramp + frequencies * (1 - ramp)


def _llama3_inverse_frequencies(
    frequencies: torch.Tensor, factor: float, low_freq_factor: float, high_freq_factor: float, original: int
) -> torch.Tensor:
    """Llama 3's rule: short waves stay, long waves slow down by `factor`, a linear blend between them."""
    turns = original * frequencies / (2 * math.pi)
    blend = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)
    return frequencies / factor * (1 - blend) + frequencies * blend


def _dynamic_inverse_frequencies(exponents: torch.Tensor, theta: float, factor: float, original: int) -> torch.Tensor:
    """As for a text of original * factor tokens (NTK-aware scaling)."""
    rotary_size = 2 * exponents.numel()
    stretch = factor * int(original * factor) / original - (factor - 1)
    return (theta * stretch ** (rotary_size / (rotary_size - 2))) ** -exponents


def _longrope_inverse_frequencies(frequencies: torch.Tensor, factors: Sequence[float]) -> torch.Tensor:
    """LongRoPE (arXiv 2402.13753): a factor for each pair of channels."""
    if len(factors) != len(frequencies):
        raise ValueError(f"rope kind 'longrope' needs {len(frequencies)} factors of each kind, got {len(factors)}")
    return frequencies / torch.tensor(factors, dtype=torch.float64)


def rope_table(
    head_size: int,
    max_position: int,
    *,
    theta: float = 10000.0,
    kind: str = "default",
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_max_position: int = 0,
    rotary_size: int = 0,
    num_turning: int = 0,
    amplitude: float = 0.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    short_factors: Sequence[float] = (),
    long_factors: Sequence[float] = (),
) -> torch.Tensor:
    """Cosines, then sines, of positions 0 .. max_position - 1: [max_position, rotary] float32.

    `rotary` is `rotary_size`, or `head_size` where that is 0. Angles are computed in float64 and rounded once.
    `amplitude` multiplies all; 0 means YaRN's attention factor (0.1 ln(factor) + 1), or 1 for other kinds. Two kinds
    turn all positions otherwise where `max_position` exceeds `original_max_position`: dynamic, as for a text of
    original_max_position * factor tokens, and longrope, by `long_factors`; a factor for each pair of channels.
    `kind` "proportional" turns the first `num_turning` pairs of channels, with the angles that they have where all do.
    `kind` "none" turns nothing: every cosine is 1 and every sine 0, which keeps each channel's bits; of an odd head
    `rotary` leaves the last channel out. Raises ValueError for an unknown `kind`, an odd rotary size, and a scaled kind
    without `original_max_position` or factors.
    """
    rotary = rotary_size or head_size - (head_size % 2 if kind == "none" else 0)
    if rotary % 2 or rotary > head_size:
        raise ValueError(f"rotary size {rotary} must be even and at most the head size {head_size}")
    if kind in ("dynamic", "llama3", "yarn", "longrope") and original_max_position <= 0:
        raise ValueError(f"rope kind {kind!r} needs original_max_position > 0, got {original_max_position}")
    exponents = torch.arange(0, rotary, 2, dtype=torch.float64) / rotary
    frequencies = theta**-exponents
    is_long = max_position > original_max_position
    own_amplitude = 1.0
    if kind in ("none", "linear", "proportional"):
        frequencies = frequencies / factor
        frequencies[{"none": 0, "linear": rotary, "proportional": num_turning}[kind] :] = 0
    elif kind == "dynamic":
        if is_long and rotary > 2:
            frequencies = _dynamic_inverse_frequencies(exponents, theta, factor, original_max_position)
    elif kind == "longrope":
        frequencies = _longrope_inverse_frequencies(frequencies, long_factors if is_long else short_factors)
    elif kind == "llama3":
        frequencies = _llama3_inverse_frequencies(
            frequencies, factor, low_freq_factor, high_freq_factor, original_max_position
        )
    elif kind == "yarn":
        frequencies = _yarn_inverse_frequencies(
            exponents, theta, factor, original_max_position, (beta_fast, beta_slow), truncate
        )
        own_amplitude = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    elif kind != "default":
        raise ValueError(f"unknown rope kind {kind!r}: known are {', '.join(_KINDS)}")
    angles = torch.arange(max_position, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).mul_(amplitude or own_amplitude).to(torch.float32)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rotation:
    """What becomes of a projection in a layer and step: as `qk_norm_rope_store`'s arguments of these names."""

    positions: torch.Tensor
    cos_sin: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    slot_mapping: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None


def qk_norm_rope_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    kv: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_scale: float = 1.0,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm (optional) and rotate q and k, write k and v to the cache; returns q: [tokens, heads, head_size].

    qkv: [tokens, (heads + 2 * kv_heads) * head_size], q then k then v, contiguous last axis, float32 or bfloat16 (GPU:
    or float16); positions: [tokens] int64; cos_sin: `rope_table`; q_norm, k_norm: [head_size] float32 weights of the
    RMS norm of each head, or None; kv: [blocks, kv_heads, block_size, 2 * head_size] of qkv's dtype, or narrower
    (bfloat16, float8_e4m3fn, int8), any strides but a contiguous last axis; slot_mapping: [tokens] int64, block *
    block_size + offset, -1 writes nothing. A normed channel is rounded to the dtype before it turns; `q_scale`
    multiplies q before its last rounding. A quantized cache holds what one of qkv's dtype would, divided by `key_scale`
    or `value_scale` ([kv_heads] float32; None: 1), cut to +-448 or +-127 and rounded to the nearest, ties to even.
    """
    arguments = (
        qkv,
        positions,
        cos_sin,
        q_norm,
        k_norm,
        eps,
        num_heads,
        num_kv_heads,
        head_size,
        kv,
        slot_mapping,
        q_scale,
        key_scale,
        value_scale,
    )
    if qkv.is_cuda:
        from octavo.ops.rope import gpu

        return gpu.qk_norm_rope_store(*arguments)
    library = native.lib()
    if not library or qkv.dtype not in native.DTYPE_CODES or kv.dtype not in {qkv.dtype, *_NARROW}:
        return qk_norm_rope_store_eager(*arguments)
    num_tokens = qkv.shape[0]
    q = torch.empty(num_tokens, num_heads, head_size, dtype=qkv.dtype)
    library.octavo_qk_norm_rope_store(
        qkv.data_ptr(), positions.data_ptr(), cos_sin.data_ptr(), None if q_norm is None else q_norm.data_ptr(),
        None if k_norm is None else k_norm.data_ptr(), kv.data_ptr(), q.data_ptr(), slot_mapping.data_ptr(),
        num_tokens, qkv.stride(0), *kv.stride()[:3], num_heads, num_kv_heads, head_size, cos_sin.shape[1],
        kv.shape[2], eps, q_scale, None if key_scale is None else key_scale.data_ptr(),
        None if value_scale is None else value_scale.data_ptr(), native.CACHE_CODES[kv.dtype],
        native.DTYPE_CODES[qkv.dtype],
    )  # fmt: skip
    return q


def _norm_eager(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """RMS norm of the last axis in float32, rounded to x's dtype, as float32."""
    wide = x.float()
    if weight is None:
        return wide
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype).float()


def _rotate_eager(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [tokens, heads, head_size] float32 by cos_sin [tokens, rotary]."""
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def qk_norm_rope_store_eager(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    kv: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_scale: float = 1.0,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The reference implementation of `qk_norm_rope_store` in plain torch, any device."""
    num_tokens = qkv.shape[0]
    heads = qkv.view(num_tokens, num_heads + 2 * num_kv_heads, head_size)
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    rows = cos_sin[positions]
    q = (_rotate_eager(_norm_eager(q, q_norm, eps), rows) * q_scale).to(qkv.dtype)
    k = _rotate_eager(_norm_eager(k, k_norm, eps), rows).to(qkv.dtype)
    states = torch.cat((quantize(k, kv.dtype, key_scale), quantize(v, kv.dtype, value_scale)), dim=-1)
    store(kv, states, slot_mapping)
    return q.contiguous()
