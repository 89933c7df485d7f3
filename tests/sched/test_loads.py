"""Requests whose blocks come from elsewhere: the scheduler's half of connectors (C), with a connector by hand."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from answers import expected_answer
from block_states import BlockState, state_of
from fake_connector import Clock, FakeConnector
from octavo.kv_connector import NO_CONNECTOR
from octavo.request.request import Request, Status
from sched_harness import BLOCK, Driver, full, make_request, make_scheduler, sliding

PLAIN, HYBRID = (full(),), (full(), sliding(6), sliding(13))
PROMPT = list(range(100, 122))  # 5 blocks and a half


def drive(groups=PLAIN, **options) -> tuple[Driver, FakeConnector, Clock]:
    connector, clock = FakeConnector(), Clock()
    scheduler = make_scheduler(groups, connector=connector, clock=clock, load_timeout=10.0, **options)
    return Driver(scheduler, groups), connector, clock


def offer(driver: Driver, connector: FakeConnector, request: Request, num_tokens: int) -> Request:
    connector.offers[request.request_id] = num_tokens
    driver.add(request)
    return request


def is_right(driver: Driver, *requests: Request) -> bool:
    return all(driver.output(request) == expected_answer(request, 64).tokens for request in requests)


@pytest.mark.parametrize("groups", [PLAIN, HYBRID], ids=["plain", "hybrid"])
def test_C_1_a_request_that_loads_has_blocks_and_no_work_and_none_of_them_is_found(groups):
    driver, connector, _ = drive(groups)
    request = offer(driver, connector, make_request(PROMPT), 20)
    assert request.status is Status.WAITING
    plan = driver.step()
    assert request.status is Status.LOADING and not plan.has_work and driver.scheduler.kv.usage > 0
    (load,) = connector.begun.values()
    assert (load.start, load.end) == (0, 20)
    pool = driver.scheduler.kv._pool
    assert {state_of(pool, block) for table in load.blocks for block in table if block} == {BlockState.RESERVED}
    other = make_request(PROMPT, 1)  # an equal prompt neither hits what is not there nor is hit by it
    driver.add(other)
    assert driver.step().num_tokens.tolist() == [22] and request.status is Status.LOADING
    connector.arrive(load.number)
    assert driver.step().new_rows[0].num_computed == 20 and request.status is Status.RUNNING
    driver.run()
    assert is_right(driver, request, other) and driver.worker.computed[request.request_id] == 2 + 3
    assert request.num_cached == request.num_loaded == driver.scheduler.stats().num_loaded_tokens == 20


def test_C_2_what_arrived_is_published_in_full_blocks_and_a_whole_prompt_computes_its_last_token():
    driver, connector, _ = drive()
    request = offer(driver, connector, make_request(PROMPT[:20], 2), 20)
    driver.step()
    (load,) = connector.begun.values()
    connector.arrive(load.number)
    plan = driver.step()
    assert plan.num_tokens.tolist() == [1] and plan.new_rows[0].block_ids == [list(load.blocks[0])]
    kv = driver.scheduler.kv
    assert [state_of(kv._pool, block) for block in load.blocks[0]] == [BlockState.PUBLISHED] * 5
    second = offer(driver, connector, make_request([*PROMPT[:18], 7, 7, 7, 7], 2), 18)
    driver.step()
    (load,) = connector.begun.values()
    assert load.start == 16  # what is here is not loaded
    connector.arrive(load.number)
    driver.scheduler.take_loads()
    assert [state_of(kv._pool, block) for block in load.blocks[0]] == [BlockState.PUBLISHED] * 4 + [BlockState.RESERVED]
    driver.run()
    assert is_right(driver, request, second)


def test_C_2_too_few_blocks_after_arrival_wait_and_nothing_leaks():
    driver, connector, _ = drive(num_blocks=17, max_model_len=60)
    first = offer(driver, connector, make_request(PROMPT, 4), 8)
    driver.step()
    others = [make_request(20, 20), make_request(8, 12)]
    driver.add(*others)
    driver.step()
    (load,) = connector.begun.values()
    connector.arrive(load.number)
    for _ in range(3):
        driver.step()
        driver.scheduler.kv.check()
    driver.run()
    assert is_right(driver, first, *others)


def test_C_3_who_is_told_later_is_stepped_over_and_asked_again_until_its_time_is_over():
    driver, connector, clock = drive(max_num_seqs=2)
    slow, quick = make_request(PROMPT, 2), make_request(9, 2)
    connector.later.add(slow.request_id)
    offer(driver, connector, slow, 20)
    driver.add(quick)
    assert [new.request_id for new in driver.step().new_rows] == [quick.request_id]
    assert [len(connector.matched), driver.step().rows.size] == [2, 1]
    connector.later.clear()
    driver.step()
    assert slow.status is Status.LOADING
    driver.scheduler.abort([slow.request_id])
    never = make_request(PROMPT, 2)
    connector.later.add(never.request_id)
    driver.add(never)
    driver.step()
    clock.now += 9.9
    assert not driver.step().new_rows  # overtaken for as long as the deadline says, and no longer
    clock.now += 0.1
    assert [new.request_id for new in driver.step().new_rows] == [never.request_id]
    driver.run()
    assert is_right(driver, never, quick)


@pytest.mark.parametrize("arrives", [True, False], ids=["arrives", "fails"])
def test_C_3_a_second_completion_waits_for_the_blocks_of_the_first_and_finds_them_here(arrives: bool):
    driver, connector, _ = drive()
    first = offer(driver, connector, make_request(PROMPT, 3), 22)
    second = make_request(PROMPT, 4, waits_for=first.request_id)
    driver.add(second)
    assert not driver.step().has_work and first.status is Status.LOADING
    assert not driver.step().has_work and second.status is Status.WAITING
    assert not any(name == second.request_id for name, _ in connector.matched)
    (load,) = connector.begun.values()
    connector.arrive(load.number, None if arrives else ())
    driver.run()
    assert is_right(driver, first, second) and second.num_cached == 20
    assert driver.worker.computed[second.request_id] == 2 + 3
    assert driver.worker.computed[first.request_id] == (1 if arrives else 22) + 2


def test_C_3_the_connector_is_asked_behind_the_local_hit():
    driver, connector, _ = drive()
    driver.add(make_request(PROMPT, 1))
    driver.run()
    request = offer(driver, connector, make_request([*PROMPT, 5], 1), 22)
    driver.step()
    (load,) = connector.begun.values()
    assert connector.matched[-1] == (request.request_id, 20) and (load.start, load.end) == (20, 22)
    connector.arrive(load.number)
    driver.run()
    assert is_right(driver, request)


@pytest.mark.parametrize("stops", [True, False])
def test_C_5_blocks_of_an_aborted_load_are_free_when_nobody_writes_them(stops):
    driver, connector, clock = drive()
    connector.stops = stops
    request = offer(driver, connector, make_request(PROMPT), 20)
    driver.step()
    (number,) = connector.begun
    driver.scheduler.abort([request.request_id])
    kv = driver.scheduler.kv
    assert (kv.usage == 0.0) is stops and (kv.num_held_blocks == 5) is not stops
    assert driver.scheduler.has_work is not stops, "who steps the engine is to come back"
    if not stops:
        connector.arrive(number)
        driver.step()
    driver.audit_idle()
    for _ in range(2):  # nothing comes: the hold has a deadline
        request = offer(driver, connector, make_request(PROMPT), 20)
        driver.step()
        driver.scheduler.abort([request.request_id])
        clock.now += 10
        driver.step()
        driver.audit_idle()
    assert driver.scheduler.stats().num_expired_holds == (0 if stops else 2)


def test_C_5_blocks_that_are_saved_stay_until_the_save_is_reported_once():
    driver, connector, _ = drive(num_blocks=17, max_model_len=60)
    connector.saves = True
    request, other = make_request(PROMPT, 4), make_request(20, 20)
    driver.add(request)
    for _ in range(5):
        driver.step(depth=1)
    assert request.finished and driver.scheduler.kv.num_held_blocks == 7
    driver.add(other)
    for _ in range(20):
        driver.step()
        driver.scheduler.kv.check()
    (save,) = connector.begun.values()
    assert save.end == 25
    connector.arrive(save.number)
    connector.hurries = True
    driver.run()
    assert is_right(driver, request, other)


def test_C_5_a_save_has_a_deadline(caplog):
    driver, connector, clock = drive()
    connector.saves = True
    driver.add(make_request(PROMPT, 2))
    for _ in range(4):
        driver.step()
    assert driver.scheduler.kv.num_held_blocks
    clock.now += 10
    with caplog.at_level(logging.WARNING):
        driver.step()
    driver.audit_idle()
    assert "did not end in time" in caplog.text and driver.scheduler.stats().num_expired_holds == 1


@pytest.mark.parametrize("groups", [PLAIN, HYBRID], ids=["plain", "hybrid"])
@pytest.mark.parametrize("bad", [0, 2, 4])
def test_C_6_a_bad_block_takes_the_count_back_to_where_it_begins(groups, bad, caplog):
    driver, connector, _ = drive(groups)
    request, neighbour = make_request(PROMPT, 4), make_request([*PROMPT, 9], 4)
    offer(driver, connector, request, 20)
    driver.step()
    (load,) = connector.begun.values()
    with caplog.at_level(logging.WARNING):
        connector.arrive(load.number, [load.blocks[0][bad], load.blocks[0][4]])
        driver.add(neighbour)
        plan = driver.step()
    assert plan.new_rows[0].num_computed == (bad * BLOCK if groups == PLAIN else 0)  # windows were not loaded there
    assert "the first" in caplog.text and driver.scheduler.stats().num_load_failures == 1
    driver.run()
    assert is_right(driver, request, neighbour)
    assert [who for who, _ in connector.matched].count(request.request_id) == 1, "what failed is not tried again"


def test_C_6_a_load_that_fails_whole_is_recomputed():
    driver, connector, _ = drive(HYBRID)
    request = offer(driver, connector, make_request(PROMPT, 4), 20)
    driver.step()
    (number,) = connector.begun
    connector.arrive(number, [])
    driver.run()
    assert is_right(driver, request) and driver.worker.computed[request.request_id] == 22 + 3


def test_C_7_the_policy_fail_ends_the_request_and_counts():
    driver, connector, _ = drive(load_failure_policy="fail")
    request, other = make_request(PROMPT), make_request(PROMPT)
    offer(driver, connector, request, 20)
    driver.step()
    (load,) = connector.begun.values()
    connector.arrive(load.number, load.blocks[0][3:4])
    driver.add(other)
    driver.run()
    (update,) = driver.updates[request.request_id]
    assert update.finish_reason == "error" and update.error == "kv_load_failed"
    assert is_right(driver, other) and driver.scheduler.stats().num_load_failures == 1


def test_C_7_an_unknown_policy_is_refused():
    with pytest.raises(AssertionError, match="recompute"):
        drive(load_failure_policy="ignore")


def test_C_7_a_load_that_takes_too_long_has_failed():
    driver, connector, clock = drive()
    request = offer(driver, connector, make_request(PROMPT, 3), 20)
    driver.step()
    clock.now += 10
    driver.run()
    assert is_right(driver, request) and not connector.begun
    assert driver.scheduler.stats().num_load_failures == 1


def test_C_10_loads_count_as_sequences_and_in_the_budget():
    driver, connector, _ = drive(max_num_seqs=2, max_num_batched_tokens=24)
    loads = [make_request(20, 2) for _ in range(3)]
    for request in loads:
        offer(driver, connector, request, 16)
    late = make_request(20, 2)
    driver.add(late)
    driver.step()
    assert [request.status for request in loads] == [Status.LOADING, Status.LOADING, Status.WAITING]
    assert driver.scheduler.stats().num_loading == 2
    assert driver.scheduler.stats().num_scheduled_tokens == 0
    connector.hurries = True
    for number in list(connector.begun):
        connector.arrive(number)
    driver.run()
    assert is_right(driver, late, *loads)


def test_a_running_request_takes_the_blocks_of_a_load_behind_it():
    driver, connector, _ = drive(num_blocks=17, max_model_len=60)
    runs, loads = make_request(8, 50), make_request(PROMPT, 4)
    driver.add(runs)
    driver.step()
    offer(driver, connector, loads, 20)
    driver.step()
    assert loads.status is Status.LOADING
    for _ in range(48):
        driver.step()
    assert runs.num_preemptions == 0 and loads.num_preemptions == 1 and not connector.begun
    connector.hurries = True
    driver.run()
    assert is_right(driver, runs, loads)


def test_a_request_that_waits_for_held_blocks_is_preempted_by_itself_and_comes_back():
    driver, connector, _ = drive(num_blocks=17, max_model_len=60)
    connector.saves = True
    driver.add(make_request(20, 1))
    for _ in range(2):
        driver.step()
    assert driver.scheduler.kv.num_held_blocks == 5
    grows = make_request(20, 35)
    driver.add(grows)
    for _ in range(60):
        driver.step()
    assert not driver.scheduler.running and grows.num_preemptions == 1 and connector.begun
    connector.hurries = True
    for number in list(connector.begun):
        connector.arrive(number)
    driver.run()
    assert is_right(driver, grows)


def test_two_that_have_arrived_and_both_lack_blocks_do_not_wait_for_each_other():
    driver, connector, _ = drive(num_blocks=13, max_model_len=44, max_num_batched_tokens=44)
    pair = [make_request(40, 2), make_request(40, 2)]
    for request in pair:
        offer(driver, connector, request, 16)
    for _ in range(3):
        driver.step()
    for _ in range(20):
        for number in list(connector.begun):
            connector.arrive(number)
        driver.step()
        driver.scheduler.kv.check()
    driver.run()
    assert is_right(driver, *pair)


def test_a_load_begins_when_the_steps_in_flight_are_done():
    driver, connector, _ = drive(num_blocks=17, max_model_len=60)
    first = make_request(40, 8)
    driver.add(first)
    driver.step(depth=1)
    driver.scheduler.abort([first.request_id])  # its last step still writes its blocks
    request = offer(driver, connector, make_request(PROMPT, 2), 20)
    driver.issue()
    assert request.status is Status.LOADING and driver.in_flight and not connector.begun
    driver.collect()
    while driver.in_flight:
        driver.collect()
    driver.scheduler.take_loads()
    (number,) = connector.begun
    connector.arrive(number)
    driver.run()
    assert is_right(driver, request)


def test_a_report_of_what_is_not_under_way_is_logged_and_ignored(caplog):
    driver, connector, _ = drive()
    connector.done = [17]
    driver.add(make_request(3, 2))
    driver.run()
    assert "transfer 17" in caplog.text


def test_without_a_connector_nothing_is_asked_or_kept():
    driver = Driver(make_scheduler())
    driver.add(make_request(PROMPT, 2))
    driver.run()
    assert NO_CONNECTOR.match(make_request(3), 0) == 0 and not NO_CONNECTOR.take_results().done
    assert not driver.scheduler.take_loads()


@pytest.mark.parametrize("keep_kv", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
def test_V_3_an_update_computes_again_what_runs_or_lets_it_go_on(depth, keep_kv):
    """FakeWorker checks that who begins after the update reads nothing older."""
    driver, connector, _ = drive()
    runs, loads, waits = make_request(PROMPT, 12), make_request(30, 4), make_request([*PROMPT, 3, 4], 4)
    driver.add(runs)
    for _ in range(3):
        driver.step(depth)
    offer(driver, connector, loads, 28)
    driver.step(depth)
    driver.worker.version = 1
    driver.scheduler.set_weights_version("1", keep_kv=keep_kv)
    assert not connector.begun and runs.num_preemptions == (not keep_kv)
    driver.add(waits)
    connector.hurries = True
    driver.run(depth)
    assert is_right(driver, runs, loads, waits)
    assert driver.worker.computed[waits.request_id] > 24 - 20 * (not keep_kv)


def test_V_3_what_two_versions_made_is_not_saved():
    driver, connector, _ = drive()
    connector.saves = True
    request = make_request(PROMPT, 6)
    driver.add(request)
    driver.step()
    driver.worker.version = 1
    driver.scheduler.set_weights_version("1", keep_kv=True)
    driver.run()
    assert is_right(driver, request) and not connector.begun


def test_V_4_what_failed_under_older_weights_is_not_found_when_they_come_back():
    driver = Driver(make_scheduler())
    first, second = make_request(PROMPT, 4), make_request([*PROMPT, 5], 4)
    driver.add(first)
    driver.worker.break_next = first.request_id
    driver.issue()
    driver.scheduler.set_weights_version("1")
    driver.collect()
    driver.run()
    assert first.error == "mod_failed"
    driver.scheduler.set_weights_version("")
    driver.add(second)
    driver.run()
    assert is_right(driver, second) and second.num_cached == 0


def test_C_2_blocks_that_a_load_fills_are_not_zeroed_by_a_step_behind_it():
    groups = (dataclasses.replace(full(), zero_fresh_blocks=True),)
    driver, connector, _ = drive(groups)
    connector.hurries = True
    request, other = make_request(PROMPT, 3), make_request(9, 3)
    offer(driver, connector, request, 20)
    driver.step()
    driver.add(other)
    driver.run()
    assert is_right(driver, request, other) and driver.worker.computed[request.request_id] == 2 + 2
