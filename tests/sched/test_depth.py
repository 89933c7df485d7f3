"""How many drafts a row verifies: few where few are accepted, fewer where many rows run."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from octavo.plan import StepLimits, StepResult
from octavo.request.request import RequestRows
from octavo.sched.drafts import Drafting
from octavo.sched.drafts.depth import Depth

ROWS = np.array([0, 1])


def make(num_drafts: int = 4, cheap_tokens: int = 48) -> Depth:
    return Depth(
        StepLimits(max_num_rows=8, max_num_tokens=64, max_model_len=64, max_num_drafts=num_drafts), cheap_tokens
    )


def test_a_row_goes_as_deep_as_its_drafts_are_good() -> None:
    """One whose drafts are all accepted goes to the end, one whose are all rejected stops, and tries again at times."""
    depth = make()
    for _ in range(20):
        depth.learn(ROWS, np.array([4, 4]), np.array([4, 0]))
    assert depth.of_rows(ROWS, 4, 2).tolist() == [4, 0]
    assert tries(depth, ROWS, 254)[1] == [32, 64, 128], "one draft after 32 steps, and then more rarely"
    depth.of_next(2)
    assert depth.of_rows(ROWS, 4, 2).tolist() == [4, 1], "step 256"
    depth.learn(ROWS[1:], np.array([1]), np.array([1]))
    assert depth.of_rows(ROWS, 4, 2).tolist() == [4, 4], "it begins anew"


def test_a_batch_in_which_nobody_has_drafts_pauses() -> None:
    """Nothing is proposed until the rows try again, all in the same step; who enters, or is right, ends the pause."""
    depth = make()
    for _ in range(20):
        depth.learn(ROWS, np.array([4, 4]), np.array([0, 0]))
    assert depth.num_paused(2) == 0
    assert depth.of_rows(ROWS, 4, 2).tolist() == [0, 0]
    assert depth.num_paused(2) == 29, "steps 2 to 30: behind step 31 drafts are proposed"
    assert [depth.of_next(2) for _ in range(31)] == [0] * 30 + [4]
    assert depth.of_rows(ROWS, 4, 2).tolist() == [1, 1]
    depth.of_next(2)
    assert depth.of_rows(ROWS, 4, 2).tolist() == [0, 0]
    depth.learn(ROWS, np.array([1, 1]), np.array([0, 1]))
    assert depth.of_next(2) == 4
    assert depth.of_rows(ROWS, 4, 2).tolist() == [0, 4]
    depth.learn(ROWS[1:], np.array([4]), np.array([0]))
    assert depth.of_rows(ROWS[:1], 4, 1).tolist() == [0]
    assert not depth.of_next(1)
    depth.clear(ROWS[1:])
    assert depth.of_next(2) == 4


def test_a_wrong_try_leaves_the_pause_behind_it() -> None:
    """Its result comes while the next step is planned."""
    depth = make()
    for _ in range(20):
        depth.learn(ROWS, np.array([4, 4]), np.array([0, 0]))
    for _ in range(31):
        depth.of_next(2)
    assert depth.of_rows(ROWS, 4, 2).tolist() == [1, 1]
    assert depth.of_next(2) == 4
    assert depth.of_rows(ROWS, 4, 2).tolist() == [0, 0]
    depth.learn(ROWS, np.array([1, 1]), np.array([0, 0]))
    assert depth.of_next(2) == 0


def test_a_row_that_is_not_asked_is_not_paused() -> None:
    depth = make()
    for _ in range(20):
        depth.learn(ROWS, np.array([4, 4]), np.array([4, 0]))
    depth.of_next(2)
    assert depth.of_rows(ROWS[1:], 4, 2).tolist() == [0]
    assert depth.of_next(2) == 4


def test_a_try_that_was_not_judged_is_not_counted() -> None:
    """The step's budget, or a mask that is late, may have taken it: the row tries again in the next such step."""
    depth = make()
    for _ in range(20):
        depth.learn(ROWS, np.array([4, 4]), np.array([0, 0]))
    found = []
    for step in range(2, 97):
        if depth.of_next(2) and depth.of_rows(ROWS, 4, 2)[1]:
            found.append(step)
            depth.learn(ROWS[:1], np.array([1]), np.array([0]))
    assert found == [32, 64, 96]


def tries(depth: Depth, rows: np.ndarray, num_steps: int) -> list[list[int]]:
    """[rows]: in which of the steps to come each has one draft, which is wrong."""
    found: list[list[int]] = [[] for _ in rows]
    for step in range(1, num_steps + 1):
        if depth.of_next(len(rows)):
            one = (depth.of_rows(rows, 4, len(rows)) == 1).nonzero()[0]
            depth.learn(rows[one], np.ones_like(one), np.zeros_like(one))
            for number in one.tolist():
                found[number].append(step + 1)
    return found


