"""Guard: what is raised by code that is not the engine's, a store's, a disk's or a connector's of somebody.

Owns how such errors are told and counted, and the guard around a scheduler's half that is out of tree. Invariants: what
that code raises ends no step: what it was asked for is taken for a miss or a failed transfer, and a block that it may
still touch is not given to anybody; a look-up of it that hangs holds no step up, nor does its end that of the engine.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import numbers
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from octavo.config.kv_transfer import DEFAULT_LOOKUP, DEFAULT_TIMEOUT, LOOKUP_TIMEOUT, refuse
from octavo.config.quoted import describe
from octavo.config.settings import ConfigError
from octavo.kv_connector import (
    LATER,
    NO_RESULTS,
    NO_STATS,
    Connector,
    ConnectorStats,
    Later,
    Transfer,
    TransferResults,
)
from octavo.request.request import Request
from octavo.startup.interrupts import may_be_a_signal

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_QUOTED = re.compile(r"'[^']*'")
_PARTICULAR = frozenset("/0123456789")  # no word of a kind has one of these
_MAX_KIND = 400  # characters of a kind: a library's error may repeat what a server sent
_MAX_KINDS = 256  # that are remembered
PERIOD = 60.0  # seconds
_FAILED: Any = object()  # what is said in place of an answer
_AT_ONCE = 0.05  # seconds: a look-up of a connector's own that takes longer goes on beside the steps
RAISED = (Exception, SystemExit)  # sys.exit() of a library is no wish of the user's


def _line(place: str, error: BaseException) -> str:
    return f"{place}: {describe(error)}"


def made(name: str, make: Callable[[], _T]) -> _T:
    """What `make` makes of the connector `name`. Raises ConfigError, of which the rest is made."""
    try:
        return make()
    except ConfigError:
        raise
    except RAISED as error:
        change = "repair it, or take another connector"
        raise refuse("kv_connector", name, f"cannot be made: {describe(error)}", change) from error


class Troubles:
    """What goes wrong in one connector, maybe again and again. Any thread may tell."""

    def __init__(self, name: str, period: float = PERIOD, clock: Callable[[], float] = time.monotonic) -> None:
        """name: of the connector. period: seconds in which one kind of trouble is told once; 0: each time."""
        self.name, self._period, self._clock = name, period, clock
        self._lock = threading.Lock()
        self._num = 0
        self._told: dict[str, tuple[float, int, str]] = {}  # kind -> when, how many since, what was logged

    @property
    def num(self) -> int:
        """That were told, or counted, since the start."""
        return self._num

    def tell(self, kind: str, text: str | Callable[[], str]) -> None:
        """Log a line, or count it where one of its kind was logged less than a period ago.

        kind: words, of which numbers, names in quotes and paths do not count. text: asked for if it is logged.
        """
        words = _QUOTED.sub("", kind[:_MAX_KIND]).split()
        kind = " ".join(word for word in words if _PARTICULAR.isdisjoint(word))
        now = self._clock()
        with self._lock:
            self._num += 1
            when, count, last = self._told.get(kind, (now - self._period, 0, ""))
            if now - when < self._period:
                self._told[kind] = when, count + 1, last
                return
            text = text if isinstance(text, str) else text()
            self._told[kind] = now, 0, text
            while len(self._told) > _MAX_KINDS:
                del self._told[next(iter(self._told))]
        self._log(text, count)

    def close(self) -> None:
        """Log what was only counted."""
        with self._lock:
            told, self._told = self._told, {}
        for _, count, text in told.values():
            if count:
                self._log(text, count)

    def _log(self, text: str, count: int) -> None:
        more = f" ({count} more like it since the last such line)" if count else ""
        _LOG.warning("kv_connector %s: %s%s", self.name, text, more)


def ends_within(seconds: float, troubles: Troubles, what: str, end: Callable[[], object]) -> bool:
    """Whether a call that ends something of a connector ends in time: it runs on a thread that is left behind if not.

    what: the thing, in words. What the call raises is told, and so is that it does not end.
    """

    def run() -> None:
        try:
            end()
        except BaseException as error:  # of a library: the rest is to be closed
            troubles.tell(f"close {what} {type(error).__name__}", f"{what} failed: {describe(error)}")

    thread = threading.Thread(target=run, name="octavo-kv-close", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends and begins none
        run()
        return True
    thread.join(seconds)
    if thread.is_alive():
        text = f"{what} did not end within {seconds:g} s (see kv_transfer_timeout) and will not be waited for"
        troubles.tell(f"hangs {what}", text)
    return not thread.is_alive()


class _Lookup:
    """A look-up that a thread makes."""

    def __init__(self, request_id: str, num_local: int, find: Callable[[], int | Later], until: float) -> None:
        self.request_id, self.num_local, self.until = request_id, num_local, until
        self.found: int | Later = 0
        self._find, self._done = find, threading.Event()
        self._lock = threading.Lock()
        self._due = collections.deque[Callable[[], object]]()

    def run(self) -> None:
        """Make it, and what was to be done behind it."""
        self.found = self._find()
        while True:
            with self._lock:
                if not self._due:
                    self._done.set()
                    return
                job = self._due.popleft()
            job()

    def then(self, job: Callable[[], object]) -> bool:
        """Do something behind it. False: it has ended."""
        with self._lock:
            if not self._done.is_set():
                self._due.append(job)
            return not self._done.is_set()

    def ends(self, seconds: float = 0.0) -> bool:
        """Whether it has ended, or does so within some seconds."""
        return self._done.wait(seconds)


class Guarded:
    """See Connector. One of somebody's, whose errors stay with it, and whose look-ups hold nobody up.

    A look-up that takes long goes on beside the steps, and until it has ended nothing else of the connector is called:
    it was promised one thread. What it would have been told then, it is told when it is back.
    """

    def __init__(
        self, inner: Connector, name: str, *, lookup: float = DEFAULT_LOOKUP, timeout: float = DEFAULT_TIMEOUT
    ) -> None:
        """`inner`: the connector called `name`. Raises AttributeError where it lacks one of Connector's attributes.

        lookup, timeout: seconds for which a request waits for a look-up, and the engine's end for the connector's.
        """
        self._inner, self._troubles = inner, Troubles(name)
        self._lookup, self._timeout = lookup, timeout
        self._at_once: bool = getattr(inner, "answers_at_once", False)  # it has a thread of its own that looks
        self._unheard: Sequence[str] = getattr(inner, "calls_nobody_in", ())  # methods that call none of somebody's
        self._due = queue.SimpleQueue[Callable[[], object]]()
        self._thread: threading.Thread | None = None
        self._looking: _Lookup | None = None  # what goes on beside the steps
        self._came: _Lookup | None = None  # what has ended last, until its request asks
        self._is_silent = False  # it is late
        self._num_late = 0
        self._stats = NO_STATS
        self.saves_running, self.save_unit = bool(inner.saves_running), int(inner.save_unit)
        self.has_own_names, self.offers = bool(inner.has_own_names), bool(inner.offers)
        self._lost: set[int] = set()  # loads that could not begin
        self._late: set[int] = set()  # loads that were not begun, for a look-up went on

    def _ask(self, name: str, *args: Any, otherwise: _T, kind: type | tuple[type, ...] = object, **named: Any) -> _T:
        """What the method says; `otherwise` where it raises, says what it may not, or is busy with a look-up."""
        if self._looking is not None and name not in self._unheard and not self._is_back():
            return otherwise
        return self._call(name, *args, otherwise=otherwise, kind=kind, **named)

    def _call(self, name: str, *args: Any, otherwise: _T, kind: type | tuple[type, ...] = object, **named: Any) -> _T:
        try:
            said = getattr(self._inner, name)(*args, **named)
            if not isinstance(said, kind):
                raise TypeError(f"it answered {said!r}"[:100])
        except BaseException as error:  # whatever it was, an exit or a cancelled task: the engine lives
            if may_be_a_signal(error):
                raise
            place = f"{self._troubles.name}.{name}"
            self._troubles.tell(f"{name} {type(error).__name__}", functools.partial(_line, place, error))
            return otherwise
        return cast(_T, said)

    def match(self, request: Request, num_local: int) -> int | Later:
        """See Connector."""
        if self._at_once:
            return self._match(request, num_local)
        is_back = self._is_back()  # one look: what ends behind it may be another request's
        if is_back and not self._has_come(request, num_local):
            until = time.monotonic() + self._lookup
            find = functools.partial(self._match, request, num_local)
            self._looking = _Lookup(request.request_id, num_local, find, until)
            self._run(self._looking.run)
            self._looking.ends(min(_AT_ONCE, self._lookup))
            is_back = self._is_back()
        if is_back and self._came is not None:
            came, self._came = self._came, None
            return came.found
        assert self._looking is not None, "a look-up goes on, or has ended"
        if self._looking.until > time.monotonic():
            return LATER
        if not self._is_silent:
            self._is_silent = True
            self._num_late += 1
            text = (
                f"{self._troubles.name}.match did not answer within {self._lookup:g} s ({LOOKUP_TIMEOUT}): prompts are "
                "computed, and nothing is saved, until it has"
            )
            self._troubles.tell("look-up", text)
        return 0

    def _match(self, request: Request, num_local: int) -> int | Later:
        found: int | Later = self._call("match", request, num_local, otherwise=0, kind=(numbers.Integral, Later))
        return found if isinstance(found, Later) else max(int(found), 0)

    def _has_come(self, request: Request, num_local: int) -> bool:
        came = self._came
        return came is not None and (came.request_id, came.num_local) == (request.request_id, num_local)

    def _is_back(self) -> bool:
        """Whether no look-up goes on any more."""
        if self._looking is not None and self._looking.ends():
            self._came, self._looking, self._is_silent = self._looking, None, False
        return self._looking is None

    def _run(self, job: Callable[[], object]) -> None:
        self._due.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="octavo-kv-look", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            self._due.get()()

    def _tell_later(self, name: str, *args: Any) -> None:
        """What is not answered, told when it is back from a look-up; at once where none goes on."""
        call = functools.partial(self._call, name, *args, otherwise=None)
        if self._looking is None or not self._looking.then(call):
            call()

    def shorter(self, request: Request, num_local: int, end: int) -> int:
        """See Connector."""
        return int(self._ask("shorter", request, num_local, end, otherwise=num_local, kind=numbers.Integral))

    def allocated(self, load: Transfer) -> None:
        """See Connector. A load that cannot begin has failed, once nothing of it goes on, or is late for a look-up."""
        if not self._is_back():
            self._late.add(load.number)
        elif self._call("allocated", load, otherwise=_FAILED) is _FAILED and self._is_over(load.number):
            self._lost.add(load.number)

    def allocated_now(self, load: Transfer) -> bool:
        """See Connector. What is out of tree may fail at any time."""
        return False

    def loads_no_more(self, request: Request) -> None:
        """See Connector."""
        self._tell_later("loads_no_more", request)

    def release(self, transfer_ids: Sequence[str]) -> int:
        """See Connector."""
        return int(self._ask("release", transfer_ids, otherwise=0, kind=numbers.Integral))

    def _is_over(self, number: int) -> bool:
        return bool(self._ask("cancel", number, force=True, otherwise=False))

    def _save(self, name: str, save: Transfer) -> bool:
        """Whether it is kept: what was begun before an error may read the blocks until it is cancelled."""
        if name not in self._unheard and not self._is_back():
            return False
        said = self._call(name, save, otherwise=_FAILED)
        return not self._is_over(save.number) if said is _FAILED else bool(said)

    def computed(self, save: Transfer) -> bool:
        """See Connector."""
        return self._save("computed", save)

    def finished(self, save: Transfer) -> bool:
        """See Connector."""
        return self._save("finished", save)

    def ending(self, save: Transfer) -> dict[str, Any] | None:
        """See Connector. Who hears of it late has none of its blocks any more."""
        if not self._is_back():
            self._tell_later("ending", dataclasses.replace(save, blocks=tuple(() for _ in save.blocks), names=()))
            return None
        return self._ask("ending", save, otherwise=None, kind=(dict, type(None)))

    def cancel(self, number: int, *, force: bool) -> bool:
        """See Connector."""
        if number in self._lost or number in self._late:
            self._lost.discard(number)
            self._late.discard(number)
            return True
        return bool(self._ask("cancel", number, force=force, otherwise=False))

    def take_results(self) -> TransferResults:
        """See Connector."""
        results = self._ask("take_results", otherwise=NO_RESULTS, kind=TransferResults)
        if not self._lost and not self._late:
            return results
        lost, self._lost = dict.fromkeys(self._lost, frozenset[int]()), set()
        late, self._late = dict.fromkeys(self._late, frozenset[int]()), set()
        failed, missed = {**results.failed, **lost}, {**results.missed, **late}
        return dataclasses.replace(results, failed=failed, missed=missed)

    def wait(self, seconds: float) -> None:
        """See Connector."""
        if self._lost or self._late:
            return
        if self._looking is not None and not self._is_silent:
            self._looking.ends(seconds)
        elif self._ask("wait", seconds, otherwise=_FAILED) is _FAILED:
            time.sleep(seconds)  # whoever waits asks again at once

    def reset(self) -> bool:
        """See Connector."""
        return bool(self._ask("reset", otherwise=False))

    def stats(self) -> ConnectorStats:
        """See Connector."""
        stats = self._stats = self._ask("stats", otherwise=self._stats, kind=ConnectorStats)
        num_late = stats.num_late_lookups + self._num_late
        return dataclasses.replace(stats, num_errors=stats.num_errors + self._troubles.num, num_late_lookups=num_late)

    def close(self) -> None:
        """See Connector. One of Octavo's ends in time by itself."""
        seconds = self._timeout
        if type(self._inner).__module__.startswith("octavo."):
            seconds = self._lookup + 4 * seconds  # for what it ends one after the other, each in time
        ends_within(seconds, self._troubles, "close", functools.partial(self._call, "close", otherwise=None))
        self._troubles.close()
