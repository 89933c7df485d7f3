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
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from octavo.config.quoted import said
from octavo.plan import StepPlan
from octavo.request.fields import FieldSpec, salt_with_fields, salt_with_prompt
from octavo.request.outputs import WEIGHTS_BROKEN
from octavo.request.request import FinishReason, Request
from octavo.request.sampling_params import SamplingParams
from octavo.request.seeds import sample_seed
from octavo.request.transfer_params import of_sibling
from octavo.request.updates import RequestUpdate
from octavo.rl.session import HOLD_TIMEOUT, WeightUpdates
from octavo.sched import pause
from octavo.worker.executor import Executor, PendingResult, ask, ask_beside

if TYPE_CHECKING:
    from octavo.sched.scheduler import Scheduler

TRANSFER_SECONDS = 5.0  # that a cache which is to be forgotten waits for transfers that need nobody else
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
        session_timeout: float | None = None,
    ) -> None:
        """`seed` draws the seeds of requests that have none; `async_scheduling` plans a step while one runs.

        `request_fields`: what the attention reads of a request beside its tokens; `looks_ahead`: whether a query may
        see later keys of the prompt. num_uncaptured: graphs that the workers' start has left. session_timeout: seconds
        after which an update of which nothing is heard is over, or makes room.
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
        self.gate = pause.Gate()
        self._held: list[RequestUpdate] = []  # of steps that a pause has waited for; the next step tells them
        self._later: list[Request] = []  # that came while a pause waits for others
        self._settling = pause.Askers()  # who wait for the end of such a pause
        self.weights = WeightUpdates(self, self.gate, hold_timeout=session_timeout or HOLD_TIMEOUT)
        self._calls: dict[str, Callable[[bytes], bytes | Future[bytes]]] = {
            "reset_prefix_cache": _call(pause.ResetOrder, self._reset),
            "standing": lambda _: msgspec.msgpack.encode(self.standing()),
            "pause": _call(pause.PauseOrder, self._pause),
            "settled": lambda _: self._settling.add(),
            "resume": lambda _: msgspec.msgpack.encode(self._resume()),
            "check_sleep": _call(pause.SleepOrder, self._check_sleep),
            "sleep": _call(pause.SleepOrder, self._sleep),
            "wake_up": _call(pause.WakeOrder, self._wake_up),
            "transfers": lambda _: self._transfers(),
            "release_transfers": self._release_transfers,
            **self.weights.calls(),
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
        others = params  # the prompt of one request is scored once, and its blocks go from engine to engine once
        if len(sequence_ids) > 1:
            others = of_sibling(params)
            if params.prompt_logprobs is not None:
                others = msgspec.structs.replace(others, prompt_logprobs=None)
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
                waits_for=sequence_ids[0] if index else "",
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

        Arguments and results are msgpack: orders of `octavo.sched.pause` and the Standing after them.
        `reset_prefix_cache`: not a success, and nothing is done, while any block is held. `pause`: no step runs and
        no result is on its way when it answers, but for one that waits, which is done once `standing` is settled:
        `settled` answers then, for who has others step, or when the pause was undone.
        New weights: `octavo.rl.session`. Raises ValueError for an unknown name, and for what an order may not hold.
        One that waits for a trainer is waited for, without steps: `begin_call` does not.
        """
        answer = self.begin_call(name, payload)
        while not answer.done():
            self.weights.moves.wait()
            self.weights.moves.poll()
        return answer.result()

    def begin_call(self, name: str, payload: bytes = b"") -> Future[bytes]:
        """As `call`; what waits for a trainer waits beside the steps, and `weights.moves.poll` answers it later.

        Cancelled, such a call is cut short, or not begun.
        """
        self._check_alive()
        call = self._calls.get(name)
        if call is None:
            raise ValueError(f"unknown call {name!r}: known are {', '.join(sorted(self._calls))}")
        answer = call(payload)
        if isinstance(answer, Future):
            return answer
        done = Future[bytes]()
        done.set_result(answer)
        return done

    @property
    def has_unfinished(self) -> bool:
        """Whether a `step` has anything to do. A failed or closed engine has not."""
        waits = bool(self._inbox or self._in_flight or self._held) or (self.gate.is_open and self.scheduler.has_work)
        waits = waits or (bool(self._settling) and not self.gate.draining)
        return self._failure is None and waits

    @property
    def waits_for_peers(self) -> bool:
        """Whether nothing is unfinished but blocks on offer, or in transfers that hang: they end some time or never."""
        is_idle = not (self._inbox or self._in_flight or self._held or self.scheduler.num_unfinished)
        return is_idle and self.scheduler.loads.are_on_offer

    @property
    def has_failed(self) -> bool:
        """Whether it stopped, or was closed: no step runs any more."""
        return self._failure is not None

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
        if self.gate.asleep or self.gate.overwriting:  # what a graph reads may have no memory, or change
            return False
        self._has_uncaptured = self._has_uncaptured and any(self.ask_workers("capture_next", bool))
        return self._has_uncaptured

    def ask_workers(self, name: str, reply: type[_Reply], request: Any = None) -> list[_Reply]:
        """Ask every worker, between two steps, for what `octavo.worker.calls` has under `name`; their answers.

        Raises ValueError for an unknown name or a request of another type, and RuntimeError as `add`.
        """
        self._check_alive()
        return ask(self._executor, name, reply, request)

    def ask_beside(self, name: str, reply: type[_Reply], request: Any = None) -> list[_Reply]:
        """As `ask_workers`, from another thread, while steps run: for what touches nothing of them."""
        return ask_beside(self._executor, name, reply, request)

    def close(self) -> None:
        """Wait for issued steps and release the worker. The engine cannot be used afterwards."""
        self._failure = self._failure or RuntimeError("it was closed")
        self.scheduler.loads.close()
        self._executor.close()

    def change_weights(self, apply: Callable[[], bool], identity: str, version: str, running: str) -> tuple[int, str]:
        """Between two steps: `apply` makes workers run with other weights, whose tokens are stamped with `version`.

        identity: what blocks of these weights are named by. running: what becomes of requests that have begun:
        "recompute", "keep_kv" or "abort". `apply` says whether K and V of before can be read no more: then what would
        keep them is computed again. Returns how many there were, and what became of them.
        """
        self.settle()
        if apply() and running == "keep_kv":
            running = "recompute"
        scheduler, keeps_kv = self.scheduler, running == "keep_kv"
        num_running, versions = len(scheduler.running), scheduler.versions
        if running == "abort":
            self._held += versions.end_all(FinishReason.ABORT, begun=True)
        anew = identity != scheduler.kv.identity.weights_version
        self._held += versions.relabel(version, recomputed=anew and not keeps_kv, mixed=anew and keeps_kv)
        scheduler.set_weights_version(identity, keep_kv=keeps_kv)
        self.gate.repaired()
        return num_running, running

    def relabel(self, version: str) -> None:
        """Between two steps: stamp tokens with `version` from now on. No request and no block is touched."""
        self.settle()
        self._held += self.scheduler.versions.relabel(version)

    def hold_weights(self) -> None:
        """Between two steps: plan none until the weights have changed, or are broken."""
        self.settle()
        self.gate.overwriting = True

    def release_weights(self) -> None:
        """Between two steps: plan them again, for no weight was overwritten."""
        self.gate.overwriting = False

    def break_weights(self, reason: str) -> None:
        """Between two steps: end all requests, for nothing can be computed until whole weights have come."""
        self.settle()
        self._held += self.scheduler.versions.end_all(FinishReason.ERROR, WEIGHTS_BROKEN)
        self.gate.lose(reason)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the engine stopped: {said(self._failure)}") from self._failure

    def _step(self) -> list[RequestUpdate]:
        started = time.perf_counter()
        self._drain_inbox()
        if self._settling and not (self.gate.draining or self._held):  # all was told by the step before
            self._settling.tell(msgspec.msgpack.encode(self.standing()))
        if not self.gate.is_open:
            self.weights.expire()
            if self.gate.draining:  # what it waits for may have been ended
                self._end_of_wait()
            if self.gate.broken:  # for those that came while that was found
                self._held += self.scheduler.versions.end_all(FinishReason.ERROR, WEIGHTS_BROKEN)
            held, self._held = self._held, []
            return held
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
        if self._held:
            held, self._held = self._held, []
            updates = held + updates
        if self.gate.draining:
            self._end_of_wait()
        return updates

    def _drain_inbox(self) -> None:
        while self._inbox:
            entries = self._inbox.popleft()
            for entry in entries:
                if isinstance(entry, str):
                    self._later = [request for request in self._later if request.request_id != entry]
                    self.scheduler.abort([entry])
                elif self.gate.draining:
                    self._later.append(entry)
                else:
                    self.scheduler.add(entry)

    # Pause and sleep: between two steps, see `call`.

    def standing(self, refused: str = "", *, success: bool = True) -> pause.Standing:
        """How the engine stands. refused: why a move was not made."""
        gate = self.gate
        return pause.Standing(
            paused=gate.paused or gate.draining,
            settled=not (self._in_flight or self._held or gate.draining),
            sleep_level=gate.level,
            asleep=[tag for tag in pause.TAGS if tag in gate.asleep],
            lost=gate.lost,
            lost_because=gate.lost_because,
            num_unfinished=self.scheduler.num_unfinished + len(self._later),
            refused=refused,
            success=success and not refused,
        )

    def settle(self) -> None:
        """Wait for the steps that run; the next step tells their results."""
        while self._in_flight:
            due, pending = self._in_flight.popleft()
            self._held += self.scheduler.update(due, pending.result())

    def _pause(self, order: pause.PauseOrder) -> pause.Standing:
        if order.wait and self.gate.is_open and (self.scheduler.num_unfinished or self._in_flight):
            self.gate.draining, self.gate.clears = True, order.clear_cache
            return self.standing()
        self.settle()
        self.gate.paused = True
        self._end_of_wait(at_once=True)
        if order.clear_cache:
            self._forget_cache()
        return self.standing()

    def _end_of_wait(self, *, at_once: bool = False) -> None:
        """Pause, if all that a pause waits for has ended. at_once: whatever has; the rest is kept."""
        gate = self.gate
        if not at_once and (self.scheduler.num_unfinished or self._in_flight):
            return
        gate.paused, gate.draining = True, False
        if gate.clears:
            self._forget_cache()
        gate.clears = False
        self._take_later()

    def _take_later(self) -> None:
        later, self._later = self._later, []
        for request in later:
            self.scheduler.add(request)

    def _resume(self) -> pause.Standing:
        refused = self.gate.resume()
        if not refused:
            self._take_later()
        return self.standing(refused)

    def _reset(self, order: pause.ResetOrder) -> pause.Standing:
        done = self._forget_cache() if order.reset_running_requests else self.scheduler.reset_prefix_cache()
        if done and order.reset_connector:
            done = self.scheduler.loads.connector.reset()
        return self.standing(success=done)

    def _transfers(self) -> bytes:
        """Loads that failed since the start, and why the blocks of a peer could not be taken, if they could not."""
        stats = self.scheduler.loads.stats
        return msgspec.msgpack.encode({"num_load_failures": stats.num_load_failures, "refusal": stats.refusal})

    def _release_transfers(self, payload: bytes) -> bytes:
        """How many offers of blocks end, since nobody will fetch them."""
        transfer_ids = msgspec.msgpack.decode(payload, type=list[str])
        return msgspec.msgpack.encode(self.scheduler.loads.connector.release(transfer_ids))

    def _forget_cache(self) -> bool:
        """Whatever runs is computed again. False while a transfer holds blocks that does not end by itself in time."""
        self.settle()
        self._held += self.scheduler.take_loads()  # no step may look for what has ended
        self.scheduler.recompute()
        until = time.monotonic() + TRANSFER_SECONDS
        while self.scheduler.loads.end_by_themselves and time.monotonic() < until:
            self.scheduler.loads.wait()
            self._held += self.scheduler.take_loads()
        return self.scheduler.reset_prefix_cache()

    def _check_sleep(self, order: pause.SleepOrder) -> pause.Standing:
        if not 0 <= order.level <= 2:
            raise ValueError(f"level: must be 0, 1 or 2, got {order.level}")
        going = self.ask_workers("check_sleep", list[str], order.keeps)
        if any("weights" in tags for tags in going):
            self.weights.give_up_if_gone()
            if self.weights.is_open:  # what has come would be lost
                return self.standing("sleep: an update of the weights is open: finish or abort it first")
        return self.standing(self.gate.check_sleep(order.level))

    def _sleep(self, order: pause.SleepOrder) -> pause.Standing:
        refused = self._check_sleep(order).refused
        try:
            refused = refused or self._stop_for_sleep(order)
            if order.keeps and not refused:
                refused = next(filter(None, self.ask_workers("sleep", str, order.keeps)), "")
        except BaseException:
            self.gate.sleep(order.level, order.tags)  # nobody knows what memory is there: no step may look
            raise
        else:
            if not refused:
                self.gate.sleep(order.level, order.tags)
        finally:
            self.gate.paused &= not order.ends_pause
        return self.standing(refused)

    def _stop_for_sleep(self, order: pause.SleepOrder) -> str:
        """Let steps end, and forget a cache that is to go; why that cannot be, or ""."""
        self.settle()
        if self.gate.draining:
            self._end_of_wait(at_once=True)
        if order.keeps and not self._forget_cache():
            return f"sleep: {pause.BLOCKS_HELD}"
        return ""

    def _wake_up(self, order: pause.WakeOrder) -> pause.Standing:
        unknown = [tag for tag in order.tags or () if tag not in pause.TAGS]
        if unknown:
            raise ValueError(f"tags: unknown {unknown[0][:64]!r}: known are {', '.join(pause.TAGS)}")
        asleep = [tag for tag in pause.MEMORY_TAGS if tag in self.gate.asleep]
        tags = [tag for tag in asleep if order.tags is None or tag in order.tags]
        refused = next(filter(None, self.ask_workers("wake", str, tags)), "") if tags else ""
        if not refused:
            self.gate.wake(order.tags)
        return self.standing(refused)


_Order = TypeVar("_Order")


def _call(kind: type[_Order], run: Callable[[_Order], pause.Standing]) -> Callable[[bytes], bytes]:
    """A call that takes an order, or nothing for the order's defaults. Raises ValueError for anything else."""

    def answer(payload: bytes) -> bytes:
        return msgspec.msgpack.encode(run(msgspec.msgpack.decode(payload, type=kind) if payload else kind()))

    return answer
