"""The Triton kernels of `octavo.ops.gemm.gpu`: tiles of a product that walk K in order.

Owns the arithmetic of the canonical order that `matmul` states. Does not know launch sizes: tiles, warps, stages and
which operand is which side of the matrix unit are free, for no bit depends on them. Invariant: an output is one chain
of matrix-unit steps over k in ascending order into one float32 accumulator, whatever tile holds it.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.compile.launch import begin_after, launched


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


@triton.jit
def read_tile(at, start, kept, k, K: tl.constexpr, BK: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of k from `start` on; 0 beyond K, and in rows that are not kept unless it is WHOLE."""
    if K % BK == 0 and WHOLE:
        tile = tl.load(at + start)
    elif K % BK == 0:
        tile = tl.load(at + start, mask=kept, other=0.0)
    else:
        tile = tl.load(at + start, mask=kept & (k < K - start)[None, :], other=0.0)
    return tile


@triton.jit
def add_products(sums, a, b, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    """The sums and the products of a, rows, with b, weights."""
    if SWAP:
        total = tl.dot(b.to(a.dtype), tl.trans(a), sums, input_precision=PRECISION)
    else:
        total = tl.dot(a, tl.trans(b.to(a.dtype)), sums, input_precision=PRECISION)
    return total


@triton.jit
def add_last(sums, bias):
    """sums + bias. As a plain sum the compiler would begin a product of one step with the bias: another order."""
    return tl.fma(sums, tl.full(sums.shape, 1.0, tl.float32), tl.broadcast_to(bias, sums.shape))


@launched(triton.jit(do_not_specialize=["num_rows"]))
def product(
    x, weight, bias, out, num_rows, x_stride, out_stride, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr,
    AHEAD: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [num_rows, N] = x [num_rows, K] times weight [N, K], transposed. SWAP: channels are the unit's first side.

    AHEAD: steps (0 to 3) whose weights are read before the kernel ahead is done.
    """
    if PDL and AHEAD > 0:
        tl.extra.cuda.gdc_launch_dependents()
    tile_row, tile_channel = _tile_of(tl.program_id(0), num_rows, N, BM, BN, GROUP)
    row = tile_row * BM + tl.arange(0, BM)
    channel = tile_channel * BN + tl.arange(0, BN)
    live = (row < num_rows)[:, None]
    kept = (channel < N)[:, None]
    k = tl.arange(0, BK)
    x_at = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_at = weight + channel.to(tl.int64)[:, None] * K + k[None, :]
    even: tl.constexpr = N % BN == 0
    if AHEAD > 0:
        b0 = read_tile(weight_at, 0, kept, k, K, BK, even)
    if AHEAD > 1:
        b1 = read_tile(weight_at, BK, kept, k, K, BK, even)
    if AHEAD > 2:
        b2 = read_tile(weight_at, 2 * BK, kept, k, K, BK, even)
    begin_after(PDL)
    if AHEAD > 0:
        a0 = read_tile(x_at, 0, live, k, K, BK, False)
    if AHEAD > 1:
        a1 = read_tile(x_at, BK, live, k, K, BK, False)
    if AHEAD > 2:
        a2 = read_tile(x_at, 2 * BK, live, k, K, BK, False)
    if SWAP:
        sums = tl.zeros((BN, BM), tl.float32)
    else:
        sums = tl.zeros((BM, BN), tl.float32)
    if AHEAD > 0:
        sums = add_products(sums, a0, b0, SWAP, PRECISION)
    if AHEAD > 1:
        sums = add_products(sums, a1, b1, SWAP, PRECISION)
    if AHEAD > 2:
        sums = add_products(sums, a2, b2, SWAP, PRECISION)
    for start in tl.range(AHEAD * BK, K, BK, num_stages=STAGES):
        a = read_tile(x_at, start, live, k, K, BK, False)
        b = read_tile(weight_at, start, kept, k, K, BK, even)
        sums = add_products(sums, a, b, SWAP, PRECISION)
    if SWAP:
        sums = tl.trans(sums)
    if HAS_BIAS:
        sums = add_last(sums, tl.load(bias + channel, mask=channel < N, other=0.0)[None, :])
    at = out + row.to(tl.int64)[:, None] * out_stride + channel[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=live & (channel < N)[None, :])
