"""What a drafter's metadata says of lengths (criteria M5), and where its drafts may be written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from octavo.ops.inputs.tensors import RowTensors
from octavo.speculate.step import DraftStep, draft_max_seq_len


def step(bounds: list[int], *, totals: list[int] | None = None, sample_of: list[int] | None = None) -> DraftStep:
    count, width = len(bounds), 8
    totals_tensor = torch.tensor(totals or [0] * count, dtype=torch.int32)
    table = RowTensors(torch.zeros((count + 1, width), dtype=torch.int32), totals_tensor, totals_tensor)
    batch = SimpleNamespace(rows=torch.arange(count), seq_lens=totals_tensor, num_rows=count)
    return DraftStep(
        batch=cast(Any, batch),
        table=table,
        sample_of=torch.tensor(sample_of or [0] * count, dtype=torch.int32),
        taps=torch.empty((0, 0)),
        num_drafts=3,
        seq_lens=np.array(bounds),
    )


@pytest.mark.parametrize(
    ("longest", "num_drafts", "max_model_len", "bound"), [(17, 3, 1024, 20), (17, 3, 18, 18), (17, 1, 1024, 18)]
)
def test_S_4_M5_4_a_drafters_bound_is_the_steps_and_its_own_drafts(
    longest: int, num_drafts: int, max_model_len: int, bound: int
) -> None:
    """Of the step's own number of drafts, not of the configured one, and never beyond max_model_len."""
    assert draft_max_seq_len(longest, num_drafts, max_model_len) == bound


@pytest.mark.parametrize(
    ("base", "number", "max_model_len", "expected"),
    [
        ([100, 200, 300, 0], 2, 4096, [102, 202, 302, 0]),
        ([1023, 500], 3, 1024, [1024, 503]),
        ([0, 0], 1, 1024, [0, 0]),
    ],
)
def test_M5_8_each_row_has_a_bound_and_padding_none(
    base: list[int], number: int, max_model_len: int, expected: list[int]
) -> None:
    assert step(base).bounds(number, max_model_len).tolist() == expected


def test_drafts_are_written_behind_known_tokens_of_rows_that_sampled() -> None:
    """S.5: none behind the table's end, none for a chunk of a prompt, none for padding."""
    own = step([1] * 5, totals=[3, 7, 8, 2, 0], sample_of=[0, 1, 2, -1, 3])
    for place in range(2):
        own.write(place, torch.tensor([41, 42, 43, 44, 45]) + 100 * place)
    expected = torch.zeros((6, 8), dtype=torch.int32)
    expected[0, 3], expected[0, 4], expected[1, 7] = 41, 141, 42
    assert torch.equal(own.table.token_ids, expected)
