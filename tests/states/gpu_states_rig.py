"""The Triton operators of layers with states against recurrences in float64: on a GPU, or interpreted."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

import state_rig as rig
from octavo.states.gpu import GpuStates

MAKERS = rig.CASES


def check_results(
    device: str, name: str, dtype: torch.dtype, lengths: Sequence[int], largest: int, sizes: tuple[int, ...] = ()
) -> None:
    """In steps of at most `largest` tokens of random rows, with rejected tokens behind."""
    case = MAKERS[name](dtype, *sizes)
    drawn = rig.draw_all(case, lengths)
    move(case, device)
    rows = rig.Rows(case, GpuStates(), drawn, beside=[rig.ATTENTION], device=device)
    rng = random.Random(3)
    while left := [row for row, count in enumerate(lengths) if rows.computed[row] < count]:
        chosen = rng.sample(left, rng.randint(1, len(left)))
        rows.compute({row: min(rng.randint(1, largest), lengths[row] - rows.computed[row]) for row in chosen}, 2)
    move(case, "cpu")
    for found, own in zip(rows.results, drawn, strict=True):
        expected = case.oracle(own)
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert error < (3e-5 if dtype is torch.float32 else 3e-2), (name, len(expected), error)


def move(case: rig.Case, device: str) -> None:
    """The operands' weights."""
    operands = case.part.operands
    moved = [each.to(device) if isinstance(each, torch.Tensor) else each for each in operands]
    case.part.__dict__["operands"] = type(operands)(*moved)


def interpreted(name: str) -> None:
    check_results("cpu", name, torch.float32, (1, 17, 70, 140), 80 if name != "mamba1" else 20)


INTERPRETED = {name: lambda name=name: interpreted(name) for name in MAKERS}
