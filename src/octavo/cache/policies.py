"""Policies: what a kind of cache group keeps of a sequence, and which prefixes it can continue from.

Owns one class per kind with the same questions. Knows entries of a group's table by logical index and hash only;
neither requests nor the pool; entries are the group's own, whose size may differ from other groups'. Positions and
lengths are counts of tokens. Invariant: a query at position p reads the entries from `first_needed(p)` on and no other,
so a hit of n tokens is acceptable exactly if entries `first_needed(n)` up to those of n tokens are cached.
"""

from __future__ import annotations

import abc
from collections.abc import Container, Sequence

from octavo.cache.groups import CacheGroup

MOST_SNAPSHOTS = 8  # states that a step keeps of one row, beside its last ones: what a pool must have room for
CUT_TOKENS = 512  # or those of so many tokens, where that is more: states that are kept more often are small ones


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


class Policy(abc.ABC):
    """One per cache group."""

    def __init__(self, group: CacheGroup) -> None:
        """From the group's block size and window."""
        self._size = group.block_size

    @abc.abstractmethod
    def first_needed(self, position: int) -> int:
        """Logical index of the first entry that a query at `position` reads; those before it are dead."""

    @abc.abstractmethod
    def longest_hit(self, cached: Container[bytes], names: Sequence[bytes], num_tokens: int) -> int:
        """The largest acceptable hit of at most `num_tokens` tokens. names: of the entries."""

    @abc.abstractmethod
    def peak_entries(self, num_tokens: int, max_new: int, *, drafts: bool) -> int:
        """Upper bound of the entries held at once on the way to `num_tokens`, by steps of at most `max_new` tokens.

        drafts: whether rows may have some, and layers of a drafter that are written for tokens behind a step.
        """

    def cut(self, start: int, end: int) -> int:
        """Where a step must end that is to compute a prompt from `start` to `end`: behind `start`, at most `end`."""
        return end

    def is_written(self, index: int, low: int) -> bool:
        """Whether a step writes a new entry `index` that leaves a row at `low` tokens or more: else it has no block."""
        return True

    def keeps(self, index: int, num_prompt: int) -> bool:
        """Whether hashes are to find a written entry of a request whose prompt has `num_prompt` tokens."""
        return True

    def is_whole(self, index: int, end: int) -> bool:
        """Whether the blocks of entry `index`, if it has some, hold all its tokens when the step that passes it ends.

        end: where that step ends.
        """
        return True


class FullPolicy(Policy):
    """Every query reads everything before it."""

    def first_needed(self, position: int) -> int:
        """See Policy."""
        return 0

    def longest_hit(self, cached: Container[bytes], names: Sequence[bytes], num_tokens: int) -> int:
        """See Policy. Stops at the first block that is not cached."""
        num_blocks = num_tokens // self._size
        for index in range(num_blocks):
            if names[index] not in cached:
                return index * self._size
        return num_blocks * self._size

    def peak_entries(self, num_tokens: int, max_new: int, *, drafts: bool) -> int:
        """See Policy."""
        return cdiv(num_tokens, self._size)


class _LocalPolicy(Policy):
    """A query reads itself and some tokens before it, the later the query the later the first of them."""

    _span: int  # the most tokens that a query reads, itself included

    def longest_hit(self, cached: Container[bytes], names: Sequence[bytes], num_tokens: int) -> int:
        """See Policy. From long to short: a run of cached blocks must reach back to the first that is needed.

        After a miss no hit that ends between the miss and the run's end is acceptable: it would need the missing block.
        """
        end = num_tokens // self._size
        first = self.first_needed(end * self._size)
        for index in range(end - 1, -1, -1):
            if index < first:
                break
            if names[index] not in cached:
                end = index
                first = self.first_needed(end * self._size)
        return end * self._size

    def peak_entries(self, num_tokens: int, max_new: int, *, drafts: bool) -> int:
        """See Policy. A span and a step's tokens, at any offset; one token more, as an upper bound may be off by."""
        return min(cdiv(num_tokens, self._size), cdiv(self._span + max_new - 1, self._size) + 1)


class SlidingPolicy(_LocalPolicy):
    """A query reads itself and the `window - 1` tokens before it."""

    def __init__(self, group: CacheGroup) -> None:
        """See Policy."""
        super().__init__(group)
        assert group.window > 0, "a sliding window holds at least the query's own token"
        self._span = group.window

    def first_needed(self, position: int) -> int:
        """See Policy."""
        return max(0, position - self._span + 1) // self._size


class ChunkedPolicy(_LocalPolicy):
    """A query reads its own chunk, up to itself. At the start of a chunk nothing is needed."""

    def __init__(self, group: CacheGroup) -> None:
        """See Policy."""
        super().__init__(group)
        assert group.chunk > 0, "a chunk holds at least the query's own token"
        self._span = group.chunk

    def first_needed(self, position: int) -> int:
        """See Policy."""
        return position // self._span * self._span // self._size


class InputsPolicy(ChunkedPolicy):
    """What the tokens of the open chunk bring to a state. Chunks that a step begins and ends leave nothing.

    An operator keeps at least what a step brings to the chunk that is open where it ends, and to the one before that. A
    block that an earlier step has begun to fill may so stay without its last tokens. A step leaves a row at most a
    chunk before where it ends: drafts that may be rejected are fewer than a chunk.
    """

    def is_written(self, index: int, low: int) -> bool:
        """See Policy. From the chunk of the row's last token on, so that one token less can be continued from too."""
        return (index + 1) * self._size > (low - 1) // self._span * self._span

    def is_whole(self, index: int, end: int) -> bool:
        """See Policy. Of other chunks operators need not keep what the step brings."""
        return index * self._size >= end // self._span * self._span - self._span

    def peak_entries(self, num_tokens: int, max_new: int, *, drafts: bool) -> int:
        """See Policy. The chunk that was open before a step and the one that it leaves, and what lies ahead of each.

        Nothing lies ahead without drafts. Blocks and chunks divide each other: the blocks of two chunks are all that
        they touch.
        """
        ahead = cdiv(min(max_new, self._span), self._size) if drafts else 0
        return min(cdiv(num_tokens, self._size), 2 * (cdiv(self._span, self._size) + ahead))