@pytest.mark.parametrize(("num_rows", "most"), [(1, 4), (9, 4), (10, 3), (16, 2), (24, 1), (25, 0), (1000, 0)])
def test_a_batch_has_no_more_tokens_than_are_cheap(num_rows: int, most: int) -> None:
    assert make().of_batch(num_rows) == most
    assert make(cheap_tokens=0).of_batch(num_rows) == 4, "as the settings say"


def test_a_draft_of_many_rows_must_be_better() -> None:
    depth = make(num_drafts=8)
    for _ in range(50):
        depth.learn(ROWS, np.array([1, 1]), np.array([1, 0]))
        depth.learn(ROWS, np.array([1, 1]), np.array([0, 1]))
    alone, among_many = (depth.of_rows(ROWS, 8, count)[0] for count in (1, 40))
    assert alone > among_many >= 0


def test_who_enters_a_row_begins_anew() -> None:
    depth = make()
    for _ in range(20):
        depth.learn(ROWS, np.array([4, 4]), np.array([0, 0]))
    depth.clear(ROWS[:1])
    assert depth.of_rows(ROWS, 4, 1).tolist() == [4, 0]


def verified(rows: np.ndarray, num_sampled: list[int], **fields: Any) -> StepResult:
    """Of a step in which each row had 4 drafts."""
    return StepResult(
        step=0, rows=rows, tokens=np.zeros((len(rows), 5), np.int64), num_sampled=np.array(num_sampled), **fields
    )


@pytest.mark.parametrize(
    ("num_accepted", "lookahead", "is_said"), [(0, 4, True), (1, 4, False), (0, 0, False)], ids=["wrong", "", "n-grams"]
)
def test_a_drafter_whose_drafts_are_hardly_ever_right_is_told_once(
    num_accepted: int, lookahead: int, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"max_num_rows": 8, "max_num_tokens": 64, "max_model_len": 64}
    limits = StepLimits(max_num_drafts=4, num_lookahead=lookahead, **sizes)
    drafting = Drafting(limits, cast(Any, None), RequestRows(8, 5), cheap_tokens=0)
    plan: Any = SimpleNamespace(rows=ROWS, num_drafts=np.array([4, 4]))
    result = verified(ROWS, [1 + num_accepted, 1])
    with caplog.at_level(logging.WARNING, "octavo"):
        for _ in range(63):
            drafting.take_back_rejected(plan, result, {})
        assert not caplog.messages, "126 runs of 4 drafts are too few to judge by"
        for _ in range(30):
            drafting.take_back_rejected(plan, result, {})
    said = [line for line in caplog.messages if "of the first 128 runs of drafts 0 had one that was accepted" in line]
    assert len(said) == len(caplog.messages) == is_said


def test_drafts_behind_a_late_mask_are_neither_counted_nor_learned() -> None:
    """Two rows of 4 drafts: one was held behind two right ones, the other at once; a third rejects its second."""
    rows = np.array([0, 1, 2])
    limits = StepLimits(max_num_rows=8, max_num_tokens=64, max_model_len=64, max_num_drafts=4)
    drafting = Drafting(limits, cast(Any, None), RequestRows(8, 5), cheap_tokens=40)
    plan: Any = SimpleNamespace(rows=rows, num_drafts=np.array([4, 4, 4]))
    result = verified(rows, [2, 0, 2], held=rows[:2])
    for _ in range(40):
        drafting.take_back_rejected(plan, result, {})
    stats = drafting.stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (80, 40 * (2 + 4), 40 * (2 + 1))
    assert stats.accepted_per_position == [80, 40, 0, 0]
    right, unknown, half = drafting.depth.of_rows(rows, 4, 8).tolist()
    assert right == unknown == 4 > half, "who was held is as good as new, or as its right drafts say"


@pytest.mark.parametrize(
    ("result", "counts"),
    [
        (verified(ROWS, [2, 3], failed={1: "nan_logits"}), (2, 4 + 2, 1 + 2)),
        (StepResult(step=0, rows=ROWS, tokens=np.zeros((2, 1), np.int64), num_sampled=np.array([1, 1])), (0, 0, 0)),
    ],
    ids=["behind a failure", "taken away, as an attention mod failed"],
)
def test_drafts_that_were_not_judged_are_not_counted_as_rejected(
    result: StepResult, counts: tuple[int, int, int]
) -> None:
    """Two rows of 4 drafts. What the plan counted as computed is taken back in any case."""
    limits = StepLimits(max_num_rows=8, max_num_tokens=64, max_model_len=64, max_num_drafts=4)
    rows = RequestRows(8, 5)
    drafting = Drafting(limits, cast(Any, None), rows, cheap_tokens=40)
    rows.num_known[ROWS] = 20
    plan: Any = SimpleNamespace(rows=ROWS, num_drafts=np.array([4, 4]))
    drafting.take_back_rejected(plan, result, {})
    stats = drafting.stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == counts
    assert rows.num_known[ROWS].tolist() == (20 - 5 + result.num_sampled).tolist()
