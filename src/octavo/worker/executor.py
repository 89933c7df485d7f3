"""Executors: where workers run, seen from the engine.

Owns the hand-over of plans, results and calls. Knows neither devices nor what is called. `InlineExecutor` issues a
step in the caller's thread: on a CPU nothing overlaps; a GPU works through what was issued while the caller goes on.
`ThreadExecutor` runs steps in order on one thread of its own, so that the engine plans step N + 1 while step N runs.
Invariant: steps execute in the order in which they were submitted, and a call sees all steps that were submitted before
it, and none that come later.
"""

from __future__ import annotations

import concurrent.futures
from typing import Any, Protocol, TypeVar

import msgspec

from octavo.plan import StepPlan, StepResult
from octavo.startup.forks import tell_in_child

_Reply = TypeVar("_Reply")


class PendingResult(Protocol):
    """The result of a step that may still run."""

    def result(self) -> StepResult:
        """Wait for the step and give its result; raises what the step raised."""


class StepWorker(Protocol):
    """A worker as far as every executor must know it; its other methods go by name."""

    def issue(self, plan: StepPlan) -> PendingResult:
        """Begin a step."""


class Executor(Protocol):
    """Runs workers, one or several, each with a device."""

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every worker between two steps; what each gave. Raises what one of them raised."""

    def beside(self, method: str, *args: Any) -> list[Any]:
        """Call a method that touches nothing of a step, of every worker, while steps may run; what each gave."""

    def submit(self, plan: StepPlan) -> PendingResult:
        """Issue a step on all workers. Does not wait for it where the executor is asynchronous."""

    def close(self) -> None:
        """Wait for issued steps and release the workers."""


def ask(executor: Executor, name: str, reply: type[_Reply], request: Any = None) -> list[_Reply]:
    """Ask every worker for what `octavo.worker.calls` has under `name`; their answers.

    Raises ValueError for an unknown name, and for an answer of another type.
    """
    payload = msgspec.msgpack.encode(request)
    return [msgspec.msgpack.decode(answer, type=reply) for answer in executor.call("call", name, payload)]


def ask_beside(executor: Executor, name: str, reply: type[_Reply], request: Any = None) -> list[_Reply]:
    """As `ask`, on the caller's thread, while steps may run."""
    payload = msgspec.msgpack.encode(request)
    return [msgspec.msgpack.decode(answer, type=reply) for answer in executor.beside("beside", name, payload)]


class _Closed:
    """In place of a worker that was released."""

    def issue(self, plan: StepPlan) -> PendingResult:
        """Refuse."""
        raise RuntimeError("the executor was closed")

    def __getattr__(self, method: str) -> Any:
        """Refuse."""
        raise RuntimeError("the executor was closed")


class InlineExecutor:
    """One worker, in the caller's thread."""

    def __init__(self, worker: StepWorker) -> None:
        """`worker` belongs to the executor from now on."""
        self._worker = worker

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call it."""
        return [getattr(self._worker, method)(*args)]

    def beside(self, method: str, *args: Any) -> list[Any]:
        """Call it."""
        return self.call(method, *args)

    def submit(self, plan: StepPlan) -> PendingResult:
        """Issue the step."""
        return self._worker.issue(plan)

    def close(self) -> None:
        """A step in flight ends by itself: let go of the worker."""
        self._worker = _Closed()


class ThreadExecutor:
    """One worker, whose steps run on a thread of their own. Calls run in the caller's, while no step does."""

    def __init__(self, worker: StepWorker) -> None:
        """`worker` belongs to the executor from now on."""
        self._worker = worker
        self._forked()
        tell_in_child(self._forked)

    def _forked(self) -> None:
        """Have a thread: a forked process has none."""
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="octavo-worker")
        self._last: concurrent.futures.Future[StepResult] | None = None

    def call(self, method: str, *args: Any) -> list[Any]:
        """Wait for the steps that were submitted, whatever became of them, and call it."""
        if self._last is not None:
            concurrent.futures.wait([self._last])
        return [getattr(self._worker, method)(*args)]

    def beside(self, method: str, *args: Any) -> list[Any]:
        """Call it, in the caller's thread."""
        return [getattr(self._worker, method)(*args)]

    def submit(self, plan: StepPlan) -> PendingResult:
        """Queue the step behind the ones before it."""
        self._last = self._pool.submit(self._execute, plan)
        return self._last

    def _execute(self, plan: StepPlan) -> StepResult:
        return self._worker.issue(plan).result()

    def close(self) -> None:
        """Wait for issued steps, end the thread and let go of the worker."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._worker, self._last = _Closed(), None
