"""Holds: blocks of requests that have them no more, or share them, kept from being handed on.

Owns the references that holds have. Knows no clock. Invariant: a hold is released once, and its blocks with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from octavo.sched.block_pool import NULL_BLOCK, BlockPool


@dataclasses.dataclass(eq=False, slots=True)
class Hold:
    """Blocks that somebody outside of the order of plans still reads or writes."""

    request_id: str
    until: float  # seconds on the clock of whoever asked
    blocks: list[int]


class Holds:
    """All holds of one pool."""

    def __init__(self, pool: BlockPool) -> None:
        """There is none."""
        self._pool = pool
        self._holds: dict[int, Hold] = {}  # by id()

    def take_over(self, request_id: str, blocks: Iterable[int], until: float) -> Hold:
        """Hold blocks by the references of an owner that goes."""
        hold = Hold(request_id, until, self._pool.hold(blocks))
        self._holds[id(hold)] = hold
        return hold

    def share(self, request_id: str, blocks: Iterable[int], until: float) -> Hold:
        """Hold blocks beside an owner that stays. Null blocks are skipped."""
        own = [block for block in blocks if block != NULL_BLOCK]
        for block in own:
            self._pool.share(block)
        return self.take_over(request_id, own, until)

    def release(self, hold: Hold) -> None:
        """Give the blocks of a hold back. Once."""
        assert self._holds.pop(id(hold), None) is hold, f"the hold of {hold.request_id} was released before"
        self._pool.release_held(hold.blocks)

    def __iter__(self) -> Iterator[list[int]]:
        """The blocks of each."""
        return (hold.blocks for hold in self._holds.values())
