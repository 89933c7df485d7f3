"""Mixture of experts: a router picks a few of many feed-forward networks per token.

Owns the routing, the grouping of tokens by expert, and the order in which a token's experts are summed. Does
not know batches. Invariant: a token's result depends on its own row only: its experts are summed in order of
rank, in float32, whatever other tokens share them.
"""

from __future__ import annotations

import torch
from torch import nn

from octavo.layers.base import Layer
from octavo.layers.linear import Linear
from octavo.layers.mlp import Mlp


class MoeMlp(Layer):
    """Softmax over all experts in float32, then the top ones; `normalize` makes their weights sum to one."""

    def __init__(
        self,
        size: int,
        expert_size: int,
        num_experts: int,
        experts_per_token: int,
        activation: str,
        dtype: torch.dtype,
        *,
        normalize: bool,
    ) -> None:
        """`size`: of the hidden state; `expert_size`: between one expert's products."""
        super().__init__()
        self.router = Linear(size, num_experts, dtype, quantize=False, out_dtype=torch.float32)
        self.experts = nn.ModuleList(Mlp(size, expert_size, activation, dtype) for _ in range(num_experts))
        self._experts_per_token = experts_per_token
        self._normalize = normalize

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights float32, expert ids int64), both [tokens, experts_per_token], best first."""
        weights, experts = self.router.forward(x).softmax(-1).topk(self._experts_per_token)
        if self._normalize:
            total = weights[:, :1].clone()
            for rank in range(1, self._experts_per_token):  # a fixed order of summation
                total += weights[:, rank : rank + 1]
            weights = weights / total
        return weights, experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        weights, experts = self.route(x)
        ranks = self._experts_per_token
        pairs = experts.flatten().argsort(stable=True)  # (token, rank) pairs, one expert's beside each other
        counts = experts.flatten().bincount(minlength=len(self.experts)).tolist()
        results = x.new_empty(x.shape[0] * ranks, x.shape[1])  # [pair, size]
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                chosen = pairs[start : start + count]
                results[chosen] = expert.forward(x[chosen // ranks])
                start += count
        by_rank = results.view(x.shape[0], ranks, x.shape[1])
        total = by_rank[:, 0] * weights[:, :1]
        for rank in range(1, ranks):
            total += by_rank[:, rank] * weights[:, rank : rank + 1]
        return total.to(x.dtype)
