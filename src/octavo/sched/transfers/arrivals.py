"""Arrivals: which blocks of a request a load fills, and how many tokens are there when it has ended.

Owns the rules by which entries that nobody reads stay null, and a count falls where a block did not arrive. Knows block
lists by cache group, and neither the pool nor who loads. Invariant: behind the tokens that are said to be there every
group has what is read next.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.cache.groups import CacheGroup
from octavo.cache.policies import Policy
from octavo.sched.block_pool import NULL_BLOCK

_NEVER = 1 << 62


class Arrivals:
    """Of the groups of one cache."""

    def __init__(self, groups: Sequence[CacheGroup], policies: Sequence[Policy]) -> None:
        """`policies`: of the groups, in order."""
        self._groups = list(zip(groups, policies, strict=True))
        self._step = min(group.block_size for group in groups)

    def skip_unread(self, tables: Sequence[list[int]], position: int) -> None:
        """Null blocks behind those of `tables`, up to where a query at `position` reads."""
        for table, count in zip(tables, self.num_unread(position), strict=True):
            table += [NULL_BLOCK] * (count - len(table))

    def num_unread(self, position: int) -> list[int]:
        """Per group the leading blocks that no query from `position` on reads."""
        return [policy.first_needed(position) * group.parts.blocks for group, policy in self._groups]

    def count(self, tables: Sequence[Sequence[int]], start: int, end: int, bad: frozenset[int]) -> int:
        """How many tokens are there, where those from `start` to `end` were to come.

        bad: the blocks that did not arrive; empty: all. The count falls to the first bad block of any group, and on to
        where every group has all that is read next, which is at `start` at the latest.
        """
        ends = [
            self._first_bad(group, table, start, bad) for (group, _), table in zip(self._groups, tables, strict=True)
        ]
        end = min(end, *ends)
        while end > start and not self._can_continue(tables, end):
            end = (end - 1) // self._step * self._step
        return end

    def _first_bad(self, group: CacheGroup, table: Sequence[int], start: int, bad: frozenset[int]) -> int:
        """The most tokens that a group's first block that did not arrive is not read behind."""
        size, num = group.block_size, group.parts.blocks
        first = start // size * num
        places = (place for place, block in enumerate(table[first:], first) if block and (not bad or block in bad))
        entry = next(places, _NEVER) // num
        if group.kind == "state":  # it is read from its border on
            return ((entry + 1) * size - 1) // self._step * self._step
        return entry * size

    def _can_continue(self, tables: Sequence[Sequence[int]], position: int) -> bool:
        """Whether all that a query at `position` reads before it has blocks."""
        return all(
            NULL_BLOCK not in table[policy.first_needed(position) * group.parts.blocks : group.num_blocks(position)]
            for (group, policy), table in zip(self._groups, tables, strict=True)
        )
