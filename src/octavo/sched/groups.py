"""Policies: what a kind of cache group keeps of a sequence, and which prefixes it can continue from.

Owns one class per kind with the same three questions. Knows blocks by logical index and hash only; neither requests
nor the pool. Invariant: a query at position p reads the blocks from `first_needed(p)` on and no other, so a hit of n
blocks is acceptable exactly if blocks `first_needed(n * block_size)` .. n - 1 are cached.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Protocol

from octavo.groups import CacheGroup


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


class Policy(Protocol):
    """One per cache group."""

    def __init__(self, group: CacheGroup) -> None:
        """From the group's block size and window."""

    def first_needed(self, position: int) -> int:
        """Logical index of the first block that a query at `position` reads; those before it are dead."""

    def longest_hit(self, cached: Container[bytes], hashes: Sequence[bytes], num_blocks: int) -> int:
        """The largest acceptable hit of at most `num_blocks` blocks."""

    def peak_blocks(self, num_tokens: int, max_new: int) -> int:
        """Upper bound of the blocks held at once on the way to `num_tokens`, by steps of at most `max_new` tokens."""


class FullPolicy:
    """Every query reads everything before it."""

    def __init__(self, group: CacheGroup) -> None:
        """See Policy."""
        self._block_size = group.block_size

    def first_needed(self, position: int) -> int:
        """See Policy."""
        return 0

    def longest_hit(self, cached: Container[bytes], hashes: Sequence[bytes], num_blocks: int) -> int:
        """See Policy. Stops at the first block that is not cached."""
        for index in range(num_blocks):
            if hashes[index] not in cached:
                return index
        return num_blocks

    def peak_blocks(self, num_tokens: int, max_new: int) -> int:
        """See Policy."""
        return cdiv(num_tokens, self._block_size)


class SlidingPolicy:
    """A query reads itself and the `window - 1` tokens before it."""

    def __init__(self, group: CacheGroup) -> None:
        """See Policy."""
        assert group.window > 0, "a sliding window holds at least the query's own token"
        self._block_size = group.block_size
        self._window = group.window

    def first_needed(self, position: int) -> int:
        """See Policy."""
        return max(0, position - self._window + 1) // self._block_size

    def longest_hit(self, cached: Container[bytes], hashes: Sequence[bytes], num_blocks: int) -> int:
        """See Policy. From long to short: a run of cached blocks must fill the window, or reach the start."""
        needed = cdiv(self._window - 1, self._block_size)
        end = num_blocks
        for index in range(num_blocks - 1, -1, -1):
            if end - index > needed:
                return end
            if hashes[index] not in cached:
                end = index
        return end

    def peak_blocks(self, num_tokens: int, max_new: int) -> int:
        """See Policy. A window and a step's tokens, at any offset; one token more, as an upper bound may be off by."""
        return min(cdiv(num_tokens, self._block_size), cdiv(self._window + max_new - 1, self._block_size) + 1)


POLICIES: dict[str, type[Policy]] = {"full": FullPolicy, "mla": FullPolicy, "sliding": SlidingPolicy}


def make_policies(groups: Sequence[CacheGroup]) -> list[Policy]:
    """The policy of each group."""
    return [POLICIES[group.kind](group) for group in groups]
