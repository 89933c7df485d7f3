"""RMS norm of rows, alone or fused with the residual addition before it.

Owns the canonical reduction of a row: squares in float32, summed by one halving tree over the row padded with zeros to
a power of two. It knows nothing of layers. Invariant: a row's bits depend on that row, the weight and eps only, and
the native operator and its reference implementation give the same bits. A GPU has a tree of its own
(`octavo.ops.compile.row_sum`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops import native

_P, _I = native.PTR, native.I64
native.declare("octavo_rms_norm", [_P, _I, _P, _I, _P, _P, _P, _I, _I, native.F32, native.I32])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` per row (Zhang and Sennrich 2019).

    x [T, H] float32 or bfloat16 (GPU: or float16), rows may be strided; weight [H] float32; the result is contiguous,
    of x's dtype, computed in float32 and rounded once.
    """
    if x.is_cuda:
        from octavo.ops.norm import gpu

        return gpu.rms_norm(x, weight, eps)
    lib = native.lib()
    if not lib:
        return rms_norm_reference(x, weight, eps)
    rows, n = x.shape
    out = torch.empty((rows, n), dtype=x.dtype)
    lib.octavo_rms_norm(
        x.data_ptr(),
        x.stride(0),
        None,
        0,
        weight.data_ptr(),
        out.data_ptr(),
        None,
        rows,
        n,
        eps,
        native.DTYPE_CODES[x.dtype],
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`new_residual = x + residual` rounded to their dtype, then its rms_norm: returns (normed, new_residual).

    x and residual [T, H] of one dtype (float32, bfloat16, GPU: or float16), rows may be strided; weight [H] float32;
    both results are new, contiguous and of that dtype.
    """
    if x.is_cuda:
        from octavo.ops.norm import gpu

        return gpu.add_rms_norm(x, residual, weight, eps)
    lib = native.lib()
    if not lib:
        return add_rms_norm_reference(x, residual, weight, eps)
    rows, n = x.shape
    out = torch.empty((rows, n), dtype=x.dtype)
    total = torch.empty((rows, n), dtype=x.dtype)
    lib.octavo_rms_norm(
        x.data_ptr(),
        x.stride(0),
        residual.data_ptr(),
        residual.stride(0),
        weight.data_ptr(),
        out.data_ptr(),
        total.data_ptr(),
        rows,
        n,
        eps,
        native.DTYPE_CODES[x.dtype],
    )
    return out, total


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The reference implementation of `rms_norm`: the same tree in torch, the same bits."""
    row = x.float()
    mean = _sum_of_squares(row) / row.shape[-1]
    # MKL's float32 sqrt is not correctly rounded; float64 rounded to float32 is.
    scale = 1.0 / torch.sqrt((mean + eps).double()).float()
    return (row * scale * weight).to(x.dtype)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The reference implementation of `add_rms_norm`, the same bits."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm_reference(total, weight, eps), total


def _sum_of_squares(row: Tensor) -> Tensor:
    """[T, H] float32 -> [T, 1]: the halving tree as elementwise additions, which torch cannot reorder."""
    n = row.shape[-1]
    padded = 1 << (n - 1).bit_length()
    level = torch.nn.functional.pad(row * row, (0, padded - n))
    while level.shape[-1] > 1:
        lower, upper = level.chunk(2, dim=-1)
        level = lower + upper
    return level
