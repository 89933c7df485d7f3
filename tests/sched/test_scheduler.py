"""Scheduler: budget, rows, order, preemption, ends, and the totals that async scheduling must keep."""

from __future__ import annotations

import numpy as np
import pytest

from answers import expected_answer
from octavo.plan import StepResult, TokenLogprobs
from octavo.request.request import FinishReason
from octavo.request.sampling_params import RepetitionDetectionParams
from sched_harness import BLOCK, Driver, full, make_request, make_scheduler, sliding, smallest_pool
from step_words import blocks_by_row, result_of, scores_of

HYBRID = (full(), sliding(6), sliding(13))


def work(plan):
    return dict(zip(plan.rows.tolist(), plan.num_tokens.tolist(), strict=True))


def feed(driver: Driver, *tokens: int, **fields):
    """Schedule one step for one request and answer with these tokens instead of the worker's."""
    plan = driver.scheduler.schedule()
    assert len(plan.rows) == 1
    result = result_of(plan.step, plan.rows.tolist(), [tokens], **fields)
    return driver.scheduler.update(plan, result)


# Budget and chunks


def test_the_budget_cuts_a_prompt_into_chunks():
    driver = Driver(make_scheduler(max_num_batched_tokens=8))
    driver.add(make_request(20, 1))
    assert [driver.step().num_tokens.tolist() for _ in range(3)] == [[8], [8], [4]]


def test_running_requests_come_before_waiting_ones():
    driver = Driver(make_scheduler(max_num_batched_tokens=8))
    driver.add(make_request(5))
    driver.step()
    driver.add(make_request(20))
    assert driver.step().num_tokens.tolist() == [1, 7]


def test_several_prompts_share_a_step():
    driver = Driver(make_scheduler(max_num_batched_tokens=8))
    driver.add(make_request(3), make_request(3), make_request(3))
    assert driver.step().num_tokens.tolist() == [3, 3, 2]


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_whole():
    driver = Driver(make_scheduler(max_num_batched_tokens=10, max_model_len=10, enable_chunked_prefill=False))
    driver.add(make_request(6), make_request(6))
    assert driver.step().num_tokens.tolist() == [6]
    assert driver.step().num_tokens.tolist() == [1, 6]


def test_a_whole_prompt_waits_and_replayed_output_does_not():
    """Under a mask that looks ahead a prompt is one piece, and what is known behind it may be cut."""
    driver = Driver(make_scheduler(max_num_batched_tokens=10, max_model_len=10, whole_prompts=True))
    first, second, replayed = make_request(6), make_request(6), make_request(2)
    replayed.append(1)
    replayed.append(2)
    driver.add(first, second, replayed)
    assert driver.step().num_tokens.tolist() == [6]
    assert driver.step().num_tokens.tolist() == [1, 6, 3]
    assert driver.step().num_tokens.tolist() == [1, 1, 1]


def test_no_more_requests_run_than_there_are_rows():
    driver = Driver(make_scheduler(max_num_seqs=2))
    driver.add(*(make_request(3, 2) for _ in range(5)))
    sizes = [len(driver.step().rows) for _ in range(6)]
    assert sizes == [2, 2, 2, 2, 1, 1]
    assert driver.scheduler.stats().num_waiting == 0


def test_a_prompt_alone_must_fit_the_budget_without_chunked_prefill():
    with pytest.raises(AssertionError, match="whole prompt"):
        make_scheduler(max_num_batched_tokens=8, enable_chunked_prefill=False)


def test_the_pool_must_hold_one_longest_request():
    num_blocks = smallest_pool(HYBRID, 64, 64)
    make_scheduler(HYBRID, num_blocks=num_blocks)
    with pytest.raises(AssertionError, match="fits the pool"):
        make_scheduler(HYBRID, num_blocks=num_blocks - 1)


# Rows and plans


def test_a_request_keeps_its_row_and_frees_it_once():
    driver = Driver(make_scheduler())
    first, second = make_request(3, 2), make_request(3, 5)
    driver.add(first, second)
    driver.run()
    assert [plan.rows.tolist() for plan in driver.plans] == [[0, 1], [0, 1], [1], [1], [1], []]
    assert [plan.finished_rows for plan in driver.plans] == [[], [], [0], [], [], [1]]


