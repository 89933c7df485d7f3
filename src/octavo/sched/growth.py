"""Growth: blocks for running requests, as a plan brings them further, and who is preempted for them.

Owns how many blocks are kept free for them. Knows neither budgets nor results. Invariant: after `grow` every row that
was not preempted has the blocks of its planned tokens, and of those that a drafter's layers are written for behind
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from octavo.plan import NO_INTS, IntArray, NewBlocks
from octavo.request.request import Request
from octavo.sched.drafts import Drafting
from octavo.sched.kv_manager import KVManager
from octavo.sched.running import Running
from octavo.sched.transfers.loads import Loads
from octavo.sched.work import PlanBuilder, pack


class Growth:
    """Reserves blocks for those that run."""

    def __init__(
        self,
        kv: KVManager,
        running: Running,
        loads: Loads,
        drafting: Drafting,
        preempt: Callable[[Request], None],
        max_model_len: int,
    ) -> None:
        """`preempt`: lets a request wait without its blocks."""
        self._kv, self._running, self._loads, self._drafting = kv, running, loads, drafting
        self._preempt, self._max_model_len = preempt, max_model_len
        self._of_one = functools.lru_cache(4096)(lambda num, computed: self._headroom(num, np.array([computed])))

    def headroom(self, num: int, work: PlanBuilder) -> int:
        """Blocks that are kept free for those who run when one more is admitted. num: of tokens, for each and group."""
        if work.headroom is None:
            rows = self._running.rows
            work.headroom = self._headroom(num, rows.num_computed[rows.num_tokens > 0])
        return work.headroom

    def enter(self, num: int, request: Request, work: PlanBuilder) -> None:
        """Count the headroom of a request that was just admitted."""
        if work.headroom is not None:
            work.headroom += self._of_one(num, request.num_computed)

    def _headroom(self, num: int, computed: IntArray) -> int:
        if not self._kv.cuts or not num:
            return num * len(computed) * self._kv.num_groups
        return self._kv.headroom(num, computed)

    def grow(self, at: IntArray, num_new: IntArray, work: PlanBuilder) -> bool:
        """Blocks for the rows that leave theirs, in order, if need be those of requests behind.

        A decode inside a block needs none. Returns whether somebody was preempted: the last ones in order.
        """
        places = self.reserve(at, self._running.rows.num_computed[at], num_new, work)
        if not len(places):
            return False
        self._grow_each(at, num_new, places.tolist(), work)
        return bool(work.victims)

    def reserve(self, at: IntArray, starts: IntArray, num_new: IntArray, work: PlanBuilder) -> IntArray:
        """`grow` as far as no row takes a look; starts: [N], what each has computed.

        Returns those that do, by their places in `at`: nothing is done then.
        """
        if self._drafting.most:
            return self._reserve_runs(at, starts, num_new, work)
        places = ((starts % self._kv.block_size == 0) | (num_new > 1)).nonzero()[0]
        if len(places) and num_new[places].max() == 1:
            own, at_first = at[places], starts[places]
            places = NO_INTS if self._extend(own, at_first, at_first + 1, work) else places
        return places

    def _reserve_runs(self, at: IntArray, starts: IntArray, num_new: IntArray, work: PlanBuilder) -> IntArray:
        """`reserve` where rows may verify drafts."""
        reserved, size = self._running.rows.num_reserved, self._kv.block_size
        ends = starts + (num_new + self._drafting.lookahead)
        places = (ends > reserved[at]).nonzero()[0]
        if not len(places):
            return NO_INTS
        rows, ends = at[places], np.minimum(ends[places], self._max_model_len)
        if not self._extend(rows, starts[places], ends, work):
            return places
        reserved[rows] = -(-ends // size) * size
        return NO_INTS

    def _extend(self, rows: IntArray, starts: IntArray, ends: IntArray, work: PlanBuilder) -> bool:
        """A block for each of `rows`, which go from `starts` to `ends`; False, and nothing is done: see KVManager."""
        owners = [self._running.owners[row] for row in rows.tolist()]
        blocks = self._kv.reserve_each(owners, starts.tolist(), ends.tolist())
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
            request, count = self._running.owners[row], int(num_new[place])
            ahead = min(self._drafting.lookahead, self._max_model_len - request.num_computed - count)
            while (blocks := self._kv.reserve(request, count, ahead)) is None:
                victim = self._running.requests[-1]
                if self._loads.keeps_blocks and self._loads.unpark_behind(victim):
                    continue
                assert len(self._running.requests) > 1 or self._loads.keeps_blocks, "one request alone fits the pool"
                work.victims.add(victim.row)
                self._preempt(victim)
                if victim is request:
                    break
            else:
                end = request.num_computed + count
                self._kv.publish(request, end)
                self._running.rows.num_reserved[row] = self._kv.room_of(end + ahead)
            if blocks:
                growth.append((row, blocks))
        work.growth = pack(growth)
