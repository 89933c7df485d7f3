"""Scheduler: which tokens run in the next step, and when a request ends.

Owns the queues, the rows, the token budget, preemption and the stop rules. Knows neither tensors nor text; blocks are
KVManager's. There is no prefill or decode phase: a request's computed tokens catch up with its known ones, as far as
the step's budget goes. Plans may be made one step ahead of results; they are executed in the order of their making.
Invariant: running and waiting requests are sorted by the policy's order, requests are served in it and preempted from
its end, so a request that is in the plan in hand is never preempted from it.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable

import msgspec

from octavo.plan import NewRow, StepPlan, StepResult
from octavo.request import FinishReason, Request, Status
from octavo.sampling_params import ends_in_repetition
from octavo.sched.kv_manager import KVManager
from octavo.updates import RequestUpdate

MAX_OUTSTANDING = 2  # plans without results: one that runs, and the next one
HEADROOM_BLOCKS = 2  # kept free per running request and group when one is admitted; 2 halve the preemptions of 1

_Order = tuple[int, int]
_ORDERS: dict[str, Callable[[Request], _Order]] = {
    "fcfs": lambda request: (0, request.arrival),
    "priority": lambda request: (request.priority, request.arrival),
}
_RUNNING, _FINISHED = Status.RUNNING, Status.FINISHED  # a module's name costs less than a member's, per row


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges now, counters since the start."""

    num_running: int
    num_waiting: int
    cache_usage: float  # share of the blocks that are held, 0 to 1
    num_preemptions: int
    num_scheduled_tokens: int
    num_prefix_queries: int  # tokens
    num_prefix_hits: int  # tokens


class _Work:
    """A plan in the making."""

    __slots__ = ("budget", "new_blocks", "new_rows", "num_tokens", "preempted", "requests", "rows")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.preempted = False
        self.requests: list[Request] = []  # the owners of `rows`
        self.rows: list[int] = []
        self.num_tokens: list[int] = []
        self.new_rows: list[NewRow] = []
        self.new_blocks: list[tuple[int, list[list[int]]]] = []


