"""EngineCore: schedule, execute, update, with one step in flight.

Owns the loop of a step and the inbox of adds and aborts. The parts are built by `start`. Knows neither tensors nor
text: a frontend stands before it (`octavo.frontend`), here or in another process. Invariant: whatever enters through
`add` leaves through `step` with a finish reason exactly once, unless it is aborted.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from octavo.plan import StepPlan
from octavo.request.fields import FieldSpec, salt_with_fields, salt_with_prompt
from octavo.request.request import Request
from octavo.request.sampling_params import SamplingParams
from octavo.request.seeds import sample_seed
from octavo.request.updates import RequestUpdate
from octavo.worker.executor import Executor, PendingResult, ask

if TYPE_CHECKING:
    from octavo.sched.scheduler import Scheduler

_Reply = TypeVar("_Reply")


@dataclasses.dataclass(slots=True)
class StepTimes:
    """Seconds that the engine's thread spent since the start, by part of a step, and how many steps ran."""

    num_steps: int = 0
    schedule: float = 0.0
    issue: float = 0.0  # handing steps to the worker; where nothing overlaps, the step itself
    wait: float = 0.0  # for results
    update: float = 0.0  # the scheduler's update
    output: float = 0.0  # text and outputs

    def copy(self) -> StepTimes:
        """The times so far."""
        return dataclasses.replace(self)

    def since(self, earlier: StepTimes) -> StepTimes:
        """What was spent after `earlier` was copied."""
        now, then = dataclasses.astuple(self), dataclasses.astuple(earlier)
        return StepTimes(*(a - b for a, b in zip(now, then, strict=True)))

    def per_step(self) -> dict[str, float]:
        """Mean microseconds per step of each part."""
        parts = dataclasses.asdict(self)
        num_steps = max(parts.pop("num_steps"), 1)
        return {name: seconds / num_steps * 1e6 for name, seconds in parts.items()}


