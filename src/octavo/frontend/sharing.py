"""SharedEngine: one engine for any number of threads, whose requests run in one batch.

Owns which thread steps, the calls on their way in, and whom an output belongs to. It has no thread of its own: of the
threads that wait for outputs one leads. The leader takes in what all have asked for, steps, and hands the outputs out;
when it has what it waits for, or is interrupted, another leads. Knows no prompts and no text. Invariants: the engine is
touched under `_lead` alone; who does not get it either is woken by who has it, or left something in `_inbox`, where
every holder looks after it has let go. In a forked process the engine works if it was idle then, on a CPU; else every
use says so.
"""

from __future__ import annotations

import collections
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from octavo.frontend.control import PauseOrder, Standing
from octavo.frontend.engine import Engine
from octavo.frontend.frontend import Checked
from octavo.frontend.request_metrics import RequestLog
from octavo.request.outputs import RequestOutput
from octavo.startup import gc_control
from octavo.startup.forks import tell_in_child
from octavo.startup.interrupts import HeldSignals

_T = TypeVar("_T")
_EVENTS_A_STEP = 64  # that are counted of requests that have ended: a tenth of a millisecond


class Call:
    """Requests of one thread, and what came of them."""

    def __init__(self, parts: Sequence[Sequence[tuple[str, Checked]]]) -> None:
        """`parts[i]` is queued before the call's step i: requests with their ids."""
        self.parts = collections.deque(parts)
        self.outputs: collections.deque[RequestOutput] = collections.deque()
        self.unfinished: dict[str, None] = {}  # ids of queued requests, in order
        self.error: Exception | None = None  # why they could not be queued
        self.is_over = False
        self.wake = threading.Event()  # something may have changed for who waits

    @property
    def is_due(self) -> bool:
        """Whether `wait` has something to say."""
        return bool(self.outputs) or self.error is not None


