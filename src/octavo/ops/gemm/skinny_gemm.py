"""Products of few rows on a GPU, each in one kernel with the norm before it and the activation or addition behind it.

Owns that kernel, and the choice of others: a row alone is `octavo.ops.gemm.gemv`'s, more rows by weights that fit
shared memory are `octavo.ops.gemm.held_gemm`'s. Does not know layers.
Invariant: the bits are those of `matmul`, `norm` and `activation`: K's order, the tree of squares, every rounding.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.activation import GATED_KINDS, SQUARED_RELU
from octavo.ops.activation.gpu import gated_value, squared_value
from octavo.ops.compile.launch import begin_after, chained, launched
from octavo.ops.compile.row_sum import padded_length
from octavo.ops.gemm import cluster_gemm, gemv, held_gemm, streamed_gemm
from octavo.ops.gemm import gpu as matmul
from octavo.ops.gemm.kernels import add_last
from octavo.ops.norm.gpu import inverse_norm

MAX_ROWS, _TILE_ROWS = 4, 8  # more than the first are as well served by separate kernels


@triton.jit
def _input(at, scale_at, live, inverse, NORM: tl.constexpr):
    """A tile of the rows, normalized and rounded if NORM."""
    a = tl.load(at, mask=live[:, None], other=0.0)
    if NORM:
        a = (a.to(tl.float32) * inverse[:, None] * tl.load(scale_at)[None, :]).to(a.dtype)
    return a


@launched(triton.jit(do_not_specialize=["num_rows"]))
def _product(
    x, norm, weight, bias, residual, out, num_rows, x_stride, residual_stride, out_stride, eps, N: tl.constexpr,
    K: tl.constexpr, PADDED: tl.constexpr, LEVELS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, TANH: tl.constexpr,
    SQUARED: tl.constexpr, ADD: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN channels of all rows. AHEAD: steps (0 to 2) whose weights are read before the kernel ahead is done."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row, i, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    if GATED:  # gates and their ups in turn
        channel = tl.program_id(0) * (BN // 2) + i // 2 + i % 2 * (N // 2)
    else:
        channel = tl.program_id(0) * BN + i
    live = row < num_rows
    x_at = x + row[:, None] * x_stride + k[None, :]
    weight_at = weight + channel.to(tl.int64)[:, None] * K + k[None, :]
    out_at = out + row[None, :] * out_stride + channel[:, None]
    if AHEAD > 0:
        b0 = tl.load(weight_at)
    if AHEAD > 1:
        b1 = tl.load(weight_at + BK)
    begin_after(PDL)
    if ADD:
        before = tl.load(residual + row[None, :] * residual_stride + channel[:, None], mask=live[None, :], other=0.0)
    inverse = tl.zeros((BM,), tl.float32)
    if NORM:
        whole = tl.arange(0, PADDED)
        for one in range(num_rows):
            value = tl.load(x + one * x_stride + whole, mask=whole < K, other=0.0).to(tl.float32)
            inverse = tl.where(row == one, inverse_norm(value, eps, K, PADDED, LEVELS), inverse)
    sums = tl.zeros((BN, BM), tl.float32)
    if AHEAD > 0:
        sums = tl.dot(b0, tl.trans(_input(x_at, norm + k, live, inverse, NORM)), sums)
    if AHEAD > 1:
        sums = tl.dot(b1, tl.trans(_input(x_at + BK, norm + BK + k, live, inverse, NORM)), sums)
    for start in tl.range(AHEAD * BK, K, BK, num_stages=STAGES):
        a = _input(x_at + start, norm + start + k, live, inverse, NORM)
        b = tl.load(weight_at + start)
        sums = tl.dot(b, tl.trans(a), sums)
    if HAS_BIAS:
        sums = add_last(sums, tl.load(bias + channel)[:, None])
    y = sums.to(out.dtype.element_ty)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (BN // 2, 2, BM)), (0, 2, 1)))
        first = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
        value = gated_value(gate.to(tl.float32), up.to(tl.float32), TANH)
        at = out + row[None, :] * out_stride + first[:, None]
        tl.store(at, value.to(out.dtype.element_ty), mask=live[None, :])
    else:
        if SQUARED:
            y = squared_value(y.to(tl.float32)).to(out.dtype.element_ty)
        if ADD:
            y = (y.to(tl.float32) + before.to(tl.float32)).to(out.dtype.element_ty)
        tl.store(out_at, y, mask=live[None, :])


def serves(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    normed: bool = False,
    out_dtype: torch.dtype | None = None,
) -> bool:
    """Whether x [M, K] by weight [N, K] runs here: few rows of 16 bits, of a shape that the tiles divide.

    out_dtype: of the product; None: x's.
    """
    if out_dtype == torch.float32 and streamed_gemm.serves(x, weight, bias):
        return False  # a head's programs would norm the rows again and again
    if _serves_few(x.shape[0], x.dtype, weight):
        return bias is not None or out_dtype not in (None, x.dtype) or not _clusters(x, weight, activation)
    return out_dtype in (None, x.dtype) and held_gemm.serves(x, weight, bias, activation, normed=normed)


def _clusters(x: Tensor, weight: Tensor, activation: str | None) -> bool:
    """Whether a kernel beside the norm is faster: of long weights, which it streams better."""
    return cluster_gemm.has_tile(x, weight, activation) and cluster_gemm.serves(x, weight, None, activation)


def _serves_few(num_rows: int, dtype: torch.dtype, weight: Tensor) -> bool:
    if not 0 < num_rows <= MAX_ROWS or not matmul.is_reproducible() or dtype not in (torch.bfloat16, torch.float16):
        return False
    return dtype == weight.dtype and _divides(*weight.shape)


@functools.cache
def _divides(n: int, k: int) -> bool:
    """Whether the tiles divide a weight [n, k]."""
    tiles = (_tile(n, k, normed) for normed in (False, True))
    return all(k % tile.depth == 0 and n % (2 * tile.channels) == 0 for tile in tiles)


@functools.cache
def _tile(n: int, k: int, normed: bool) -> matmul.Tile:
    """The best of a sweep on an H200, in a chain of such products."""
    if n > 16384:
        return matmul.Tile(8, 64, 256, 4, 3, swap=True, ahead=1)
    if k >= 4096 or k % 512:
        return matmul.Tile(8, 32, 256, 2, 4, swap=True, ahead=1) if normed else matmul.Tile(8, 16, 256, 1, 4, swap=True)
    if k > 2048 or k % 1024:
        return matmul.Tile(8, 16, 512, 2, 3, swap=True, ahead=2)
    return matmul.Tile(8, 16, 1024, 2, 2, swap=True, ahead=k // 1024)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See `octavo.ops.gemm.fused.linear_of_few`."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, bias=bias)
    return out


def normed_linear(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """See `octavo.ops.gemm.fused.normed_linear`."""
    n = weight.shape[0]
    width = n // 2 if activation in GATED_KINDS else n
    out = torch.empty((x.shape[0], width), dtype=out_dtype or x.dtype, device=x.device)
    _launch(x, weight, out, norm=norm, eps=eps, bias=bias, activation=activation)
    return out


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """See `octavo.ops.gemm.fused.linear_add`."""
    out = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    _launch(x, weight, out, bias=bias, residual=residual)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> None:
    (num_rows, k), n = x.shape, weight.shape[0]
    assert weight.is_contiguous() and x.stride(1) == 1, "channels are contiguous"
    normed = norm is not None
    if out.dtype == x.dtype and held_gemm.serves(x, weight, bias, activation, normed=normed):
        held_gemm.product(x, weight, out, norm=norm, eps=eps, residual=residual, activation=activation)
        return
    assert _serves_few(num_rows, x.dtype, weight), "rows and shape fit the kernel"
    if gemv.serves(x, weight, bias, activation, normed=normed, out_dtype=out.dtype):
        gemv.product(x, weight, out, norm=norm, eps=eps, residual=residual, activation=activation)
        return
    tile, padded = _tile(n, k, norm is not None), padded_length(k)
    gated, before = activation in GATED_KINDS, x if residual is None else residual
    _product[(n // tile.channels,)](
        x, out if norm is None else norm, weight, out if bias is None else bias, before, out, num_rows, x.stride(0),
        before.stride(0), out.stride(0), eps, N=n, K=k, PADDED=padded, LEVELS=padded.bit_length() - 1, BM=_TILE_ROWS,
        BN=tile.channels, BK=tile.depth, STAGES=tile.stages, AHEAD=min(tile.ahead, k // tile.depth),
        NORM=norm is not None, GATED=gated, TANH=GATED_KINDS.get(activation or "") == 1,
        SQUARED=activation == SQUARED_RELU, ADD=residual is not None, HAS_BIAS=bias is not None,
        num_warps=tile.warps, enable_fp_fusion=False, **chained(x.device),
    )  # fmt: skip
