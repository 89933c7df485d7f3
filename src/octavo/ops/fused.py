"""Products joined with the operators beside them: a norm before, an activation or a rounded addition behind.

Owns the choice between one kernel (on a GPU: few rows, and gates of many) and the separate operators. Does not know
layers.
Invariant: both ways give the same bits.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.activation import gated_activation
from octavo.ops.matmul import LinearWeight, linear
from octavo.ops.norm import rms_norm


def runs_fused(x: Tensor, *weights: LinearWeight) -> bool:
    """Whether products of as many rows as x [T, K], of its dtype, by these weights run in one kernel each."""
    if not x.is_cuda:
        return False
    from octavo.ops.gpu import few_rows  # needs triton

    return all(few_rows.serves(x.shape[0], x.dtype, weight.storage) for weight in weights)


def gated_linear(x: Tensor, weight: LinearWeight, activation: str) -> Tensor:
    """`gated_activation` of `linear` of x [T, K] by a weight of gates and then their ups."""
    if x.is_cuda:
        from octavo.ops.gpu import cluster_product, gated_product  # need triton

        if cluster_product.serves(x, weight.storage, None, activation):
            return cluster_product.product(x, weight.storage, x.new_empty(x.shape[0], weight.n // 2), activation)
        if gated_product.serves(x, weight.storage):
            return gated_product.gated_linear(x, weight.storage, activation)
    return gated_activation(linear(x, weight), activation)


def normed_linear(
    x: Tensor, norm: Tensor, eps: float, weight: LinearWeight, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """`linear` of the `rms_norm` of x [T, K] with norm [K], and its `gated_activation` if one is named."""
    if runs_fused(x, weight):
        from octavo.ops.gpu import few_rows  # needs triton

        return few_rows.normed_linear(x, norm, eps, weight.storage, bias, activation)
    normed = rms_norm(x, norm, eps)
    if activation is not None and bias is None:
        return gated_linear(normed, weight, activation)
    y = linear(normed, weight, bias)
    return y if activation is None else gated_activation(y, activation)


def linear_add(x: Tensor, weight: LinearWeight, bias: Tensor | None, residual: Tensor) -> Tensor:
    """`linear` of x [T, K], rounded, plus residual [T, N], rounded again."""
    if runs_fused(x, weight):
        from octavo.ops.gpu import few_rows  # needs triton

        return few_rows.linear_add(x, weight.storage, bias, residual)
    return (linear(x, weight, bias).float() + residual.float()).to(x.dtype)
