"""One small product per head: x[:, h] @ weight[h].T.

Owns the packed weights of all heads and the loop over them; each product is `octavo.ops.matmul.linear`, so its
arithmetic is stated there. Does not know what the heads mean. Invariant: a row's bits depend on that row and the
weights only.
"""

from __future__ import annotations

import torch

from octavo.ops.matmul import LinearWeight, linear, pack_linear

HeadWeights = tuple[LinearWeight, ...]


def pack_heads(weight: torch.Tensor) -> HeadWeights:
    """Pack weight [heads, N, K] for `head_linear`; see pack_linear."""
    return tuple(pack_linear(head.contiguous()) for head in weight)


def head_linear(x: torch.Tensor, weights: HeadWeights, out: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, K] -> out [tokens, heads, N] of x's dtype, which is returned; both may be strided views."""
    for head, weight in enumerate(weights):
        linear(x[:, head], weight, out=out[:, head])
    return out
