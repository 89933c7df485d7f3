"""One LLM in many threads: the answers are those of one thread, and whoever fails or leaves takes nobody along."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from engine_checks import assert_idle
from octavo import LLM, SamplingParams
from octavo.request.sampling_params import ParameterError
from octavo.startup import gc_control

NUM_THREADS = 12
PATIENCE = 60  # seconds until a thread that hangs is a failure
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def _params(index: int, **fields: Any) -> SamplingParams:
    return SamplingParams(
        temperature=1.0, seed=index, max_tokens=16, ignore_eos=True, n=1 + index % 2, detokenize=False, **fields
    )


def _prompt(index: int) -> list[int]:
    return [30 + index] * (3 + 5 * index)


def _generated(llm: LLM, index: int) -> list[list[int]]:
    (output,) = llm.generate([_prompt(index)], _params(index), use_tqdm=False)
    return [list(completion.token_ids) for completion in output.outputs]


def _streamed(llm: LLM, index: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(_params(index).n)]
    for output in llm.stream(_prompt(index), _params(index)):
        for completion in output.outputs:
            found[completion.index] += completion.token_ids
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["waits", "plans ahead"])
def shared(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, list[list[list[int]]]]]:
    """An engine, and its answers to one thread."""
    with LLM(dtype="float32", async_scheduling=request.param) as llm:
        yield llm, [_generated(llm, index) for index in range(NUM_THREADS)]


@contextlib.contextmanager
def _within_steps(llm: LLM, action: Callable[[int], object]) -> Iterator[None]:
    """Call `action` with the number of each step, within it."""
    step, numbers = llm.engine.step, iter(range(1 << 30))

    def acting() -> Any:
        action(next(numbers))
        return step()

    llm.engine.step = acting  # type: ignore[method-assign]
    try:
        yield
    finally:
        del llm.engine.step


def _answers(futures: list[Future[Any]]) -> list[Any]:
    return [future.result(PATIENCE) for future in futures]


def test_many_threads_have_the_answers_of_one_and_its_steps(shared: tuple[LLM, list[list[list[int]]]]) -> None:
    """`AssertionError: results come in the order of plans`, for good."""
    llm, expected = shared
    steps = llm.engine.times.num_steps
    llm.generate([_prompt(index) for index in range(NUM_THREADS)], [_params(index) for index in range(NUM_THREADS)])
    num_steps = llm.engine.times.num_steps - steps
    everybody = threading.Barrier(NUM_THREADS)
    asked = threading.Semaphore(0)
    check = llm.engine.check

    def checking(*given: Any, **more: Any) -> Any:
        asked.release()
        return check(*given, **more)

    def all_have_asked(number: int) -> None:
        if not number:
            for _ in range(NUM_THREADS):
                assert asked.acquire(timeout=PATIENCE)

    def ask(index: int) -> list[list[int]]:
        everybody.wait(PATIENCE)
        return _streamed(llm, index) if index % 3 == 0 else _generated(llm, index)

    llm.engine.check = checking  # type: ignore[method-assign]
    try:
        with ThreadPoolExecutor(NUM_THREADS) as pool, _within_steps(llm, all_have_asked):
            steps = llm.engine.times.num_steps
            assert _answers([pool.submit(ask, index) for index in range(NUM_THREADS)]) == expected
    finally:
        del llm.engine.check
    assert llm.engine.times.num_steps - steps < 3 * num_steps, "they shared steps"
    with ThreadPoolExecutor(NUM_THREADS) as pool:  # and again, in no order at all
        futures = [pool.submit(_generated, llm, index % NUM_THREADS) for index in range(3 * NUM_THREADS)]
        assert _answers(futures) == expected * 3
    assert_idle(llm)


@pytest.mark.parametrize("leads", [True, False], ids=["leads", "follows"])
def test_ctrl_c_in_the_main_thread_leaves_the_others_alone(
    shared: tuple[LLM, list[list[list[int]]]], leads: bool
) -> None:
    """Whether the main thread steps for all, or waits for another that does."""
    llm, expected = shared
    futures: list[Future[Any]] = []
    sent, never = list[bool](), threading.Event()

    def act(number: int) -> None:
        if number == 2 and leads:
            futures.extend(pool.submit(_generated, llm, index) for index in range(4))
        lengths = {request.num_prompt for request in llm.engine.scheduler.running}
        if not sent and 77 in lengths and (not leads or 3 in lengths):  # those of the main thread, and of the others
            sent.append(threading.current_thread() is threading.main_thread())
            os.kill(os.getpid(), signal.SIGINT)
        elif not sent:
            never.wait(0.005)  # so that nobody has all tokens before everybody is there

    with ThreadPoolExecutor(5) as pool, _within_steps(llm, act):
        begun = threading.Event()
        if not leads:
            futures.append(pool.submit(_begin, llm, begun))
            assert begun.wait(PATIENCE)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5] * 77, [6] * 4], LONG, use_tqdm=False)
        answers = _answers(futures)
    assert sent == [leads]
    assert answers == expected[:4] if leads else len(answers[0]) == 400
    assert_idle(llm)


def _begin(llm: LLM, begun: threading.Event) -> list[int]:
    """A long answer of a thread that steps from the beginning to the end."""
    queue = llm.engine.queue
    llm.engine.queue = lambda *given, **more: (queue(*given, **more), begun.set())[0]  # type: ignore[method-assign]
    (output,) = llm.generate([[7]], LONG, use_tqdm=False)
    del llm.engine.queue
    return list(output.outputs[0].token_ids)


def test_what_is_refused_in_one_thread_is_nobody_elses(shared: tuple[LLM, list[list[list[int]]]]) -> None:
    llm, expected = shared

    def refused() -> None:
        with pytest.raises(ParameterError, match="10000000"):
            llm.generate([[10**7]], LONG)

    with ThreadPoolExecutor(5) as pool:
        futures: list[Future[Any]] = [pool.submit(_generated, llm, index) for index in range(4)]
        assert _answers([*futures, pool.submit(refused)]) == [*expected[:4], None]
    assert_idle(llm)


def test_a_stream_that_is_dropped_within_a_step_is_gone_after_it(shared: tuple[LLM, list[list[list[int]]]]) -> None:
    """Its iterator may end anywhere, also in the thread that steps and within the step."""
    llm, expected = shared
    streams = [llm.stream(_prompt(0), SamplingParams(max_tokens=1000, ignore_eos=True)) for _ in range(2)]
    for stream in streams:
        next(stream)
    del stream

    def drop(number: int) -> None:
        if number == 2:
            streams.pop()
            gc.collect()

    with ThreadPoolExecutor(2) as pool, _within_steps(llm, drop):
        assert _answers([pool.submit(_generated, llm, index) for index in (3, 4)]) == expected[3:5]
    assert llm.engine.scheduler.num_unfinished == 1
    with ThreadPoolExecutor(1) as pool:
        pool.submit(streams.pop().close).result(PATIENCE)
    assert_idle(llm)


def test_closing_in_one_thread_ends_what_others_wait_for(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    running, never = threading.Event(), threading.Event()

    def note(number: int) -> None:
        if number >= 3:
            running.set()
            never.wait(0.005)  # so that nobody has all tokens before it is closed

    with ThreadPoolExecutor(4) as pool, _within_steps(llm, note):
        long = SamplingParams(max_tokens=1500, ignore_eos=True)
        futures = [pool.submit(llm.generate, [[index + 5]], long, use_tqdm=False) for index in range(4)]
        assert running.wait(PATIENCE)
        llm.close()
        for future in futures:
            with pytest.raises(RuntimeError, match="closed"):
                future.result(PATIENCE)


def test_the_collectors_thresholds_come_back_whoever_ends_first() -> None:
    outside = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    before, first, second = gc.get_threshold(), gc_control.relaxed(), gc_control.relaxed()
    first.__enter__()
    second.__enter__()
    assert gc.get_threshold() != before
    first.__exit__(None, None, None)
    assert gc.get_threshold() != before
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before
    gc.set_threshold(*outside)
