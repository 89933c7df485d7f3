"""Grouped products against the loop over experts, under Triton's interpreter and, from tests/gpu, on a GPU."""

from __future__ import annotations

import functools

import torch

from octavo.ops.gemm import LinearWeight
from octavo.ops.moe import ExpertWeights
from octavo.ops.moe import gpu as moe

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
    return moe.grouped_linear(x, weights.addresses, weight[0], groups, pairs_per_row=experts.shape[1])


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


CHECKS = {name: check for name, check in list(globals().items()) if name.startswith("check_")}
INTERPRETED = {name: functools.partial(check, CPU, torch.float32) for name, check in CHECKS.items()}