class SharedEngine:
    """The engine's calls, one at a time."""

    def __init__(self, engine: Engine) -> None:
        """Nobody calls yet."""
        self._engine = engine
        self._lead = threading.Lock()
        self._turn = threading.Lock()  # who wants `_lead` for an action waits here; who leads lets it go first
        self._inbox = queue.SimpleQueue[Call]()  # may be used within a garbage collection, as its documentation says
        self._arriving: list[Call] = []  # with parts to be queued
        self._owners: dict[str, Call] = {}  # per id of a queued request
        self._waiting: dict[Call, None] = {}  # in order; changed by single operations alone
        self._watching: dict[Call, None] = {}  # who waits for a state, and looks behind each step and each move
        self.log = RequestLog(engine.limits.max_model_len)
        self._process = os.getpid()
        self._foreign = ""  # why this process cannot use the engine
        tell_in_child(self._forked)
        waiting, watching = self._waiting, self._watching  # and no more: the thread that calls holds no engine

        def wake_all() -> None:
            for call in [*waiting, *watching]:  # the one that leads too: it may have looked just before
                call.wake.set()

        engine.core.weights.moves.on_news = wake_all

    def submit(self, call: Call) -> None:
        """Ask for a call's requests. They are queued by whoever steps next. Raises as `check_process`."""
        self.check_process()
        self._inbox.put(call)

    def wait(self, call: Call) -> list[RequestOutput]:
        """The call's next outputs, at least one. Steps for everybody until they are there, unless another does.

        Raises what a step raises, and what queueing the call's requests raised. Ctrl-C waits for the end of a step.
        """
        self.check_process()
        try:
            self._waiting[call] = None
            while not call.is_due:
                with self._turn:
                    pass
                idle = self._inbox.empty() and not self._arriving
                leads = (idle or self._alone(self._take_in)) and (call.is_due or self._alone(self._step))
                if leads and (call.is_due or not self._stands_still):
                    continue
                call.wake.wait(self._engine.core.weights.expires_in)
                call.wake.clear()
        finally:
            self._waiting.pop(call, None)
            if self._waiting or not self._inbox.empty():
                self._let_go()
        if call.error is not None:
            raise call.error
        return [call.outputs.popleft() for _ in range(len(call.outputs))]

    def forget(self, call: Call) -> None:
        """Abort what is left of a call; with the last call gone, leave the engine idle.

        Waits for no other thread and may run anywhere, since a stream's iterator may end in a garbage collection: if
        another thread leads, it does the work at the end of its step.
        """
        call.is_over = True
        if self._foreign:  # its requests run in the process that this one was forked from
            return
        self._inbox.put(call)
        self._let_go()

    def exclusively(self, action: Callable[[], _T]) -> _T:
        """`action` between two steps. Raises as `check_process`."""
        self.check_process()
        try:
            with self._turn, self._lead:
                return action()
        finally:
            self._let_go()

    @property
    def engine(self) -> Engine:
        """For what may be read at any time."""
        return self._engine

    def ask(self, name: str, order: object = None) -> Standing:
        """Ask the core between two steps; see Engine.ask."""
        return self.exclusively(lambda: self._engine.ask(name, order))

    def call(self, name: str, payload: bytes = b"") -> bytes:
        """Ask the core; see EngineCore.call. What waits for a trainer does so while others step.

        Interrupted, it is cut short.
        """
        moves = self._engine.core.weights.moves
        answer = self.exclusively(lambda: self._engine.begin_call(name, payload))
        try:
            while not answer.done():
                moves.wait()
                self.exclusively(moves.poll)
        except BaseException:
            self.exclusively(answer.cancel)
            raise
        return answer.result()

    def halt(self, order: PauseOrder, *, abort: bool) -> None:
        """Stop planning steps, and hand out what they gave. abort: with it every request that was queued ends."""

        def stop() -> None:
            self._engine.ask("pause", order)
            if not order.wait:
                self._engine.settle(abort=abort)
                self._step()  # plans nothing

        self.exclusively(stop)

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Step for everybody until `is_done`, which is asked between two steps; where these are held, wait for others.

        Raises what a step raises.
        """
        watcher = Call([])
        try:
            self._watching[watcher] = None
            while not self.exclusively(is_done):
                if self._alone(self._step) and not self._stands_still:
                    continue
                watcher.wake.wait(self._engine.core.weights.expires_in)
                watcher.wake.clear()
        finally:
            self._watching.pop(watcher, None)
            self._let_go()

    @property
    def _stands_still(self) -> bool:
        """Whether a step would do nothing for who waits: a pause, until another thread resumes."""
        return not self._engine.core.gate.is_open and not self._engine.has_unfinished

    def check_process(self) -> None:
        """Raise RuntimeError in a forked process that cannot use the engine."""
        if self._foreign:
            raise RuntimeError(self._foreign)

    def close(self) -> None:
        """Release the engine, at the end of a step that runs. A process that cannot use it has nothing to release."""
        if not self._foreign:
            self.exclusively(self._engine.close)

    def _forked(self) -> None:
        gc_control.forget_threads()
        self.log.forget_threads()
        parent, self._process = self._process, os.getpid()
        whose = f"this LLM belongs to process {parent}, from which this one was forked"
        waiting = self._waiting or self._watching
        is_busy = self._lead.locked() or self._owners or self._arriving or waiting or not self._inbox.empty()
        if self._engine.resolved.device != "cpu":
            self._foreign = f"{whose}, and a device works for one process: make an LLM here, in a process by spawn"
        elif is_busy:
            self._foreign = self._foreign or f"{whose} while requests ran: make an LLM here, or fork when none runs"

    def _alone(self, action: Callable[[], None]) -> bool:
        """`action` as the leader. False, and nothing is done, if another thread leads."""
        with HeldSignals():
            if not self._lead.acquire(blocking=False):
                return False
            try:
                action()
            finally:
                self._lead.release()
        return True

    def _let_go(self) -> None:
        """After leading: see to what came in meanwhile, and let one of those who wait lead."""
        while not self._inbox.empty() and self._alone(self._take_in):
            pass
        for call in [*list(self._waiting)[:1], *self._watching]:
            call.wake.set()

    def _take_in(self) -> None:
        """Begin and end calls, and queue the next part of each."""
        while not self._inbox.empty():
            call = self._inbox.get()
            if call.is_over:
                self._end(call)
            else:
                self._arriving.append(call)
        for call in self._arriving.copy():
            self._queue_part(call)

    def _queue_part(self, call: Call) -> None:
        try:
            for request_id, request in call.parts.popleft():
                self._engine.queue(request_id, request)
                self._owners[request_id] = call
                self.log.begin(request_id, request)
                call.unfinished[request_id] = None
        except Exception as error:  # its own: the leader and others go on
            call.error = error
            call.parts.clear()
            call.wake.set()
        if not call.parts:
            self._arriving.remove(call)

    def _step(self) -> None:
        self._engine.core.weights.moves.poll()  # who asked for what waits may have been interrupted
        outputs = self._engine.step()
        if not outputs:  # the device computes meanwhile
            self.log.count(_EVENTS_A_STEP)
        for output in outputs:
            call = self._owners.get(output.request_id)
            if call is not None:
                self.log.take(output)
                call.outputs.append(output)
                if output.finished:
                    del call.unfinished[output.request_id], self._owners[output.request_id]
                call.wake.set()
        for watcher in list(self._watching):
            watcher.wake.set()

    def _end(self, call: Call) -> None:
        if call in self._arriving:
            self._arriving.remove(call)
        for request_id in call.unfinished:
            del self._owners[request_id]
        if call.unfinished:
            self._engine.abort(list(call.unfinished))
            self.log.drop(list(call.unfinished))
            call.unfinished.clear()
        while not self._owners and not self._arriving and self._engine.has_unfinished:
            if self._engine.core.waits_for_peers:
                break
            self._step()
