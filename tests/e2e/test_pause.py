"""Pauses, sleep and scores of an engine in this process, whose bits they do not change."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from octavo import LLM, SamplingParams
from octavo.frontend.control import WrongStateError
from octavo.request.outputs import RequestOutput
from octavo.request.sampling_params import ParameterError, StructuredOutputsParams
from octavo.sched.pause import PauseOrder
from patience import patient

PROMPTS = [[5, 6, 7], [9, 8, 7, 6]]
DRAWN = SamplingParams(max_tokens=400, temperature=1.0, seed=3, logprobs=0, ignore_eos=True, flat_logprobs=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("octavo-tiny", dtype="float32") as made:
        yield made


@pytest.fixture(scope="module")
def whole(llm: LLM) -> list[RequestOutput]:
    return llm.generate(PROMPTS, DRAWN)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


class Running:
    """`generate` in a thread of its own, which has begun when this is entered, and takes its time until it is read."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._pool, self._hurry = llm, ThreadPoolExecutor(1), threading.Event()

    def __enter__(self) -> Running:
        step = self._llm.engine.step
        self._llm.engine.step = lambda: (self._hurry.wait(0.01), step())[1]  # type: ignore[method-assign]
        before = self._llm.engine.times.num_steps
        self._future = self._pool.submit(self._llm.generate, PROMPTS, DRAWN)
        while self._llm.engine.times.num_steps < before + 3:
            pass
        return self

    def result(self) -> list[RequestOutput]:
        self._hurry.set()
        return self._future.result(patient(60))

    def __exit__(self, *_: object) -> None:
        self._llm.resume_generation()
        self.result()
        self._pool.shutdown()
        del self._llm.engine.step


def test_rl_g6_a_score_is_what_the_sampler_said(llm: LLM, whole: list[RequestOutput]) -> None:
    """RL.G6: in bits, from any start, whatever the cache holds; and at a temperature as processed ones are."""
    for output in whole:
        told = output.outputs[0]
        ids, start = [*output.prompt_token_ids, *told.token_ids], len(output.prompt_token_ids)
        assert llm.score([ids], start=start) == [told.logprobs.logprobs.tolist()]
        assert llm.score([ids])[0][start - 1 :] == told.logprobs.logprobs.tolist()
    with LLM("octavo-tiny", dtype="float32", logprobs_mode="processed_logprobs") as other:
        (drawn,) = other.generate([PROMPTS[0]], SamplingParams(max_tokens=40, temperature=0.6, seed=1, logprobs=0))
        ids = [*PROMPTS[0], *drawn.outputs[0].token_ids]
        said = [entry[token].logprob for entry, token in zip(drawn.outputs[0].logprobs, ids[3:], strict=True)]
        assert other.score([ids], temperature=0.6, start=3) == [said] == llm.score([ids], temperature=0.6, start=3)
    for wrong in ({"start": -1}, {"temperature": 0.0}):
        with pytest.raises(ParameterError):
            llm.score([[1, 2]], **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("clear_cache", [False, True])
def test_rl_p5_a_kept_pause_changes_no_token(llm: LLM, whole: list[RequestOutput], clear_cache: bool) -> None:
    """RL.P5: in flight it stops at once, and goes on in the same bits, with its blocks or without."""
    with Running(llm) as running:
        llm.pause_generation("keep", clear_cache=clear_cache)
        steps = llm.engine.times.num_steps
        assert llm.is_paused() and llm.engine.core.standing().settled
        late = threading.Thread(target=lambda: llm.generate([[1, 2]], SamplingParams(max_tokens=2)))
        late.start()
        assert llm.engine.times.num_steps == steps
        llm.resume_generation()
        llm.resume_generation()
        outputs = running.result()
        late.join(patient(30))
    assert tokens_of(outputs) == tokens_of(whole) and not late.is_alive()
    assert [o.outputs[0].logprobs for o in outputs] == [o.outputs[0].logprobs for o in whole]


def test_rl_p1_the_other_pauses(llm: LLM, whole: list[RequestOutput]) -> None:
    """RL.P1: abort gives what there is, wait lets all end first; requests that come later wait for the end of it."""
    with Running(llm) as running:
        llm.pause_generation("abort")
        for output, full in zip(running.result(), whole, strict=True):
            told = output.outputs[0]
            assert told.finish_reason == "abort" and 0 < len(told.token_ids) == len(told.logprobs or ()) < 400
            assert told.token_ids == full.outputs[0].token_ids[: len(told.token_ids)]
    with Running(llm) as running:
        llm.pause_generation("wait")
        assert tokens_of(running.result()) == tokens_of(whole) and llm.is_paused()
    with pytest.raises(ParameterError):
        llm.pause_generation("now")


def test_rl_s1_sleep_gives_memory_back(whole: list[RequestOutput]) -> None:
    """RL.S1: the cache's at level 1, the weights' too at level 2; kept requests go on in the same bits."""
    with LLM("octavo-tiny", dtype="float32", num_gpu_blocks_override=6_000) as llm:
        pool = llm.engine.memory.kv_bytes
        assert pool > 32 << 20
        llm.generate(PROMPTS, DRAWN)
        llm.engine.core._executor._worker._runner.cache.fill_(1)  # type: ignore[attr-defined]
        rss = psutil.Process().memory_info().rss
        with Running(llm) as running:
            llm.sleep(1, mode="keep")
            assert rss - psutil.Process().memory_info().rss > 0.9 * pool
            assert llm.is_sleeping() and not llm.wake_up(["weights"])
            with pytest.raises(WrongStateError, match="sleeps"):
                llm.resume_generation()
            with pytest.raises(WrongStateError, match="call wake_up"):
                llm.generate([[1]])
            assert llm.wake_up() and not llm.is_paused()
            assert tokens_of(running.result()) == tokens_of(whole)
        llm.sleep(2)
        assert llm.wake_up(["weights", "kv_cache"])
        with pytest.raises(WrongStateError, match="weights were discarded at sleep level 2"):
            llm.generate([[1]])


def test_a_reset_may_take_running_requests_with_it(llm: LLM, whole: list[RequestOutput]) -> None:
    with Running(llm) as running:
        assert not llm.reset_prefix_cache()
        assert llm.reset_prefix_cache(reset_running_requests=True)
        assert tokens_of(running.result()) == tokens_of(whole)


FORM = StructuredOutputsParams(regex="[ab]{3}( [0-9]{2}){6}")
MIXED: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 32, "async_scheduling": True},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "no room": {"num_gpu_blocks_override": 26, "block_size": 16, "max_num_batched_tokens": 48},
}


