"""linear: the sampler's product, with gradients.

Owns the joined product of several weights with one input (q, k and v; gate and up), which has the bits of one weight
that holds their rows. Backward: two plain products a weight, on a GPU the library's own. Invariant: every output is
the sampler's chain over K.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.ops.gemm import linear as linear_operator
from octavo.ops.gemm import linear_as_it_lies
from octavo.rl.autograd.outside import apply, check_dtype, first_order
from octavo.rl.autograd.packed_weights import packed, rounded


def linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`x @ weight.T + bias`: x [tokens, K], weight [N, K], bias [N] -> [tokens, N] of `out_dtype` (None: x's).

    Several weights, each with its bias or None, give their results side by side. The sum is one chain in float32 with
    the bias behind it, rounded once. Weights wider than x are rounded to x's dtype first. Raises ValueError for shapes
    and types that do not fit.
    """
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    biases = [bias] if bias is None or isinstance(bias, Tensor) else list(bias)
    if bias is None:
        biases = [None] * len(weights)
    if len(biases) != len(weights):
        raise ValueError(f"{len(weights)} weights need as many biases, each one or None, got {len(biases)}")
    size = x.shape[-1]
    for each in weights:
        if each.dim() != 2 or each.shape[1] != size:
            raise ValueError(f"a weight must be [N, {x.shape[-1]}] for rows of {x.shape[-1]}, got {list(each.shape)}")
    if out_dtype is not None:
        check_dtype("octavo.rl's linear", out_dtype, x.device)
    result: Tensor = apply(_Linear, x, out_dtype or x.dtype, *weights, *biases)
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, out_dtype: torch.dtype, *tensors: Tensor | None) -> Tensor:
        count = len(tensors) // 2
        weights, biases = [each for each in tensors[:count] if each is not None], tensors[count:]
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = torch.empty(x.shape[0], sum(weight.shape[0] for weight in weights), dtype=out_dtype, device=x.device)
        for part, weight, bias in zip(_parts(out, weights), weights, biases, strict=True):
            added = None if bias is None else bias.detach().float().contiguous()
            if x.is_cuda:
                linear_as_it_lies(x, rounded(weight, x.dtype).detach(), added, part)
            else:
                linear_operator(x.detach(), packed(weight, x.dtype), added, out_dtype, out=part)
        ctx.save_for_backward(x, *weights)
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        parts, first = _parts(grad, weights), 2
        grad_x = None
        if ctx.needs_input_grad[0]:
            for part, weight in zip(parts, weights, strict=True):
                grad_x = backward_input(part, weight, x, grad_x)
        of_weights = [
            backward_weight(part, x, weight) if ctx.needs_input_grad[first + place] else None
            for place, (part, weight) in enumerate(zip(parts, weights, strict=True))
        ]
        of_biases = [
            part.sum(0, dtype=torch.float32).to(dtype)
            if dtype is not None and ctx.needs_input_grad[first + len(weights) + place]
            else None
            for place, (part, dtype) in enumerate(zip(parts, ctx.bias_dtypes, strict=True))
        ]
        return grad_x, None, *of_weights, *of_biases


def backward_input(grad: Tensor, weight: Tensor, x: Tensor, add_to: Tensor | None = None) -> Tensor:
    """grad [tokens, N] @ weight [N, K] -> [tokens, K] of x's dtype; it is added to `add_to`, which is overwritten."""
    dtype = torch.promote_types(grad.dtype, x.dtype)
    narrow = rounded(weight, x.dtype).to(dtype)
    if x.is_cuda and dtype == x.dtype:
        return _library_product(grad.to(dtype), narrow, dtype, add_to)
    own = (grad.to(dtype) @ narrow).to(x.dtype)
    return own if add_to is None else add_to.add_(own)


def backward_weight(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """grad [tokens, N] transposed @ x [tokens, K] -> [N, K] of the weight's dtype."""
    dtype = torch.promote_types(grad.dtype, x.dtype)
    if x.is_cuda and weight.dtype in (dtype, torch.float32):
        return _library_product(grad.to(dtype).t(), x.to(dtype), weight.dtype)
    return (grad.to(dtype).t() @ x.to(dtype)).to(weight.dtype)


def add_weight(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add grad [tokens, N] transposed @ x [tokens, K], of one dtype, to total [N, K] float32."""
    if x.is_cuda:
        _library_product(grad.t(), x, torch.float32, total)
    elif x.dtype == torch.float32:
        total.addmm_(grad.t(), x)
    else:
        total += grad.t() @ x


def _library_product(a: Tensor, b: Tensor, out_dtype: torch.dtype, add_to: Tensor | None = None) -> Tensor:
    from octavo.ops.backward.products import product  # needs triton

    return product(a, b, out_dtype, add_to)


def _parts(joined: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    if len(weights) == 1:
        return [joined]
    return list(joined.split_with_sizes([weight.shape[0] for weight in weights], dim=1))