class EngineCore:
    """Scheduler and worker: sequences in, updates out. It knows no text, so it may live in a process of its own.

    `add` and `abort` may be called from any thread, the rest from one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        async_scheduling: bool = False,
        request_fields: Sequence[FieldSpec] = (),
        looks_ahead: bool = False,
        num_uncaptured: int = 0,
    ) -> None:
        """`seed` draws the seeds of requests that have none; `async_scheduling` plans a step while one runs.

        `request_fields`: what the attention reads of a request beside its tokens; `looks_ahead`: whether a query may
        see later keys of the prompt. num_uncaptured: graphs that the workers' start has left.
        """
        self.scheduler = scheduler
        self.times = StepTimes()
        self._executor = executor
        self._eos_token_ids = frozenset(eos_token_ids)
        self._request_fields, self._looks_ahead = tuple(request_fields), looks_ahead
        self._has_uncaptured = num_uncaptured > 0
        self._seeds = random.Random(seed)
        self._inbox: collections.deque[list[Request] | list[str]] = collections.deque()
        self._in_flight: collections.deque[tuple[StepPlan, PendingResult]] = collections.deque()
        self._max_in_flight = 1 if async_scheduling else 0
        self._failure: BaseException | None = None
        self._calls: dict[str, Callable[[bytes], bytes]] = {
            "reset_prefix_cache": lambda _: msgspec.msgpack.encode(scheduler.reset_prefix_cache())
        }

    def add(
        self,
        sequence_ids: Sequence[str],
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_tokens: int,
        priority: int = 0,
        cache_salt: str = "",
        coalesce_updates: bool = False,
    ) -> None:
        """Queue a checked request, one sequence per id; sequence i draws with `sample_seed(seed, i)`.

        coalesce_updates: one update for the first token and one at the end will do; `take_untold` gives what is known
        between. Raises RuntimeError if a step has failed before, or the engine was closed.
        """
        self._check_alive()
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        cache_salt = salt_with_fields(cache_salt, self._request_fields, params.extra_args)
        if self._looks_ahead:
            cache_salt = salt_with_prompt(cache_salt, prompt_token_ids)
        others = params  # the prompt of one request is scored once
        if params.prompt_logprobs is not None and len(sequence_ids) > 1:
            others = msgspec.structs.replace(params, prompt_logprobs=None)
        sequences = [
            Request(
                sequence_id,
                prompt_token_ids,
                others if index else params,
                max_tokens=max_tokens,
                seed=sample_seed(seed, index),
                eos_token_ids=self._eos_token_ids,
                priority=priority,
                cache_salt=cache_salt,
                coalesce_updates=coalesce_updates,
            )
            for index, sequence_id in enumerate(sequence_ids)
        ]
        self._inbox.append(sequences)

    def abort(self, sequence_ids: Iterable[str]) -> None:
        """End sequences as soon as possible, in any state, without an update. Unknown ids are ignored."""
        self._inbox.append(list(sequence_ids))

    def take_untold(self, sequence_ids: Iterable[str]) -> list[RequestUpdate]:
        """What sequences with `coalesce_updates` have that no update told. Unknown ids are ignored."""
        return self.scheduler.take_untold(sequence_ids)

    def call(self, name: str, payload: bytes = b"") -> bytes:
        """Ask something between two steps; one may be in flight.

        Arguments and results are msgpack, as the call's name says. `reset_prefix_cache`: forget every cached prefix;
        the result is False, and nothing is done, while any block is held. Raises ValueError for an unknown name.
        """
        self._check_alive()
        answer = self._calls.get(name)
        if answer is None:
            raise ValueError(f"unknown call {name!r}: known are {', '.join(sorted(self._calls))}")
        return answer(payload)

    @property
    def has_unfinished(self) -> bool:
        """Whether a `step` has anything to do. A failed or closed engine has not."""
        return self._failure is None and (bool(self._inbox) or bool(self._in_flight) or self.scheduler.has_work)

    def step(self) -> list[RequestUpdate]:
        """Issue the next step, then take in the results of the oldest one that is due.

        What a step raises is not a request's fault: the engine stops, and says so from then on. So does an interrupt
        that cuts a step in two.
        """
        self._check_alive()
        try:
            return self._step()
        except BaseException as error:
            self._failure = error
            raise

    def capture_next(self) -> bool:
        """Capture one of the graphs that the start has left; False if there is none. Takes 10 to 30 ms."""
        self._check_alive()
        self._has_uncaptured = self._has_uncaptured and any(self.ask_workers("capture_next", bool))
        return self._has_uncaptured

    def ask_workers(self, name: str, reply: type[_Reply], request: Any = None) -> list[_Reply]:
        """Ask every worker, between two steps, for what `octavo.worker.calls` has under `name`; their answers.

        Raises ValueError for an unknown name or a request of another type, and RuntimeError as `add`.
        """
        self._check_alive()
        return ask(self._executor, name, reply, request)

    def close(self) -> None:
        """Wait for issued steps and release the worker. The engine cannot be used afterwards."""
        self._failure = self._failure or RuntimeError("it was closed")
        self._executor.close()

    def set_weights_version(self, version: str, *, keep_kv: bool = False) -> None:
        """Steps from the next one on run with other weights. Between two steps; see Scheduler."""
        self._check_alive()
        self.scheduler.set_weights_version(version, keep_kv=keep_kv)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine stopped: {self._failure!r}") from self._failure

    def _step(self) -> list[RequestUpdate]:
        started = time.perf_counter()
        self._drain_inbox()
        updates = self.scheduler.take_loads()
        plan = self.scheduler.schedule()
        scheduled = time.perf_counter()
        issued = plan.has_work
        if issued:
            self._in_flight.append((plan, self._executor.submit(plan)))
        elif not self._in_flight and not updates:
            self.scheduler.loads.wait()
        executed = issued_at = time.perf_counter()
        if self._in_flight and not (issued and len(self._in_flight) <= self._max_in_flight):
            due, pending = self._in_flight.popleft()
            result = pending.result()
            executed = time.perf_counter()
            updates += self.scheduler.update(due, result)
        self.times.num_steps += issued
        self.times.schedule += scheduled - started
        self.times.issue += issued_at - scheduled
        self.times.wait += executed - issued_at
        self.times.update += time.perf_counter() - executed
        return updates

    def _drain_inbox(self) -> None:
        while self._inbox:
            entries = self._inbox.popleft()
            for entry in entries:
                if isinstance(entry, Request):
                    self.scheduler.add(entry)
                else:
                    self.scheduler.abort([entry])
