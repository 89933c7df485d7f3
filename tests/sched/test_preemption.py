"""Preemption: who goes, what returns, and what of prompt log-probabilities is computed again."""

from __future__ import annotations

import random

import pytest

from answers import expected_answer
from octavo.request.request import Status
from sched_harness import Driver, full, make_request, make_scheduler
from step_words import entries_of, result_of


def preempt_at_next_growth(driver, monkeypatch):
    """The next request that asks for blocks gets none, once: the newest is preempted, inside `schedule`."""
    kv = driver.scheduler.kv
    reserve, reserve_each = kv.reserve, kv.reserve_each

    def refuse(request, num_new, ahead):
        monkeypatch.setattr(kv, "reserve", reserve)
        monkeypatch.setattr(kv, "reserve_each", reserve_each)

    monkeypatch.setattr(kv, "reserve", refuse)
    monkeypatch.setattr(kv, "reserve_each", lambda *_: None)


def crowded(policy: str = "fcfs", priorities=(0, 0, 0)):
    """Three requests of up to 6 blocks each, in a pool of 10: all are admitted, one is preempted."""
    driver = Driver(make_scheduler(num_blocks=11, max_model_len=32, policy=policy))
    requests = [make_request(5, 18, priority=priority) for priority in priorities]
    driver.add(*requests)
    return driver, requests


def until_preempted(driver: Driver):
    """To loop over, one step at a time."""
    for step in range(100):
        if driver.scheduler.num_preemptions:
            return
        yield step
    raise AssertionError("nobody is preempted")


@pytest.mark.parametrize("depth", [0, 1], ids=["sync", "async"])
def test_preemption_changes_no_token(depth):
    driver, requests = crowded()
    driver.run(depth)
    assert driver.scheduler.num_preemptions > 0
    for request in requests:
        assert driver.output(request) == expected_answer(request, 32).tokens


@pytest.mark.parametrize("depth", [0, 1], ids=["sync", "async"])
def test_the_newest_is_preempted_and_returns_to_the_front(depth):
    driver, (first, second, third) = crowded()
    driver.add(fourth := make_request(5, 18))
    for _ in until_preempted(driver):
        driver.step(depth)
    assert first.status is second.status is Status.RUNNING
    assert third.status is Status.PREEMPTED
    assert driver.scheduler.waiting == [third, fourth]


def test_preemption_ends_a_row_and_resumption_is_a_new_row():
    driver, (_, _, third) = crowded()
    for _ in until_preempted(driver):
        plan = driver.step()
    assert plan.finished_rows == [2] and 2 not in plan.rows and not plan.new_rows
    known = list(third.tokens)
    while third.status is Status.PREEMPTED:
        plan = driver.step()
    (new,) = plan.new_rows
    assert new.request_id == third.request_id and new.token_ids == known and new.num_prompt == 5


def test_a_preempted_request_takes_its_token_in_flight():
    driver, (_, _, third) = crowded()
    for _ in until_preempted(driver):
        driver.issue()
        num_known = third.num_tokens
        if len(driver.in_flight) > 1:
            driver.collect()
    assert third.status is Status.PREEMPTED
    assert (third.num_tokens, third.num_in_flight, third.num_computed) == (num_known + 1, 0, 0)
    driver.run(1)


def test_a_preempted_request_that_stops_on_its_token_in_flight_has_ended(monkeypatch):
    driver = Driver(make_scheduler())
    driver.add(make_request(4, 10), request := make_request(4, 10))
    tokens = expected_answer(request, 64).tokens
    request.stop_token_ids = request.end_token_ids = frozenset(tokens[:1])
    driver.issue()
    preempt_at_next_growth(driver, monkeypatch)
    driver.issue()
    assert request.status is Status.PREEMPTED and request.num_in_flight == 1
    driver.collect()
    assert request.finished and request not in driver.scheduler.waiting
    driver.run(1)
    assert driver.output(request) == tokens[:1]


def test_priority_decides_who_runs_and_who_is_preempted():
    driver, (low, high, middle) = crowded(policy="priority", priorities=(5, -1, 3))
    assert driver.scheduler.waiting == [high, middle, low]
    for _ in until_preempted(driver):
        driver.step()
    assert low.status is Status.PREEMPTED and high.status is middle.status is Status.RUNNING
    driver.run()
    assert high.num_preemptions == 0


def test_a_later_request_of_higher_priority_is_admitted_first():
    driver = Driver(make_scheduler(max_num_seqs=1, policy="priority"))
    driver.add(make_request(3, 1), low := make_request(3, 1, priority=1), high := make_request(3, 1))
    driver.step()
    driver.step()
    assert high.finished and not low.finished


@pytest.mark.parametrize(("aging", "wanted"), [(4, 4), (1, 1)])
def test_a_request_of_lower_priority_is_overtaken_by_so_many_and_no_more(aging: int, wanted: int) -> None:
    """At saturation: whenever one ends, one of higher priority has come. Without aging it would wait for ever."""
    driver = Driver(make_scheduler(max_num_seqs=1, policy="priority", priority_aging=aging))
    driver.add(make_request(3, 1), low := make_request(3, 1, priority=2))
    num_overtook = 0
    while not low.finished:
        driver.add(high := make_request(3, 1))
        driver.step()
        num_overtook += high.finished or low.status is Status.WAITING
        assert num_overtook <= 2 * wanted + 2, "it starves"
    assert num_overtook >= 2 * wanted - 1


