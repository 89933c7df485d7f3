"""Versions: which weights draw which tokens, and what a change of weights tells of unfinished requests.

Owns the label that new tokens get, and who goes on with blocks of two versions. Knows neither blocks nor plans: the
scheduler names blocks anew. Invariant: when the label changes, all tokens drawn before it have been told under the old
one, so an update with a label speaks of the tokens behind it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from octavo.request.request import FinishReason, Request, Status
from octavo.request.updates import RequestUpdate
from octavo.sched.results import NOTHING, Results


class Versions:
    """Of one scheduler's requests. To be called between two steps, when no result is on its way."""

    def __init__(
        self, requests: Mapping[str, Request], results: Results, end: Callable[[Sequence[Request]], None]
    ) -> None:
        """`requests`: the unfinished ones; `end`: ends those that have a finish reason."""
        self._requests, self._results, self._end = requests, results, end

    def relabel(self, version: str, *, recomputed: bool = False, mixed: bool = False) -> list[RequestUpdate]:
        """Tokens from now on are of `version`.

        recomputed: what runs is computed again under it. mixed: what runs has blocks of older weights.
        """
        results = self._results
        updates = results.take_untold(self._requests.values())
        results.version = version
        if recomputed:
            results.mixed.clear()
        results.mixed &= self._requests.keys()
        if mixed:
            running = (r for r in self._requests.values() if r.status is Status.RUNNING)
            results.mixed |= {request.request_id for request in running}
        for request in self._requests.values():
            if request.num_reported:
                is_mixed = request.request_id in results.mixed
                updates.append(RequestUpdate(request.request_id, weights_version=version, weights_mixed=is_mixed))
        return updates

    def end_all(self, reason: FinishReason, error: str = "", *, begun: bool = False) -> list[RequestUpdate]:
        """End unfinished requests, with what they have. begun: those alone of which something was computed."""
        updates: list[RequestUpdate] = []
        for request in list(self._requests.values()):
            if not begun or request.status is not Status.WAITING:
                row = request.row
                request.finish_reason, request.error = reason, error
                self._end([request])
                self._results.emit(request, row, NOTHING, updates)
        return updates
