"""Running: the requests that have a row, in the order of the policy.

Owns the rows, who runs where, and the arrays over running rows that a step without events is made of. Knows no blocks
and no budget. Invariant: `requests`, `owners` and the rows that are not free name the same requests, and the arrays are
theirs whenever `refresh` was called after the last change.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

import numpy as np

from octavo.plan import NO_INTS
from octavo.request.request import Request, RequestRows, Status
from octavo.sched.order import OrderOf
from octavo.sched.work import Issued

_FEW = 4  # rows that leave faster one by one


class Running:
    """Running requests and their rows."""

    def __init__(self, num_rows: int, order: OrderOf, max_new: int = 1) -> None:
        """`order`: see order_of; max_new: see RequestRows."""
        self.requests: list[Request] = []
        self.rows = RequestRows(num_rows, max_new)
        self.owners: dict[int, Request] = {}  # row -> who runs there
        self.free_rows = list(reversed(range(num_rows)))
        self.finished_rows: list[int] = []  # since the last plan
        self.at = NO_INTS  # rows of `requests`, in its order
        self.ones = NO_INTS  # as many
        self.changed = False
        self.may_end = np.zeros(1, np.bool_)  # by token: some request has ended or will end with it; the last: False
        self._order = order
        self._in_order: list[int] = []  # what `at` is after the next `refresh`

    def refresh(self) -> None:
        """Make `at` and `ones` those of now."""
        self.at = np.array(self._in_order, np.int64)
        self.ones = np.ones_like(self.at)
        self.changed = False

    def place(self, queue: list[Request], request: Request) -> int:
        """The place of `request` in a sorted queue that it is in."""
        if queue[0] is request:  # who is served next
            return 0
        place = bisect.bisect_left(queue, self._order(request), key=self._order)
        assert queue[place] is request, "a queue is sorted, and a request is in the queue of its status"
        return place

    def enter(self, request: Request) -> None:
        """Give a request a row and its place among the others."""
        request.status = Status.RUNNING
        row = self.free_rows.pop()
        order = self._order(request)
        if not self.requests or self._order(self.requests[-1]) < order:  # nearly always
            self.requests.append(request)
            self._in_order.append(row)
        else:
            place = bisect.bisect_right(self.requests, order, key=self._order)
            self.requests.insert(place, request)
            self._in_order.insert(place, row)
        request.enter(self.rows, row)
        self.rows.needs_update[row] = not request.coalesce_updates or not request.num_reported
        self.owners[row] = request
        self.changed = True
        for token in request.end_token_ids:
            if token >= len(self.may_end) - 1:
                self.may_end = np.concatenate([self.may_end, np.zeros(token + 1, np.bool_)])
            self.may_end[token] = True

    def leave(self, requests: Sequence[Request], outstanding: Iterable[Issued]) -> None:
        """These run no longer. Steps that are `outstanding` remember whose their rows were."""
        if len(requests) > _FEW:
            gone = {request.row for request in requests}
            self.requests[:] = [request for request in self.requests if request.row not in gone]
            self._in_order = [row for row in self._in_order if row not in gone]
        else:
            for request in requests:
                place = self.place(self.requests, request)
                del self.requests[place], self._in_order[place]
        for request in requests:
            row = request.row
            for issued in outstanding:
                issued.left.setdefault(row, request)
            request.leave()
            del self.owners[row]
            self.free_rows.append(row)
            self.finished_rows.append(row)
            self.changed = True