class StatePolicy(Policy):
    """A query reads the state at the last border before it: entry i is the one behind (i + 1) * block_size tokens.

    Every interval-th border of a prompt is kept to be found again, and with an interval of 0 none of these; the last
    one of a prompt, and of all tokens when a request ends, are kept always. A step leaves a row at most a chunk before
    where it ends, see InputsPolicy.
    """

    def __init__(self, group: CacheGroup) -> None:
        """See Policy."""
        super().__init__(group)
        self._interval, self._unit = group.interval, group.unit
        self._most = max(MOST_SNAPSHOTS, CUT_TOKENS // (max(self._interval, 1) * self._size))

    def first_needed(self, position: int) -> int:
        """See Policy."""
        return max(position // self._size - 1, 0)

    def longest_hit(self, cached: Container[bytes], names: Sequence[bytes], num_tokens: int) -> int:
        """See Policy. Behind a kept border it may end anywhere in the chunk, and in the first chunk of all."""
        for count in range(num_tokens // self._size, 0, -1):
            if names[count - 1] in cached:
                return min(num_tokens, (count + 1) * self._size - 1)
        return min(num_tokens, self._size - 1)

    def peak_entries(self, num_tokens: int, max_new: int, *, drafts: bool) -> int:
        """See Policy. What is read, by a row that may be a chunk back, and what a step writes."""
        most = cdiv(num_tokens, self._unit) * self._unit // self._size
        return min(most, 3 + min(cdiv(max_new + self._unit, self._size) + 1, self._most + 4))

    def cut(self, start: int, end: int) -> int:
        """See Policy. A step passes so many kept borders that it keeps them all."""
        if not self._interval:
            return end
        step = self._interval * self._size
        first = (start // step + 1) * step
        return end if end < first + self._most * step else first + (self._most - 1) * step

    def is_written(self, index: int, low: int) -> bool:
        """See Policy. The borders around the row's last token, and the last of those that are kept before them."""
        last = (low - 1) // self._size - 1
        if index >= last:
            return True
        return self._is_snapshot(index) and index >= last - self._most * self._interval

    def keeps(self, index: int, num_prompt: int) -> bool:
        """See Policy."""
        return self._is_snapshot(index) or index == (num_prompt - 1) // self._size - 1

    def _is_snapshot(self, index: int) -> bool:
        return self._interval > 0 and (index + 1) % self._interval == 0


class NothingPolicy(Policy):
    """A layer that keeps nothing sees the tokens of its own step only, so no prefix of them can be skipped."""

    def first_needed(self, position: int) -> int:
        """See Policy."""
        return 0

    def longest_hit(self, cached: Container[bytes], names: Sequence[bytes], num_tokens: int) -> int:
        """See Policy."""
        return 0

    def peak_entries(self, num_tokens: int, max_new: int, *, drafts: bool) -> int:
        """See Policy."""
        return 0


POLICIES: dict[str, type[Policy]] = {
    "full": FullPolicy,
    "mla": FullPolicy,
    "sliding": SlidingPolicy,
    "chunked": ChunkedPolicy,
    "encoder_only": NothingPolicy,
    "inputs": InputsPolicy,
    "state": StatePolicy,
}


def make_policies(groups: Sequence[CacheGroup]) -> list[Policy]:
    """The policy of each group."""
    return [POLICIES[group.kind](group) for group in groups]


def blocks_for_request(groups: Sequence[CacheGroup], num_tokens: int, max_new: int, *, drafts: bool) -> int:
    """Blocks that one request of `num_tokens` holds at most, all groups together, by steps of `max_new` tokens.

    drafts: see Policy.peak_entries.
    """
    policies = make_policies(groups)
    pairs = zip(groups, policies, strict=True)
    return sum(
        [group.parts.blocks * policy.peak_entries(num_tokens, max_new, drafts=drafts) for group, policy in pairs]
    )


def most_decoding(group: CacheGroup, num_unsure: int) -> int:
    """Entries that a row which decodes has at once, in a group of states or of their inputs.

    num_unsure: by so many tokens its blocks may be ahead of what is known of it, 0 where a new state takes the blocks
    of the one before it. Else what lies before a border stays until it is known that the row has passed it: the state
    that is read beside the next one, and the inputs of a whole chunk beside those of the next one's first tokens.
    """
    if group.kind == "inputs":
        return cdiv(group.chunk, group.block_size) + cdiv(max(num_unsure - 1, 0), group.block_size)
    if not num_unsure:
        return 1
    until_known = cdiv(num_unsure - 1, group.unit) * group.unit  # blocks come and go as a unit begins
    return 2 + until_known // group.block_size  # blocks of a third are reserved before the first's go


def lost_prefixes(groups: Sequence[CacheGroup]) -> str:
    """Why no prefix of these groups can ever be found again; empty: it can."""
    layers = [layer for group in groups if group.kind == "encoder_only" for layer in group.layers]
    if not layers:
        return ""
    return f"layer {layers[0]} sees the whole prompt and keeps nothing of it: every prompt is computed in full"
