"""Products joined with the operators beside them: a norm before, an activation, a rounded addition or a draw behind.

Owns the choice between one kernel (on a GPU: few rows; gates, additions and draws of many) and the separate operators.
Does not know layers.
Invariant: both ways give the same bits.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from octavo.ops.activation import GATED_KINDS, activate
from octavo.ops.gemm import LinearWeight, linear
from octavo.ops.norm import rms_norm
from octavo.ops.sampling import draw


def runs_fused(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    normed: bool = False,
    out_dtype: torch.dtype | None = None,
) -> bool:
    """Whether the product of x [T, K] by this weight runs in one kernel with the norm before it, or what is behind."""
    if not x.is_cuda:
        return False
    from octavo.ops.gemm import skinny_gemm  # needs triton

    return skinny_gemm.serves(x, weight.storage, bias, activation, normed=normed, out_dtype=out_dtype)


def activated_linear(x: Tensor, weight: LinearWeight, activation: str) -> Tensor:
    """`activate` of `linear` of x [T, K]; the weight of a gated activation is gates and then their ups."""
    if x.is_cuda:
        from octavo.ops.gemm import cluster_gemm  # needs triton

        if cluster_gemm.serves(x, weight.storage, None, activation):
            width = weight.n // 2 if activation in GATED_KINDS else weight.n
            return cluster_gemm.product(x, weight.storage, x.new_empty(x.shape[0], width), activation)
    return activate(linear(x, weight), activation)


def fused_sampling_rows(weight: LinearWeight) -> Collection[int]:
    """The numbers of rows at which `fused_linear_sampling` writes no logits."""
    if not weight.storage.is_cuda:
        return ()
    from octavo.ops.sampling import fused_lm_head_sampling  # needs triton

    return fused_lm_head_sampling.supports(weight.storage)


def fused_linear_sampling(
    x: Tensor, weight: LinearWeight, rows: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """`sample.draw`, without cuts, of float32 logits, which are `linear` of x [S, K] by a head's weight."""
    if x.is_cuda:
        from octavo.ops.sampling import fused_lm_head_sampling  # needs triton

        if fused_lm_head_sampling.serves(x, weight.storage):
            return fused_lm_head_sampling.draw(x, weight.storage, rows, temperatures, seeds, positions)
    return draw(linear(x, weight, out_dtype=torch.float32), rows, temperatures, seeds, positions)


def linear_of_few(x: Tensor, weight: LinearWeight, bias: Tensor | None = None) -> Tensor:
    """`linear` of x [T, K], by the kernel of a row, or a few, where there is one."""
    if runs_fused(x, weight, bias):
        from octavo.ops.gemm import skinny_gemm  # needs triton

        return skinny_gemm.linear(x, weight.storage, bias)
    return linear(x, weight, bias)


def normed_logits(x: Tensor, norm: Tensor, eps: float, weight: LinearWeight) -> Tensor:
    """`linear` in float32 of the `rms_norm` of x [T, K] with norm [K]."""
    if runs_fused(x, weight, normed=True, out_dtype=torch.float32):
        from octavo.ops.gemm import skinny_gemm  # needs triton

        return skinny_gemm.normed_linear(x, norm, eps, weight.storage, None, None, torch.float32)
    return linear(rms_norm(x, norm, eps), weight, out_dtype=torch.float32)


def normed_linear(
    x: Tensor, norm: Tensor, eps: float, weight: LinearWeight, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """`linear` of the `rms_norm` of x [T, K] with norm [K], and what `activate` makes of it if a kind is named."""
    if runs_fused(x, weight, bias, activation, normed=True):
        from octavo.ops.gemm import skinny_gemm  # needs triton

        return skinny_gemm.normed_linear(x, norm, eps, weight.storage, bias, activation)
    normed = rms_norm(x, norm, eps)
    if activation is not None and bias is None:
        return activated_linear(normed, weight, activation)
    y = linear(normed, weight, bias)
    return y if activation is None else activate(y, activation)


def linear_add(x: Tensor, weight: LinearWeight, bias: Tensor | None, residual: Tensor) -> Tensor:
    """`linear` of x [T, K], rounded, plus residual [T, N], rounded again."""
    total = linear_add_at_once(x, weight, bias, residual)
    return (linear(x, weight, bias).float() + residual.float()).to(x.dtype) if total is None else total


def linear_add_at_once(x: Tensor, weight: LinearWeight, bias: Tensor | None, residual: Tensor) -> Tensor | None:
    """`linear_add` in one kernel; None where there is none: a norm behind it then adds at less cost."""
    if runs_fused(x, weight, bias):
        from octavo.ops.gemm import skinny_gemm  # needs triton

        return skinny_gemm.linear_add(x, weight.storage, bias, residual)
    if x.is_cuda and bias is None:
        from octavo.ops.gemm import cluster_gemm  # needs triton

        if cluster_gemm.serves(x, weight.storage, None, residual=residual):
            return cluster_gemm.product(x, weight.storage, x.new_empty(residual.shape), residual=residual)
    return None
