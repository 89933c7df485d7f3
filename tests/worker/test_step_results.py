"""What a step with drafts gave, of what the device wrote."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.sampling.grammar import HELD
from octavo.sampling.sampler import FAILURES
from octavo.worker.results import PendingStep, Runs

ROWS = np.array([7, 2, 5])


def give(lines: list[list[int]], counts: list[int], entries: list[int]) -> PendingStep:
    entries_np = np.array(entries)
    runs = Runs(entries_np, torch.tensor([*counts, 99, 99]), np.full(len(lines), 2))
    return PendingStep(3, torch.tensor(lines), ROWS[entries_np], runs=runs)


@pytest.mark.parametrize("entries", [[0, 1, 2], [0, 2]], ids=["all rows sample", "some do"])
@pytest.mark.parametrize(
    ("reason", "count", "failed"),
    [(0, 2, False), (1, 2, True), (1, 1, False), (HELD, 1, False), (HELD, 0, False)],
    ids=["sound", "the last one fails", "one that does not count fails", "held behind a draft", "held"],
)
def test_the_last_token_that_counts_tells_whether_the_row_failed(
    reason: int, count: int, failed: bool, entries: list[int]
) -> None:
    place = max(count - 1, 0) if reason == HELD and not count else 1
    lines = [[11, 12, 13], [21, 22, 23], [31, 32, 33]]
    lines[2][place] |= reason << 32
    result = give(lines, [3, 1, count], entries).result()
    assert result.rows.tolist() == ROWS[entries].tolist()
    assert result.num_sampled.tolist() == np.array([3, 1, count])[entries].tolist()
    for line, own, num in zip(result.tokens.tolist(), entries, result.num_sampled.tolist(), strict=True):
        assert line[:num] == [10 * (own + 1) + 1, 10 * (own + 1) + 2, 10 * (own + 1) + 3][:num]
    assert result.failed == ({5: FAILURES[reason]} if failed else {})
    assert result.held.tolist() == [5] * (reason == HELD), "the one that a mask held, before it might have failed"


def test_results_hold_when_the_device_writes_the_next_step() -> None:
    packed, counts = torch.full((2, 3), 4), torch.tensor([2, 3])
    pending = PendingStep(1, packed, ROWS[:2], runs=Runs(np.arange(2), counts, np.full(2, 2)))
    result = pending.result()
    packed.fill_(9)
    counts.fill_(1)
    assert result.tokens.tolist() == [[4] * 3] * 2 and result.num_sampled.tolist() == [2, 3]
