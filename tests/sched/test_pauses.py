"""A batch that pauses its drafts, and begins again: blocks are there for what a drafter writes."""

from __future__ import annotations

import pytest

from octavo.sched.scheduler import Scheduler
from sched_harness import full, make_request, make_scheduler
from step_words import result_of

SIZE, AHEAD = 16, 4


def decode(scheduler: Scheduler, num_steps: int, *, in_flight: int) -> list[int]:
    """Every draft is wrong. The depth of each plan; where it has one, rows have room for what is written behind it."""
    depths, outstanding = [], []
    for number in range(num_steps):
        if number == num_steps // 2:
            scheduler.add(make_request(16, 400, ignore_eos=True))
        plan = scheduler.schedule()
        depths.append(plan.depth)
        for request in scheduler.running if plan.depth else ():
            room = SIZE * len(scheduler.kv.tables(request)[0])
            assert room >= request.num_computed + AHEAD, f"step {number}: a drafter would write to somebody's block"
        rows = plan.rows.tolist()
        outstanding.append((plan, result_of(plan.step, rows, [[7]] * len(rows), num_drafts=plan.num_drafts)))
        if len(outstanding) > in_flight:
            scheduler.update(*outstanding.pop(0))
    return depths


@pytest.mark.parametrize("in_flight", [0, 1])
def test_rows_have_room_ahead_whenever_drafts_are_proposed(in_flight: int) -> None:
    scheduler = make_scheduler(
        (full(SIZE),),
        num_blocks=400,
        max_model_len=512,
        max_num_batched_tokens=128,
        num_drafts=AHEAD,
        num_lookahead=AHEAD,
        cheap_tokens=48,
        enable_prefix_caching=False,
    )
    for length in (16, 21, 30):  # so that some row is about to leave its block in any step
        scheduler.add(make_request(length, 400, ignore_eos=True))
    depths = decode(scheduler, 301, in_flight=in_flight)
    assert depths[:5] == [4] * 5 and depths[150] in (0, 4)
    assert 200 < depths.count(0) < 300, "it pauses, and tries again"
    assert 4 in depths[151:155], "who enters has drafts"
