"""Policies: what a kind of cache group keeps of a sequence, and which prefixes it can continue from.

Owns one class per kind with the same three questions. Knows blocks by logical index and hash only; neither requests
nor the pool; blocks are the group's own, whose size may differ from other groups'. Invariant: a query at position p
reads the blocks from `first_needed(p)` on and no other, so a hit of n blocks is acceptable exactly if blocks
`first_needed(n * block_size)` .. n - 1 are cached.
"""

from __future__ import annotations

import abc
from collections.abc import Container, Sequence
from typing import Protocol

from octavo.cache.groups import CacheGroup


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


class _LocalPolicy(abc.ABC):
    """A query reads itself and some tokens before it, the later the query the later the first of them."""

    _block_size: int
    _span: int  # the most tokens that a query reads, itself included

    @abc.abstractmethod
    def first_needed(self, position: int) -> int:
        """See Policy. Never less for a later position."""

    def longest_hit(self, cached: Container[bytes], hashes: Sequence[bytes], num_blocks: int) -> int:
        """See Policy. From long to short: a run of cached blocks must reach back to the first that is needed.

        After a miss no hit that ends between the miss and the run's end is acceptable: it would need the missing block.
        """
        end = num_blocks
        first = self.first_needed(end * self._block_size)
        for index in range(num_blocks - 1, -1, -1):
            if index < first:
                return end
            if hashes[index] not in cached:
                end = index
                first = self.first_needed(end * self._block_size)
        return end

    def peak_blocks(self, num_tokens: int, max_new: int) -> int:
        """See Policy. A span and a step's tokens, at any offset; one token more, as an upper bound may be off by."""
        return min(cdiv(num_tokens, self._block_size), cdiv(self._span + max_new - 1, self._block_size) + 1)


class SlidingPolicy(_LocalPolicy):
    """A query reads itself and the `window - 1` tokens before it."""

    def __init__(self, group: CacheGroup) -> None:
        """See Policy."""
        assert group.window > 0, "a sliding window holds at least the query's own token"
        self._block_size, self._span = group.block_size, group.window

    def first_needed(self, position: int) -> int:
        """See Policy."""
        return max(0, position - self._span + 1) // self._block_size


class ChunkedPolicy(_LocalPolicy):
    """A query reads its own chunk, up to itself. At the start of a chunk nothing is needed."""

    def __init__(self, group: CacheGroup) -> None:
        """See Policy."""
        assert group.chunk > 0, "a chunk holds at least the query's own token"
        self._block_size, self._span = group.block_size, group.chunk

    def first_needed(self, position: int) -> int:
        """See Policy."""
        return position // self._span * self._span // self._block_size


class NothingPolicy:
    """A layer that keeps nothing sees the tokens of its own step only, so no prefix of them can be skipped."""

    def __init__(self, group: CacheGroup) -> None:
        """See Policy."""

    def first_needed(self, position: int) -> int:
        """See Policy."""
        return 0

    def longest_hit(self, cached: Container[bytes], hashes: Sequence[bytes], num_blocks: int) -> int:
        """See Policy."""
        return 0

    def peak_blocks(self, num_tokens: int, max_new: int) -> int:
        """See Policy."""
        return 0


POLICIES: dict[str, type[Policy]] = {
    "full": FullPolicy,
    "mla": FullPolicy,
    "mamba": FullPolicy,  # of one block that is never full, so that no prefix is found
    "sliding": SlidingPolicy,
    "chunked": ChunkedPolicy,
    "encoder_only": NothingPolicy,
}


def make_policies(groups: Sequence[CacheGroup]) -> list[Policy]:
    """The policy of each group."""
    return [POLICIES[group.kind](group) for group in groups]
