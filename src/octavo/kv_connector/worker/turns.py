"""Turns: which thread works off what, for jobs of several lanes.

Owns the threads. A lane is whatever may stand still as a whole, as a peer does. Invariants: a lane has so many threads
and no more, in the order in which its jobs came; another lane's jobs wait for none of them, unless there are as many
threads as there may be; what was put before `close` is worked off.
"""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_MOST_LANES = 32  # that may have all their threads at once
_LINGERS = 10.0  # seconds that a thread beyond those of one lane has nothing to do
_Job = TypeVar("_Job")
_Inbox = queue.SimpleQueue[tuple[Hashable, _Job] | None]


def _no_work(job: object) -> None:
    """Nothing is put behind the end."""


class Turns(Generic[_Job]):
    """Any thread may put."""

    def __init__(self, work: Callable[[_Job], None], name: str, num_threads: int) -> None:
        """work: raises nothing. name: what those of its threads begin with. num_threads: of a lane."""
        self._work, self._name, self._num_threads = work, name, num_threads
        self._lock = threading.Lock()
        self._busy = collections.Counter[Hashable]()  # lane -> threads that work for it
        self._waiting = collections.OrderedDict[Hashable, collections.deque[_Job]]()  # the next lane first
        self._idle: list[_Inbox[_Job]] = []  # the one that ended last is at the end
        self._threads: dict[int, threading.Thread] = {}  # by the number in its name
        self._closing = False
        for number in range(num_threads):
            inbox: _Inbox[_Job] = queue.SimpleQueue()
            self._idle.append(inbox)
            self._run(number, inbox)

    def put(self, lane: Hashable, job: _Job) -> None:
        """Have it worked off."""
        with self._lock:
            if self._busy[lane] >= self._num_threads:
                self._wait(lane, job)
            elif self._idle:
                self._busy[lane] += 1
                self._idle.pop().put((lane, job))
            elif not self._add(lane, job):
                self._wait(lane, job)

    def _wait(self, lane: Hashable, job: _Job) -> None:
        self._waiting.setdefault(lane, collections.deque()).append(job)

    def _add(self, lane: Hashable, job: _Job) -> bool:
        """Whether another thread could be had for it."""
        if len(self._threads) >= self._num_threads * _MOST_LANES:
            return False
        number = next(number for number in range(len(self._threads) + 1) if number not in self._threads)
        inbox: _Inbox[_Job] = queue.SimpleQueue()
        try:
            self._run(number, inbox)
        except RuntimeError:  # the system gives no more
            return False
        self._busy[lane] += 1
        inbox.put((lane, job))
        return True

    def _run(self, number: int, inbox: _Inbox[_Job]) -> None:
        name, args = f"{self._name}-{number}", (number, inbox, self._work)
        thread = threading.Thread(target=self._live, args=args, name=name, daemon=True)
        thread.start()
        self._threads[number] = thread

    def _live(self, number: int, inbox: _Inbox[_Job], work: Callable[[_Job], None]) -> None:
        while (given := self._given(number, inbox)) is not None:
            lane, job = given
            work(job)
            del given, job
            with self._lock:
                self._busy[lane] -= 1
                if not self._busy[lane]:
                    del self._busy[lane]
                if (following := self._next()) is not None:
                    inbox.put(following)
                elif self._closing:
                    inbox.put(None)
                else:
                    self._idle.append(inbox)

    def _given(self, number: int, inbox: _Inbox[_Job]) -> tuple[Hashable, _Job] | None:
        """What a thread does next; None: it ends."""
        if number < self._num_threads:
            return inbox.get()
        try:
            return inbox.get(timeout=_LINGERS)
        except queue.Empty:
            with self._lock:
                if inbox in self._idle:
                    self._idle.remove(inbox)
                    del self._threads[number]
                    return None
            return inbox.get()

    def _next(self) -> tuple[Hashable, _Job] | None:
        """The first job of a lane that has not all its threads. That lane is the last one then."""
        for lane, jobs in self._waiting.items():
            if self._busy[lane] < self._num_threads:
                job = jobs.popleft()
                del self._waiting[lane]
                if jobs:
                    self._waiting[lane] = jobs
                self._busy[lane] += 1
                return lane, job
        return None

    def close(self) -> list[threading.Thread]:
        """Nothing is put any more. The threads, each of which ends when there is nothing for it."""
        with self._lock:
            self._closing, self._work = True, _no_work  # whose work it is may go, with what it holds
            idle, self._idle = self._idle, []
            for inbox in idle:
                inbox.put(None)
            return list(self._threads.values())