def test_a_freed_row_is_used_again_in_the_plan_that_frees_it():
    driver = Driver(make_scheduler(max_num_seqs=1))
    driver.add(make_request(3, 1), make_request(3, 1))
    driver.step()
    plan = driver.step()
    assert plan.finished_rows == [0] and [new.row for new in plan.new_rows] == [0]


def test_a_plan_that_says_nothing_has_no_number_of_its_own():
    driver = Driver(make_scheduler())
    empty = driver.scheduler.schedule()
    assert not empty.has_work
    driver.add(make_request(3))
    assert driver.step().step == empty.step == 0


def test_a_plan_is_a_difference():
    driver = Driver(make_scheduler())
    driver.add(make_request(4, 10))
    assert driver.step().new_rows[0].block_ids == [[1]]
    new_blocks = [[blocks_by_row(group) for group in driver.step().new_blocks] for _ in range(5)]
    assert new_blocks == [[{0: [2]}], [], [], [], [{0: [3]}]]


def test_block_lists_in_a_plan_are_copies():
    driver = Driver(make_scheduler())
    driver.add(make_request(4, 10))
    new = driver.step().new_rows[0]
    driver.step()
    assert new.block_ids == [[1]] and len(new.token_ids) == 4


def test_at_most_one_step_is_planned_ahead():
    scheduler = make_scheduler()
    scheduler.add(make_request(3, 10))
    scheduler.schedule()
    scheduler.schedule()
    with pytest.raises(AssertionError, match="one step ahead"):
        scheduler.schedule()


def test_a_result_has_every_row_of_its_plan():
    scheduler = make_scheduler()
    scheduler.add(make_request(3, 10))
    plan = scheduler.schedule()
    with pytest.raises(AssertionError, match="every row"):
        scheduler.update(plan, StepResult(step=0))


# Totals


@pytest.mark.parametrize("depth", [0, 1], ids=["sync", "async"])
@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("max_tokens", [1, 2, 9])
def test_a_request_computes_its_prompt_and_all_but_one_output_token(depth, budget, max_tokens):
    driver = Driver(make_scheduler(HYBRID, max_num_batched_tokens=budget), HYBRID)
    requests = [make_request(num_prompt, max_tokens) for num_prompt in (1, 7, 12)]
    driver.add(*requests)
    driver.run(depth)
    for request in requests:
        assert driver.worker.computed[request.request_id] == request.num_prompt + max_tokens - 1
        assert request.num_output == max_tokens
    assert driver.scheduler.num_scheduled_tokens == sum(driver.worker.computed.values())


@pytest.mark.parametrize("depth", [0, 1], ids=["sync", "async"])
def test_the_context_ends_a_request_like_max_tokens(depth):
    driver = Driver(make_scheduler(max_model_len=12))
    request = make_request(9, 50)
    driver.add(request)
    driver.run(depth)
    assert request.num_tokens == 12 and request.finish_reason is FinishReason.LENGTH
    assert driver.worker.computed[request.request_id] == 11


def test_the_next_step_is_planned_before_the_token_is_known():
    driver = Driver(make_scheduler())
    request = make_request(3, 10)
    driver.add(request)
    driver.issue()
    assert work(driver.issue()) == {0: 1}
    assert (request.num_tokens, request.num_computed, request.num_in_flight) == (3, 4, 2)
    driver.collect()
    assert (request.num_tokens, request.num_computed, request.num_in_flight) == (4, 4, 1)


def test_a_result_after_the_end_is_dropped():
    driver = Driver(make_scheduler())
    answer = expected_answer(request := make_request(3, 10), 64)
    request.stop_token_ids = request.end_token_ids = frozenset(answer.tokens[:1])
    driver.add(request)
    driver.issue()
    driver.issue()
    driver.collect()
    assert request.finished
    driver.run()
    assert driver.output(request) == answer.tokens[:1]
    assert driver.worker.computed[request.request_id] == 4


# Ends


def test_the_stop_rules_have_an_order():
    """EOS before stop tokens before the length."""
    driver = Driver(make_scheduler())
    request = make_request(3, 1, eos=True, stop_token_ids=[7])
    driver.add(request)
    (update,) = feed(driver, 7)
    assert (update.finish_reason, update.stop_reason) == ("stop", None)


def test_a_stop_token_is_the_stop_reason():
    driver = Driver(make_scheduler())
    request = make_request(3, 1, stop_token_ids=[9])
    driver.add(request)
    (update,) = feed(driver, 9)
    assert (update.finish_reason, update.stop_reason, update.tokens) == ("stop", 9, [9])


