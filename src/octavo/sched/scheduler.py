"""Scheduler: which tokens run in the next step, and when a request ends.

Owns the queues, the rows, the token budget and preemption; the stop rules are in `stops`. Knows neither tensors nor
text; blocks are KVManager's. There is no prefill or decode phase: a request's computed tokens catch up with its known
ones, as far as the step's budget goes. Plans may be made one step ahead of results; they are executed in the order of
their making. What a step does for every running request it does to the arrays of RequestRows; a Request is looked at
when something happens to it: it starts, grows by a block, may have ended, or wants to be told.

Who waits is served in the policy's order: one that does not fit is passed by nobody but those who have blocks already,
as a load has brought them; one that cannot be served yet is stepped over: a step that it left has not ended, or the
connector said LATER, for `load_timeout` seconds at most. Invariant: running and waiting requests are sorted by the
policy's order, requests are served in it and preempted from its end, so a request that is in the plan in hand is never
preempted from it.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from octavo.kv_connector import NO_CONNECTOR, Connector, Later
from octavo.plan import NO_INTS, IntArray, StepLimits, StepPlan, StepResult
from octavo.request.outputs import LOAD_FAILED
from octavo.request.request import FinishReason, Request, Status
from octavo.request.updates import RequestUpdate
from octavo.sched.drafts import Drafting, run_of
from octavo.sched.growth import Growth
from octavo.sched.kv_manager import KVManager
from octavo.sched.order import order_of
from octavo.sched.prefixes import Hit
from octavo.sched.results import NOTHING, Results
from octavo.sched.running import Running
from octavo.sched.transfers.loads import FAILURE_POLICIES, LOAD_TIMEOUT, NEVER, Loads
from octavo.sched.versions import Versions
from octavo.sched.work import Issued, PlanBuilder, SchedulerStats, cut_prompts, num_proven, take_back, without

MAX_OUTSTANDING = 2  # plans without results: one that runs, and the next one
HEADROOM_BLOCKS = 2  # kept free per running request and group when one is admitted; 2 halve the preemptions of 1


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
        cheap_tokens: int = 0,
        connector: Connector = NO_CONNECTOR,
        load_timeout: float = LOAD_TIMEOUT,
        load_failure_policy: str = "recompute",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limits`: the worker's; of drafts a row verifies as many in a step as the worker's speculator proposes.

        `policy` and `priority_aging`: see order_of. whole_prompts: only output is chunked. cheap_tokens: see
        Depth. load_timeout: seconds that a transfer may take, and `match` to answer. load_failure_policy: "recompute"
        what did not arrive, or "fail" its request; both are logged and counted.
        """
        assert load_failure_policy in FAILURE_POLICIES, f"a load_failure_policy is one of {FAILURE_POLICIES}"
        in_pieces = enable_chunked_prefill and not whole_prompts
        assert in_pieces or limits.max_num_tokens >= limits.max_model_len, "a whole prompt fits one step"
        # a step's tokens, and those that a row may lie behind its upper bound, but for the one that it always may
        self._max_new = limits.max_num_tokens + limits.max_num_drafts + limits.num_lookahead
        assert kv.fits_alone(limits.max_model_len, self._max_new), "one request of max_model_len fits the pool"
        self._cuts, self._reads_next = in_pieces and kv.cuts, limits.num_next_tokens > 0
        self.kv = kv
        self.waiting: list[Request] = []
        self.num_preemptions = self.num_scheduled_tokens = 0
        self._order = order_of(policy, priority_aging)
        self._running = Running(limits.max_num_rows, self._order, 1 + limits.max_num_drafts)
        self._results = Results(self._running, self._end)
        self.drafting = Drafting(limits, kv, self._running.rows, cheap_tokens=cheap_tokens)
        self.running = self._running.requests
        self._max_num_tokens, self._max_model_len = limits.max_num_tokens, limits.max_model_len
        self._enable_chunked_prefill, self._whole_prompts = enable_chunked_prefill, whole_prompts
        self._requests: dict[str, Request] = {}
        self._step = 0
        self._outstanding: dict[int, Issued] = {}  # by step
        self._num_repeats = 0  # steps to come in which each of them computes as many tokens, if nothing changes
        self._repeated = NO_INTS, NO_INTS, NO_INTS  # their tokens, these by row, and how many of them are drafts
        self._blocked: tuple[Request, int] | None = None  # did not fit with so many free blocks
        self.versions = Versions(self._requests, self._results, self._end)
        self.loads = Loads(kv, connector, load_timeout, clock, self._order, self._queue, limits.max_num_rows)
        self._fails_with_load = load_failure_policy == "fail"
        self._growth = Growth(kv, self._running, self.loads, self.drafting, self._preempt, limits.max_model_len)

    @property
    def num_unfinished(self) -> int:
        """Requests that are running or waiting."""
        return len(self._requests)

    @property
    def has_work(self) -> bool:
        """Whether `schedule` may have something to say. Results that are due are the caller's to know."""
        return bool(self._requests or self._running.finished_rows or self.loads.keeps_blocks)

    def stats(self) -> SchedulerStats:
        """The figures of this moment."""
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            cache_usage=self.kv.usage,
            num_preemptions=self.num_preemptions + self.loads.num_preemptions,
            num_scheduled_tokens=self.num_scheduled_tokens,
            num_prefix_queries=self.kv.stats.queries,
            num_prefix_hits=self.kv.stats.hits,
            **self.loads.figures(),
            **self.drafting.figures(),
        )

    def add(self, request: Request) -> None:
        """Queue a new request. Its `max_tokens` is cut to what `max_model_len` leaves."""
        assert request.request_id not in self._requests, "a request id is unique among unfinished requests"
        request.max_tokens = min(request.max_tokens, self._max_model_len - request.num_prompt)
        assert request.max_tokens >= 1, "a prompt that leaves no room for a token is refused before"
        longest = request.num_prompt + request.max_tokens
        request.check_from = longest if request.params.repetition_detection is None else 0
        self._requests[request.request_id] = request
        self._results.queued_at[request.request_id] = time.perf_counter()
        self._results.mixed.discard(request.request_id)  # an earlier request's
        self._queue(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests in any state, without an update. Unknown ids, ended requests among them, are ignored."""
        ended = list(filter(None, map(self._requests.get, dict.fromkeys(request_ids))))
        for request in ended:
            request.finish_reason = FinishReason.ABORT
            self._results.queue_times.pop(request.request_id, None)
        self._end(ended)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. False, and nothing is done, while a request holds blocks: see `recompute`."""
        return self.kv.reset_prefix_cache()

    def schedule(self) -> StepPlan:
        """The next step. If it has rows or finished rows, it is to be executed and its result given to `update`.

        A plan with neither says nothing, and its number is used again.
        """
        assert len(self._outstanding) < MAX_OUTSTANDING, "a plan is made at most one step ahead of results"
        work = PlanBuilder(self._max_num_tokens)
        self._schedule_running(work)
        if self.waiting and not work.victims:
            self._schedule_waiting(work)
        work.depth = self.drafting.announce(len(self.running), has_room_ahead=work.has_room_ahead)
        plan = work.plan(self._step, self._running.finished_rows, self.kv.take_fresh(), self.loads.awaited)
        self._running.finished_rows = []
        if plan.has_work:
            self.loads.awaited = -1 if len(plan.rows) else self.loads.awaited
            self._outstanding[plan.step] = Issued(plan, work.num_sampling, {}, set())
            self.num_scheduled_tokens += self._max_num_tokens - work.budget - work.num_loading
            self._step += 1
        if self.loads.is_on:
            self.loads.save_running(self._running, self._step)
            self.loads.start(next(iter(self._outstanding), NEVER))
        return plan

    def take_loads(self) -> list[RequestUpdate]:
        """Take in which transfers have ended, in time or not. To be called before each `schedule`."""
        updates: list[RequestUpdate] = []
        if not self.loads.is_on:
            return updates
        self.loads.start(next(iter(self._outstanding), NEVER))
        for request, failed in self.loads.take():
            self._queue(request)
            if failed and self._fails_with_load:
                request.error, request.finish_reason = LOAD_FAILED, FinishReason.ERROR
                self._end([request])
                self._results.emit(request, -1, NOTHING, updates)
        return updates

    def set_weights_version(self, version: str, *, keep_kv: bool = False) -> None:
        """Plans from now on run with other weights: what was cached under the old ones is found under them alone.

        Running requests are computed again, with their tokens; or with `keep_kv` they go on with blocks of both
        weights, of which none is ever found. A row that was held is computed again in any case: its last token's K and
        V, which it stores anew, may have been found, or are being saved. Loads of old bytes are given up.
        """
        if version == self.kv.identity.weights_version:
            return
        for issued in self._outstanding.values():  # whether they fail is told when the old names are forgotten
            for row in issued.plan.rows.tolist():
                request = issued.left.get(row) or self._running.owners[row]
                self.kv.unpublish(request, num_proven(request, row, self._outstanding.values()))
                if keep_kv:
                    self.loads.distrust(request)
        for request in reversed(self.running[:]) if keep_kv else ():
            if max(self.kv.num_published(request), self.loads.num_offered(request)) > request.num_computed:
                self._preempt(request)
        self.kv.set_weights_version(version)
        self.recompute(running=not keep_kv)
        for request in self.waiting:
            request.block_hashes.clear()

    def recompute(self, *, running: bool = True) -> None:
        """Let whoever has blocks wait without them, and be computed again; those that run only if that is meant."""
        self.loads.unpark_all()
        for request in reversed(self.running[:]) if running else ():
            self._preempt(request)
        self._num_repeats, self._blocked = 0, None

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Take in a step's result: append tokens, apply the stop rules, end requests. In the order of the plans.

        Rows whose request has ended meanwhile are dropped; a preempted request still gets its token.
        """
        assert result.step == plan.step, "a plan and its result have one number"
        assert plan.step == next(iter(self._outstanding)), "results come in the order of plans"
        issued = self._outstanding[plan.step]
        assert len(result.rows) == issued.num_sampling, "a result has every row that sampled in its plan"
        updates: list[RequestUpdate] = []
        if issued.dropped:
            result = without(result, issued.dropped)
        has_drafts = len(plan.num_drafts) > 0
        has_held = not result.num_sampled.all()
        if has_held:
            self._num_repeats = 0
        if has_drafts:
            self.drafting.take_back_rejected(plan, result, issued.left)
        elif has_held:
            result = take_back(result, self._running.owners | issued.left)
        if result.failed or result.prompt_logprobs or result.experts:
            result = self._settle(result, issued, updates)
        self._results.take(result, issued.left, updates, are_runs=has_drafts)
        del self._outstanding[plan.step]
        return updates

    def take_untold(self, request_ids: Iterable[str]) -> list[RequestUpdate]:
        """What quiet requests have that no update told. Unknown ids are ignored."""
        return self._results.take_untold(filter(None, map(self._requests.get, request_ids)))

    def _settle(self, result: StepResult, issued: Issued, updates: list[RequestUpdate]) -> StepResult:
        """What few rows have, before the tokens: failures, prompt log-probabilities. Returns what counts."""
        owners = self._running.owners | issued.left
        num_sampled = dict(zip(result.rows.tolist(), result.num_sampled.tolist(), strict=True))
        for row, reason in result.failed.items():
            request = owners[row]
            self._restart_readers(request, row)
            if num_sampled.get(row, 0) > 1 and request.status is not Status.FINISHED:  # drafts came before what failed
                self._results.append(request, row, run_of(result, row)[:-1], result, updates)
            if request.status is not Status.FINISHED:
                request.error, request.finish_reason = reason, FinishReason.ERROR
                self._end([request])
                self._results.emit(request, row, result, updates)
        result = without(result, issued.dropped)
        self._results.take_prompt_logprobs(result, owners, updates)
        self._num_repeats = 0
        return result

    def _restart_readers(self, request: Request, row: int) -> None:
        """A step failed for `row`, so it may have written nothing: compute again who found what it was to write.

        Those were admitted in that step or the next one, and what they sampled in either is dropped.
        """
        outstanding = self._outstanding.values()
        first = num_proven(request, row, outstanding)
        left = {id(other): other for issued in outstanding for other in issued.left.values() if not other.finished}
        self.loads.distrust(request)
        for reader in self.kv.readers(request, first, left.values()):
            self.loads.distrust(reader)
            if reader.status is Status.RUNNING:
                self._preempt(reader, first)
            elif id(reader) not in left:
                self.loads.unpark(reader)
                continue
            else:
                self.kv.unpublish(reader, first)
            for issued in outstanding:
                issued.dropped.update(number for number, own in issued.left.items() if own is reader)
            reader.num_in_flight = 0
        if request.finished:
            self.kv.discard(request, first)

    def _schedule_running(self, work: PlanBuilder) -> None:
        """Give each running request what it can use, in order, as far as the budget goes."""
        rows = self._running.rows
        if self._num_repeats and not self._running.changed and self._repeat(work):
            self._num_repeats -= 1
            return
        self._num_repeats = 0
        if self._running.changed:
            self._running.refresh()
        # those whose last token is in flight have nothing to compute
        wanted = ((rows.num_known - rows.num_computed) * (rows.num_known < rows.max_len))[self._running.at]
        some = wanted.nonzero()[0]
        at, num_new = self._running.at[some], wanted[some]
        whole = num_new
        num_new, sampling = cut_prompts(self.kv, at, rows, whole) if self._cuts else (whole, at)
        total = int(num_new.sum())
        if total > work.budget:
            before = num_new.cumsum() - num_new
            count = int(before.searchsorted(work.budget))
            at, num_new = at[:count], np.minimum(num_new[:count], work.budget - before[:count])
            sampling, total = at[num_new == whole[:count]], work.budget
        drafts = NO_INTS
        if self.drafting.most and sampling is at:  # what is known already comes first
            drafts = self.drafting.count(at, num_new, work.budget - total)
            num_new, total = num_new + drafts, total + int(drafts.sum())
        if self._growth.grow(at, num_new, work):
            count = next((place for place, row in enumerate(at.tolist()) if row in work.victims), len(at))
            at, num_new, drafts = at[:count], num_new[:count], drafts[:count]
            sampling, total = sampling[np.isin(sampling, at)], int(num_new.sum())
        work.rows, work.num_tokens, work.num_sampling = at, num_new, len(sampling)
        if self.drafting.most:
            self.drafting.plan(work, drafts, self._outstanding.values(), len(self.running))
        rows.num_computed[at] += num_new
        rows.num_known[sampling] += 1
        work.budget -= total
        if len(sampling) == len(self.running) > 0:
            self._num_repeats = self._count_repeats(at, num_new, total, drafts)

    def _count_repeats(self, at: IntArray, num_new: IntArray, total: int, drafts: IntArray) -> int:
        """How many steps to come may compute what this one does, in which all running requests sample."""
        if total == len(at):
            most, drafts = self.drafting.repeats(total), NO_INTS
        else:
            most = self.drafting.is_steady(drafts) << 30
        if not most:
            return 0
        rows = self._running.rows
        by_row = np.zeros_like(rows.num_known)
        by_row[at] = num_new
        self._repeated = num_new, by_row, drafts
        return min(most, int((rows.max_len[at] - rows.num_known[at]).min()) // num_new.item(0))

    def _repeat(self, work: PlanBuilder) -> bool:
        """What each running request computed in the last step. False, and nothing is done: it takes a closer look."""
        rows, at, (num_new, by_row, drafts) = self._running.rows, self._running.at, self._repeated
        starts = rows.num_computed[at]
        if len(drafts) and not self.drafting.has_room(at):
            return False
        if len(self._growth.reserve(at, starts, num_new, work)):
            return False
        if len(drafts):
            work.num_drafts, work.computed = drafts, starts
        else:
            work.has_room_ahead = not self.drafting.lookahead
        work.rows, work.num_tokens, work.num_sampling = at, num_new, len(at)
        work.budget -= len(at) * num_new.item(0)
        rows.advance(by_row)
        return True

    def _schedule_waiting(self, work: PlanBuilder) -> None:
        """Admit waiting requests, strictly in order, as far as rows, budget and blocks go."""
        place, is_full = 0, False
        left = {request.request_id for issued in self._outstanding.values() for request in issued.left.values()}
        while place < len(self.waiting) and len(self._running.free_rows) > self.loads.num_loading and work.budget:
            request = self.waiting[place]
            has_blocks = request.request_id in self.loads.arrived
            if request.request_id in left or (is_full and not has_blocks):
                place += 1
                continue
            taken = self._take_arrived(request, work) if has_blocks else self._take_waiting(request, work)
            if taken is None:
                if not self.loads.arrived:
                    return
                is_full = True
            place += not taken

    def _take_waiting(self, request: Request, work: PlanBuilder) -> bool | None:
        """Admit a request or begin its load. False: it is to be stepped over. None: nobody is to pass it."""
        kv = self.kv
        if self.running and self._blocked is not None:
            blocked, num_free = self._blocked
            if blocked is request and kv.num_free_blocks <= num_free:
                return None
        hit = kv.match(request, request.max_hit)
        if self.loads.is_on and (found := self._find_load(request, hit.num_tokens)):
            return self._begin_load(request, hit, found, work) if isinstance(found, int) else False
        num_new = self._fit(request, hit.num_tokens, work.budget)
        if not num_new:
            return None
        # Without room for the running ones to grow the newcomer would soon be preempted, and computed again.
        keep_free = self._growth.headroom(HEADROOM_BLOCKS, work)
        end = hit.num_tokens + num_new
        ahead = min(self.drafting.lookahead, self._max_model_len - end)
        blocks = kv.admit(request, hit, end + ahead, max_new=self._max_new, keep_free=keep_free, ahead=ahead)
        if blocks is None:
            assert self.running or self.loads.keeps_blocks, "one request alone fits the pool"
            self._blocked = request, kv.num_free_blocks
            return None
        self._admit(request, hit.num_tokens, num_new, blocks, work)
        return True

    def _find_load(self, request: Request, num_local: int) -> int | Later:
        """What can be loaded; where a drafter reads next tokens, no last block that is not found by our names."""
        gives_up = self._reads_next and self.loads.connector.has_own_names
        return self.loads.match(request, num_local, self.kv.unit if gives_up else 0)

    def _fit(self, request: Request, num_computed: int, budget: int) -> int:
        """How many tokens of a waiting request this step computes; 0: it waits for a step with more room."""
        num_new = min(request.num_tokens - num_computed, budget)
        if self._cuts:
            num_new = self.kv.cut(num_computed, num_computed + num_new) - num_computed
        least = request.num_prompt * self._whole_prompts if self._enable_chunked_prefill else request.num_tokens
        return num_new if num_computed + num_new >= least else 0

    def _begin_load(self, request: Request, hit: Hit, num_found: int, work: PlanBuilder) -> bool | None:
        """Reserve blocks for `num_found` tokens behind the hit, and wait for them. None: they do not fit."""
        end, keep_free = hit.num_tokens + num_found, self._growth.headroom(HEADROOM_BLOCKS, work)
        if self.kv.admit(request, hit, end, max_new=self._max_new, keep_free=keep_free, loads=True) is None:
            if not self.running and not self.loads.keeps_blocks:
                self.loads.refuse(request)  # its window is there twice, at both ends of the load
                return self._take_waiting(request, work)
            self._blocked = request, self.kv.num_free_blocks
            return None
        is_alone = not self.running and not self._outstanding and len(self.waiting) == 1 and not self.loads.num_loading
        if is_alone and self.loads.begin_now(request, hit.num_tokens, end):
            return self._take_arrived(request, work)
        del self.waiting[self._running.place(self.waiting, request)]
        num_counted = min(num_found, work.budget)
        work.budget -= num_counted
        work.num_loading += num_counted
        self.loads.begin(request, hit.num_tokens, end, self._step)
        return True

    def _take_arrived(self, request: Request, work: PlanBuilder) -> bool | None:
        """Admit a request that has blocks of its first `num_computed` tokens."""
        num_computed = request.num_computed
        num_new = self._fit(request, num_computed, work.budget)
        if not num_new:
            return None
        ahead = min(self.drafting.lookahead, self._max_model_len - num_computed - num_new)
        while self.kv.reserve(request, num_new, ahead) is None:
            if self.running or not self.loads.unpark_behind(request):
                return None  # who runs or loads, or has arrived before, goes on
        del self.loads.arrived[request.request_id]
        self._admit(request, num_computed, num_new, self.kv.tables(request), work)
        return True

    def _admit(
        self, request: Request, num_computed: int, num_new: int, blocks: list[list[int]], work: PlanBuilder
    ) -> None:
        """Move a waiting request to the running ones, and into the plan."""
        del self.waiting[self._running.place(self.waiting, request)]
        self._blocked = None
        self.kv.publish(request, num_computed + num_new)
        self._results.note_admission(request, num_computed)
        request.num_computed = num_computed + num_new
        if request.num_computed == request.num_tokens:
            request.num_in_flight = 1
            work.num_sampling += 1
        self._running.enter(request)
        self._growth.enter(HEADROOM_BLOCKS, request, work)
        self.loads.enter(request)
        self.drafting.depth.clear(request.row)
        work.admit(request, num_computed, num_new, blocks)

    def _preempt(self, request: Request, sound: int | None = None) -> None:
        """Back to the waiting ones, with its tokens and without its blocks: to the worker the row has ended.

        sound: tokens whose content is right; None: all that are computed.
        """
        self._running.leave([request], self._outstanding.values())
        if sound is None:
            self.kv.release(request)
        else:
            self.kv.discard(request, sound)
        request.status = Status.PREEMPTED
        request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._queue(request)

    def _queue(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=self._order)

    def _end(self, requests: Sequence[Request]) -> None:
        """End those that have a finish reason, from any state.

        Blocks are free at once, unless a save keeps them: plans in flight use them before any plan still to be made.
        """
        self._running.leave([r for r in requests if r.status is Status.RUNNING], self._outstanding.values())
        for request in requests:
            ran, has_failed = request.status is Status.RUNNING, request.finish_reason is FinishReason.ERROR
            if not ran and request.status is not Status.LOADING:
                del self.waiting[self._running.place(self.waiting, request)]
            if self.loads.has_blocks(request):
                self.loads.stop(request)
            elif has_failed:
                self.kv.discard(request)
            elif ran and self.loads.is_on and self.kv.is_current(request):
                self.kv.publish_all(request)
                self.loads.keep(request, self._step)
            else:
                self.kv.release(request)
            request.status = Status.FINISHED
            del self._requests[request.request_id]
            self._results.queued_at.pop(request.request_id, None)
            self.loads.forget(request)
