"""Mixture of experts: a router picks a few of many feed-forward networks per token.

Owns the routing and the order in which a token's experts are summed; `octavo.ops.moe` runs them. Does not know
batches. Invariant: a token's result depends on its own row only: its experts are summed in order of rank, then the
shared ones, in float32, whatever other tokens share them. Scores are float32.
"""

from __future__ import annotations

import torch
from torch import nn

from octavo.checkpoint.arch import Arch, Moe
from octavo.layers.base import Layer
from octavo.layers.linear import Linear
from octavo.layers.mlp import Mlp, UngatedMlp, make_mlp
from octavo.ops.activation import sigmoid
from octavo.ops.moe import ExpertWeights, run_experts


class MoeMlp(Layer):
    """Routed experts beside shared ones, as `Moe` says: Qwen3's, DeepSeek-V2's and -V3's, LFM2's rules of choice.

    `activation`: as an MLP's; experts of one that is not gated have no gates. They may compute on fewer channels than
    the hidden state has.
    """

    correction: torch.Tensor | None  # [experts] float32, takes part in the choice only
    weights: tuple[ExpertWeights, ExpertWeights]  # of the two products, set by join
    record: torch.Tensor | None = None  # [tokens, experts_per_token] int16, where choices are copied to

    def __init__(self, size: int, moe: Moe, activation: str, dtype: torch.dtype, *, bias: bool = False) -> None:
        """`size`: of the hidden state; `bias`: on what every token meets, the routed experts have none."""
        super().__init__()
        self.router = Linear(size, moe.num_experts, dtype, quantize=False, out_dtype=torch.float32)
        inner = moe.latent_size or size
        self.experts = nn.ModuleList(
            make_mlp(inner, moe.expert_size, activation, dtype) for _ in range(moe.num_experts)
        )
        self.into = Linear(size, inner, dtype, bias=bias) if moe.latent_size else None
        self.back = Linear(inner, size, dtype, bias=bias) if moe.latent_size else None
        shared_size = moe.shared_size or moe.num_shared * moe.expert_size
        self.shared = make_mlp(size, shared_size, activation, dtype, bias=bias) if moe.num_shared else None
        self.shared_gate = Linear(size, 1, dtype, quantize=False, out_dtype=torch.float32) if moe.shared_gate else None
        if moe.corrected:
            self.declare("correction", (moe.num_experts,), torch.float32, dummy=0.0)
        else:
            self.correction = None
        self._moe = moe
        self._activation = activation

    def join(self) -> None:
        """Gather the experts' weights for the two products."""
        first = "up" if self._activation == "relu2" else "gate_up"
        products = ([getattr(mlp, name).packed for mlp in self.experts] for name in (first, "down"))
        gate_up, down = map(ExpertWeights, products)
        self.weights = gate_up, down

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights float32, expert ids int64), both [tokens, experts_per_token], best first."""
        return choose_experts(self.router.forward(x), self._moe, self.correction)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        weights, experts = self.route(x)
        if self.record is not None:
            self.record[: len(experts)].copy_(experts)
        taken = x if self.into is None else self.into.forward(x)
        total = sum_by_rank(run_experts(taken, experts, *self.weights, self._activation), weights)
        if self.back is not None:
            total = self.back.forward(total.to(x.dtype)).float()
        if self.shared is not None:
            shared = self.shared.forward(x)
            total += shared if self.shared_gate is None else sigmoid(self.shared_gate.forward(x)) * shared
        return total.to(x.dtype)


def make_network(index: int, arch: Arch, dtype: torch.dtype) -> Mlp | UngatedMlp | MoeMlp:
    """What stands in layer number `index` of `arch` for each token by itself: experts or an MLP."""
    if index in arch.moe_layers:
        assert arch.moe is not None, "layers with experts need their facts"
        return MoeMlp(arch.hidden_size, arch.moe, arch.activation, dtype, bias=arch.mlp_bias)
    return make_mlp(arch.hidden_size, arch.intermediate_size, arch.activation, dtype, bias=arch.mlp_bias)


def choose_experts(
    logits: torch.Tensor, moe: Moe, correction: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights float32, expert ids int64), both [tokens, experts_per_token], best first.

    logits: the router's, [tokens, experts] float32; correction: [experts] float32, of the choice alone.
    """
    scores = sigmoid(logits) if moe.scoring == "sigmoid" else logits.softmax(-1)
    choice = scores if correction is None else scores + correction
    if moe.num_groups > 1:
        choice = _within_best_groups(choice, moe)
    experts = choice.topk(moe.experts_per_token).indices
    weights = scores.gather(1, experts)
    if moe.norm_topk_prob:
        total = weights[:, :1].clone()
        for rank in range(1, moe.experts_per_token):  # a fixed order of summation
            total += weights[:, rank : rank + 1]
        weights = weights / (total + moe.added_to_sum if moe.added_to_sum else total)
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
