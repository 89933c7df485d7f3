"""Mixture of experts: a router picks a few of many feed-forward networks per token.

Owns the routing and the order in which a token's experts are summed; `octavo.ops.moe` runs them. Does not know
batches. Invariant: a token's result depends on its own row only: its experts are summed in order of rank, then the
shared ones, in float32, whatever other tokens share them. Scores are float32.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from octavo.checkpoint.arch import Moe
from octavo.layers.base import Layer
from octavo.layers.linear import Linear
from octavo.layers.mlp import Mlp
from octavo.ops.moe import ExpertWeights, run_experts


class MoeMlp(Layer):
    """Routed experts beside shared ones, as `Moe` says: Qwen3's, DeepSeek-V2's and -V3's rules of choice."""

    correction: torch.Tensor | None  # [experts] float32, takes part in the choice only
    weights: tuple[ExpertWeights, ExpertWeights]  # of the two products, set by join

    def __init__(self, size: int, moe: Moe, activation: str, dtype: torch.dtype) -> None:
        """`size`: of the hidden state."""
        super().__init__()
        self.router = Linear(size, moe.num_experts, dtype, quantize=False, out_dtype=torch.float32)
        self.experts = nn.ModuleList(Mlp(size, moe.expert_size, activation, dtype) for _ in range(moe.num_experts))
        self.shared = Mlp(size, moe.num_shared * moe.expert_size, activation, dtype) if moe.num_shared else None
        if moe.corrected:
            self.declare("correction", (moe.num_experts,), torch.float32, dummy=0.0)
        else:
            self.correction = None
        self._moe = moe
        self._activation = activation

    def join(self) -> None:
        """Gather the experts' weights for the two products."""
        experts = cast(list[Mlp], list(self.experts))
        gate_up, down = ([getattr(mlp, name).packed for mlp in experts] for name in ("gate_up", "down"))
        self.weights = ExpertWeights(gate_up), ExpertWeights(down)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights float32, expert ids int64), both [tokens, experts_per_token], best first."""
        return choose_experts(self.router.forward(x), self._moe, self.correction)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        weights, experts = self.route(x)
        results = run_experts(x, experts, *self.weights, self._activation)  # [pair, size]
        total = sum_by_rank(results, weights)
        if self.shared is not None:
            total += self.shared.forward(x)
        return total.to(x.dtype)


def choose_experts(
    logits: torch.Tensor, moe: Moe, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float32, expert ids int64), both [tokens, experts_per_token], best first.

    logits: the router's, [tokens, experts] float32; correction: [experts] float32, of the choice alone.
    """
    scores = _sigmoid(logits) if moe.scoring == "sigmoid" else logits.softmax(-1)
    choice = scores if correction is None else scores + correction
    if moe.num_groups > 1:
        choice = _within_best_groups(choice, moe)
    experts = choice.topk(moe.experts_per_token).indices
    weights = scores.gather(1, experts)
    if moe.norm_topk_prob:
        total = weights[:, :1].clone()
        for rank in range(1, moe.experts_per_token):  # a fixed order of summation
            total += weights[:, rank : rank + 1]
        weights = weights / total
    return weights * moe.scale, experts


def sum_by_rank(results: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """results [tokens * ranks, size], weights [tokens, ranks] float32 -> [tokens, size] float32, in order of rank."""
    by_rank = results.view(*weights.shape, results.shape[1])
    total = by_rank[:, 0] * weights[:, :1]
    for rank in range(1, weights.shape[1]):
        total += by_rank[:, rank] * weights[:, rank : rank + 1]
    return total


def _within_best_groups(choice: torch.Tensor, moe: Moe) -> torch.Tensor:
    """`choice` [tokens, experts] with -inf for all experts outside the token's best groups."""
    groups = choice.unflatten(1, (moe.num_groups, -1))
    best = groups.topk(moe.group_score, dim=-1).values
    value = best[..., 0]
    for place in range(1, moe.group_score):
        value = value + best[..., place]
    kept = torch.zeros_like(value, dtype=torch.bool).scatter_(1, value.topk(moe.groups_kept).indices, True)
    return groups.masked_fill(~kept[..., None], float("-inf")).flatten(1)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """As a softmax of (x, 0): on a CPU torch's sigmoid has other bits for the last elements of a tensor."""
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]
