"""The Triton kernels of `octavo.ops.gpu.matmul`: tiles of a product that walk K in order.

Owns the arithmetic of the canonical order that `matmul` states. Does not know launch sizes: tiles, warps, stages and
which operand is which side of the matrix unit are free, for no bit depends on them. Invariant: an output is one chain
of matrix-unit steps over k in ascending order into one float32 accumulator, whatever tile holds it.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tile_of(program, num_rows, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """(row tile, channel tile) of a program: GROUP row tiles share a sweep over the channels, for the cache's sake."""
    row_tiles = tl.cdiv(num_rows, BM)
    channel_tiles: tl.constexpr = (N + BN - 1) // BN
    group = program // (GROUP * channel_tiles)
    first = group * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    within = program % (GROUP * channel_tiles)
    return first + within % height, within // height


@triton.jit(do_not_specialize=["num_rows"])
def product(
    x, weight, bias, out, num_rows, x_stride, out_stride, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [num_rows, N] = x [num_rows, K] times weight [N, K], transposed. SWAP: channels are the unit's first side."""
    tile_row, tile_channel = _tile_of(tl.program_id(0), num_rows, N, BM, BN, GROUP)
    row = tile_row * BM + tl.arange(0, BM)
    channel = tile_channel * BN + tl.arange(0, BN)
    live = (row < num_rows)[:, None]
    kept = (channel < N)[:, None]
    k = tl.arange(0, BK)
    x_at = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_at = weight + channel.to(tl.int64)[:, None] * K + k[None, :]
    if SWAP:
        sums = tl.zeros((BN, BM), tl.float32)
    else:
        sums = tl.zeros((BM, BN), tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        if K % BK == 0:
            a = tl.load(x_at + start, mask=live, other=0.0)
            b = tl.load(weight_at + start) if N % BN == 0 else tl.load(weight_at + start, mask=kept, other=0.0)
        else:
            inside = (k < K - start)[None, :]
            a = tl.load(x_at + start, mask=live & inside, other=0.0)
            b = tl.load(weight_at + start, mask=kept & inside, other=0.0)
        if SWAP:
            sums = tl.dot(b.to(a.dtype), tl.trans(a), sums, input_precision=PRECISION)
        else:
            sums = tl.dot(a, tl.trans(b.to(a.dtype)), sums, input_precision=PRECISION)
    if SWAP:
        sums = tl.trans(sums)
    if HAS_BIAS:
        sums += tl.load(bias + channel, mask=channel < N, other=0.0)[None, :]
    at = out + row.to(tl.int64)[:, None] * out_stride + channel[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=live & (channel < N)[None, :])
