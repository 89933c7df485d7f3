"""Executors: where a worker runs, seen from the engine.

Owns the hand-over of plans and results. `InlineExecutor` runs a step in the caller's thread: nothing overlaps.
`ThreadExecutor` runs steps in order on one thread of its own, so that the engine plans step N + 1 while step N runs;
with `DeviceExecutor` the same is true of a device that works through what the caller's thread issues.
Invariant: steps execute in the order in which they were submitted.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import NoReturn, Protocol

from octavo.plan import StepPlan, StepResult
from octavo.startup.forks import tell_in_child


class PendingResult(Protocol):
    """The result of a step that may still run."""

    def result(self) -> StepResult:
        """Wait for the step and give its result; raises what the step raised."""


class Executor(Protocol):
    """Submits steps to a worker."""

    def submit(self, plan: StepPlan) -> PendingResult:
        """Issue a step. Does not wait for it where the executor is asynchronous."""

    def close(self) -> None:
        """Wait for issued steps and release the worker."""


def _closed(plan: StepPlan) -> NoReturn:
    raise RuntimeError("the executor was closed")


class _Done:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


class InlineExecutor:
    """Runs each step before `submit` returns."""

    def __init__(self, execute: Callable[[StepPlan], StepResult]) -> None:
        """`execute` is a runner's."""
        self._execute = execute

    def submit(self, plan: StepPlan) -> PendingResult:
        """Run the step."""
        return _Done(self._execute(plan))

    def close(self) -> None:
        """Nothing is in flight: let go of the runner."""
        self._execute = _closed


class DeviceExecutor:
    """Issues each step in the caller's thread, and leaves the waiting to the result."""

    def __init__(self, issue: Callable[[StepPlan], PendingResult]) -> None:
        """`issue` is a runner's."""
        self._issue = issue

    def submit(self, plan: StepPlan) -> PendingResult:
        """Issue the step."""
        return self._issue(plan)

    def close(self) -> None:
        """A step in flight ends by itself: let go of the runner."""
        self._issue = _closed


class ThreadExecutor:
    """Runs steps on a thread of its own."""

    def __init__(self, execute: Callable[[StepPlan], StepResult]) -> None:
        """`execute` is a runner's."""
        self._execute = execute
        self._forked()
        tell_in_child(self._forked)

    def _forked(self) -> None:
        """Have a thread: a forked process has none."""
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="octavo-worker")

    def submit(self, plan: StepPlan) -> PendingResult:
        """Queue the step behind the ones before it."""
        return self._pool.submit(self._execute, plan)

    def close(self) -> None:
        """Wait for issued steps, end the thread and let go of the runner."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._execute = _closed
