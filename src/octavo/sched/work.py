"""A plan in the making, and what is remembered of it until its result comes.

Owns no state of its own: the scheduler fills and keeps these. Invariant: a row that left is told by the plans that it
was in, so a result finds its request though the row has another one by then.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np

from octavo.plan import NO_INTS, IntArray, NewBlocks, NewRow, StepPlan, StepResult
from octavo.request.request import Request, RequestRows, Status
from octavo.sched.kv_manager import KVManager


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges now, counters since the start."""

    num_running: int
    num_waiting: int
    num_loading: int = 0  # wait for blocks from elsewhere
    cache_usage: float  # share of the blocks that are not free, 0 to 1
    num_preemptions: int
    num_scheduled_tokens: int
    num_prefix_queries: int  # tokens
    num_prefix_hits: int  # tokens
    num_matched_tokens: int = 0  # that a connector was asked for, when their requests were first admitted
    num_loaded_tokens: int = 0
    num_load_failures: int = 0
    num_load_misses: int = 0
    num_expired_holds: int = 0
    refusal: str = ""  # why the blocks of a peer could not be taken, when that was found last
    num_drafts: int = 0  # rows' steps that verified drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = []


class PlanBuilder:
    """A plan in the making."""

    __slots__ = (
        "budget",
        "computed",
        "depth",
        "growth",
        "has_room_ahead",
        "headroom",
        "new_num_tokens",
        "new_rows",
        "num_drafts",
        "num_loading",
        "num_sampling",
        "num_tokens",
        "rows",
        "victims",
    )

    def __init__(self, budget: int) -> None:
        """`budget`: tokens that the step may compute."""
        self.budget = budget
        self.victims: set[int] = set()  # rows that were preempted
        self.rows: IntArray = NO_INTS  # of those that ran before
        self.num_tokens: IntArray = NO_INTS
        self.num_drafts: IntArray = NO_INTS  # of these; empty: none
        self.computed: IntArray = NO_INTS  # what they have computed, all drafts accepted; empty: the worker knows
        self.depth = 0  # drafts that are proposed behind the step
        self.has_room_ahead = True  # see Drafting.announce
        self.new_rows: list[NewRow] = []
        self.new_num_tokens: list[int] = []
        self.num_sampling = 0
        self.num_loading = 0  # tokens of the budget that loads count for
        self.growth: list[NewBlocks] = []
        self.headroom: int | None = None  # blocks that those who run may soon need; None: nobody has asked

    def admit(self, request: Request, num_computed: int, num_new: int, blocks: list[list[int]]) -> None:
        """A request enters its row, with `num_computed` tokens in the cache, and computes `num_new`."""
        self.budget -= num_new
        self.new_num_tokens.append(num_new)
        owes = request.owes_prompt_logprobs
        self.new_rows.append(
            NewRow(
                row=request.row,
                request_id=request.request_id,
                token_ids=list(request.tokens),
                num_prompt=request.num_prompt,
                num_computed=num_computed,
                block_ids=blocks,
                sampling=request.params,
                seed=request.seed,
                eos_token_ids=list(request.model_eos_token_ids),
                prompt_logprobs_start=request.num_prompt_logprobs + 1 if owes else -1,
            )
        )

    def plan(self, step: int, finished_rows: list[int], zero_blocks: list[int], load: int) -> StepPlan:
        """The plan, its new rows behind those that ran before. load: see StepPlan."""
        rows, num_tokens, num_drafts, computed = self.rows, self.num_tokens, self.num_drafts, self.computed
        if self.new_rows:
            rows = np.concatenate([rows, [new.row for new in self.new_rows]])
            num_tokens = np.concatenate([num_tokens, self.new_num_tokens])
            if len(computed):
                computed = np.concatenate([computed, [new.num_computed for new in self.new_rows]])
            if len(num_drafts):
                num_drafts = np.concatenate([num_drafts, np.zeros(len(self.new_rows), np.int64)])
        return StepPlan(
            step=step,
            finished_rows=finished_rows,
            new_rows=self.new_rows,
            rows=rows,
            num_tokens=num_tokens,
            num_drafts=num_drafts,
            computed=computed,
            depth=self.depth,
            new_blocks=self.growth,
            zero_blocks=zero_blocks,
            load=load if len(rows) else -1,
        )


class Issued(NamedTuple):
    """What is remembered of a plan until its result comes."""

    plan: StepPlan
    num_sampling: int
    left: dict[int, Request]  # row -> its request at that step, where it runs there no longer
    dropped: set[int]  # rows that have read what was never written


def pack(growth: list[tuple[int, list[list[int]]]]) -> list[NewBlocks]:
    """From blocks by row to blocks by group."""
    if not growth:
        return []
    rows, packed = np.array([row for row, _ in growth], np.int64), []
    for group in range(len(growth[0][1])):
        parts = [blocks[group] for _, blocks in growth]
        counts = [len(part) for part in parts]
        blocks = np.fromiter(itertools.chain.from_iterable(parts), np.int64, sum(counts))
        packed.append(NewBlocks(rows.repeat(counts), blocks))
    return packed


def num_proven(request: Request, row: int, outstanding: Iterable[Issued]) -> int:
    """Tokens of `request`, in `row`, that steps with known results have computed, or fewer."""
    planned = sum(int(issued.plan.num_tokens[issued.plan.rows == row].sum()) for issued in outstanding)
    return max(request.num_computed - planned, 0)


def without(result: StepResult, dropped: set[int]) -> StepResult:
    """The result of all rows but these."""
    if not dropped:
        return result
    rest = np.array([row not in dropped for row in result.rows.tolist()], np.bool_)
    return msgspec.structs.replace(
        result,
        rows=result.rows[rest],
        tokens=result.tokens[rest],
        num_sampled=result.num_sampled[rest],
        failed={row: reason for row, reason in result.failed.items() if row not in dropped},
        prompt_logprobs={row: part for row, part in result.prompt_logprobs.items() if row not in dropped},
        experts={row: part for row, part in result.experts.items() if row not in dropped},
    )


def take_back(result: StepResult, owners: dict[int, Request]) -> StepResult:
    """Count the rows that were held as if the plan, one without drafts, had left out their last token.

    Returns the result of the others.
    """
    held = result.num_sampled == 0
    for row in result.rows[held].tolist():
        request = owners[row]
        if request.status is Status.FINISHED:
            continue
        request.num_in_flight -= 1
        if request.status is Status.RUNNING:
            request.num_computed -= 1
    rest = ~held
    return msgspec.structs.replace(
        result, rows=result.rows[rest], tokens=result.tokens[rest], num_sampled=result.num_sampled[rest]
    )


def cut_prompts(kv: KVManager, at: IntArray, rows: RequestRows, num_new: IntArray) -> tuple[IntArray, IntArray]:
    """How many of their next `num_new` tokens the rows `at` compute in one step, as far as the cache has a say; [N].

    And those of the rows that are not cut: `at` itself where none is.
    """
    counts = num_new.copy()
    for place in (num_new > 1).nonzero()[0].tolist():
        start = rows.num_computed.item(at[place])
        counts[place] = kv.cut(start, start + num_new.item(place)) - start
    whole = counts == num_new
    return (num_new, at) if whole.all() else (counts, at[whole])
