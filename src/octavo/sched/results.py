"""Results: what a step's result gives to its requests.

Owns the taking in of tokens, the look at who may have ended, and the updates that tell of it. Knows neither plans nor
blocks: whoever ends is handed to the scheduler. Invariant: an update tells all tokens that none before it told, and a
request that has ended is told of once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from octavo.plan import NO_EXPERTS, NO_INTS, NO_PROMPT_LOGPROBS, IntArray, StepResult
from octavo.request.request import Request, Status
from octavo.request.updates import RequestUpdate
from octavo.sched.running import Running
from octavo.sched.stops import ends

NOTHING = StepResult(step=-1)
_FEW = 4  # rows that are taken in faster one by one


class Results:
    """Takes results in."""

    def __init__(self, running: Running, end: Callable[[Sequence[Request]], None]) -> None:
        """`end`: ends requests that have a finish reason."""
        self.queued_at: dict[str, float] = {}  # of requests that were never admitted
        self.queue_times: dict[str, float] = {}  # of admitted requests, until an update tells it
        self.version = ""  # label of the weights; empty: those of the start, as no update changed them
        self.mixed: set[str] = set()  # requests that attend K and V of older weights too
        self._running, self._end = running, end

    def note_admission(self, request: Request, num_cached: int) -> None:
        """`request` gets a row; where that is for the first time, with so many tokens in the cache."""
        queued_at = self.queued_at.pop(request.request_id, None)
        if queued_at is not None:
            request.num_cached = num_cached
            self.queue_times[request.request_id] = time.perf_counter() - queued_at

    def take(
        self, result: StepResult, left: Mapping[int, Request], updates: list[RequestUpdate], *, are_runs: bool
    ) -> None:
        """The tokens of all rows. left: by row, the requests that run there no longer.

        are_runs: a row may have several tokens, or none; else it has one.
        """
        rows, tokens = result.rows, result.tokens
        one_by_one = range(len(rows)) if len(rows) <= _FEW else _places(rows, left)
        for place in one_by_one:
            request = left.get(row := rows.item(place)) or self._running.owners[row]
            if request.status is not Status.FINISHED and result.num_sampled[place]:
                self.append(request, row, tokens[place, : result.num_sampled[place]].tolist(), result, updates)
        if len(one_by_one) == len(rows):
            return
        if one_by_one:
            others = np.ones(len(rows), np.bool_)
            others[one_by_one] = False
            rows, tokens = rows[others], tokens[others]
        if not are_runs:
            self._take_all(rows, tokens[:, 0], result, updates)
        else:
            counts = result.num_sampled[others] if one_by_one else result.num_sampled
            self._take_runs(rows, tokens, counts, result, updates)

    def _take_all(self, rows: IntArray, tokens: IntArray, result: StepResult, updates: list[RequestUpdate]) -> None:
        """One token for each of `rows`, all of which run."""
        lengths = self._running.rows.append(rows, tokens)
        look = self._running.may_end.take(tokens, mode="clip")
        look |= lengths >= self._running.rows.check_at[rows]
        places = look.nonzero()[0]
        if len(places):
            self._check_stop(rows[places].tolist(), tokens[places].tolist(), result, updates)
        needs_update = self._running.rows.needs_update[rows].nonzero()[0]
        if len(needs_update):
            new = [[token] for token in tokens[needs_update].tolist()]
            self._tell(rows[needs_update].tolist(), new, result, updates)

    def _tell(
        self, rows: list[int], new: Sequence[list[int]], result: StepResult, updates: list[RequestUpdate]
    ) -> None:
        """To each of `rows`, of which every token is told: its new ones."""
        in_full = bool(result.logprobs or result.prompt_logprobs or result.supports or result.experts)
        for row, tokens in zip(rows, new, strict=True):
            request = self._running.owners[row]
            if in_full or request.coalesce_updates or not request.num_reported:
                self.emit(request, row, result, updates)
            else:
                request.num_reported += len(tokens)
                updates.append(RequestUpdate(request.request_id, tokens))

    def _take_runs(
        self, rows: IntArray, tokens: IntArray, counts: IntArray, result: StepResult, updates: list[RequestUpdate]
    ) -> None:
        """The first counts[i] of tokens[i] for each of `rows`, all of which run, as far as none ends its request."""
        table, ended = self._running.rows, dict[int, Request]()
        looked_at = self._may_end_in(rows, tokens, counts)
        if len(looked_at):
            usual = np.ones(len(rows), np.bool_)
            usual[looked_at] = False
            table.append_runs(rows[usual], tokens[usual], counts[usual])
        else:
            table.append_runs(rows, tokens, counts)
        for line in looked_at.tolist():
            request = self._running.owners[rows.item(line)]
            if self._ends_in(request, rows[line : line + 1], tokens[line : line + 1], counts.item(line)):
                ended[request.row] = request
        if ended:
            self._end(list(ended.values()))
            for row, request in ended.items():
                self.emit(request, row, result, updates)
        needs_update = table.needs_update[rows].nonzero()[0]  # of those that ended no more
        if len(needs_update):
            lines = zip(tokens[needs_update].tolist(), counts[needs_update].tolist(), strict=True)
            new = [tokens[:count] for tokens, count in lines]
            own = rows[needs_update].tolist()
            if not all(new):  # some row was held
                own, new = [row for row, tokens in zip(own, new, strict=True) if tokens], [*filter(None, new)]
            self._tell(own, new, result, updates)

    def _may_end_in(self, rows: IntArray, tokens: IntArray, counts: IntArray) -> IntArray:
        """The lines whose requests may end with one of their tokens, see `_take_runs`. Makes room for all others."""
        table, found = self._running.rows, NO_INTS
        may_end = self._running.may_end.take(tokens, mode="clip")
        if may_end.any():
            may_end &= np.arange(tokens.shape[1]) < counts[:, None]
            found = np.logical_or.reduce(may_end, axis=1).nonzero()[0]
        lengths = table.num_tokens[rows] + counts
        full = (lengths >= table.check_at[rows]).nonzero()[0]
        if not len(full):
            return found
        for row in rows[full].tolist():
            self._running.owners[row].make_room()  # which is all that most need
        full = full[lengths[full] >= table.check_at[rows[full]]]
        return np.union1d(found, full) if len(full) else found

    def _ends_in(self, request: Request, row: IntArray, tokens: IntArray, count: int) -> bool:
        """Whether `request` ends with one of the first `count` of its `tokens`, [1, W]; takes those up to it."""
        for place in range(count):
            token = tokens.item(0, place)
            length = self._running.rows.append(row, tokens[:, place])
            if token not in request.end_token_ids and length < self._running.rows.check_at[row]:
                continue
            request.make_room()
            if (token in request.end_token_ids or request.num_tokens >= request.check_from) and ends(request, token):
                num_left = request.num_in_flight - (count - place - 1)
                # accepted drafts behind it are nobody's
                request.num_computed = min(request.num_computed, request.num_tokens + num_left)
                return True
        return False

    def _check_stop(self, rows: list[int], tokens: list[int], result: StepResult, updates: list[RequestUpdate]) -> None:
        """At requests that may end with `tokens`, or whose row has no more room."""
        ended: dict[int, Request] = {}
        for row, token in zip(rows, tokens, strict=True):
            request = self._running.owners[row]
            if (token in request.end_token_ids or request.num_tokens >= request.check_from) and ends(request, token):
                ended[row] = request
            else:
                request.make_room()
        if ended:
            self._end(list(ended.values()))
            for row, request in ended.items():
                self.emit(request, row, result, updates)

    def append(
        self, request: Request, row: int, tokens: list[int], result: StepResult, updates: list[RequestUpdate]
    ) -> None:
        """The tokens of one request, which may have been preempted meanwhile."""
        request.num_in_flight -= len(tokens)
        for token in tokens:
            request.append(token)
            may_end = token in request.end_token_ids or request.num_tokens >= request.check_from
            if may_end and ends(request, token):
                # accepted drafts behind it are nobody's
                request.num_computed = min(request.num_computed, request.num_tokens + request.num_in_flight)
                self._end([request])
                break
        if request.status is Status.FINISHED or not request.coalesce_updates or not request.num_reported:
            self.emit(request, row, result, updates)

    def take_prompt_logprobs(
        self, result: StepResult, owners: Mapping[int, Request], updates: list[RequestUpdate]
    ) -> None:
        """And their experts. Those of rows that sampled too, and were not held, are told with their token."""
        for row, part in result.prompt_logprobs.items():
            owners[row].num_prompt_logprobs += part.num_positions
        sampled = result.rows[result.num_sampled > 0]
        for row in result.prompt_logprobs.keys() | result.experts.keys():
            request = owners[row]
            if row not in sampled and request.status is not Status.FINISHED:
                self.emit(request, row, result, updates)

    def take_untold(self, requests: Iterable[Request]) -> list[RequestUpdate]:
        """What requests have that no update told."""
        updates: list[RequestUpdate] = []
        for request in requests:
            self.emit(request, request.row, NOTHING, updates)
        return updates

    def emit(self, request: Request, row: int, result: StepResult, updates: list[RequestUpdate]) -> None:
        """Append the update in full, if there is something to tell: all tokens that no update told."""
        tokens = request.tokens[request.num_prompt + request.num_reported :]
        prompt_logprobs = result.prompt_logprobs.get(row, NO_PROMPT_LOGPROBS)
        experts = result.experts.get(row, NO_EXPERTS)
        if not tokens and not prompt_logprobs.num_positions and not experts and request.finish_reason is None:
            return
        is_first = not request.num_reported
        request.num_reported += len(tokens)
        if request.coalesce_updates and tokens and request.row >= 0:
            self._running.rows.needs_update[request.row] = False
        updates.append(
            RequestUpdate(
                request_id=request.request_id,
                tokens=tokens,
                logprobs=result.logprobs.get(row, [])[: len(tokens)],
                prompt_logprobs=prompt_logprobs,
                supports=result.supports.get(row, [])[: len(tokens)],
                experts=experts,
                finish_reason=request.finish_reason,
                stop_reason=request.stop_reason,
                num_cached=request.num_cached,
                num_loaded=request.num_loaded,
                queue_time=self.queue_times.pop(request.request_id, None),
                weights_version=self.version if is_first else "",
                weights_mixed=is_first and request.request_id in self.mixed,
                error=request.error,
                kv_transfer_params=request.kv_transfer_params,
            )
        )


def _places(rows: IntArray, left: Mapping[int, Request]) -> list[int]:
    """Where `rows` names a row of `left`."""
    if not left or not len(rows):
        return []
    named = np.zeros(max(int(rows.max()), *left) + 1, np.bool_)
    named[list(left)] = True
    return named[rows].nonzero()[0].tolist()
