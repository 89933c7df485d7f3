"""Which experts a token meets, with which weights, and their sum.

Owns the rules of choice and the order of the sums. Does not know products. Invariant: a token's choice follows from its
own scores only, and its experts are summed in order of rank, then what every token meets, in float32.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from octavo.ops import native
from octavo.ops.activation import sigmoid

native.declare("octavo_softmax", [native.PTR, native.I64, native.PTR, native.I64, native.I64])


class Rule(Protocol):
    """How a router's logits become a choice: `octavo.checkpoint.arch.Moe`, where each is explained."""

    @property
    def experts_per_token(self) -> int:
        """How many are chosen."""

    @property
    def norm_topk_prob(self) -> bool:
        """Whether a token's weights are divided by their sum."""

    @property
    def scoring(self) -> str:
        """softmax | sigmoid."""

    @property
    def num_groups(self) -> int:
        """Of experts; 1: they are chosen among all."""

    @property
    def groups_kept(self) -> int:
        """Of a token."""

    @property
    def group_score(self) -> int:
        """How many of its best experts' sum a group is as good as."""

    @property
    def scale(self) -> float:
        """Of the weights."""

    @property
    def added_to_sum(self) -> float:
        """To the sum that weights are divided by."""


def choose_experts(
    logits: Tensor, rule: Rule, correction: Tensor | None = None, *, shared: bool = False
) -> tuple[Tensor, Tensor]:
    """(weights float32, expert ids), both [tokens, experts_per_token], best first; ids are int64, on a GPU int32.

    logits: the router's, [tokens, experts] float32; correction: [experts] float32, of the choice alone.
    shared: the ids have one more rank, of the expert behind the others, which every token meets. There is no gradient.
    """
    if logits.is_cuda:
        from octavo.ops.moe import routing_gpu  # needs triton

        if routing_gpu.serves(logits.shape[1], rule.experts_per_token + shared):
            return routing_gpu.choose_experts(
                logits,
                correction,
                ranks=rule.experts_per_token,
                sigmoid=rule.scoring == "sigmoid",
                groups=(rule.num_groups, rule.groups_kept, rule.group_score),
                normed=rule.norm_topk_prob,
                added=rule.added_to_sum,
                scale=rule.scale,
                shared=shared,
            )
    return choose_experts_reference(logits, rule, correction, shared=shared)


def softmax(logits: Tensor) -> Tensor:
    """Of rows, [tokens, experts], with gradients. Compiled, it has torch's bits with AVX-512 on every processor.

    torch's own order of sums follows the width of the processor's vectors.
    """
    lib = native.lib() if logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.numel() else None
    if not lib:
        return logits.softmax(-1)
    rows = logits.detach() if logits.stride(1) == 1 else logits.detach().contiguous()
    # a gradient needs torch's own function, which keeps its result: that is then overwritten
    scores = logits.softmax(-1) if logits.requires_grad else torch.empty(logits.shape, dtype=logits.dtype, device="cpu")
    lib.octavo_softmax(rows.data_ptr(), rows.stride(0), scores.data_ptr(), *logits.shape)
    return scores


def choose_experts_reference(
    logits: Tensor, rule: Rule, correction: Tensor | None = None, *, shared: bool = False
) -> tuple[Tensor, Tensor]:
    """The reference implementation of `choose_experts`, with gradients; ids are int64."""
    scores = sigmoid(logits) if rule.scoring == "sigmoid" else softmax(logits)
    choice = scores if correction is None else scores + correction
    if rule.num_groups > 1:
        choice = _within_best_groups(choice, rule)
    experts = choice.topk(rule.experts_per_token).indices
    weights = scores.gather(1, experts)
    if rule.norm_topk_prob:
        total = weights[:, :1].clone()
        for rank in range(1, rule.experts_per_token):  # a fixed order of summation
            total += weights[:, rank : rank + 1]
        weights = weights / (total + rule.added_to_sum if rule.added_to_sum else total)
    if shared:
        experts = torch.cat((experts, experts.new_full((len(experts), 1), logits.shape[1])), 1)
    return weights * rule.scale, experts


def sum_experts(
    results: Tensor, weights: Tensor | None, shared: Tensor | None, gate: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """results [tokens, ranks, size], weights [tokens, ranks] float32 -> [tokens, size] of `dtype`, rounded once.

    weights None: one rank, as it is. shared: [tokens, size], what every token meets, or None; gate: the
    logits of its weight, [tokens, 1] float32, or None. Has no gradient.
    """
    if results.is_cuda:
        from octavo.ops.moe import sums_gpu  # needs triton

        return sums_gpu.sum_experts(results, weights, shared, gate, dtype)
    return sum_experts_reference(results, weights, shared, gate, dtype)


def sum_experts_reference(
    results: Tensor, weights: Tensor | None, shared: Tensor | None, gate: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """The reference implementation of `sum_experts`, the same bits."""
    total = results[:, 0].float() if weights is None else sum_by_rank(results, weights)
    if shared is not None:
        total = total + (shared if gate is None else sigmoid(gate) * shared)
    return total.to(dtype)


def sum_by_rank(results: Tensor, weights: Tensor) -> Tensor:
    """results [tokens, ranks, size], weights [tokens, ranks] float32 -> [tokens, size] float32, in order of rank."""
    total = results[:, 0] * weights[:, :1]
    for rank in range(1, weights.shape[1]):
        total += results[:, rank] * weights[:, rank : rank + 1]
    return total


def _within_best_groups(choice: Tensor, rule: Rule) -> Tensor:
    """`choice` [tokens, experts] with -inf for all experts outside the token's best groups."""
    groups = choice.unflatten(1, (rule.num_groups, -1))
    best = groups.topk(rule.group_score, dim=-1).values
    value = best[..., 0]
    for place in range(1, rule.group_score):
        value = value + best[..., place]
    kept = torch.zeros_like(value, dtype=torch.bool).scatter_(1, value.topk(rule.groups_kept).indices, True)
    return groups.masked_fill(~kept[..., None], float("-inf")).flatten(1)
