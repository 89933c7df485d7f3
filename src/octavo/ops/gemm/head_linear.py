"""One small product per head: x[:, h] @ weight[h].T.

Owns the packed weights of all heads; each product is `octavo.ops.gemm.linear`'s chain over K in order. Does not know
what the heads mean. Invariant: a row's bits depend on that row and the weights only.
"""

from __future__ import annotations

import dataclasses

import torch

from octavo.ops import placement
from octavo.ops.gemm import LinearWeight, linear, pack_linear


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HeadWeights:
    """Weights of all heads, made ready by `pack_heads`."""

    packed: tuple[LinearWeight, ...]  # CPU: one for each head
    stacked: torch.Tensor | None  # GPU: [heads, N, K]


def pack_heads(weight: torch.Tensor, into: HeadWeights | None = None) -> HeadWeights:
    """Make weight [heads, N, K] ready for `head_linear`; `into`: see pack_linear."""
    if into is not None:
        if into.stacked is not None:
            into.stacked.copy_(weight)
        for head, packed in zip(weight, into.packed, strict=into.stacked is None):
            pack_linear(head.contiguous(), into=packed)
        return into
    if weight.is_cuda:
        return HeadWeights((), placement.empty(tuple(weight.shape), weight.dtype, weight.device).copy_(weight))
    return HeadWeights(tuple(pack_linear(head.contiguous()) for head in weight), None)


def head_linear(x: torch.Tensor, weights: HeadWeights, out: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, K] -> out [tokens, heads, N] of x's dtype, which is returned; both may be strided views."""
    if weights.stacked is not None:
        from octavo.ops.latent import gpu as latent  # needs triton

        return latent.head_linear(x, weights.stacked, out)
    for head, weight in enumerate(weights.packed):
        linear(x[:, head], weight, out=out[:, head])
    return out
