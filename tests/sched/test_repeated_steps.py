"""Steps in which every row goes on as before: what is kept of the last one changes no plan and no token."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from octavo.request.request import NUM_RECENT, Request, RequestRows
from octavo.request.sampling_params import SamplingParams
from sched_harness import Driver, full, make_request, make_scheduler
from step_words import blocks_by_row

BLOCK = 16


def make_driver(**options: object) -> Driver:
    groups = (full(BLOCK),)
    scheduler = make_scheduler(groups, max_model_len=256, max_num_batched_tokens=128, **options)
    driver = Driver(scheduler, groups)
    driver.add(
        *(make_request(list(range(5, 8 + row)), 150 + 7 * row, coalesce_updates=row % 2 == 0) for row in range(6))
    )
    return driver


@pytest.mark.parametrize("depth", [0, 1], ids=["alone", "one in flight"])
@pytest.mark.parametrize(("num_drafts", "lookahead"), [(0, 0), (1, 3), (4, 0), (4, 3)])
def test_a_repeated_step_is_planned_as_a_closer_look_would(
    num_drafts: int, lookahead: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, slow = (make_driver(num_drafts=num_drafts, num_lookahead=lookahead) for _ in range(2))
    monkeypatch.setattr(slow.scheduler, "_repeat", lambda work: False)
    rng, num_repeated = random.Random(3), 0
    while quick.scheduler.has_work or quick.in_flight:
        if rng.random() < 0.1:
            quick.worker.hold_next = slow.worker.hold_next = rng.randint(1, 3)
        before = quick.plans[-1] if quick.plans else None
        plan, other = quick.step(depth), slow.step(depth)
        for name in ("rows", "num_tokens", "num_drafts", "computed"):
            assert np.array_equal(getattr(plan, name), getattr(other, name)), name
        assert [*map(blocks_by_row, plan.new_blocks)] == [*map(blocks_by_row, other.new_blocks)]
        num_repeated += before is not None and plan.has_work and plan.num_tokens is before.num_tokens
    quick.audit_idle()
    slow.audit_idle()
    assert num_repeated > 10
    told, expected = ([driver.output(request) for request in driver.requests.values()] for driver in (quick, slow))
    assert told == expected and min(map(len, told)) >= 150
    stats = quick.scheduler.drafting.stats
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (quick.worker.num_drafted, quick.worker.num_accepted)
    assert stats == slow.scheduler.drafting.stats and sum(stats.accepted_per_position) == stats.num_accepted_tokens
    assert len(stats.accepted_per_position) == num_drafts and (stats.num_drafts > 100) == (num_drafts > 0)


def test_rows_that_verify_as_many_drafts_again_keep_their_arrays() -> None:
    """So a worker lays out and stages nothing anew. What they have computed is told in each plan."""
    driver = make_driver(num_drafts=4)
    plans = [driver.step(1) for _ in range(12)][4:]
    for name in ("rows", "num_tokens", "num_drafts"):
        assert len({id(getattr(plan, name)) for plan in plans}) == 1, name
    assert all(len(plan.computed) == 6 for plan in plans) and plans[0].num_drafts.tolist() == [4] * 6


def test_rows_keep_what_they_are_given_until_their_requests_take_it() -> None:
    """Runs of any length, in any order of rows; a request reads the same tokens whoever holds them."""
    rng, width = np.random.default_rng(11), 5
    rows = RequestRows(3, width)
    requests = [Request(str(row), [row] * 7, make_request(1).params, max_tokens=9999, seed=0) for row in range(3)]
    known = [list(request.tokens) for request in requests]
    for row, request in enumerate(requests):
        request.check_from = 9999
        request.enter(rows, row)
    for _ in range(6 * NUM_RECENT // width):
        at, counts = rng.permutation(3), rng.integers(0, width + 1, 3)
        given = rng.integers(0, 1 << 31, (3, width))
        for row in at[(rows.num_tokens[at] + counts >= rows.check_at[at])].tolist():
            requests[row].make_room()
        rows.append_runs(at, given, counts)
        if rng.integers(4) == 0:
            rows.append(at[:2], given[:2, 0])
        for place, row in enumerate(at.tolist()):
            known[row] += given[place, : counts[place]].tolist()
            if rows.num_tokens[row] > len(known[row]):
                known[row].append(given.item(place, 0))
        row = int(rng.integers(3))
        start, end = sorted(rng.integers(0, len(known[row]) + 1, 2).tolist())
        assert requests[row].packed(start, end) == np.array(known[row][start:end], "<i4").tobytes()
        if rng.integers(8) == 0:
            assert requests[row].tokens == known[row]
    assert [request.tokens for request in requests] == known and min(map(len, known)) > 3 * NUM_RECENT


def test_what_rows_have_not_come_to_takes_no_memory() -> None:
    """Each row had half a page to itself, of which a short answer wrote a line."""
    num_rows, num_tokens = 2000, 24
    rows, params = RequestRows(2 * num_rows), make_request(1).params
    requests = [Request(str(row), [row] * 2, params, max_tokens=99, seed=0) for row in range(num_rows)]
    for row, request in enumerate(requests):
        request.check_from = 99
        request.enter(rows, row)
    for _ in range(num_tokens):
        rows.append(np.arange(num_rows), np.full(num_rows, 7))
    pages = rows.cells.reshape(-1, 1024)  # of 4 KB
    assert np.count_nonzero(pages.any(axis=1)) * 4096 <= 2 * 4 * num_rows * (num_tokens + 1)
    assert all(request.tokens == [row] * 2 + [7] * num_tokens for row, request in enumerate(requests))


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_requests_without_stop_tokens_share_their_sets(ignore_eos: bool) -> None:
    """An empty set takes 216 bytes, of which a request had three."""
    params, eos = SamplingParams(ignore_eos=ignore_eos), frozenset({1, 2})
    one, two = (Request(name, [1], params, max_tokens=9, seed=0, eos_token_ids=eos) for name in "ab")
    for name in ("eos_token_ids", "stop_token_ids", "end_token_ids"):
        assert getattr(one, name) is getattr(two, name), name
    assert one.end_token_ids == (frozenset() if ignore_eos else eos) and not one.stop_token_ids
    stops = msgspec.structs.replace(params, stop_token_ids=[3])
    assert Request("c", [1], stops, max_tokens=9, seed=0, eos_token_ids=eos).end_token_ids == one.end_token_ids | {3}


def test_more_tokens_at_once_than_a_row_keeps_are_no_run() -> None:
    with pytest.raises(AssertionError, match="too many"):
        RequestRows(1, NUM_RECENT)
