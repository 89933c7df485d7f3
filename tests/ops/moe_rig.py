"""Choices, products and sums of experts against the reference implementations, interpreted and on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import torch

from octavo.checkpoint.arch import Moe
from octavo.ops.activation.gpu import gated_activation
from octavo.ops.gemm import LinearWeight
from octavo.ops.moe import ExpertWeights, routing_gpu, sums_gpu
from octavo.ops.moe import gpu as moe
from octavo.ops.moe.routing import choose_experts_reference, sum_experts_reference

EXPERTS, SIZE, OUT = 5, 40, 70
CPU = torch.device("cpu")


def _world(tokens: int, ranks: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, SIZE, generator=generator).to(device, dtype)
    # no token's first choice is the last expert, so that one may be without pairs
    experts = torch.stack([torch.randperm(EXPERTS - 1, generator=generator)[:ranks] for _ in range(tokens)])
    weight = torch.randn(EXPERTS, OUT, SIZE, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    return x, experts.to(device), weight


def run(x: torch.Tensor, experts: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    kind = str(weight.dtype).removeprefix("torch.")
    weights = ExpertWeights([LinearWeight(OUT, SIZE, kind, part) for part in weight])
    groups = moe.group_pairs(experts, EXPERTS)
    options = {"pairs_per_row": experts.shape[1], "aligned": weights.aligned}
    return moe.grouped_linear(x, weights.addresses, weight[0], groups, **options)


def check_equals_one_product_per_pair(device: torch.device, dtype: torch.dtype) -> None:
    for tokens, ranks in ((1, 1), (1, 3), (7, 2), (40, 3)):
        x, experts, weight = _world(tokens, ranks, device, dtype)
        expected = torch.einsum("ts,trns->trn", x.float(), weight[experts].float()).flatten(0, 1)
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(run(x, experts, weight).float(), expected, atol=tolerance, rtol=1e-2)


def check_float32_rows_read_narrower_weights(device: torch.device, dtype: torch.dtype) -> None:
    """As a float32 run keeps the matrices of a bfloat16 checkpoint."""
    x, experts, weight = _world(7, 2, device, torch.bfloat16)
    assert torch.equal(run(x.float(), experts, weight), run(x.float(), experts, weight.float()))


def check_bits_of_a_token_alone(device: torch.device, dtype: torch.dtype) -> None:
    x, experts, weight = _world(12, 3, device, dtype)
    together = run(x, experts, weight).view(12, 3, OUT)
    alone = run(x[5:6], experts[5:6], weight)
    assert torch.equal(alone, together[5])


def check_an_expert_that_every_token_meets(device: torch.device, dtype: torch.dtype) -> None:
    """One rank more for all of them moves no other pair, and has the bits of a choice of that expert."""
    for tokens in (1, 9):
        x, experts, weight = _world(tokens, 3, device, dtype)
        joined = torch.cat((experts, torch.full_like(experts[:, :1], EXPERTS - 1)), 1)
        together = run(x, joined.int(), weight).view(tokens, 4, OUT)
        assert torch.equal(together[:, :3].flatten(0, 1), run(x, experts, weight))
        assert torch.equal(together[:, 3], run(x, joined[:, 3:].contiguous(), weight))


def check_every_tile_has_the_same_bits(device: torch.device, dtype: torch.dtype) -> None:
    """Also large ones that are half empty, or less."""
    x, experts, weight = _world(200, 3, device, dtype)
    weights = ExpertWeights([LinearWeight(OUT, SIZE, "", part) for part in weight])
    found = []
    for rows in (8, 16, 32, 64, 128):
        groups = moe.group_pairs(experts, EXPERTS, rows)
        options = {"pairs_per_row": 3, "aligned": weights.aligned}
        found.append(moe.grouped_linear(x, weights.addresses, weight[0], groups, **options))
    for each in found[1:]:
        assert torch.equal(each, found[0])


def check_tiles_hold_every_pair_once(device: torch.device, dtype: torch.dtype) -> None:
    """In order of expert and then of pair, whatever a tile's rows: also with more pairs than are looked at at once."""
    for tokens, ranks, experts, rows in (
        (1, 3, 7, 8),
        (5, 2, 7, 8),
        (40, 3, 7, 16),
        (300, 4, 11, 64),
        (1100, 2, 3, 8),
        (2100, 2, 3, 64),
    ):
        generator = torch.Generator().manual_seed(tokens)
        chosen = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :ranks].contiguous()
        chosen = chosen.where(chosen != experts // 2, experts - 1)  # one is without pairs
        for kind in (torch.int32, torch.int64):
            groups = moe.group_pairs(chosen.to(device, kind), experts, rows)
            flat, seen = chosen.flatten().tolist(), []
            if groups.direct:
                assert tokens == 1 and groups.slots == ranks
                continue
            assert groups.order.tolist() == chosen.flatten().argsort(stable=True).tolist()
            for expert, first, count in groups.tiles.tolist():
                assert 0 <= count <= rows
                pairs = groups.order[first : first + count].tolist() if count else []
                assert all(flat[pair] == expert for pair in pairs)
                seen += pairs
            assert seen == groups.order.tolist()


def check_gates_in_the_product(device: torch.device, dtype: torch.dtype) -> None:
    """The bits of the product and the activation behind it."""
    kind = torch.float16 if dtype == torch.float32 else dtype
    for tokens, rows, activation in ((1, 8, "silu"), (30, 8, "gelu_tanh"), (300, 64, "silu"), (300, 128, "silu")):
        x, experts, weight = _world(tokens, 2, device, kind)
        addresses = torch.tensor([part.data_ptr() for part in weight], device=device)
        groups = moe.group_pairs(experts, EXPERTS, rows)
        options = {"pairs_per_row": 2, "aligned": weight.data_ptr() % 16 == 0}
        plain = moe.grouped_linear(x, addresses, weight[0], groups, **options)
        gated = moe.grouped_linear(x, addresses, weight[0], groups, activation=activation, **options)
        assert torch.equal(gated, gated_activation(plain, tanh=activation == "gelu_tanh"))


RULES = {
    "softmax": Moe(num_experts=40, experts_per_token=6, expert_size=8),
    "few": Moe(num_experts=5, experts_per_token=2, expert_size=8, norm_topk_prob=False),
    "one": Moe(num_experts=16, experts_per_token=1, expert_size=8, scale=1.5),
    "groups": Moe(
        num_experts=30, experts_per_token=4, expert_size=8, num_groups=5, groups_kept=2, norm_topk_prob=False,
    ),
    "sigmoid": Moe(
        num_experts=64, experts_per_token=8, expert_size=8, scoring="sigmoid", corrected=True, num_groups=8,
        groups_kept=4, group_score=2, scale=2.5, added_to_sum=1e-20,
    ),
    "corrected": Moe(num_experts=32, experts_per_token=4, expert_size=8, scoring="sigmoid", corrected=True),
}  # fmt: skip


def _choices(
    device: torch.device, rule: Moe, logits: torch.Tensor, correction: torch.Tensor | None, *, shared: bool = False
) -> list[Any]:
    """(weights, experts) of the kernel and of the reference implementation."""
    kernel = routing_gpu.choose_experts(
        logits.to(device),
        correction if correction is None else correction.to(device),
        ranks=rule.experts_per_token,
        sigmoid=rule.scoring == "sigmoid",
        groups=(rule.num_groups, rule.groups_kept, rule.group_score),
        normed=rule.norm_topk_prob,
        added=rule.added_to_sum,
        scale=rule.scale,
        shared=shared,
    )
    correction = correction if correction is None else correction.to(device)
    return [kernel, choose_experts_reference(logits.to(device), rule, correction, shared=shared)]


def check_choice(device: torch.device, dtype: torch.dtype) -> None:
    """Of every family's rule; a GPU's has torch's bits."""
    for seed, rule in enumerate(RULES.values()):
        generator = torch.Generator().manual_seed(seed)
        tokens = 7 if device.type == "cpu" else 3000
        logits = torch.randn(tokens, rule.num_experts, generator=generator) * 3
        correction = torch.randn(rule.num_experts, generator=generator) if rule.corrected else None
        (weights, experts), (expected, chosen) = _choices(device, rule, logits, correction)
        assert torch.equal(experts.long(), chosen), rule
        if device.type == "cpu":
            torch.testing.assert_close(weights, expected, atol=1e-6, rtol=1e-5)
        else:
            assert torch.equal(weights, expected), rule
        again, joined = _choices(device, rule, logits, correction, shared=True)[0]
        assert torch.equal(again, weights) and torch.equal(joined[:, :-1], experts)
        assert torch.equal(joined[:, -1], torch.full_like(joined[:, -1], rule.num_experts))


def check_choice_of_equal_scores(device: torch.device, dtype: torch.dtype) -> None:
    """As torch's topk has it on a GPU: which are chosen, and in which order they are summed."""
    for seed, ranks in enumerate((1, 2, 3, 8, 10, 32)):
        rule = Moe(num_experts=48, experts_per_token=ranks, expert_size=8)
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randint(0, 6, (6 if device.type == "cpu" else 500, 48), generator=generator).float()
        logits[0] = 0.0
        (weights, experts), (expected, chosen) = _choices(device, rule, logits, None)
        assert experts[:6].tolist() == [_topk(row, ranks) for row in logits[:6].tolist()], ranks
        if device.type == "cuda":
            assert torch.equal(experts.long(), chosen) and torch.equal(weights, expected), ranks


def _topk(scores: list[float], ranks: int) -> list[int]:
    """torch's on a GPU, by its rule: what is above the least chosen by id, then the least; then a bitonic network."""
    least = sorted(scores)[-ranks]
    chosen = [i for i, score in enumerate(scores) if score > least]
    chosen += [i for i, score in enumerate(scores) if score == least][: ranks - len(chosen)]
    if ranks == 1:
        return chosen
    places: list[int | None] = [*chosen, *[None] * (32 - ranks)]
    for size in (2, 4, 8, 16, 32):
        stride = size // 2
        while stride:
            for at in range(32):
                if not at & stride:
                    one, two = places[at], places[at + stride]
                    ordered = two is None or (one is not None and scores[one] > scores[two])
                    if ordered == (size < 32 and at & size != 0):
                        places[at], places[at + stride] = two, one
            stride //= 2
    return [place for place in places if place is not None]


def check_sums(device: torch.device, dtype: torch.dtype) -> None:
    """By rank, with what every token meets, gated or not, and of one result alone."""
    generator = torch.Generator().manual_seed(3)
    for tokens, ranks, size in ((1, 1, 5), (6, 3, 1030)):
        results = torch.randn(tokens * ranks, size, generator=generator).to(device, dtype)
        weights = torch.rand(tokens, ranks, generator=generator).to(device)
        shared = torch.randn(tokens, size + 3, generator=generator).to(device, dtype)[:, :size]
        gate = torch.randn(tokens, 1, generator=generator).to(device)
        whole, by_token = results[:tokens, None], results.view(tokens, ranks, size)
        joined = torch.randn(tokens, ranks + 1, size, generator=generator).to(device, dtype)
        for operands in (
            (by_token, weights, None, None),
            (by_token, weights, shared, None),
            (by_token, weights, shared, gate),
            (joined[:, :ranks], weights, joined[:, ranks], gate),
            (whole, None, None, None),
            (whole, None, shared, gate),
        ):
            total = sums_gpu.sum_experts(*operands, dtype)
            expected = sum_experts_reference(*operands, dtype)
            if device.type == "cpu" and operands[3] is not None:
                torch.testing.assert_close(total, expected, atol=1e-6, rtol=1e-5)
            else:
                assert torch.equal(total, expected)


CHECKS = {name: check for name, check in list(globals().items()) if name.startswith("check_")}
INTERPRETED = {name: functools.partial(check, CPU, torch.float32) for name, check in CHECKS.items()}