class Scheduler:
    """Host truth of all unfinished requests."""

    def __init__(
        self,
        kv: KVManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: str = "fcfs",
        enable_chunked_prefill: bool = True,
    ) -> None:
        """`policy`: "fcfs", or "priority" (a lower number runs first)."""
        assert enable_chunked_prefill or max_num_batched_tokens >= max_model_len, "a whole prompt fits one step"
        assert kv.fits_alone(max_model_len, max_num_batched_tokens), "one request of max_model_len fits the pool"
        self.kv = kv
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.num_preemptions = 0
        self.num_scheduled_tokens = 0
        self._order = _ORDERS[policy]
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._enable_chunked_prefill = enable_chunked_prefill
        self._requests: dict[str, Request] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))
        self._finished_rows: list[int] = []
        self._step = 0
        self._outstanding: dict[int, list[Request]] = {}  # step -> the owners of its plan's rows
        self._blocked: tuple[Request, int] | None = None  # did not fit with so many free blocks
        self._queued_at: dict[str, float] = {}  # of requests that were never admitted
        self._queue_times: dict[str, float] = {}  # of admitted requests, until an update tells it

    @property
    def num_unfinished(self) -> int:
        """Requests that are running or waiting."""
        return len(self._requests)

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
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._end(request, FinishReason.ABORT)
                self._queue_times.pop(request_id, None)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. False, and nothing is done, while a request holds blocks."""
        return self.kv.reset_prefix_cache()

    def schedule(self) -> StepPlan:
        """The next step. If it has rows or finished rows, it is to be executed and its result given to `update`.

        A plan with neither says nothing, and its number is used again.
        """
        assert len(self._outstanding) < MAX_OUTSTANDING, "a plan is made at most one step ahead of results"
        work = _Work(self._max_num_batched_tokens)
        self._schedule_running(work)
        if not work.preempted:
            self._schedule_waiting(work)
        plan = StepPlan(
            step=self._step,
            finished_rows=self._finished_rows,
            new_rows=work.new_rows,
            rows=work.rows,
            num_tokens=work.num_tokens,
            new_blocks=work.new_blocks,
            zero_blocks=self.kv.take_fresh(),
        )
        self._finished_rows = []
        if plan.rows or plan.finished_rows:
            self._outstanding[plan.step] = work.requests
            self.num_scheduled_tokens += self._max_num_batched_tokens - work.budget
            self._step += 1
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Take in a step's result: append tokens, apply the stop rules, end requests. In the order of the plans.

        Rows whose request has ended meanwhile are dropped; a preempted request still gets its token.
        """
        assert result.step == plan.step, "a plan and its result have one number"
        assert plan.step == next(iter(self._outstanding)), "results come in the order of plans"
        owners = dict(zip(plan.rows, self._outstanding.pop(plan.step), strict=True))
        updates = self._settle(plan, result, owners)
        in_full = bool(result.logprobs or result.prompt_logprobs or self._queue_times)
        for row, tokens in zip(result.rows, result.tokens, strict=True):
            request = owners[row]
            if request.status is _FINISHED:
                continue
            if tokens:
                request.num_in_flight -= 1
                known = request.tokens
                for num_kept, token in enumerate(tokens, 1):
                    known.append(token)
                    may_end = token in request.end_token_ids or len(known) >= request.check_from
                    if may_end and self._stop(request, token):
                        tokens = tokens[:num_kept]
                        break
            if in_full or request.status is _FINISHED:
                self._tell(request, row, tokens, result, updates)
            elif tokens:
                updates.append(RequestUpdate(request.request_id, tokens))
        return updates

    def _settle(self, plan: StepPlan, result: StepResult, owners: dict[int, Request]) -> list[RequestUpdate]:
        """What few rows have, before the loop over all: failures, prompt log-probabilities, rejected drafts."""
        assert len(result.rows) == len(owners), "a result has every row of its plan"
        updates: list[RequestUpdate] = []
        for row, reason in result.failed.items():
            request = owners[row]
            if request.status is not _FINISHED:
                request.error = reason
                self._end(request, FinishReason.ERROR)
                self._tell(request, row, [], result, updates)
        for row, entries in result.prompt_logprobs.items():
            owners[row].num_prompt_logprobs += len(entries)
        tokens = dict(zip(result.rows, result.tokens, strict=True)) if plan.drafts else {}
        for row, drafts in plan.drafts.items():
            owners[row].num_in_flight -= len(drafts)
            if owners[row].status is _RUNNING:
                owners[row].num_computed -= 1 + len(drafts) - len(tokens[row])
        return updates

    def _schedule_running(self, work: _Work) -> None:
        """Give each running request what it can use. A decode inside a block is the fast path."""
        block_size = self.kv.block_size
        budget, rows, num_tokens, requests = work.budget, work.rows, work.num_tokens, work.requests
        for request in self.running:  # preemption takes from the end of this list, which ends the loop early
            if not budget:
                break
            start, in_flight = request.num_computed, request.num_in_flight
            known = len(request.tokens) + in_flight
            if in_flight and known >= request.num_prompt + request.max_tokens:
                continue  # its last token is in flight
            num_new = known - start
            if num_new > 1 or start % block_size == 0:
                num_new = min(num_new, budget)
                if not self._grow(request, num_new, work):
                    break
            request.num_computed = start + num_new
            if start + num_new == known:
                request.num_in_flight = in_flight + 1
            budget -= num_new
            requests.append(request)
            rows.append(request.row)
            num_tokens.append(num_new)
        work.budget = budget

    def _grow(self, request: Request, num_new: int, work: _Work) -> bool:
        """Blocks for `num_new` more tokens, if need be those of requests behind. False: `request` was preempted."""
        while (blocks := self.kv.allocate(request, num_new)) is None:
            victim = self.running[-1]
            assert len(self.running) > 1, "one request alone fits the pool"
            self._preempt(victim)
            work.preempted = True
            if victim is request:
                return False
        if blocks:
            work.new_blocks.append((request.row, blocks))
        return True

    def _schedule_waiting(self, work: _Work) -> None:
        """Admit waiting requests, strictly in order, as far as rows, budget and blocks go."""
        kv = self.kv
        while self.waiting and self._free_rows and work.budget:
            request = self.waiting[0]
            assert request.num_in_flight == 0, "the token in flight of a preempted request has arrived"
            if self.running and self._blocked is not None:
                blocked, num_free = self._blocked
                if blocked is request and kv.num_free_blocks <= num_free:
                    return
            hit = kv.match(request, self._max_hit(request))
            num_computed = hit.num_tokens  # what a connector finds beyond the hit is added here
            num_new = min(request.num_tokens - num_computed, work.budget)
            if num_computed + num_new < request.num_tokens and not self._enable_chunked_prefill:
                return
            # Without room for the running ones to grow the newcomer would soon be preempted, and computed again.
            keep_free = HEADROOM_BLOCKS * len(self.running) * kv.num_groups
            blocks = kv.admit(
                request, hit, num_computed + num_new, max_new=self._max_num_batched_tokens, keep_free=keep_free
            )
            if blocks is None:
                assert self.running, "one request alone fits the pool"
                self._blocked = request, kv.num_free_blocks
                return
            self._admit(request, num_computed, num_new, blocks, work)

    def _admit(self, request: Request, num_computed: int, num_new: int, blocks: list[list[int]], work: _Work) -> None:
        """Move the first waiting request to the running ones, and into the plan."""
        del self.waiting[0]
        bisect.insort(self.running, request, key=self._order)
        self._blocked = None
        if request.num_preemptions == 0:
            request.num_cached = num_computed
            self._queue_times[request.request_id] = time.perf_counter() - self._queued_at.pop(request.request_id)
        request.status = _RUNNING
        request.row = self._free_rows.pop()
        request.num_computed = num_computed + num_new
        if request.num_computed == request.num_tokens:
            request.num_in_flight = 1
        work.budget -= num_new
        work.requests.append(request)
        work.rows.append(request.row)
        work.num_tokens.append(num_new)
        missing = _misses_prompt_logprobs(request)
        work.new_rows.append(
            NewRow(
                row=request.row,
                request_id=request.request_id,
                token_ids=list(request.tokens),
                num_prompt=request.num_prompt,
                num_computed=num_computed,
                block_ids=blocks,
                sampling=request.params,
                seed=request.seed,
                eos_token_ids=list(request.eos_token_ids),
                prompt_logprobs_start=request.num_prompt_logprobs + 1 if missing else -1,
            )
        )

    def _max_hit(self, request: Request) -> int:
        """Tokens that need not be computed again: all but one, and none whose log-probabilities are still owed."""
        if _misses_prompt_logprobs(request):
            return request.num_prompt_logprobs  # position p is scored when token p - 1 is computed
        return request.num_tokens - 1

    def _preempt(self, request: Request) -> None:
        """Back to the waiting ones, with its tokens and without its blocks: to the worker the row has ended."""
        self._leave(self.running, request)
        self._release_row(request)
        self.kv.free(request)
        request.status = Status.PREEMPTED
        request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        bisect.insort(self.waiting, request, key=self._order)

    def _stop(self, request: Request, token: int) -> bool:
        """Apply the stop rules to the last token; the first that holds is the reason."""
        params = request.params
        enough = request.num_output >= params.min_tokens
        if enough and token in request.eos_token_ids:
            self._end(request, FinishReason.STOP)
        elif enough and token in request.stop_token_ids:
            request.stop_reason = token
            self._end(request, FinishReason.STOP)
        elif request.num_output >= request.max_tokens:
            self._end(request, FinishReason.LENGTH)
        elif enough and _loops(request):
            self._end(request, FinishReason.REPETITION)
        return request.status is _FINISHED

    def _end(self, request: Request, reason: FinishReason) -> None:
        """From any state. Blocks are free at once: plans in flight use them before any plan still to be made."""
        if request.status is _RUNNING:
            self._leave(self.running, request)
            self._release_row(request)
        else:
            self._leave(self.waiting, request)
        if reason is FinishReason.ERROR:
            self.kv.forget(request)
        else:
            self.kv.free(request)
        request.status = _FINISHED
        request.finish_reason = reason
        del self._requests[request.request_id]
        self._queued_at.pop(request.request_id, None)

    def _tell(
        self, request: Request, row: int, tokens: list[int], result: StepResult, updates: list[RequestUpdate]
    ) -> None:
        """Append the update in full, if there is something to tell."""
        prompt_logprobs = result.prompt_logprobs.get(row, [])
        if tokens or prompt_logprobs or request.finish_reason is not None:
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

    def _leave(self, queue: list[Request], request: Request) -> None:
        index = bisect.bisect_left(queue, self._order(request), key=self._order)
        assert queue[index] is request, "a queue is sorted, and a request is in the queue of its status"
        del queue[index]

    def _release_row(self, request: Request) -> None:
        self._free_rows.append(request.row)
        self._finished_rows.append(request.row)
        request.row = -1


def _misses_prompt_logprobs(request: Request) -> bool:
    """Whether prompt positions wait for their log-probabilities. The first position has none."""
    return request.params.prompt_logprobs is not None and request.num_prompt_logprobs < request.num_prompt - 1


def _loops(request: Request) -> bool:
    """Whether the output ends in the repetition that its parameters call an end."""
    detection = request.params.repetition_detection
    if detection is None:
        return False
    longest = detection.max_pattern_size * detection.min_count
    return ends_in_repetition(request.tokens[max(request.num_prompt, request.num_tokens - longest) :], detection)