def test_nothing_stops_before_min_tokens():
    driver = Driver(make_scheduler())
    driver.add(make_request(3, 5, eos=True, stop_token_ids=[9], min_tokens=3))
    assert [feed(driver, token)[0].finish_reason for token in (7, 9, 7)] == [None, None, "stop"]


def test_ignored_eos_does_not_stop():
    driver = Driver(make_scheduler())
    driver.add(make_request(3, 2, eos=True, ignore_eos=True))
    assert [feed(driver, 7)[0].finish_reason for _ in range(2)] == [None, "length"]


def test_several_tokens_are_cut_at_the_first_stop():
    driver = Driver(make_scheduler())
    request = make_request(3, 10, stop_token_ids=[9])
    driver.add(request)
    (update,) = feed(driver, 4, 9, 5, logprobs={0: ["a", "b", "c"]})
    assert update.tokens == [4, 9] and update.logprobs == ["a", "b"]
    assert request.tokens[3:] == [4, 9]


def test_several_tokens_are_cut_at_max_tokens():
    driver = Driver(make_scheduler())
    driver.add(make_request(3, 2))
    (update,) = feed(driver, 4, 5, 6)
    assert (update.tokens, update.finish_reason) == ([4, 5], "length")


def with_drafts(request):
    """A scheduler that plans 2 drafts a row, and its second plan: the request's token and the drafts."""
    scheduler = make_scheduler(num_drafts=2)
    scheduler.add(request)
    first = scheduler.schedule()
    assert not len(first.num_drafts), "nobody has proposed anything yet"
    scheduler.update(first, result_of(0, [0], [[3]]))
    plan = scheduler.schedule()
    assert (plan.num_tokens.tolist(), plan.num_drafts.tolist(), plan.computed.tolist()) == ([3], [2], [3])
    return scheduler, plan


@pytest.mark.parametrize("num_accepted", [0, 1, 2])
def test_rejected_drafts_are_not_computed(num_accepted):
    """Of 2 drafts; the verifier adds one token of its own. The last token is always still to be computed."""
    scheduler, plan = with_drafts(request := make_request(3, 20))
    tokens = [4, 5, 6][: num_accepted + 1]
    scheduler.update(plan, result_of(1, [0], [tokens]))
    assert (request.num_tokens, request.num_in_flight) == (4 + len(tokens), 0)
    assert request.num_computed == request.num_tokens - 1


def test_a_row_with_drafts_may_be_held():
    """It has drawn nothing: all of its step is taken back, and the next one computes the same again."""
    scheduler, plan = with_drafts(request := make_request(3, 20))
    held = StepResult(step=1, rows=np.array([0]), tokens=np.zeros((1, 3), np.int64), num_sampled=np.array([0]))
    assert not scheduler.update(plan, held)
    assert (request.num_tokens, request.num_in_flight, request.num_computed) == (4, 0, 3)
    again = scheduler.schedule()
    assert (again.num_tokens.tolist(), again.num_drafts.tolist(), again.computed.tolist()) == ([3], [2], [3])


@pytest.mark.parametrize("num_others", [1, 6])
def test_a_held_rows_prompt_logprobs_are_told(num_others):
    """Once: its prompt was scored, and its form's mask came late, in a step that verifies other rows' drafts."""
    scheduler = make_scheduler(num_drafts=2)
    others = [make_request(3, 20) for _ in range(num_others)]
    for request in others:
        scheduler.add(request)
    scheduler.update(scheduler.schedule(), result_of(0, range(num_others), [[3]] * num_others))
    scheduler.add(request := make_request(3, 20, prompt_logprobs=0))
    plan = scheduler.schedule()
    assert len(plan.num_drafts)
    scores = scores_of([TokenLogprobs([1], [-1.0], [1]), TokenLogprobs([2], [-2.0], [1])])
    rows, counts = np.arange(num_others + 1), np.array([1] * num_others + [0])
    tokens = np.full((num_others + 1, 3), 4)
    held = StepResult(step=1, rows=rows, tokens=tokens, num_sampled=counts, prompt_logprobs={num_others: scores})
    own = [update for update in scheduler.update(plan, held) if update.request_id == request.request_id]
    assert [(update.tokens, update.prompt_logprobs.num_positions) for update in own] == [([], 2)]
    assert (request.num_tokens, request.num_computed) == (3, 2)


