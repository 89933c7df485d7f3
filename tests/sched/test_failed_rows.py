"""A row that failed may have written nothing: whoever found what it was to write begins again. And rows held then."""

from __future__ import annotations

import pytest

from answers import expected_answer
from sched_harness import BLOCK, Driver, full, make_request, make_scheduler, sliding
from step_words import result_of

HYBRID = (full(), sliding(6), sliding(13))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("groups", [(full(),), HYBRID], ids=["plain", "hybrid"])
@pytest.mark.parametrize("chunk", [64, 8])
def test_who_reads_what_a_failed_row_did_not_write_begins_again(depth, groups, chunk):
    """A mod may fail for one row and not for those that share its blocks; their tokens of that step are dropped."""
    driver = Driver(make_scheduler(groups, max_num_batched_tokens=chunk), groups)
    prompt = list(range(20))
    first, second, third = make_request([*prompt, 5], 6), make_request([*prompt, 6], 6), make_request(30, 6)
    fourth = make_request([*second.tokens, *expected_answer(second, 64).tokens], 6)
    driver.add(third, first, second, fourth)
    driver.worker.break_next = first.request_id
    driver.run(depth)
    assert first.error == "mod_failed"
    assert second.num_preemptions == 1 or chunk == 8
    for request in (second, third, fourth):
        assert driver.output(request) == expected_answer(request, 64).tokens, request
    assert third.num_preemptions == 0
    fifth = make_request([*prompt, 7], 6)
    driver.add(fifth)
    driver.run(depth)
    assert driver.output(fifth) == expected_answer(fifth, 64).tokens


def test_a_preempted_reader_of_what_a_failed_row_did_not_write_gets_no_token_of_that_step(monkeypatch):
    """It found the failed row's block in the step of the failure, and left its row before that step's result came."""
    driver = Driver(make_scheduler())
    broken, reader = make_request(list(range(2 * BLOCK)), 1), make_request(list(range(2 * BLOCK)), 4)
    driver.add(broken, reader)
    driver.worker.break_next = broken.request_id
    kv = driver.scheduler.kv
    reserve, refused = kv.reserve, []

    def refuse_once(*asked):
        if refused or len(driver.scheduler.running) < 2:
            return reserve(*asked)
        refused.append(asked)
        return None

    monkeypatch.setattr(kv, "reserve_each", lambda *_: None)
    monkeypatch.setattr(kv, "reserve", refuse_once)
    driver.run(1)
    assert refused and reader.num_preemptions == 1
    assert broken.error == "mod_failed"
    assert driver.output(reader) == expected_answer(reader, 64).tokens


@pytest.mark.parametrize("num_rows", [1, 6])
def test_a_row_is_held_though_the_worker_verified_no_drafts(num_rows):
    """It leaves drafts out where a mod fails with them: each row has drawn one token then, or none."""
    scheduler = make_scheduler(num_drafts=2)
    requests = [make_request(3, 20) for _ in range(num_rows)]
    for request in requests:
        scheduler.add(request)
    scheduler.update(scheduler.schedule(), result_of(0, range(num_rows), [[3]] * num_rows))
    plan = scheduler.schedule()
    assert plan.num_drafts.tolist() == [2] * num_rows
    said = [[4]] * (num_rows - 1)
    updates = scheduler.update(plan, result_of(1, range(num_rows), [*said, []], held=[num_rows - 1]))
    assert [update.tokens for update in updates] == said
    assert [request.tokens[3:] for request in requests] == [*[[3, 4]] * (num_rows - 1), [3]]
    assert [request.num_in_flight for request in requests] == [0] * num_rows
