"""Guard: what is raised by code that is not the engine's, a store's, a disk's or a connector's of somebody.

Owns how such errors are told and counted, and the guard around a scheduler's half that is out of tree. Invariant: what
that code raises ends no step: what it was asked for is taken for a miss or a failed transfer, and a block that it may
still touch is not given to anybody.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import numbers
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from octavo.config.kv_transfer import refuse
from octavo.config.settings import ConfigError
from octavo.kv_connector import NO_RESULTS, NO_STATS, Connector, ConnectorStats, Later, Transfer, TransferResults
from octavo.request.request import Request

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_PARTICULAR = re.compile(r"'[^']*'|\S*[/0-9]\S*")
_MAX_KINDS = 256  # that are remembered
PERIOD = 60.0  # seconds
_FAILED: Any = object()  # what is said in place of an answer
RAISED = (Exception, SystemExit)  # sys.exit() of a library is no wish of the user's


def describe(error: BaseException) -> str:
    """The error and where it was raised, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300] + place


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
        kind = _PARTICULAR.sub("", kind)
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


class Guarded:
    """See Connector. One of somebody's, whose errors stay with it."""

    def __init__(self, inner: Connector, name: str) -> None:
        """`inner`: the connector called `name`. Raises AttributeError where it lacks one of Connector's attributes."""
        self._inner, self._troubles = inner, Troubles(name)
        self.saves_running, self.save_unit = bool(inner.saves_running), int(inner.save_unit)
        self.has_own_names, self.offers = bool(inner.has_own_names), bool(inner.offers)
        self._lost: set[int] = set()  # loads that could not begin

    def _ask(self, name: str, *args: Any, otherwise: _T, kind: type | tuple[type, ...] = object, **named: Any) -> _T:
        """What the method says; `otherwise` where it raises, or says what it may not."""
        try:
            said = getattr(self._inner, name)(*args, **named)
            if not isinstance(said, kind):
                raise TypeError(f"it answered {said!r}"[:100])
        except RAISED as error:
            place = f"{self._troubles.name}.{name}"
            self._troubles.tell(f"{name} {error!r}", functools.partial(_line, place, error))
            return otherwise
        return cast(_T, said)

    def match(self, request: Request, num_local: int) -> int | Later:
        """See Connector."""
        found: int | Later = self._ask("match", request, num_local, otherwise=0, kind=(numbers.Integral, Later))
        return found if isinstance(found, Later) else max(int(found), 0)

    def shorter(self, request: Request, num_local: int, end: int) -> int:
        """See Connector."""
        return int(self._ask("shorter", request, num_local, end, otherwise=num_local, kind=numbers.Integral))

    def allocated(self, load: Transfer) -> None:
        """See Connector. A load that cannot begin has failed, once nothing of it goes on."""
        if self._ask("allocated", load, otherwise=_FAILED) is _FAILED and self._is_over(load.number):
            self._lost.add(load.number)

    def loads_no_more(self, request: Request) -> None:
        """See Connector."""
        self._ask("loads_no_more", request, otherwise=None)

    def release(self, transfer_ids: Sequence[str]) -> int:
        """See Connector."""
        return int(self._ask("release", transfer_ids, otherwise=0, kind=numbers.Integral))

    def _is_over(self, number: int) -> bool:
        return bool(self._ask("cancel", number, force=True, otherwise=False))

    def _save(self, name: str, save: Transfer) -> bool:
        """Whether it is kept: what was begun before an error may read the blocks until it is cancelled."""
        said = self._ask(name, save, otherwise=_FAILED)
        return not self._is_over(save.number) if said is _FAILED else bool(said)

    def computed(self, save: Transfer) -> bool:
        """See Connector."""
        return self._save("computed", save)

    def finished(self, save: Transfer) -> bool:
        """See Connector."""
        return self._save("finished", save)

    def ending(self, save: Transfer) -> dict[str, Any] | None:
        """See Connector."""
        return self._ask("ending", save, otherwise=None, kind=(dict, type(None)))

    def cancel(self, number: int, *, force: bool) -> bool:
        """See Connector."""
        if number in self._lost:
            self._lost.discard(number)
            return True
        return bool(self._ask("cancel", number, force=force, otherwise=False))

    def take_results(self) -> TransferResults:
        """See Connector."""
        results = self._ask("take_results", otherwise=NO_RESULTS, kind=TransferResults)
        if not self._lost:
            return results
        lost, self._lost = dict.fromkeys(self._lost, frozenset[int]()), set()
        return dataclasses.replace(results, failed={**results.failed, **lost})

    def wait(self, seconds: float) -> None:
        """See Connector."""
        if not self._lost and self._ask("wait", seconds, otherwise=_FAILED) is _FAILED:
            time.sleep(seconds)  # whoever waits asks again at once

    def reset(self) -> bool:
        """See Connector."""
        return bool(self._ask("reset", otherwise=False))

    def stats(self) -> ConnectorStats:
        """See Connector."""
        stats = self._ask("stats", otherwise=NO_STATS, kind=ConnectorStats)
        return dataclasses.replace(stats, num_errors=stats.num_errors + self._troubles.num)

    def close(self) -> None:
        """See Connector."""
        self._ask("close", otherwise=None)
        self._troubles.close()