@pytest.mark.parametrize("own", MIXED.values(), ids=MIXED)
def test_rl_p5_a_pause_at_any_step_changes_no_token_of_anything_in_flight(own: dict[str, Any]) -> None:
    """RL.P5: prompts in chunks, drafts, forms, preempted requests and steps that are not taken in yet."""
    form = SamplingParams(max_tokens=40, temperature=1.0, seed=4, structured_outputs=FORM)
    plain = SamplingParams(max_tokens=40, temperature=1.0, seed=5, logprobs=0, ignore_eos=True)
    asked = [([5, 6, 7, 8] * 20, plain), ([9, 8, 7], form), ([*range(20, 160)], plain), ([3, 4] * 30, plain)]

    def run(llm: LLM, every: int, clear_cache: bool) -> list[object]:
        """All requests; with a pause behind each `every` steps."""
        engine, found, num_pauses = llm.engine, dict[str, RequestOutput](), 0
        for index, (ids, params) in enumerate(asked):
            engine.add(str(index), ids, params)
        while engine.has_unfinished:
            for _ in range(every):
                found |= {each.request_id: each for each in engine.step() if each.finished}
            if engine.has_unfinished:
                assert engine.ask("pause", PauseOrder(clear_cache=clear_cache)).paused
                before = engine.times.num_steps
                found |= {each.request_id: each for each in engine.step() if each.finished}
                assert engine.times.num_steps == before and engine.ask("standing").settled
                assert not engine.ask("resume").paused
                num_pauses += 1
        assert num_pauses >= {1: 10, 3: 4, 24: 1}.get(every, 0)
        return [(found[key].outputs[0].token_ids, found[key].outputs[0].logprobs) for key in sorted(found)]

    with LLM("octavo-tiny", dtype="float32", max_model_len=256, **own) as llm:
        wanted = run(llm, 10_000, False)
        assert len(wanted) == len(asked)
        for every, clear_cache in ((1, False), (3, False), (24, True)):
            assert run(llm, every, clear_cache) == wanted, (every, clear_cache)
