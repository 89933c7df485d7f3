"""LookedUp: what a store elsewhere has, as far as it has been asked.

Owns the questions, one for each request, and what the answers said. The worker's half asks, beside the steps.
Invariant: the thread that schedules never waits for the store: a request does, for a limited time, and none does while
the store is silent.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from octavo.kv_connector.keys import Pair
from octavo.kv_connector.orders import Order, Report
from octavo.kv_connector.stored import Index

_LOG = logging.getLogger(__name__)
_MAX_KEYS = 1 << 20  # that are known to be there
_MAX_REQUESTS = 1 << 16  # that have been asked for


class LookedUp(Index):
    """See Index."""

    answers_later = True

    def __init__(
        self, ask: Callable[..., list[Any]], limit: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """ask: see EngineSide. limit: seconds that a request waits for an answer; then nothing is there."""
        self._ask, self._limit, self._clock = ask, limit, clock
        self._there = collections.OrderedDict[bytes, None]()
        self._waiting: dict[str, tuple[Sequence[bytes], float]] = {}  # request -> its keys, until when
        self._came: dict[str, list[Sequence[bool]]] = {}  # request -> what the workers said
        self._known = collections.OrderedDict[str, int]()  # request -> how many keys were asked for
        self._is_silent = False  # a question was not answered in time, and none since: nobody waits for another
        self._saving: dict[int, list[bytes]] = {}  # save -> its keys

    def is_known(self, request_id: str, keys: Sequence[bytes]) -> bool:
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
            self._waiting[request_id] = keys, self._clock() + self._limit
            self._ask("look", request_id, list(keys))
        return False

    def _collect(self) -> None:
        answers: list[Sequence[tuple[str, Sequence[bool]]]] = self._ask("looked")
        if any(answers):
            self._is_silent = False
        for own in answers:
            for request_id, found in own:
                if request_id in self._waiting:
                    self._came.setdefault(request_id, []).append(found)
        for request_id, (keys, until) in list(self._waiting.items()):
            came = self._came.get(request_id, ())
            if len(came) == len(answers):
                self._end(request_id, keys, [all(each) for each in zip(*came, strict=True)])
            elif self._clock() >= until:
                self._is_silent = True
                _LOG.warning("request %s: the store did not answer within %g s", request_id, self._limit)
                self._end(request_id, keys, [False] * len(keys))

    def _end(self, request_id: str, keys: Sequence[bytes], found: Sequence[bool]) -> None:
        self._learn(keys, found)
        self._waiting.pop(request_id, None)
        self._came.pop(request_id, None)
        self._known[request_id] = len(keys)
        while len(self._known) > _MAX_REQUESTS:
            self._known.popitem(last=False)

    def _learn(self, keys: Sequence[bytes], found: Sequence[bool]) -> None:
        for key, is_there in zip(keys, found, strict=True):
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
