"""The random stream of `octavo.ops.sampling` on a GPU.

Owns its words (the integers of `uniform_bits`, bit for bit) and its Gumbel noise: the CPU operators' polynomial with
the same fused steps, so the noise has their bits as well. Does not know logits. Invariant: a pure function of (seed,
position, token id).
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    """SplitMix64's finaliser on a uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def stream_key(seed, position):
    """The two uint32 halves, low then high, of the key of (seed, position), both int64 scalars."""
    seed = seed.to(tl.uint64, bitcast=True)
    position = position.to(tl.uint64, bitcast=True)
    key = _mix(_mix(seed + 0x9E3779B97F4A7C15) + position * 0x9E3779B97F4A7C15)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def uniform_words(low, high, ids):
    """The stream's 32-bit words of token `ids` (uint32)."""
    h = ids + low
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = h ^ (h >> 15) ^ high
    h = h * 0xD35A2D97
    return h ^ (h >> 15)


@triton.jit
def _log_parts(whole, x):
    """ln(1 + x) where `whole` = 1 + x, positive and normal, to 2 ulp (Cephes' logf); x serves next to 1."""
    bits = whole.to(tl.int32, bitcast=True) - 0x3F3504F3
    exponent = bits >> 23
    mantissa = ((bits & 0x007FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True)
    y = tl.where(exponent == 0, x, mantissa - 1.0)
    z = y * y
    e = exponent.to(tl.float32)
    p = tl.fma(y, 7.0376836292e-2, -1.1514610310e-1)
    p = tl.fma(p, y, 1.1676998740e-1)
    p = tl.fma(p, y, -1.2420140846e-1)
    p = tl.fma(p, y, 1.4249322787e-1)
    p = tl.fma(p, y, -1.6668057665e-1)
    p = tl.fma(p, y, 2.0000714765e-1)
    p = tl.fma(p, y, -2.4999993993e-1)
    p = tl.fma(p, y, 3.3333331174e-1)
    p = p * y * z
    p = tl.fma(e, -2.12194440e-4, p)
    p = tl.fma(z, -0.5, p)
    return tl.fma(e, 0.693359375, y + p)


@triton.jit
def natural_log(x):
    """ln of positive, normal float32, to 2 ulp."""
    return _log_parts(x, x - 1.0)


@triton.jit
def gumbel(words):
    """The Gumbel noise of 32-bit words."""
    w = tl.minimum(tl.maximum(words.to(tl.float32) * 2.3283064365386963e-10, 1.1641532182693481e-10), 0.99999994)
    e = -_log_parts(1.0 - w, -w)
    return -_log_parts(e, e - 1.0)


@triton.jit
def gumbel_bound(words, amount):
    """At least the Gumbel noise of 32-bit words, and close to it where it is large: -ln(w), with log2 cut short.

    Times `amount`, a scalar.

    -log1p(-w) >= w, and the bits of a float read as an integer are its log2 with the mantissa taken as linear, which
    is never above log2.
    """
    bits = words.to(tl.float32).to(tl.int32, bitcast=True).to(tl.float32)
    return tl.fma(bits, -8.2629582881927490e-8 * amount, 110.2105 * amount)  # -ln(2) / 2^23; 159 ln(2) + 1e-4
