"""KVManager: which blocks each request holds, in every cache group.

Owns the block lists of admitted requests, the search for a prefix hit that suits all groups, and the moment at which
full blocks become findable. Knows neither rows nor budgets, and leaves the counting of blocks to BlockPool. It relies
on plans being executed in the order in which they are made: blocks are findable as soon as the step that fills them is
planned, and may be handed on as soon as the last step that reads them is. Groups may have blocks of different sizes;
content is named in the smallest, and a larger block by the last of those in it. Invariant: an admitted request has the
blocks of its planned tokens in every group, and every entry that a later query reads is one that it references.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from octavo.cache.groups import WHOLE, CacheGroup
from octavo.cache.policies import make_policies
from octavo.request.request import Request
from octavo.sched.block_pool import NULL_BLOCK, BlockPool, HashChain


class Hit(NamedTuple):
    """A prefix found in the cache. Holds no references: it is good until the pool changes."""

    num_tokens: int  # a multiple of every group's block size
    tables: list[list[int]]  # per group num_tokens / its block size; null where no later query reads


@dataclasses.dataclass(slots=True)
class CacheStats:
    """Counters since the start, in tokens of first admissions; replay after preemption is not counted."""

    queries: int = 0
    hits: int = 0


class _Entry:
    """The blocks of one admitted request."""

    __slots__ = ("num_committed", "num_tokens", "tables")

    def __init__(self, tables: list[list[int]], num_tokens: int, num_committed: int) -> None:
        self.tables = tables  # [group][logical index] -> block
        self.num_tokens = num_tokens  # that the tables were made for
        self.num_committed = num_committed  # leading blocks of the smallest size that are findable, or were once


class KVManager:
    """Blocks of all requests. `block_size` is the smallest of the groups'; all groups share one pool."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: int,
        *,
        enable_prefix_caching: bool = True,
        secret: bytes = b"",
        identity: bytes = b"",
    ) -> None:
        """`num_blocks` counts the null block. `secret` and `identity`: see HashChain."""
        self.block_size = min(group.block_size for group in groups)
        self.num_groups = len(groups)
        self.stats = CacheStats()
        self._groups, self._policies = tuple(groups), make_policies(groups)
        self._ratios = [group.block_size // self.block_size for group in groups]
        self._alignment = max(group.block_size for group in groups)  # of hits: nobody continues inside a block
        sizes = [group.block_size for group in groups if group.block_size < WHOLE]
        assert not any(max(sizes) % size for size in sizes), "block sizes divide each other"
        self._enable_prefix_caching = enable_prefix_caching and self._alignment < WHOLE
        self._sliding = [(i, policy) for i, policy in enumerate(self._policies) if groups[i].window or groups[i].chunk]
        self._pool = BlockPool(num_blocks, len(groups))
        self._chain = HashChain(self.block_size, secret=secret, identity=identity)
        self._sizes = [0 if group.kind == "encoder_only" else group.block_size for group in groups]
        self._lookups = [  # per group: block size, policy, what is findable, its blocks' names among all
            (ratio * self.block_size, policy, self._pool.cached(group), slice(ratio - 1, None, ratio))
            for group, (ratio, policy) in enumerate(zip(self._ratios, self._policies, strict=True))
        ]
        self._entries: dict[str, _Entry] = {}
        self._zeroed = [index for index, group in enumerate(groups) if group.zero_fresh_blocks]
        # one growing list of blocks for each request, as nearly all models have
        self._is_plain = len(groups) == 1 and self._sizes[0] > 0 and not self._sliding and not self._zeroed
        self._fresh: list[int] = []  # blocks of these groups, handed out since the last `take_fresh`

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return self._pool.usage

    def fits_alone(self, num_tokens: int, max_new: int) -> bool:
        """Whether a request can reach `num_tokens` in the empty pool, by steps of at most `max_new` tokens."""
        return self._peak_blocks(num_tokens, max_new) < self._pool.num_blocks

    def match(self, request: Request, max_tokens: int) -> Hit:
        """The longest cached prefix of at most `max_tokens` tokens that every group can continue from.

        Each policy can only shorten the hit, so going round until none does ends at the longest common one.
        """
        if not self._enable_prefix_caching:
            return Hit(0, [[] for _ in self._groups])
        unit, hashes = self._alignment, request.block_hashes
        num_tokens = max_tokens // unit * unit
        self._chain.extend(hashes, request.tokens, request.cache_salt, num_tokens // self.block_size)
        lookups = [(size, policy, cached, hashes[own]) for size, policy, cached, own in self._lookups]
        settled = -1
        while settled != num_tokens:
            settled = num_tokens
            for size, policy, cached, names in lookups:
                num_tokens = policy.longest_hit(cached, names, num_tokens // size) * size // unit * unit
            if len(lookups) == 1:
                break
        tables = []
        for size, policy, cached, names in lookups:
            num_blocks = num_tokens // size
            first = min(policy.first_needed(num_tokens), num_blocks) if num_blocks else 0
            tables.append([NULL_BLOCK] * first + [cached[name] for name in names[first:num_blocks]])
        return Hit(num_tokens, tables)

    def admit(
        self, request: Request, hit: Hit, num_tokens: int, *, max_new: int, keep_free: int
    ) -> list[list[int]] | None:
        """Blocks for the first `num_tokens` tokens, those of the hit among them, per group from the start.

        None, and nothing changes, unless all tokens that are known, and one more, would fit now by steps of `max_new`
        tokens and leave `keep_free` blocks.
        """
        assert request.request_id not in self._entries, "a request is admitted once, and again only after `free`"
        pool = self._pool
        shared = [block for table in hit.tables for block in table if block != NULL_BLOCK] if hit.num_tokens else []
        num_held = sum(not pool.is_free(block) for block in shared)
        num_left = request.num_tokens - hit.num_tokens
        peak = self._peak_blocks(request.num_tokens + 1, min(num_left, max_new))
        if peak - num_held + keep_free > pool.num_free:
            return None
        for block in shared:
            pool.share(block)
        entry = _Entry([list(table) for table in hit.tables], num_tokens, hit.num_tokens // self.block_size)
        self._append_blocks(entry.tables, num_tokens)
        self._entries[request.request_id] = entry
        self._commit(request, entry, num_tokens)
        if request.num_preemptions == 0:
            self.stats.queries += request.num_tokens
            self.stats.hits += hit.num_tokens
        return [list(table) for table in entry.tables]

    def allocate(self, request: Request, num_new: int) -> list[list[int]] | None:
        """New blocks per group for `num_new` more tokens; empty if the last block has room; None if too few are free.

        Gives back what slid out of every window. Need not be called for one token inside a block.
        """
        entry = self._entries[request.request_id]
        start = request.num_computed
        end = start + num_new
        if self._sliding:
            # Rejected drafts may take num_computed back, but never to before the last known token.
            self._slide(entry, min(start, request.num_tokens - 1))
        new = self._append_blocks(entry.tables, end)
        if new is None:
            return None
        if end > entry.num_tokens:
            entry.num_tokens = end
        self._commit(request, entry, end)
        return new

    def extend(self, requests: Sequence[Request], starts: Sequence[int]) -> list[int] | None:
        """What `allocate` gives each for one token more, where that is a block: requests[i] has computed starts[i].

        None, and nothing changes, where it takes a look at each: with several groups, sliding ones or such as need
        zeros, too few free blocks, and after rejected drafts, which leave room.
        """
        if not self._is_plain or len(requests) > self._pool.num_free:
            return None
        entries, size = [self._entries[request.request_id] for request in requests], self.block_size
        if any(len(entry.tables[0]) * size > start for entry, start in zip(entries, starts, strict=True)):
            return None
        blocks = self._pool.take(len(requests))
        for entry, start, block in zip(entries, starts, blocks, strict=True):
            entry.tables[0].append(block)
            entry.num_tokens = start + 1
        if self._enable_prefix_caching:
            for request, entry, start in zip(requests, entries, starts, strict=True):
                self._commit_last(request, entry, start)
        return blocks

    def free(self, request: Request) -> None:
        """Give back all blocks; the full ones stay findable. A request without blocks is ignored."""
        entry = self._entries.get(request.request_id)
        if entry is not None:
            self._commit(request, entry, request.num_computed)
            self._release(request)

    def forget(self, request: Request) -> None:
        """Give back all blocks of a request that failed, and make all content of its chain unfindable."""
        for name in request.block_hashes:
            self._pool.forget(name)
        self._release(request)

    def take_fresh(self) -> list[int]:
        """Blocks to be zeroed by the step that is being planned: handed out since the last call, not found by hash."""
        if not self._fresh:
            return []
        fresh, self._fresh = self._fresh, []
        return fresh

    def reset_prefix_cache(self) -> bool:
        """Make all content unfindable. False, and nothing changes, while any block is held."""
        return self._pool.reset_prefix_cache()

    def check(self) -> None:
        """Assert the invariants of all blocks. Linear in the pool: for tests and audits."""
        for entry in self._entries.values():
            for group, table in zip(self._groups, entry.tables, strict=True):
                assert len(table) == group.num_blocks(entry.num_tokens), "a list has the blocks of the planned tokens"
        self._pool.check(table for entry in self._entries.values() for table in entry.tables)

    def _append_blocks(self, tables: list[list[int]], num_tokens: int) -> list[list[int]] | None:
        """Blocks that tables lack for so many tokens, per group; empty if there is room; None if too few are free."""
        if len(tables) == 1 and not self._zeroed:  # what nearly all models have
            table = tables[0]
            count = -(-num_tokens // self._alignment) - len(table) if self._sizes[0] else 0
            if count <= 0:
                return []
            if count > self._pool.num_free:
                return None
            blocks = self._pool.take(count)
            table += blocks
            return [blocks]
        num_more = [
            max(-(-num_tokens // size) - len(table), 0) if size else 0
            for size, table in zip(self._sizes, tables, strict=True)
        ]
        if not any(num_more):
            return []
        if sum(num_more) > self._pool.num_free:
            return None
        new = [self._pool.take(count) for count in num_more]
        for table, blocks in zip(tables, new, strict=True):
            table += blocks
        for group in self._zeroed:
            self._fresh += new[group]
        return new

    def _peak_blocks(self, num_tokens: int, max_new: int) -> int:
        return sum([policy.peak_blocks(num_tokens, max_new) for policy in self._policies])

    def _slide(self, entry: _Entry, position: int) -> None:
        """Replace by null what no query from `position` on reads. Null blocks of a list are always leading ones."""
        for group, policy in self._sliding:
            table = entry.tables[group]
            end = first = policy.first_needed(position)
            while first > 0 and table[first - 1] != NULL_BLOCK:
                first -= 1
            if first < end:
                self._pool.release(table[first:end])
                table[first:end] = [NULL_BLOCK] * (end - first)

    def _commit(self, request: Request, entry: _Entry, num_computed: int) -> None:
        """Make the full blocks findable whose tokens are known and, with the steps planned, computed."""
        if num_computed // self.block_size <= entry.num_committed or not self._enable_prefix_caching:
            return
        hashes, tokens = request.block_hashes, request.tokens
        num_full = min(num_computed, len(tokens)) // self.block_size
        if num_full <= entry.num_committed:
            return
        self._chain.extend(hashes, tokens, request.cache_salt, num_full)
        for group, ratio in enumerate(self._ratios):
            first, last = entry.num_committed // ratio, num_full // ratio
            names = hashes[(first + 1) * ratio - 1 : last * ratio : ratio]
            self._pool.commit(entry.tables[group][first:last], group, names)
        entry.num_committed = num_full

    def _commit_last(self, request: Request, entry: _Entry, num_computed: int) -> None:
        """`_commit` for one group, where the last block of the tokens is full and mostly the only one to name."""
        done, hashes, start = entry.num_committed, request.block_hashes, num_computed - self.block_size
        if not done or done * self.block_size != start or len(hashes) != done or request.num_tokens < num_computed:
            self._commit(request, entry, num_computed)
            return
        hashes.append(self._chain.after(hashes[-1], request.packed(start, num_computed)))
        self._pool.commit(entry.tables[0][done : done + 1], 0, hashes[-1:])
        entry.num_committed = done + 1

    def _release(self, request: Request) -> None:
        """From the tail on, all groups together: a hit needs all groups, and the head of a chain is worth most."""
        entry = self._entries.pop(request.request_id, None)
        if entry is None:
            return
        if len(entry.tables) == 1:
            self._pool.release(reversed(entry.tables[0]))
            return
        if self._alignment == self.block_size:
            for blocks in zip(*map(reversed, entry.tables), strict=True):
                self._pool.release(blocks)
            return
        ends = [
            ((index + 1) * group.block_size, block)
            for group, table in zip(self._groups, entry.tables, strict=True)
            for index, block in enumerate(table)
        ]
        self._pool.release(block for _, block in sorted(ends, key=lambda end: end[0], reverse=True))
