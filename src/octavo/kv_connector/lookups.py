"""LookedUp: what a store has, as far as it has been asked.

Owns the questions, one for each request, what the answers said, and the thread that asks where nobody else does.
Invariant: the thread that schedules never waits for the store: a request does, for a limited time, and none does while
the store is silent.
"""

from __future__ import annotations

import collections
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from octavo.config.kv_transfer import LOOKUP_TIMEOUT
from octavo.config.quoted import describe, said
from octavo.kv_connector.guard import Troubles
from octavo.kv_connector.keys import Pair
from octavo.kv_connector.orders import Order, Report
from octavo.kv_connector.stored import Index

_MAX_KEYS = 1 << 20  # that are known to be there
_MAX_REQUESTS = 1 << 16  # that have been asked for
Find = Callable[[Sequence[bytes], Sequence[bool]], Sequence[bool]]


class Questions:
    """Questions to a store, which a thread asks one after the other. It runs from the first one on."""

    def __init__(self, find: Find, limit: float, troubles: Troubles, answered: Callable[[], object]) -> None:
        """`find`: of keys, see Index.is_known, which are there; it may take long. limit: seconds.

        answered: called behind each answer, by the thread. What `find` raises is told to troubles.
        """
        self._find, self._limit, self._troubles, self._answered = find, limit, troubles, answered
        self._due = queue.SimpleQueue[Callable[[], object] | None]()
        self._lock = threading.Lock()
        self._answers: list[tuple[str, Sequence[bool]]] = []
        self._thread: threading.Thread | None = None

    def look(self, name: str, keys: Sequence[bytes], stops: Sequence[bool]) -> None:
        """Ask for keys; `looked` answers under the name. A question that is late when its turn comes is not asked."""
        until = time.monotonic() + self._limit

        def ask() -> None:
            found: Sequence[bool] = [False] * len(keys)
            try:
                if time.monotonic() < until:
                    found = self._find(keys, stops)
            except BaseException as error:  # of a library or a network: nothing is there
                text = f"the store cannot be asked: {describe(error)}"
                self._troubles.tell(f"ask {said(error)}", text)
            with self._lock:
                self._answers.append((name, found))
            self._answered()

        self.run(ask)

    def looked(self) -> Sequence[tuple[str, Sequence[bool]]]:
        """(name, whether each key is there, as far as it was asked) since the last call."""
        with self._lock:
            answers, self._answers = self._answers, []
        return answers

    def run(self, job: Callable[[], object]) -> None:
        """Have the thread do something behind the questions that were asked before."""
        self._due.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="octavo-kv-look", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (job := self._due.get()) is not None:
            job()

    def close(self) -> None:
        """Nothing is asked any more. A question that hangs is not waited for longer than its limit."""
        self._due.put(None)
        if self._thread is None:
            return
        self._thread.join(self._limit)
        if self._thread.is_alive():
            text = f"a look-up did not end within {self._limit:g} s and will not be waited for"
            self._troubles.tell("look-up at the end", text)


