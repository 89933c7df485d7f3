"""A row that failed may have written nothing: whoever found what it was to write begins again."""

from __future__ import annotations

import pytest

from sched_harness import BLOCK, Driver, expected_answer, full, make_request, make_scheduler, sliding

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
