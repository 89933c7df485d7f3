"""Executors: steps in their order, calls between them, errors at their place, and nothing after the end."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from octavo.plan import StepPlan, StepResult
from octavo.worker.executor import Executor, InlineExecutor, ThreadExecutor, ask
from patience import patient

EXECUTORS = [InlineExecutor, ThreadExecutor]


class Notes:
    """A worker that notes what it is told. Step 7 fails; steps wait for `gate`."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()

    def issue(self, plan: StepPlan) -> Future[StepResult]:
        assert self.gate.wait(patient(60))
        self.told.append(plan.step)
        self.threads.add(threading.get_ident())
        done: Future[StepResult] = Future()
        if plan.step == 7:
            done.set_exception(RuntimeError("step 7 fails"))
        else:
            done.set_result(StepResult(step=plan.step))
        return done

    def double(self, number: int) -> int:
        self.told.append(f"double {number}")
        return 2 * number

    def call(self, name: str, payload: bytes) -> bytes:
        return payload if name == "echo" else b"\xc0"


@pytest.mark.parametrize("kind", EXECUTORS)
def test_steps_run_in_their_order_and_a_call_sees_those_before_it(kind: type[Any]) -> None:
    worker = Notes()
    executor: Executor = kind(worker)
    pending = [executor.submit(StepPlan(step=step)) for step in range(5)]
    assert executor.call("double", 21) == [42]
    assert worker.told == [0, 1, 2, 3, 4, "double 21"], "the call waited for the steps"
    assert [each.result().step for each in pending] == [0, 1, 2, 3, 4]
    executor.close()


@pytest.mark.parametrize("kind", EXECUTORS)
def test_what_a_step_raises_its_result_raises_and_the_next_step_runs(kind: type[Any]) -> None:
    executor: Executor = kind(Notes())
    broken, sound = (executor.submit(StepPlan(step=step)) for step in (7, 8))
    with pytest.raises(RuntimeError, match="step 7 fails"):
        broken.result()
    assert executor.call("double", 1) == [2], "a call is none of a failed step's business"
    assert sound.result().step == 8
    executor.close()


@pytest.mark.parametrize("kind", EXECUTORS)
def test_what_a_call_raises_is_its_callers(kind: type[Any]) -> None:
    executor: Executor = kind(Notes())
    with pytest.raises(TypeError):
        executor.call("double", "a", "b")
    with pytest.raises(AttributeError):
        executor.call("no_such_method")
    assert executor.submit(StepPlan(step=1)).result().step == 1
    executor.close()


@pytest.mark.parametrize("kind", EXECUTORS)
def test_a_closed_executor_refuses_and_has_let_go(kind: type[Any]) -> None:
    executor: Executor = kind(Notes())
    last = executor.submit(StepPlan(step=1))
    executor.close()
    assert last.result().step == 1, "an issued step is waited for"
    with pytest.raises(RuntimeError):
        executor.submit(StepPlan(step=2)).result()
    with pytest.raises(RuntimeError, match="the executor was closed"):
        executor.call("double", 1)
    executor.close()


def test_steps_of_a_thread_overlap_with_who_submits_them() -> None:
    worker = Notes()
    worker.gate.clear()
    executor = ThreadExecutor(worker)
    pending = executor.submit(StepPlan(step=1))
    assert not worker.told, "nobody waited"
    worker.gate.set()
    assert pending.result().step == 1 and threading.get_ident() not in worker.threads
    executor.close()


def test_answers_are_of_the_type_that_was_asked_for() -> None:
    executor = InlineExecutor(Notes())
    assert ask(executor, "echo", dict[str, int], {"a": 1}) == [{"a": 1}]
    assert ask(executor, "nothing", type(None)) == [None]
    with pytest.raises(ValueError, match="Expected `int`"):
        ask(executor, "echo", int, "text")