class LookedUp(Index):
    """See Index."""

    answers_later = True

    def __init__(
        self,
        ask: Callable[..., list[Any]],
        limit: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        troubles: Troubles | None = None,
        setting: str = LOOKUP_TIMEOUT,
    ) -> None:
        """ask: see EngineSide. limit: seconds that a request waits for an answer; then nothing is there.

        troubles: of the connector. setting: what the limit is called.
        """
        self._ask, self._limit, self._clock, self._setting = ask, limit, clock, setting
        self.troubles = troubles or Troubles(type(self).__name__)
        self._there = collections.OrderedDict[bytes, None]()
        self._numbers = itertools.count()
        self._waiting: dict[str, tuple[Sequence[bytes], float, str]] = {}  # request -> keys, until when, question
        self._came: dict[str, list[Sequence[bool]]] = {}  # question -> what the workers said
        self._known = collections.OrderedDict[str, int]()  # request -> how many keys were asked for
        self._is_silent = False  # a question was not answered in time, and none since: nobody waits for another
        self._num_late = 0
        self._saving: dict[int, list[bytes]] = {}  # save -> its keys

    def is_known(self, request_id: str, keys: Sequence[bytes], stops: Sequence[bool] = ()) -> bool:
        """See Index."""
        if not keys or self._known.get(request_id, 0) >= len(keys):
            return True
        self._collect()
        if self._is_silent and request_id not in self._waiting:
            self._end(request_id, keys, [False] * len(keys))
            return True
        if self._known.get(request_id, 0) >= len(keys):
            return True
        if request_id not in self._waiting:
            name = str(next(self._numbers))
            self._waiting[request_id], self._came[name] = (keys, self._clock() + self._limit, name), []
            self._ask("look", name, list(keys), list(stops))
        return False

    def _collect(self) -> None:
        answers: list[Sequence[tuple[str, Sequence[bool]]]] = self._ask("looked")
        if any(answers):
            self._is_silent = False
        for own in answers:
            for name, found in own:
                if name in self._came:
                    self._came[name].append(found)
        for request_id, (keys, until, name) in list(self._waiting.items()):
            came = self._came[name]
            if len(came) == len(answers):
                self._end(request_id, keys, [all(each) for each in zip(*came, strict=False)])
            elif self._clock() >= until:
                self._give_up(request_id, keys)

    def _give_up(self, request_id: str, keys: Sequence[bytes]) -> None:
        self._is_silent = True
        self._num_late += 1
        text = (
            f"request {request_id}: the store did not answer within {self._limit:g} s ({self._setting}): its prompt is "
            "computed, and nobody waits for the store until it has answered"
        )
        self.troubles.tell("look-up", text)
        self._end(request_id, keys, [False] * len(keys))

    def _end(self, request_id: str, keys: Sequence[bytes], found: Sequence[bool]) -> None:
        self._learn(keys, found)
        self.forget(request_id)
        self._known[request_id] = len(keys)
        while len(self._known) > _MAX_REQUESTS:
            self._known.popitem(last=False)

    def forget(self, request_id: str) -> None:
        """See Index."""
        self._known.pop(request_id, None)
        if request_id in self._waiting:
            del self._came[self._waiting.pop(request_id)[2]]

    def _learn(self, keys: Sequence[bytes], found: Sequence[bool]) -> None:
        for key, is_there in zip(keys, found, strict=False):  # of those behind nothing was asked
            if is_there:
                self._there[key] = None
                self._there.move_to_end(key)
            else:
                self._there.pop(key, None)
        while len(self._there) > _MAX_KEYS:
            self._there.popitem(last=False)

    @property
    def is_looking(self) -> bool:
        """See Index."""
        return bool(self._waiting)

    def __contains__(self, key: object) -> bool:
        """See Index: as it was when it was asked for."""
        return key in self._there

    def order_load(self, number: int, pairs: Sequence[Pair]) -> tuple[Order | None, list[int]]:
        """See Index."""
        blocks, keys = [pair.block for pair in pairs], [pair.key for pair in pairs]
        return Order(number=number, is_load=True, blocks=blocks, keys=keys), []

    def order_save(self, number: int, pairs: Sequence[Pair]) -> Order:
        """See Index."""
        blocks, keys = [pair.block for pair in pairs], [pair.key for pair in pairs]
        self._saving[number] = keys
        return Order(number=number, is_load=False, blocks=blocks, keys=keys)

    def ended(self, number: int, report: Report | None) -> None:
        """See Index."""
        keys = self._saving.pop(number, ())
        if report is not None and not report.failed:
            self._learn(keys, [True] * len(keys))

    @property
    def num_errors(self) -> int:
        """See Index."""
        return self.troubles.num

    @property
    def num_late(self) -> int:
        """See Index."""
        return self._num_late

    def close(self) -> None:
        """See Index."""
        self.troubles.close()


class LookedUpHere(LookedUp):
    """See LookedUp. A thread beside the one that schedules asks."""

    def __init__(self, find: Callable[[bytes], bool], limit: float, troubles: Troubles) -> None:
        """`find`: whether a key is there. The others: see LookedUp."""
        self._has, self._news = find, threading.Event()
        self.questions = Questions(self._find, limit, troubles, self._news.set)
        super().__init__(self._ask_here, limit, troubles=troubles)

    def _ask_here(self, name: str, *args: Any) -> list[Any]:
        if name == "looked":
            self._news.clear()
        return [getattr(self.questions, name)(*args)]

    def _find(self, keys: Sequence[bytes], stops: Sequence[bool]) -> Sequence[bool]:
        found: list[bool] = []
        for key, stop in zip(keys, stops, strict=True):
            found.append(self._has(key))
            if stop and not found[-1]:
                break
        return found

    def wait(self, seconds: float) -> bool:
        """See Index."""
        self._news.wait(seconds)
        return True

    def close(self) -> None:
        """See Index."""
        self.questions.close()
        super().close()