def test_drafts_that_were_accepted_come_before_a_failure():
    scheduler, plan = with_drafts(request := make_request(3, 20))
    given, end = scheduler.update(plan, result_of(1, [0], [[4, 5]], failed={0: "nan_logits"}))
    assert (given.tokens, given.finish_reason) == ([3, 4][-len(given.tokens) :], None) and request.tokens[3:] == [3, 4]
    assert (end.tokens, end.finish_reason, end.error) == ([], "error", "nan_logits")


def test_the_budget_cuts_drafts_and_no_draft_preempts():
    """Tokens that are known come first, then drafts in the order of requests."""
    driver = Driver(make_scheduler(num_drafts=3, max_num_batched_tokens=8))
    driver.add(*(make_request(2, 20) for _ in range(3)))
    driver.step()
    plan = driver.step()
    assert (plan.num_tokens.tolist(), plan.num_drafts.tolist()) == ([4, 3, 1], [3, 2, 0])
    tight = Driver(make_scheduler(num_drafts=3, num_blocks=6, max_model_len=20, enable_prefix_caching=False))
    tight.add(make_request(3, 17), make_request(3, 17))
    tight.run()
    assert all(not len(plan.num_drafts) for plan in tight.plans if len(plan.rows) > 1)


def test_rejected_drafts_of_a_preempted_request_take_nothing_back():
    scheduler, plan = with_drafts(request := make_request(3, 20))
    scheduler._preempt(request)
    scheduler.update(plan, result_of(1, [0], [[6]]))
    assert (request.num_tokens, request.num_in_flight, request.num_computed) == (5, 0, 0)


def test_a_loop_ends_a_request_that_asks_for_it():
    driver = Driver(make_scheduler())
    detection = RepetitionDetectionParams(max_pattern_size=2, min_count=2)
    driver.add(make_request([1, 1, 1, 1], 9, repetition_detection=detection))
    *others, last = (feed(driver, token)[0] for token in (1, 2, 1, 2))
    assert [update.finish_reason for update in others] == [None] * 3
    assert (last.finish_reason, last.stop_reason) == ("repetition", "repetition_detected")


@pytest.mark.parametrize("coalesce_updates", [False, True])
@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"min_tokens": 4}, "repetition"), ({"max_tokens": 2}, "length"), ({"stop_token_ids": [5]}, "stop")],
    ids=str,
)
def test_a_loop_waits_for_min_tokens_and_other_ends_come_first(coalesce_updates, fields, reason):
    driver = Driver(make_scheduler())
    detection = RepetitionDetectionParams(max_pattern_size=1, min_count=2)
    driver.add(
        make_request(
            [1, 1], **{"max_tokens": 9, **fields}, coalesce_updates=coalesce_updates, repetition_detection=detection
        )
    )
    updates = [update for _ in range(fields.get("min_tokens", 2) - (reason == "stop")) for update in feed(driver, 5)]
    assert updates[-1].finish_reason == reason and all(update.finish_reason is None for update in updates[:-1])


def test_a_failed_row_ends_its_request_only():
    driver = Driver(make_scheduler())
    first, second = make_request(9, 3), make_request(9, 3)
    driver.add(first, second)
    driver.worker.fail_next = True
    driver.run()
    assert first.finish_reason is FinishReason.ERROR and first.num_output == 0
    (update,) = driver.updates[first.request_id]
    assert (update.finish_reason, update.error, update.tokens) == ("error", "nan_logits", [])
    assert driver.output(second) == expected_answer(second, 64).tokens


def test_a_failed_request_is_not_hit():
    driver = Driver(make_scheduler())
    driver.add(make_request(list(range(12)), 1))
    driver.worker.fail_next = True
    driver.run()
    driver.add(make_request(list(range(12)), 1))
    assert driver.step().num_tokens.tolist() == [12]


def test_a_step_without_a_token_gives_no_update():
    driver = Driver(make_scheduler(max_num_batched_tokens=4))
    request = make_request(6, 1)
    driver.add(request)
    driver.step()
    assert not driver.updates
    driver.step()
    assert len(driver.updates[request.request_id]) == 1


# Quiet requests


