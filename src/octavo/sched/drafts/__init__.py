"""Drafts in the scheduler: how many a row verifies in a step, and what is taken back of those that were rejected.

Owns whether lengths are bounds, and the counts for `/metrics`. A plan counts all its drafts as accepted, so lengths are
upper bounds until its result comes; this file holds both halves of that count. Knows no draft by name: they lie in the
worker's rows. Invariant: no request reaches more tokens than its `max_len`, however many drafts are accepted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from octavo.plan import IntArray, StepLimits, StepPlan, StepResult
from octavo.request.request import Request, RequestRows, Status
from octavo.sched.drafts.depth import Depth
from octavo.sched.kv_manager import KVManager
from octavo.sched.work import Issued, PlanBuilder

_LOG = logging.getLogger(__name__)
_ENOUGH, _HARDLY_ANY = 128, 0.02  # rows' steps to judge a drafter by, and the share with a right draft that is none


class DraftStats(msgspec.Struct):
    """Counters since the start."""

    num_drafts: int = 0  # rows' steps that verified any
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = []


class Drafting:
    """Counts drafts in plans, and takes back what results reject."""

    def __init__(self, limits: StepLimits, kv: KVManager, rows: RequestRows, *, cheap_tokens: int) -> None:
        """`limits`: the worker's. cheap_tokens: see Depth."""
        self.most, self.lookahead = limits.max_num_drafts, limits.num_lookahead
        self.depth = Depth(limits, cheap_tokens)
        self._verified = np.zeros((self.most + 1, self.most + 2), np.int64)  # [judged, tokens]: how often in a row
        self._adapts = cheap_tokens > 0
        # By its first runs; not one without layers, as n-grams: what it finds is the text's, and costs little.
        self._is_judged = not self.lookahead
        self._kv, self._rows = kv, rows
        self._ahead = self.most  # as many were proposed behind the last plan
        self._unsure = False  # drafts were planned since the worker was told what rows have computed

    @property
    def stats(self) -> DraftStats:
        """The counters of now."""
        judged = self._verified[1:, 1:]
        per_run = judged.sum(axis=0)  # [n]: runs of which n drafts were accepted
        return DraftStats(
            num_drafts=int(judged.sum()),
            num_draft_tokens=int(judged.sum(axis=1) @ np.arange(1, self.most + 1)),
            num_accepted_tokens=int(per_run @ np.arange(self.most + 1)),
            accepted_per_position=per_run[:0:-1].cumsum()[::-1].tolist(),
        )

    def figures(self) -> dict[str, Any]:
        """What SchedulerStats tells of drafts."""
        return msgspec.structs.asdict(self.stats)

    def repeats(self, num_rows: int) -> int:
        """Steps to come in which nobody has drafts and none are proposed, if the same rows, so many, run."""
        if not self.most:
            return 1 << 30
        return 0 if self._unsure else self.depth.num_paused(num_rows)

    def is_steady(self, drafts: IntArray) -> bool:
        """Whether the same rows, all of which verify `drafts`, [N], will verify as many in the next step, if they can.

        False where some row has none.
        """
        return not self._adapts and self._ahead > 0 and len(drafts) > 0 and bool((drafts == self._ahead).all())

    def has_room(self, at: IntArray) -> bool:
        """Whether enough blocks are free that drafts of the rows `at` make none of them wait."""
        kv, num_ahead = self._kv, self._ahead + self.lookahead
        if kv.num_free_blocks >= len(at) * kv.num_groups * (2 + num_ahead // kv.block_size):
            return True
        # states take many blocks, and few rows are about to end a chunk
        return kv.cuts and kv.num_free_blocks >= kv.growth(self._rows.num_computed[at], 1 + num_ahead)

    def count(self, at: IntArray, wanted: IntArray, room: int) -> IntArray:
        """[N]: drafts that each of the rows `at`, which compute `wanted` tokens in a step, verifies as well; in order.

        A row that computes the one token that it sampled last takes what Depth says, or what is left of its `max_len`
        and of `room`, the step's budget. No draft is worth a preemption: where few blocks are free there are none.
        """
        if not self._ahead or not self.has_room(at):
            return np.zeros_like(wanted)
        rows = self._rows
        known = rows.num_known[at]
        decodes = (wanted == 1) & (known > rows.num_entered[at])
        if decodes.all():
            counts = np.minimum(self.depth.of_rows(at, self._ahead, len(at)), rows.max_len[at] - known - 1)
        else:
            counts = np.zeros_like(wanted)
            counts[decodes] = self.depth.of_rows(at[decodes], self._ahead, len(at))
            counts = np.minimum(counts, rows.max_len[at] - known - 1) * decodes
        if counts.sum() <= room:
            return counts
        return np.clip(room - (counts.cumsum() - counts), 0, counts)

    def plan(self, work: PlanBuilder, drafts: IntArray, outstanding: Iterable[Issued], num_running: int) -> None:
        """Complete a plan in the making, whose rows that ran before are known: their drafts, and what they computed.

        Called ahead of their count as computed. num_running: rows that might have been in it.
        """
        has_drafts = bool(drafts.any())
        in_flight = any(len(issued.plan.num_drafts) for issued in outstanding)
        if self._unsure or has_drafts:
            work.computed = self._rows.num_computed[work.rows]
        self._unsure = in_flight or has_drafts or (self._unsure and len(work.rows) < num_running)
        if has_drafts:
            work.num_drafts = drafts
            self._rows.num_known[work.rows] += drafts

    def announce(self, num_rows: int, *, has_room_ahead: bool) -> int:
        """The most drafts of a row in the next plan, where so many rows run: as many are proposed behind this one.

        has_room_ahead: whether rows have blocks for what a drafter writes behind this plan's tokens; else none are.
        """
        depth = self.depth.of_next(num_rows)
        self._ahead = depth if has_room_ahead else 0
        return self._ahead

    def take_back_rejected(self, plan: StepPlan, result: StepResult, left: Mapping[int, Request]) -> None:
        """Count for each row of a step with drafts what was accepted, where the plan counted all.

        left: by row, the requests that run there no longer.
        """
        if plan.rows is result.rows or np.array_equal(plan.rows, result.rows):
            drafted = plan.num_drafts
        else:
            order = plan.rows.argsort()
            drafted = plan.num_drafts[order[plan.rows.searchsorted(result.rows, sorter=order)]]
        rejected = 1 + drafted - result.num_sampled
        rows, here = result.rows, None
        if left:
            here = np.ones(len(rows), np.bool_)
            for place, row in enumerate(rows.tolist()):
                request = left.get(row)
                if request is not None:
                    here[place] = False
                    if request.status is not Status.FINISHED:
                        request.num_in_flight -= int(rejected[place])
            rows, rejected = rows[here], rejected[here]
        self._rows.num_known[rows] -= rejected
        self._rows.num_computed[rows] -= rejected
        if result.tokens.shape[1] == 1:  # the step ran without its drafts, for an attention mod failed
            return
        judged, tokens = drafted, result.num_sampled
        if len(result.held) or result.failed:  # no draft behind a late mask or a failure was judged, all before it were
            is_held = np.isin(result.rows, result.held)
            tokens = tokens + is_held
            judged = np.where(is_held | np.isin(result.rows, [*result.failed]), tokens - 1, drafted)
        shape = self._verified.shape
        runs = np.bincount(judged * shape[1] + tokens, minlength=self._verified.size)
        self._verified += runs.reshape(shape)
        if not self._is_judged:
            self._judge()
        if self._adapts:
            some = (judged > 0) & (tokens > 0)
            if here is not None:
                some &= here
            self.depth.learn(result.rows[some], judged[some], tokens[some] - 1)

    def _judge(self) -> None:
        """Say once that hardly any run of drafts begins right: of another model's drafter all sizes may fit.

        Of a run, not of its tokens: behind a wrong draft none is right, however good the drafter is.
        """
        stats = self.stats
        self._is_judged = stats.num_drafts >= _ENOUGH
        if self._is_judged and stats.accepted_per_position[0] < _HARDLY_ANY * stats.num_drafts:
            _LOG.warning(
                "of the first %d runs of drafts %d had one that was accepted: the drafter hardly suits this model or "
                "these texts; take another one, or leave speculative_config out (see docs/speculation.md)",
                stats.num_drafts,
                stats.accepted_per_position[0],
            )


def run_of(result: StepResult, row: int) -> list[int]:
    """The tokens that count of a row that sampled."""
    place = int((result.rows == row).argmax())
    tokens: list[int] = result.tokens[place, : result.num_sampled[place]].tolist()
    return tokens
