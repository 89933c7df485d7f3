"""Scheduler: which tokens run in the next step, and when a request ends.

Owns the queues, the rows, the token budget and preemption; the stop rules are in `stops`. Knows neither tensors nor
text; blocks are KVManager's. There is no prefill or decode phase: a request's computed tokens catch up with its known
ones, as far as the step's budget goes. Plans may be made one step ahead of results; they are executed in the order of
their making. What a step does for every running request it does to the arrays of RequestRows; a Request is looked at
when something happens to it: it starts, grows by a block, may have ended, or wants to be told. Invariant: running and
waiting requests are sorted by the policy's order, requests are served in it and preempted from its end, so a request
that is in the plan in hand is never preempted from it.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable, Sequence

import numpy as np

from octavo.plan import NO_INTS, NO_PROMPT_LOGPROBS, IntArray, NewBlocks, StepLimits, StepPlan, StepResult
from octavo.request.request import FinishReason, Request, RequestRows, Status
from octavo.request.updates import RequestUpdate
from octavo.sched.drafts import count_drafts, run_of, take_back_rejected
from octavo.sched.kv_manager import KVManager
from octavo.sched.order import order_of
from octavo.sched.stops import ends
from octavo.sched.work import Issued, PlanBuilder, SchedulerStats, pack, places, take_back

MAX_OUTSTANDING = 2  # plans without results: one that runs, and the next one
HEADROOM_BLOCKS = 2  # kept free per running request and group when one is admitted; 2 halve the preemptions of 1

_NOTHING = StepResult(step=-1)
_FEW = 4  # rows that are taken in faster one by one


class Scheduler:
    """Host truth of all unfinished requests."""

    def __init__(
        self,
        kv: KVManager,
        limits: StepLimits,
        *,
        policy: str = "fcfs",
        priority_aging: int = 0,
        enable_chunked_prefill: bool = True,
        whole_prompts: bool = False,
    ) -> None:
        """`limits`: the worker's; of drafts a row verifies as many in a step as the worker's speculator proposes.

        `policy` and `priority_aging`: see order_of. whole_prompts: only output is chunked.
        """
        in_pieces = enable_chunked_prefill and not whole_prompts
        assert in_pieces or limits.max_num_tokens >= limits.max_model_len, "a whole prompt fits one step"
        # a step's tokens, and those that a row may lie behind its upper bound, but for the one that it always may
        self._max_new = limits.max_num_tokens + limits.max_num_drafts
        assert kv.fits_alone(limits.max_model_len, self._max_new), "one request of max_model_len fits the pool"
        self._num_drafts = limits.max_num_drafts
        self.kv = kv
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.num_preemptions = 0
        self.num_scheduled_tokens = 0
        self._order = order_of(policy, priority_aging)
        self._max_num_tokens, self._max_model_len = limits.max_num_tokens, limits.max_model_len
        self._enable_chunked_prefill, self._whole_prompts = enable_chunked_prefill, whole_prompts
        self._requests: dict[str, Request] = {}
        self._free_rows = list(reversed(range(limits.max_num_rows)))
        self._finished_rows: list[int] = []
        self._step = 0
        self._outstanding: dict[int, Issued] = {}  # by step
        self._rows = RequestRows(limits.max_num_rows)
        self._owners: dict[int, Request] = {}  # row -> who runs there
        self._running_rows = NO_INTS  # of `running`, in its order
        self._ones = NO_INTS  # as many
        self._row_order: list[int] = []  # the same, always as it is
        self._running_changed = False
        self._num_repeats = 0  # steps to come in which each of them computes one token, if nothing changes
        self._may_end = np.zeros(1, np.bool_)  # by token: some request has ended or will end with it; the last: False
        self._blocked: tuple[Request, int] | None = None  # did not fit with so many free blocks
        self._queued_at: dict[str, float] = {}  # of requests that were never admitted
        self._queue_times: dict[str, float] = {}  # of admitted requests, until an update tells it

    @property
    def has_work(self) -> bool:
        """Whether `schedule` may have something to say. Results that are due are the caller's to know."""
        return bool(self._requests or self._finished_rows)

    def stats(self) -> SchedulerStats:
        """The figures of this moment."""
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            cache_usage=self.kv.usage,
            num_preemptions=self.num_preemptions,
            num_scheduled_tokens=self.num_scheduled_tokens,
            num_prefix_queries=self.kv.stats.queries,
            num_prefix_hits=self.kv.stats.hits,
        )

    def add(self, request: Request) -> None:
        """Queue a new request. Its `max_tokens` is cut to what `max_model_len` leaves."""
        assert request.request_id not in self._requests, "a request id is unique among unfinished requests"
        request.max_tokens = min(request.max_tokens, self._max_model_len - request.num_prompt)
        assert request.max_tokens >= 1, "a prompt that leaves no room for a token is refused before"
        looping = request.params.repetition_detection is not None
        request.check_from = 0 if looping else request.num_prompt + request.max_tokens
        self._requests[request.request_id] = request
        self._queued_at[request.request_id] = time.perf_counter()
        bisect.insort(self.waiting, request, key=self._order)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests in any state, without an update. Unknown ids, ended requests among them, are ignored."""
        ended = [request for request_id in dict.fromkeys(request_ids) if (request := self._requests.get(request_id))]
        for request in ended:
            request.finish_reason = FinishReason.ABORT
            self._queue_times.pop(request.request_id, None)
        self._end(ended)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. False, and nothing is done, while a request holds blocks."""
        return self.kv.reset_prefix_cache()

    def schedule(self) -> StepPlan:
        """The next step. If it has rows or finished rows, it is to be executed and its result given to `update`.

        A plan with neither says nothing, and its number is used again.
        """
        assert len(self._outstanding) < MAX_OUTSTANDING, "a plan is made at most one step ahead of results"
        work = PlanBuilder(self._max_num_tokens)
        self._schedule_running(work)
        if not work.victims:
            self._schedule_waiting(work)
        plan = work.plan(self._step, self._finished_rows, self.kv.take_fresh(), speculates=self._num_drafts > 0)
        self._finished_rows = []
        if plan.has_work:
            self._outstanding[plan.step] = Issued(work.num_sampling, {})
            self.num_scheduled_tokens += self._max_num_tokens - work.budget
            self._step += 1
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Take in a step's result: append tokens, apply the stop rules, end requests. In the order of the plans.

        Rows whose request has ended meanwhile are dropped; a preempted request still gets its token.
        """
        assert result.step == plan.step, "a plan and its result have one number"
        assert plan.step == next(iter(self._outstanding)), "results come in the order of plans"
        issued = self._outstanding[plan.step]
        assert len(result.rows) == issued.num_sampling, "a result has every row that sampled in its plan"
        updates: list[RequestUpdate] = []
        if len(plan.num_drafts):
            take_back_rejected(plan, result, self._owners | issued.left)
        elif not result.num_sampled.all():
            self._num_repeats = 0
            result = take_back(result, self._owners | issued.left)
        if result.failed or result.prompt_logprobs:
            self._settle(result, issued, updates)
        rows, tokens = result.rows, result.tokens
        few = len(rows) <= _FEW or tokens.shape[1] > 1
        one_by_one = range(len(rows)) if few else places(rows, issued.left)
        for place in one_by_one:
            row = rows.item(place)
            request = issued.left.get(row) or self._owners[row]
            if request.status is not Status.FINISHED:
                self._append(request, row, tokens[place, : result.num_sampled[place]].tolist(), result, updates)
        if not one_by_one:
            self._take_all(rows, tokens[:, 0], result, updates)
        elif len(one_by_one) < len(rows):
            others = np.ones(len(rows), np.bool_)
            others[one_by_one] = False
            self._take_all(rows[others], tokens[others, 0], result, updates)
        del self._outstanding[plan.step]
        return updates

    def take_untold(self, request_ids: Iterable[str]) -> list[RequestUpdate]:
        """What quiet requests have that no update told. Unknown ids are ignored."""
        updates: list[RequestUpdate] = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._emit(request, request.row, _NOTHING, updates)
        return updates

    def _settle(self, result: StepResult, issued: Issued, updates: list[RequestUpdate]) -> None:
        """What few rows have, before the tokens: failures, prompt log-probabilities."""
        owners = self._owners | issued.left
        num_sampled = dict(zip(result.rows.tolist(), result.num_sampled.tolist(), strict=True))
        for row, reason in result.failed.items():
            request = owners[row]
            if num_sampled.get(row, 0) > 1 and request.status is not Status.FINISHED:  # drafts came before what failed
                self._append(request, row, run_of(result, row)[:-1], result, updates)
            if request.status is not Status.FINISHED:
                request.error, request.finish_reason = reason, FinishReason.ERROR
                self._end([request])
                self._emit(request, row, result, updates)
        for row, part in result.prompt_logprobs.items():
            request = owners[row]
            request.num_prompt_logprobs += part.num_positions
            if row not in num_sampled and request.status is not Status.FINISHED:
                self._emit(request, row, result, updates)
        self._num_repeats = 0

    def _take_all(self, rows: IntArray, tokens: IntArray, result: StepResult, updates: list[RequestUpdate]) -> None:
        """One token for each of `rows`, all of which run."""
        lengths = self._rows.append(rows, tokens)
        look = self._may_end.take(tokens, mode="clip")
        look |= lengths >= self._rows.check_at[rows]
        places = look.nonzero()[0]
        if len(places):
            self._check_stop(rows[places].tolist(), tokens[places].tolist(), result, updates)
        needs_update = self._rows.needs_update[rows].nonzero()[0]
        if len(needs_update):
            in_full = bool(result.logprobs or result.prompt_logprobs)
            for row, token in zip(rows[needs_update].tolist(), tokens[needs_update].tolist(), strict=True):
                request = self._owners[row]
                if in_full or request.coalesce_updates or not request.num_reported:
                    self._emit(request, row, result, updates)
                else:
                    request.num_reported += 1
                    updates.append(RequestUpdate(request.request_id, [token]))

    def _check_stop(self, rows: list[int], tokens: list[int], result: StepResult, updates: list[RequestUpdate]) -> None:
        """At requests that may end with `tokens`, or whose row has no more room."""
        ended: dict[int, Request] = {}
        for row, token in zip(rows, tokens, strict=True):
            request = self._owners[row]
            known = request.tokens  # takes what only the row had
            if (token in request.end_token_ids or len(known) >= request.check_from) and ends(request, token):
                ended[row] = request
        if ended:
            self._end(list(ended.values()))
            for row, request in ended.items():
                self._emit(request, row, result, updates)

    def _append(
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
            self._emit(request, row, result, updates)

    def _schedule_running(self, work: PlanBuilder) -> None:
        """Give each running request what it can use, in order, as far as the budget goes."""
        rows = self._rows
        if self._num_repeats and not self._running_changed and self._repeat(work):
            self._num_repeats -= 1
            return
        self._num_repeats = 0
        if self._running_changed:
            self._running_rows = np.array(self._row_order, np.int64)
            self._ones = np.ones_like(self._running_rows)
            self._running_changed = False
        # those whose last token is in flight have nothing to compute
        wanted = ((rows.num_known - rows.num_computed) * (rows.num_known < rows.max_len))[self._running_rows]
        some = wanted.nonzero()[0]
        at, num_new = self._running_rows[some], wanted[some]
        sampling, total = at, int(num_new.sum())
        if total > work.budget:
            before = num_new.cumsum() - num_new
            count = int(before.searchsorted(work.budget))
            at, whole = at[:count], num_new[:count]
            num_new = np.minimum(whole, work.budget - before[:count])
            sampling, total = at[num_new == whole], work.budget
        drafts = NO_INTS
        if self._num_drafts and sampling is at:  # what is known already comes first
            drafts = count_drafts(rows, at, num_new, work.budget - total, self._num_drafts, self.kv)
            num_new, total = num_new + drafts, total + int(drafts.sum())
        if self._grow(at, num_new, work):
            count = next((place for place, row in enumerate(at.tolist()) if row in work.victims), len(at))
            at, num_new, sampling, drafts = at[:count], num_new[:count], sampling[:count], drafts[:count]
            total = int(num_new.sum())
        if self._num_drafts:
            work.computed = rows.num_computed[at]
            if drafts.any():
                work.num_drafts = drafts
                rows.num_known[at] += drafts
        rows.num_computed[at] += num_new
        rows.num_known[sampling] += 1
        work.rows, work.num_tokens, work.num_sampling = at, num_new, len(sampling)
        work.budget -= total
        if len(sampling) == len(self.running) == total > 0 and not self._num_drafts:
            self._num_repeats = int((rows.max_len[at] - rows.num_known[at]).min())

    def _repeat(self, work: PlanBuilder) -> bool:
        """One token for each running request. False, and nothing is done, where blocks for them take a closer look."""
        rows, at = self._rows, self._running_rows
        starts = rows.num_computed[at]
        places = (starts % self.kv.block_size == 0).nonzero()[0]
        if len(places) and not self._extend(at[places], starts[places], work):
            return False
        work.rows, work.num_tokens, work.num_sampling = at, self._ones, len(at)
        work.budget -= len(at)
        starts += 1
        rows.num_computed[at] = starts
        rows.num_known[at] += 1
        return True

    def _grow(self, at: IntArray, num_new: IntArray, work: PlanBuilder) -> bool:
        """Blocks for the rows that leave theirs, in order, if need be those of requests behind.

        A decode inside a block needs none. Returns whether somebody was preempted: the last ones in order.
        """
        starts = self._rows.num_computed[at]
        places = ((starts % self.kv.block_size == 0) | (num_new > 1)).nonzero()[0]
        if not len(places):
            return False
        if num_new[places].max() == 1 and self._extend(at[places], starts[places], work):
            return False
        self._grow_each(at, num_new, places.tolist(), work)
        return bool(work.victims)

    def _extend(self, rows: IntArray, starts: IntArray, work: PlanBuilder) -> bool:
        """A block for each of `rows`, which have computed `starts`; False, and nothing is done: see KVManager."""
        blocks = self.kv.extend([self._owners[row] for row in rows.tolist()], starts.tolist())
        if blocks is None:
            return False
        work.growth = [NewBlocks(rows, np.array(blocks))]
        return True

    def _grow_each(self, at: IntArray, num_new: IntArray, places: list[int], work: PlanBuilder) -> None:
        growth: list[tuple[int, list[list[int]]]] = []  # (row, per group its new blocks)
        for place in places:
            row = int(at[place])
            if row in work.victims:
                break
            request, count = self._owners[row], int(num_new[place])
            while (blocks := self.kv.allocate(request, count)) is None:
                assert len(self.running) > 1, "one request alone fits the pool"
                victim = self.running[-1]
                work.victims.add(victim.row)
                self._preempt(victim)
                if victim is request:
                    break
            if blocks:
                growth.append((row, blocks))
        work.growth = pack(growth)

    def _schedule_waiting(self, work: PlanBuilder) -> None:
        """Admit waiting requests, strictly in order, as far as rows, budget and blocks go."""
        kv = self.kv
        while self.waiting and self._free_rows and work.budget:
            request = self.waiting[0]
            assert request.num_in_flight == 0, "the token in flight of a preempted request has arrived"
            if self.running and self._blocked is not None:
                blocked, num_free = self._blocked
                if blocked is request and kv.num_free_blocks <= num_free:
                    return
            hit = kv.match(request, request.max_hit)
            num_computed = hit.num_tokens  # what a connector finds beyond the hit is added here
            num_new = min(request.num_tokens - num_computed, work.budget)
            least = request.num_prompt if self._whole_prompts else 0
            if num_computed + num_new < (least if self._enable_chunked_prefill else request.num_tokens):
                return
            # Without room for the running ones to grow the newcomer would soon be preempted, and computed again.
            keep_free = HEADROOM_BLOCKS * len(self.running) * kv.num_groups
            blocks = kv.admit(request, hit, num_computed + num_new, max_new=self._max_new, keep_free=keep_free)
            if blocks is None:
                assert self.running, "one request alone fits the pool"
                self._blocked = request, kv.num_free_blocks
                return
            self._admit(request, num_computed, num_new, blocks, work)

    def _admit(
        self, request: Request, num_computed: int, num_new: int, blocks: list[list[int]], work: PlanBuilder
    ) -> None:
        """Move the first waiting request to the running ones, and into the plan."""
        del self.waiting[0]
        self._blocked = None
        if request.num_preemptions == 0:
            request.num_cached = num_computed
            self._queue_times[request.request_id] = time.perf_counter() - self._queued_at.pop(request.request_id)
        request.num_computed = num_computed + num_new
        if request.num_computed == request.num_tokens:
            request.num_in_flight = 1
            work.num_sampling += 1
        self._enter_row(request)
        work.admit(request, num_computed, num_new, blocks)

    def _preempt(self, request: Request) -> None:
        """Back to the waiting ones, with its tokens and without its blocks: to the worker the row has ended."""
        self._release_rows([request])
        self.kv.free(request)
        request.status = Status.PREEMPTED
        request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        bisect.insort(self.waiting, request, key=self._order)

    def _end(self, requests: Sequence[Request]) -> None:
        """End those that have a finish reason, from any state.

        Blocks are free at once: plans in flight use them before any plan still to be made.
        """
        self._release_rows([request for request in requests if request.status is Status.RUNNING])
        for request in requests:
            if request.status is not Status.RUNNING:
                del self.waiting[self._place(self.waiting, request)]
            if request.finish_reason is FinishReason.ERROR:
                self.kv.forget(request)
            else:
                self.kv.free(request)
            request.status = Status.FINISHED
            del self._requests[request.request_id]
            self._queued_at.pop(request.request_id, None)

    def _emit(self, request: Request, row: int, result: StepResult, updates: list[RequestUpdate]) -> None:
        """Append the update in full, if there is something to tell: all tokens that no update told."""
        tokens = request.tokens[request.num_prompt + request.num_reported :]
        prompt_logprobs = result.prompt_logprobs.get(row, NO_PROMPT_LOGPROBS)
        if not tokens and not prompt_logprobs.num_positions and request.finish_reason is None:
            return
        request.num_reported += len(tokens)
        if request.coalesce_updates and tokens and request.row >= 0:
            self._rows.needs_update[request.row] = False
        updates.append(
            RequestUpdate(
                request_id=request.request_id,
                tokens=tokens,
                logprobs=result.logprobs.get(row, [])[: len(tokens)],
                prompt_logprobs=prompt_logprobs,
                finish_reason=request.finish_reason,
                stop_reason=request.stop_reason,
                num_cached=request.num_cached,
                queue_time=self._queue_times.pop(request.request_id, None),
                error=request.error,
            )
        )

    def _place(self, queue: list[Request], request: Request) -> int:
        place = bisect.bisect_left(queue, self._order(request), key=self._order)
        assert queue[place] is request, "a queue is sorted, and a request is in the queue of its status"
        return place

    def _enter_row(self, request: Request) -> None:
        request.status = Status.RUNNING
        row = self._free_rows.pop()
        order = self._order(request)
        if not self.running or self._order(self.running[-1]) < order:  # nearly always
            self.running.append(request)
            self._row_order.append(row)
        else:
            place = bisect.bisect_right(self.running, order, key=self._order)
            self.running.insert(place, request)
            self._row_order.insert(place, row)
        request.enter(self._rows, row)
        self._rows.needs_update[row] = not request.coalesce_updates or not request.num_reported
        self._owners[row] = request
        self._running_changed = True
        for token in request.end_token_ids:
            if token >= len(self._may_end) - 1:
                self._may_end = np.concatenate([self._may_end, np.zeros(token + 1, np.bool_)])
            self._may_end[token] = True

    def _release_rows(self, requests: Sequence[Request]) -> None:
        """These run no longer."""
        if len(requests) > _FEW:
            gone = {request.row for request in requests}
            self.running[:] = [request for request in self.running if request.row not in gone]
            self._row_order = [row for row in self._row_order if row not in gone]
        else:
            for request in requests:
                place = self._place(self.running, request)
                del self.running[place], self._row_order[place]
        for request in requests:
            row = request.row
            for issued in self._outstanding.values():
                issued.left.setdefault(row, request)
            request.leave()
            del self._owners[row]
            self._free_rows.append(row)
            self._finished_rows.append(row)
            self._running_changed = True