@pytest.mark.parametrize("depth", [0, 1], ids=["sync", "async"])
def test_a_quiet_request_is_told_of_its_first_token_and_its_end(depth):
    driver = Driver(make_scheduler(max_model_len=700))
    driver.add(coalesce_updates := make_request(3, 600, coalesce_updates=True), other := make_request(3, 5))
    driver.run(depth)
    assert [len(update.tokens) for update in driver.updates[coalesce_updates.request_id]] == [1, 599]
    assert len(driver.updates[other.request_id]) == 5
    assert driver.output(coalesce_updates) == expected_answer(coalesce_updates, 700).tokens


@pytest.mark.parametrize("depth", [0, 1], ids=["sync", "async"])
def test_blocks_of_tokens_that_only_rows_know_have_the_names_of_these_tokens(depth):
    driver = Driver(scheduler := make_scheduler(num_blocks=2000, max_model_len=700))
    driver.add(*(requests := [make_request(length, 500 + length, coalesce_updates=True) for length in range(1, 9)]))
    driver.run(depth)
    for request in requests:
        names: list[bytes] = []
        scheduler.kv._chain.extend(names, request.tokens, "", (request.num_tokens - 1) // BLOCK)
        assert request.block_hashes == names
        assert driver.output(request) == expected_answer(request, 700).tokens


def test_what_a_quiet_request_was_not_told_can_be_asked_for():
    driver = Driver(make_scheduler())
    driver.add(request := make_request(3, 20, coalesce_updates=True))
    for _ in range(6):
        driver.step()
    (update,) = driver.scheduler.take_untold([request.request_id, "nobody"])
    assert update.tokens == expected_answer(request, 64).tokens[1:6] and update.finish_reason is None
    assert driver.scheduler.take_untold([request.request_id]) == []
    driver.run()
    assert [len(update.tokens) for update in driver.updates[request.request_id]] == [1, 14]


# Prefix hits


@pytest.mark.parametrize("num_prompt", [3, 8, 9, 15])
def test_the_second_of_two_equal_prompts_in_one_step_computes_the_rest(num_prompt):
    driver = Driver(make_scheduler())
    prompt = list(range(num_prompt))
    first, second = make_request(prompt), make_request(prompt)
    driver.add(first, second)
    num_hit = (num_prompt - 1) // BLOCK * BLOCK
    assert driver.step().num_tokens.tolist() == [num_prompt, num_prompt - num_hit]
    assert (first.num_cached, second.num_cached) == (0, num_hit)
    driver.run()
    assert driver.output(first) == driver.output(second)


def test_another_salt_computes_everything():
    driver = Driver(make_scheduler())
    driver.add(*(make_request(list(range(12)), salt=salt) for salt in ("a", "b", "a")))
    assert driver.step().num_tokens.tolist() == [12, 12, 4]


def test_num_cached_is_told_with_the_updates():
    driver = Driver(make_scheduler())
    driver.add(make_request(list(range(12))), request := make_request(list(range(12))))
    driver.step()
    assert driver.updates[request.request_id][0].num_cached == 8


def test_hybrid_groups_share_within_a_step():
    driver = Driver(make_scheduler(HYBRID), HYBRID)
    driver.add(*(make_request(list(range(31)), 3) for _ in range(3)))
    assert driver.step().num_tokens.tolist() == [31, 3, 3]
    driver.run()


# Abort


@pytest.mark.parametrize("depth", [0, 1], ids=["sync", "async"])
@pytest.mark.parametrize("num_steps", range(5))
def test_abort_at_any_time_frees_everything(depth, num_steps):
    """Before admission, in the prompt, with a token in flight, decoding."""
    driver = Driver(make_scheduler(HYBRID, max_num_batched_tokens=8), HYBRID)
    driver.add(request := make_request(12, 20))
    for _ in range(num_steps):
        driver.step(depth)
    driver.scheduler.abort([request.request_id])
    assert request.finish_reason is FinishReason.ABORT
    assert driver.scheduler.kv.usage == 0.0
    driver.run(depth)
    assert not any(update.finish_reason for update in driver.updates[request.request_id])


def test_abort_ignores_what_it_does_not_know():
    driver = Driver(make_scheduler())
    driver.add(request := make_request(3, 1))
    driver.run()
    driver.scheduler.abort(["nobody", request.request_id, request.request_id])
    assert request.finish_reason is FinishReason.LENGTH