def test_priorities_are_strict_without_aging() -> None:
    driver = Driver(make_scheduler(max_num_seqs=1, policy="priority"))
    driver.add(make_request(3, 1), low := make_request(3, 1, priority=1))
    for _ in range(50):
        driver.add(make_request(3, 1))
        driver.step()
    assert low.status is Status.WAITING


def test_equal_priorities_run_in_order_of_arrival():
    driver = Driver(make_scheduler(policy="priority"))
    requests = [make_request(3, priority=1) for _ in range(4)]
    driver.add(*requests)
    driver.step()
    assert driver.scheduler.running == requests


def test_a_waiting_request_leaves_room_for_the_running_ones_to_grow():
    """Without it the newcomer is admitted, preempted for a running one's next block, and computed again."""
    driver = Driver(make_scheduler(num_blocks=15, max_model_len=32))
    driver.add(make_request(28, 4), make_request(27, 5))
    driver.step()
    assert driver.scheduler.stats().num_waiting == 1
    driver.run()
    assert driver.scheduler.num_preemptions == 0


@pytest.mark.parametrize("demand", [1.05, 2, 4])
def test_a_pool_that_is_too_small_does_not_thrash(demand):
    """Few preemptions per request, and little computed twice."""
    rng = random.Random(0)
    requests = [make_request(rng.randint(50, 450), rng.randint(10, 500)) for _ in range(60)]
    scheduler = make_scheduler(
        (full(16),),
        num_blocks=max(int(16 * 400 / 16 / demand), 60) + 1,
        max_num_seqs=16,
        max_num_batched_tokens=1000,
        max_model_len=950,
    )
    for request in requests:
        scheduler.add(request)
    while scheduler.has_work:
        plan = scheduler.schedule()
        owners = {request.row: request for request in scheduler.running}
        rows = plan.rows.tolist()
        done = [owners[row].num_computed == owners[row].num_tokens for row in rows]
        scheduler.update(plan, result_of(plan.step, rows, [[5] if d else [] for d in done]))
    useful = sum(request.num_prompt + request.max_tokens - 1 for request in requests)
    assert max(request.num_preemptions for request in requests) <= 4
    assert scheduler.num_scheduled_tokens <= 1.3 * useful


def test_abort_of_a_preempted_request():
    driver, (_, _, third) = crowded()
    for _ in until_preempted(driver):
        driver.step(1)
    driver.scheduler.abort([third.request_id])
    assert third not in driver.scheduler.waiting
    driver.run(1)


# Prompt log-probabilities


def delivered(driver, request):
    updates = driver.updates[request.request_id]
    return [entry.token_ids[0] for update in updates for entry in entries_of(update.prompt_logprobs)]


@pytest.mark.parametrize("depth", [0, 1], ids=["sync", "async"])
def test_prompt_logprobs_ignore_the_cache_until_they_are_delivered(depth):
    driver = Driver(make_scheduler(max_num_batched_tokens=8))
    driver.add(make_request(list(range(20)), 1))
    driver.run()
    driver.add(request := make_request(list(range(20)), 1, prompt_logprobs=0))
    driver.run(depth)
    assert driver.worker.computed[request.request_id] == 20
    assert delivered(driver, request) == list(range(1, 20))


def test_a_prompt_of_one_token_has_no_prompt_logprobs():
    driver = Driver(make_scheduler())
    driver.add(make_request(1, 1, prompt_logprobs=0))
    assert driver.step().new_rows[0].prompt_logprobs_start == -1


@pytest.mark.parametrize("depth", [0, 1], ids=["sync", "async"])
@pytest.mark.parametrize("num_steps", [2, 3, 4, 5, 6])
def test_prompt_logprobs_go_on_after_preemption_where_they_stopped(depth, num_steps, monkeypatch):
    """In the first chunk, in a later one, on the prompt's last token, decoding; with results in flight or not."""
    driver = Driver(make_scheduler(max_num_batched_tokens=8))
    driver.add(make_request(3, 30))
    driver.add(request := make_request(19, 8, prompt_logprobs=0))
    for _ in range(num_steps):
        driver.step(depth)
    preempt_at_next_growth(driver, monkeypatch)
    driver.run(depth)
    assert request.num_preemptions == 1
    assert delivered(driver, request) == list(range(1, 19))
    assert driver.output(request) == expected_answer(request, 64).tokens


def test_a_resumed_request_hits_what_it_needs_not_score_again():
    driver = Driver(make_scheduler(max_num_batched_tokens=9))
    driver.add(request := make_request(20, 5, prompt_logprobs=0))
    driver.step()
    driver.scheduler._preempt(request)
    (new,) = driver.step().new_rows
    assert (new.num_computed, new.prompt_logprobs_start) == (8, 10)
