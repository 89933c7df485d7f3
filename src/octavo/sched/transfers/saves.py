"""Saves: which tokens of requests that run a connector is offered.

Owns how far each row's blocks have been offered. A request's prompt is offered as soon as it is planned to the end,
what follows a few blocks at a time, and the rest when it ends (`Loads.keep`). Knows no blocks. Invariant: what is
offered is computed by steps that are planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from octavo.request.request import Request
from octavo.sched.running import Running

_EVERY = 4  # units of output that are offered together, where no window slides past them meanwhile
_NEVER = 1 << 62


class Offer(NamedTuple):
    """Tokens of a request that are computed by steps that are planned: whole units."""

    request: Request
    start: int
    end: int


class Saves:
    """What runs, as far as it has been offered."""

    def __init__(self, num_rows: int, unit: int, *, slides: bool, num_next_tokens: int) -> None:
        """unit: tokens that are offered together at least; slides: requests give blocks back while they run.

        num_next_tokens: that are known behind what is offered, see StepLimits.
        """
        self._num_next = num_next_tokens
        self._unit, self._every = unit, unit if slides else unit * _EVERY
        self._offered: dict[str, int] = {}  # by request: tokens
        self._next = np.full(num_rows, _NEVER)  # tokens of a row at which it is looked at

    def enter(self, request: Request) -> None:
        """A request runs in its row from now on: all that it has computed is offered, found and new alike."""
        self._offered[request.request_id] = 0
        self._next[request.row] = self._first(request, 0)

    def _first(self, request: Request, offered: int) -> int:
        """Where the next offer is due: at the prompt's end, if that comes first."""
        end = request.num_prompt // self._unit * self._unit
        return min(offered + self._every, end) if offered < end else offered + self._every

    def forget(self, request: Request) -> int:
        """A request runs no longer: how many of its tokens have been offered."""
        return self._offered.pop(request.request_id, 0)

    def num_offered(self, request: Request) -> int:
        """How many tokens of a request have been offered since it began to run."""
        return self._offered.get(request.request_id, 0)

    def due(self, running: Running) -> Iterator[Offer]:
        """What is to be offered now."""
        due = running.rows.num_computed >= self._next
        for row in due.nonzero()[0].tolist():
            request = running.owners.get(row)
            if request is None:
                continue
            start, end = (
                self._offered[request.request_id],
                min(request.num_computed, request.num_tokens - self._num_next),
            )
            end = max(end // self._unit * self._unit, start)
            self._offered[request.request_id], self._next[row] = end, self._first(request, end)
            if end > start:
                yield Offer(request, start, end)
