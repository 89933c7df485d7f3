"""norm and add: the sampler's RMS norm and its residual addition, with gradients.

Invariant: a row's bits depend on that row alone; the order of its sum is `octavo.ops.norm`'s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.ops.norm import rms_norm
from octavo.rl.autograd.outside import apply, first_order, num_processors


def norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * (offset + weight)` per row: x [tokens, size], weight [size] -> x's shape and dtype.

    In float32, rounded once; offset: 1 where a checkpoint stores the weight's distance from one.
    """
    result: Tensor = apply(_Norm, x, weight, eps, offset)
    return result


def add(x: Tensor, residual: Tensor) -> Tensor:
    """The residual stream's addition: in float32, rounded once, as torch's own sum of one dtype. Same shapes."""
    if x.dtype != residual.dtype:
        raise ValueError(f"the residual stream has one dtype: {x.dtype} was to be added to {residual.dtype}")
    return x + residual


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        x = x if x.stride(-1) == 1 else x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.offset = eps, offset
        return rms_norm(x, norm_weight(weight, offset), eps)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wide = norm_weight(weight, ctx.offset)
        if x.is_cuda:
            from octavo.ops.backward import norm as gpu  # needs triton

            grad_x, grad_weight = gpu.norm_backward(grad, x, wide, ctx.eps, num_processors(x.device))
        else:
            grad_x, grad_weight = norm_backward(grad, x, wide, ctx.eps)
        return grad_x, grad_weight.to(weight.dtype), None, None


def norm_weight(weight: Tensor, offset: float) -> Tensor:
    """The weight of a norm as operators take it, offset included: float32, on a GPU as it lies where it can."""
    own = weight.detach()
    if not offset and own.is_cuda and own.is_contiguous():
        return own  # the kernels widen it exactly
    own = own.float()
    return (own + offset if offset else own).contiguous()


def norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(gradient of x in its dtype, of weight [size] float32) of norms over the last axis."""
    wide, own = x.float(), grad.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    unit = wide * inverse
    grad_weight = (own * unit).flatten(0, -2).sum(0)
    own = own * weight
    return ((own - unit * (own * unit).mean(-1, keepdim=True)) * inverse).to(x.dtype), grad_weight
