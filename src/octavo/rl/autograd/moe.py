"""moe: the sampler's routed experts, with gradients.

Owns the way back through each expert; the choice of experts and the sum by rank are plain torch operations on float32,
`octavo.ops.moe.routing`'s own. Invariant: a pair's bits depend on its token's row and its expert's weights only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.checkpoint.arch import Moe
from octavo.ops.activation import gated_activation
from octavo.ops.gemm import linear as linear_operator
from octavo.ops.moe import ExpertWeights, run_experts
from octavo.ops.moe.routing import choose_experts_reference, sum_by_rank
from octavo.rl.autograd.gated import gated_backward
from octavo.rl.autograd.linear import backward_input, backward_weight, linear
from octavo.rl.autograd.outside import apply, first_order
from octavo.rl.autograd.packed_weights import packed


def moe(
    x: Tensor,
    router: Tensor,
    gate_up: Tensor,
    down: Tensor,
    facts: Moe,
    activation: str = "silu",
    correction: Tensor | None = None,
    shared: Tensor | None = None,
) -> Tensor:
    """x [tokens, size] -> the same shape: each token's experts, weighted by the router and summed in order of rank.

    router: [experts, size]; gate_up: [experts, 2 * expert_size, size]; down: [experts, size, expert_size]; correction:
    [experts], of a rule that corrects the choice: it takes part in that alone, and has no gradient; shared: [tokens,
    size], what the experts that every token meets made of x. Raises ValueError where the rule needs one that is
    missing, or has no use for one.
    """
    for name, given, is_needed in (
        ("correction", correction, facts.corrected),
        ("shared", shared, facts.num_shared > 0),
    ):
        if is_needed != (given is not None):
            raise ValueError(f"octavo.rl.moe {'needs' if is_needed else 'has no use for'} {name} under {facts}")
    bias = None if correction is None else correction.detach().float()
    weights, experts = choose_experts_reference(linear(x, router, out_dtype=torch.float32), facts, bias)
    results: Tensor = apply(_Moe, x, experts, gate_up, down, activation)
    total = sum_by_rank(results.view(*weights.shape, -1), weights)
    return (total if shared is None else total + shared).to(x.dtype)


class _Moe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, experts: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(x, experts, gate_up, down)
        ctx.activation = activation
        first, last = (
            ExpertWeights([packed(each, x.dtype, expert) for expert in range(len(each))]) for each in (gate_up, down)
        )
        return run_experts(x.detach().contiguous(), experts, first, last, activation).flatten(0, 1)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, experts, gate_up, down = ctx.saved_tensors
        of_x = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        of_gate_up, of_down = torch.zeros_like(gate_up), torch.zeros_like(down)
        ranks, chosen = experts.shape[1], experts.flatten()
        for expert in range(len(gate_up)):
            pairs = (chosen == expert).nonzero().flatten()
            if not len(pairs):
                continue
            rows, own = x[pairs // ranks], grad[pairs]
            pre = linear_operator(rows, packed(gate_up, x.dtype, expert))
            inner = gated_activation(pre, ctx.activation)
            of_down[expert] = backward_weight(own, inner, down)
            of_pre = gated_backward(backward_input(own, down[expert], inner), pre, ctx.activation)
            of_gate_up[expert] = backward_weight(of_pre, rows, gate_up)
            of_x.index_add_(0, pairs // ranks, backward_input(of_pre, gate_up[expert], rows).float())
        return of_x.to(x.dtype), None, of_gate_up, of_down, None
