"""Gated feed-forward experts: each (token, rank) pair runs through the expert that the router gave it.

Owns the grouping of pairs by expert. The products are `octavo.ops.gemm.linear`'s chain over K in order, so their
arithmetic is stated there. Does not know routers or how a token's experts are summed. Invariant: a pair's bits depend
on its token's row and its expert's weights only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.ops.activation import activate
from octavo.ops.gemm import LinearWeight, linear


class ExpertWeights:
    """One product's weights of all experts, of one shape and dtype."""

    def __init__(self, weights: Sequence[LinearWeight]) -> None:
        """The weights stay where they are."""
        self.weights = tuple(weights)
        first = self.weights[0]
        self.n, self.k = first.n, first.k
        assert all((weight.n, weight.k) == (self.n, self.k) for weight in self.weights), "experts are of one shape"
        addresses = [weight.storage.data_ptr() for weight in self.weights]
        self.aligned = not any(address % 16 for address in addresses)  # so that 16 bytes are read at once
        # what a GPU's kernel reads: [experts] int64
        self.addresses = torch.tensor(addresses, device="cpu")
        if first.storage.is_cuda:
            self.addresses = self.addresses.pin_memory().to(first.storage.device, non_blocking=True)


def run_experts(
    x: torch.Tensor, experts: torch.Tensor, gate_up: ExpertWeights, down: ExpertWeights, activation: str
) -> torch.Tensor:
    """x [tokens, size], experts [tokens, ranks] int64 or int32 -> [tokens, ranks, size]: down(act(gate) * up) of each.

    activation: as `octavo.ops.activation.activate`'s; of one that is not gated, `gate_up` is `up` alone.
    """
    if x.is_cuda:
        from octavo.ops.moe import gpu as moe  # needs triton

        first, last = gate_up.weights[0].storage, down.weights[0].storage
        assert x.dtype in (first.dtype, torch.float32) and x.shape[1] == gate_up.k, "rows as the weights take them"
        groups, ranks = moe.group_pairs(experts, len(gate_up.weights), dtype=x.dtype), experts.shape[1]
        gated = activation if moe.serves_gate(x, activation) else ""
        inner = moe.grouped_linear(
            x, gate_up.addresses, first, groups, pairs_per_row=ranks, activation=gated, aligned=gate_up.aligned
        )
        if not gated:
            inner = activate(inner, activation)
        results = moe.grouped_linear(inner, down.addresses, last, groups, pairs_per_row=1, aligned=down.aligned)
        return results.view(*experts.shape, down.n)
    return run_experts_reference(x, experts, gate_up, down, activation)


def run_experts_reference(
    x: torch.Tensor, experts: torch.Tensor, gate_up: ExpertWeights, down: ExpertWeights, activation: str
) -> torch.Tensor:
    """The reference implementation of `run_experts`: expert by expert, on any device, waiting for it."""
    ranks = experts.shape[1]
    pairs = experts.flatten().argsort(stable=True)  # (token, rank) pairs, one expert's beside each other
    counts = experts.flatten().bincount(minlength=len(gate_up.weights)).tolist()
    results = x.new_empty(x.shape[0] * ranks, down.n)  # [pair, size]
    start = 0
    for expert, count in enumerate(counts):
        if count:
            chosen = pairs[start : start + count]
            inner = activate(linear(x[chosen // ranks], gate_up.weights[expert]), activation)
            results[chosen] = linear(inner, down.weights[expert])
            start += count
    return results.view(*experts.shape, down.n)
