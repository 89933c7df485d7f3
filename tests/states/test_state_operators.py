"""Operators of layers with states: against recurrences in float64, and one row's bits in every cut, batch and place."""

from __future__ import annotations

import random

import pytest
import torch

import state_rig as rig
from octavo.states.base import StateBackend
from octavo.states.reference import ReferenceStates

BACKENDS: list[StateBackend] = [ReferenceStates()]
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 150)

each_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
each_case = pytest.mark.parametrize("name", list(rig.CASES))


@each_backend
@each_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_its_results_are_those_of_a_recurrence_in_float64(backend: StateBackend, name: str, dtype: torch.dtype) -> None:
    case = rig.CASES[name](dtype)
    drawn = rig.draw_all(case, LENGTHS)
    for found, own in zip(rig.alone(case, backend, drawn), drawn, strict=True):
        expected = case.oracle(own)
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert error < (2e-6 if dtype is torch.float32 else 2e-2), (len(expected), error)


@each_backend
@each_case
def test_H_8_a_row_has_the_same_bits_in_any_cut_and_batch(backend: StateBackend, name: str) -> None:
    """Cut anywhere, among other rows in any order, with rejected tokens behind, over other blocks."""
    case = rig.CASES[name]()
    drawn = rig.draw_all(case, LENGTHS)
    expected = rig.alone(case, backend, drawn)
    rng = random.Random(5)
    for largest, spoilt, options in ((1, 0, {}), (7, 3, {}), (64, 0, {"block_size": 32}), (100, 2, {})):
        beside = [rig.ATTENTION] * rng.randrange(3)
        rows = rig.Rows(case, backend, drawn, beside=beside, seed=largest, **options)
        while left := [row for row, count in enumerate(LENGTHS) if rows.computed[row] < count]:
            chosen = rng.sample(left, rng.randint(1, len(left)))
            counts = {row: min(rng.randint(1, largest), LENGTHS[row] - rows.computed[row]) for row in chosen}
            rows.compute(counts, spoilt)
        for row, (found, own) in enumerate(zip(rows.results, expected, strict=True)):
            assert torch.equal(found, own), (LENGTHS[row], largest, spoilt)
