"""Mixture of experts: a router picks a few of many feed-forward networks per token.

Owns the parts that a token meets; `octavo.ops.moe` chooses experts, runs them and sums them up. Does not know batches.
Invariant: a token's result depends on its own row only: its experts are summed in order of rank, then the
shared ones, in float32, whatever other tokens share them. Scores are float32.
"""

from __future__ import annotations

import torch
from torch import nn

from octavo.checkpoint.arch import Arch, Moe
from octavo.layers.base import Layer
from octavo.layers.linear import Linear
from octavo.layers.mlp import Mlp, UngatedMlp, make_mlp
from octavo.ops.moe import ExpertWeights, run_experts
from octavo.ops.moe.routing import choose_experts, sum_experts

_MAX_JOINED = 16  # tokens of a step whose shared experts run as one expert more


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
        """Gather the experts' weights for the two products; behind them what every token meets, if it is like them."""
        first = "up" if self._activation == "relu2" else "gate_up"
        alike = [*self.experts, *([self.shared] if self._is_expert(self.shared, first) else [])]
        products = ([getattr(mlp, name).packed for mlp in alike] for name in (first, "down"))
        gate_up, down = map(ExpertWeights, products)
        self.weights = gate_up, down

    def _is_expert(self, shared: torch.nn.Module | None, first: str) -> bool:
        """Whether what every token meets has the experts' shape and type, and no bias."""
        if shared is None or self.into is not None:
            return False
        for name in (first, "down"):
            own, other = getattr(shared, name), getattr(self.experts[0], name).packed
            if own.bias is not None or (own.packed.n, own.packed.k, own.packed.kind) != (other.n, other.k, other.kind):
                return False
        return True

    def route(self, x: torch.Tensor, *, shared: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights float32, expert ids), both [tokens, experts_per_token], best first.

        shared: ids have one more rank, for what every token meets.
        """
        return choose_experts(self.router.forward(x), self._moe, self.correction, shared=shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        # few rows on a GPU: an expert more is free, two launches are not
        joins = x.is_cuda and len(x) <= _MAX_JOINED and len(self.weights[0].weights) > len(self.experts)
        weights, experts = self.route(x, shared=joins)
        ranks = self._moe.experts_per_token
        if self.record is not None:
            self.record[: len(experts)].copy_(experts[:, :ranks])
        taken = x if self.into is None else self.into.forward(x)
        results = run_experts(taken, experts, *self.weights, self._activation)
        gate = None if self.shared_gate is None else self.shared_gate.forward(x)
        if joins:
            return sum_experts(results[:, :ranks], weights, results[:, ranks], gate, x.dtype)
        shared = None if self.shared is None else self.shared.forward(x)
        if self.back is None:
            return sum_experts(results, weights, shared, gate, x.dtype)
        whole = self.back.forward(sum_experts(results, weights, None, None, x.dtype))
        return whole if shared is None else sum_experts(whole[:, None], None, shared, gate, x.dtype)


def make_network(index: int, arch: Arch, dtype: torch.dtype) -> Mlp | UngatedMlp | MoeMlp:
    """What stands in layer number `index` of `arch` for each token by itself: experts or an MLP."""
    if index in arch.moe_layers:
        assert arch.moe is not None, "layers with experts need their facts"
        return MoeMlp(arch.hidden_size, arch.moe, arch.activation, dtype, bias=arch.mlp_bias)
    return make_mlp(arch.hidden_size, arch.intermediate_size, arch.activation, dtype, bias=arch.mlp_bias)
