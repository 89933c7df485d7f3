"""KVManager: which blocks each request holds, in every cache group.

Owns the block lists of admitted requests, the publishing of full blocks, and holds. Knows neither rows nor budgets nor
who holds, and leaves the states of blocks to BlockPool and the search for hits to Prefixes. Groups may have entries of
different sizes; content is named in the smallest, and a larger entry by the last of those in it. An entry may have
several blocks, or null ones where its policy writes none.

Blocks are reserved first and published when their content is known to be there for any reader. Plans are executed in
the order in which they are made, so what a step computes may be published as soon as it is planned, requests of the
same step may read it (but a state, which rows that run side by side do not pass on), and blocks may be handed on as
soon as the last step that reads them is planned. What comes from elsewhere is in no such order: it is published when it
has arrived, and who outside of plans still reads or writes a block holds it. Drafts are published once they are known
tokens. Where a step fails for a row, `readers` tells who reads what it did not write. Invariant: an admitted request
has the blocks of its planned tokens in every group, and every entry that a later query reads is one that it references.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

from octavo.cache.groups import CacheGroup
from octavo.cache.policies import lost_prefixes, make_policies
from octavo.request.request import Request
from octavo.sched.advancing import NO_MOVES, Advancing, Moves
from octavo.sched.block_pool import NULL_BLOCK, BlockPool, HashChain
from octavo.sched.identity import LOCAL, CacheIdentity
from octavo.sched.prefixes import Hit, Prefixes
from octavo.sched.transfers.arrivals import Arrivals
from octavo.sched.transfers.holds import Hold, Holds

_NEVER = 1 << 62  # blocks: of requests that publish none any more
_NO_BLOCKS = frozenset[int]()  # the one of all that hide none
_MOST_KNOWN = 4096  # answers that requests of equal lengths share


@dataclasses.dataclass(slots=True)
class CacheStats:
    """Counters since the start, in tokens of first admissions; replay after preemption is not counted."""

    queries: int = 0
    hits: int = 0


class _Entry:
    """The blocks of one admitted request."""

    __slots__ = ("hidden", "num_dead", "num_published", "num_tokens", "request", "tables")

    def __init__(self, request: Request, tables: list[list[int]], num_tokens: int, num_hit: int) -> None:
        self.request = request
        self.tables = tables  # [group][logical index] -> block
        self.num_tokens = num_tokens  # that the tables were made for
        self.num_published = num_hit  # leading blocks of the smallest size that are found by a hash, or were once
        self.num_dead = [0] * len(tables)  # leading entries that were given back: no query reads them any more
        self.hidden = _NO_BLOCKS  # blocks that no hash may find


class KVManager:
    """Blocks of all requests. `block_size` is the smallest of the groups'; all groups share one pool."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: int,
        *,
        enable_prefix_caching: bool = True,
        secret: bytes = b"",
        identity: CacheIdentity = LOCAL,
        num_next_tokens: int = 0,
        advances: bool = False,
        num_unsure: int = 2,
    ) -> None:
        """`num_blocks` counts the null block. `secret`: see HashChain; num_next_tokens: see StepLimits.

        advances, num_unsure: see Advancing; 2 without drafts.
        """
        self.identity, self.num_next_tokens, self._has_drafts = identity, num_next_tokens, num_unsure > 2
        self.block_size = min(group.block_size for group in groups)
        self.num_groups = sum(group.parts.blocks for group in groups)  # blocks that a new block of tokens may take
        self.stats = CacheStats()
        self._groups, self._policies = tuple(groups), make_policies(groups)
        self._ratios = [group.block_size // self.block_size for group in groups]
        sizes = [group.block_size for group in groups]
        assert not any(max(sizes) % size for size in sizes), "block sizes divide each other"
        self._enable_prefix_caching = enable_prefix_caching and not lost_prefixes(groups)
        self._sliding = [
            (i, policy)
            for i, policy in enumerate(self._policies)
            if groups[i].window or groups[i].chunk or groups[i].kind == "state"
        ]
        self._states = [i for i, group in enumerate(groups) if group.kind == "state"]
        self._num_blocks = [group.parts.blocks for group in groups]  # of an entry
        self._pool = BlockPool(num_blocks, sum(self._num_blocks))
        self._advancing = Advancing(self._groups, self._policies, self._pool, is_on=advances, num_unsure=num_unsure)
        self.headroom, self.growth = self._advancing.headroom, self._advancing.growth
        self.room_of = self._advancing.room_of
        self._prefixes = Prefixes(groups, self._policies, self._pool)
        self.unit = self._prefixes.unit  # hits are multiples of so many tokens
        self._chain = HashChain(self.block_size, secret=secret, identity=identity.encode(), num_ahead=num_next_tokens)
        self._entries: dict[str, _Entry] = {}
        self._zeroed = [index for index, group in enumerate(groups) if group.zero_fresh_blocks]
        # one growing list of blocks for each request, as nearly all models have
        self._is_single = len(groups) == 1 and groups[0].kind in ("full", "mla", "sliding", "chunked")
        self._is_plain = self._is_single and not self._sliding and not self._zeroed and not num_next_tokens
        # a table of each group has one block for the same tokens
        self._are_alike = len(set(sizes)) == 1 and not self._states and all(g.kind != "encoder_only" for g in groups)
        # what rows that run side by side do not pass on: an update of the open chunk follows from those before it
        self._unshared = {i for i, group in enumerate(groups) if not group.is_attention}
        # request id -> (group, entry) of such that the step being planned writes, before which nobody may read them
        self._being_written: dict[str, list[tuple[int, int]]] = {}
        self._fresh: list[int] = []  # blocks of these groups, handed out since the last `take_fresh`
        self._holds, self._arrivals = Holds(self._pool), Arrivals(groups, self._policies)
        self._peak_blocks = functools.lru_cache(_MOST_KNOWN)(self._find_peak)

    @property
    def can_load(self) -> bool:
        """Whether a request can continue from tokens that it did not compute."""
        return not lost_prefixes(self._groups)

    @property
    def slides(self) -> bool:
        """Whether a request gives blocks back while it runs."""
        return bool(self._sliding)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that are free."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Share of the blocks that are not free, 0 to 1."""
        return self._pool.usage

    @property
    def num_held_blocks(self) -> int:
        """Blocks that nothing but holds keeps from being free."""
        return self._pool.num_held

    def fits_alone(self, num_tokens: int, max_new: int) -> bool:
        """Whether a request can reach `num_tokens` in the empty pool, by steps of at most `max_new` tokens."""
        return self._peak_blocks(num_tokens, max_new) < self._pool.num_blocks

    def match(self, request: Request, max_tokens: int) -> Hit:
        """The longest cached prefix of at most `max_tokens` tokens that every group can continue from."""
        if not self._enable_prefix_caching:
            return Hit(0, [[] for _ in self._groups])
        unit, hashes = self._prefixes.unit, request.block_hashes
        num_tokens = min(max_tokens, self._chain.num_named(request.num_tokens) * self.block_size) // unit * unit
        self._chain.extend(hashes, request.tokens, request.cache_salt, num_tokens // self.block_size)
        return self._prefixes.match(hashes, num_tokens)

    @property
    def cuts(self) -> bool:
        """Whether `cut` has anything to say."""
        return bool(self._states)

    def cut(self, start: int, end: int) -> int:
        """Where a step must end that is to compute a prompt from `start` to `end`: behind `start`, at most `end`."""
        return min([policy.cut(start, end) for policy in self._policies])

    def admit(
        self,
        request: Request,
        hit: Hit,
        num_tokens: int,
        *,
        max_new: int,
        keep_free: int,
        ahead: int = 0,
        loads: bool = False,
    ) -> list[list[int]] | None:
        """Reserve blocks for the first `num_tokens` tokens behind the hit, which is shared: all per group, in order.

        None, and nothing changes, unless all tokens that are known, and one more, would fit now by steps of `max_new`
        tokens and leave `keep_free` blocks. ahead: those of the tokens that the next step does not compute. loads: the
        tokens behind the hit are to be loaded, so that there are null blocks where nobody reads them.
        """
        assert request.request_id not in self._entries, "a request is admitted once, and again only after `release`"
        pool, tables, known = self._pool, [list(table) for table in hit.tables], request.num_tokens
        shared = [block for table in hit.tables for block in table if block != NULL_BLOCK] if hit.num_tokens else []
        num_used = sum([not pool.is_free(block) for block in shared])
        beyond = max(num_tokens - known, 0)  # of what is not known yet
        need = self._peak_blocks(known + max(beyond, 1), min(known - hit.num_tokens + beyond, max_new))
        if loads:
            self._arrivals.skip_unread(tables, min(num_tokens, known - 1))
            lacking = (group.num_blocks(num_tokens) - len(own) for group, own in zip(self._groups, tables, strict=True))
            need = max(need, len(shared) + sum(lacking))
        if need - num_used + keep_free > pool.num_free:
            return None
        for block in shared:
            pool.share(block)
        entry, num_fresh = _Entry(request, tables, num_tokens, hit.num_tokens // self.block_size), len(self._fresh)
        self._append_blocks(entry.tables, num_tokens, num_tokens - ahead)
        if loads:  # they come whole, and are not to be zeroed by the next step
            del self._fresh[num_fresh:]
        self._entries[request.request_id] = entry
        request.num_found = hit.num_tokens
        if request.num_preemptions == 0:
            self.stats.queries += known
            self.stats.hits += hit.num_tokens
        return [list(table) for table in entry.tables]

    def reserve(self, request: Request, num_new: int, ahead: int = 0) -> list[list[int]] | None:
        """New blocks per group for `num_new` more tokens; empty if the last block has room; None if too few are free.

        And for `ahead` more, which the step does not compute. Gives back what slid out.
        """
        entry, start = self._entries[request.request_id], request.num_computed
        end = start + num_new + ahead
        if self._sliding:
            # Rejected drafts may take num_computed back, but never to before the last known token.
            is_exact = self._advancing.is_exact(request)
            self._slide(entry, start if is_exact else min(start, request.num_tokens - 1))
        # what a hash may find stays where it is as long as there is room for all
        keeps = self._enable_prefix_caching and self._advancing.has_room(len(self._entries))
        moves = NO_MOVES if keeps else self._advancing.moves(request, entry.tables, start, end)
        new = self._append_blocks(entry.tables, end, min(end - ahead, request.num_tokens), moves)
        if new is None:
            return None
        entry.num_tokens = max(entry.num_tokens, end)
        return new

    def reserve_each(self, requests: Sequence[Request], starts: Sequence[int], ends: Sequence[int]) -> list[int] | None:
        """What `reserve` gives each to reach ends[i] tokens, where that is a block: requests[i] has computed starts[i].

        Publishes the blocks that they leave. None, and nothing changes, where it takes a look at each: with several
        groups, sliding ones or such as need zeros, names that follow from tokens behind a block, too few free blocks,
        and where somebody has room, as rejected drafts leave it, or needs more than a block.
        """
        if not self._is_plain or len(requests) > self._pool.num_free:
            return None
        entries, size = [self._entries[request.request_id] for request in requests], self.block_size
        if any(-(-end // size) - len(entry.tables[0]) != 1 for entry, end in zip(entries, ends, strict=True)):
            return None
        blocks = self._pool.reserve(len(requests))
        for entry, end, block in zip(entries, ends, blocks, strict=True):
            entry.tables[0].append(block)
            entry.num_tokens = end
        if self._enable_prefix_caching:
            for request, entry, start in zip(requests, entries, starts, strict=True):
                up_to = min(start + 1, request.num_tokens) // size * size  # of drafts in flight few may count
                if up_to > entry.num_published * size:
                    self._publish_last(request, entry, up_to)
        return blocks

    def publish(self, request: Request, up_to: int) -> None:
        """Let hashes find the full blocks of the first `up_to` tokens, as far as the tokens are known.

        Their content is there, or a step that is planned computes it before any step that is planned later reads it.
        """
        if up_to // self.block_size > (entry := self._entries[request.request_id]).num_published:
            self._publish(request, entry, up_to)

    def release(self, request: Request) -> None:
        """Give back all blocks; what is computed is published first. A request without blocks is ignored."""
        if request.request_id in self._entries:
            self.publish_all(request)
            self._release(request)

    def publish_all(self, request: Request) -> None:
        """Of a request that ends: publish what is computed, its last state too."""
        entry = self._entries[request.request_id]
        self._publish(request, entry, request.num_computed)
        if self._enable_prefix_caching and entry.num_published < _NEVER:
            self._publish_states(entry)

    def discard(self, request: Request, first: int = 0) -> None:
        """Give back all blocks, and let none of the content behind token `first` be found: it may not be there."""
        self.unpublish(request, first)
        self._release(request)

    def unpublish(self, request: Request, first: int) -> None:
        """Let none of the content behind token `first` be found. What is found no more is not published again."""
        for name in request.block_hashes[first // self.block_size :]:
            self._pool.unpublish(name)

    def hide(self, request: Request, blocks: frozenset[int]) -> None:
        """Let these blocks of a request be found by nobody: only what the request itself reads of them is there."""
        self._entries[request.request_id].hidden |= blocks

    def is_current(self, request: Request) -> bool:
        """Whether the blocks of an admitted request are all made with the weights of now."""
        return self._entries[request.request_id].num_published < _NEVER

    def num_published(self, request: Request) -> int:
        """Leading tokens of an admitted request that hashes find; 0 once its weights are not those of now."""
        return self._entries[request.request_id].num_published * self.block_size if self.is_current(request) else 0

    def readers(self, request: Request, first: int, others: Iterable[Request]) -> list[Request]:
        """Who found content of the chain of `request` behind its token `first`: of those with blocks, and of `others`.

        One of `others` whose hashes were cleared since may have.
        """
        index = first // self.block_size
        if index >= len(request.block_hashes):
            return []
        names = request.block_hashes[index : index + 1]
        return [
            reader
            for reader in (*(entry.request for entry in self._entries.values()), *others)
            if reader is not request
            and reader.num_found > index * self.block_size
            and (not reader.block_hashes or reader.block_hashes[index : index + 1] == names)
        ]

    def name_blocks(self, request: Request) -> None:
        """Complete `request.block_hashes` for its known tokens."""
        num_full = self._chain.num_named(request.num_tokens)
        self._chain.extend(request.block_hashes, request.tokens, request.cache_salt, num_full)

    def tables(self, request: Request) -> list[list[int]]:
        """All blocks of a request, per group."""
        return [list(table) for table in self._entries[request.request_id].tables]

    def finish_load(self, request: Request, start: int, end: int, bad: frozenset[int] | None) -> int:
        """How many tokens are there, where those from `start` to `end` were to be loaded into the request's blocks.

        bad: the blocks that did not arrive; empty: all; None: none. What lies behind is given back, unpublished: see
        Arrivals.count.
        """
        entry = self._entries[request.request_id]
        if bad is not None:
            end = self._arrivals.count(entry.tables, start, end, bad)
            for group, table in zip(self._groups, entry.tables, strict=True):
                keep = group.num_blocks(end)
                self._pool.release(reversed(table[keep:]))
                del table[keep:]
            entry.num_tokens = end
        unread = self._arrivals.num_unread(min(end, request.num_tokens - 1))
        for table, count in zip(entry.tables, unread, strict=True):  # what the hit's own continuation would have read
            self._pool.release(table[:count])
            table[:count] = [NULL_BLOCK] * min(count, len(table))
        return end

    def hold(self, request: Request, until: float) -> Hold:
        """Take all blocks from a request; nobody gets them before `release_hold`, which is due at `until`.

        What is computed is not published by this. The caller keeps the time.
        """
        entry = self._entries.pop(request.request_id)
        self._being_written.pop(request.request_id, None)
        return self._holds.take_over(request.request_id, self._tail_first(entry), until)

    def share(self, request: Request, start: int, end: int, until: float) -> Hold:
        """Hold the blocks of full entries of tokens `start` to `end` beside the request, which keeps them."""
        blocks: list[int] = []
        for group, table in zip(self._groups, self._entries[request.request_id].tables, strict=True):
            size, num = group.block_size, group.parts.blocks
            blocks += table[start // size * num : end // size * num]
        return self._holds.share(request.request_id, blocks, until)

    def release_hold(self, hold: Hold) -> None:
        """Give the blocks of a hold back. Once."""
        self._holds.release(hold)

    def take_fresh(self) -> list[int]:
        """Blocks to be zeroed by the step that is planned now: handed out since the last call, not found by hash.

        States that the step writes, and what it brings to states, are found from now on.
        """
        if self._being_written:
            for request_id, written in self._being_written.items():
                for group, index in written:
                    self._publish_entries(self._entries[request_id], group, index, index + 1)
            self._being_written.clear()
        fresh, self._fresh = self._fresh, []
        return fresh

    def set_weights_version(self, version: str) -> bool:
        """Name blocks by this version from now on. Those of admitted requests are not published any more.

        Old names stay, for when their version comes back. False, and nothing is done, if it is the version that there
        is. The caller clears the hashes of requests that have no blocks.
        """
        if version == self.identity.weights_version:
            return False
        self.identity = dataclasses.replace(self.identity, weights_version=version)
        self._chain.set_identity(self.identity.encode())
        for entry in self._entries.values():
            entry.num_published = _NEVER
        return True

    def reset_prefix_cache(self) -> bool:
        """Let no content be found. False, and nothing changes, unless all blocks are free."""
        return self._pool.reset_prefix_cache()

    def check(self) -> None:
        """Assert the invariants of all blocks. Linear in the pool: for tests and audits."""
        for entry in self._entries.values():
            for group, table in zip(self._groups, entry.tables, strict=True):
                assert len(table) == group.num_blocks(entry.num_tokens), "a list has the blocks of the planned tokens"
        tables = (table for entry in self._entries.values() for table in entry.tables)
        self._pool.check(tables, self._holds)

    def _append_blocks(
        self, tables: list[list[int]], num_tokens: int, low: int, moves: Moves = NO_MOVES
    ) -> list[list[int]] | None:
        """Blocks that tables lack for so many tokens, per group; empty if there is room; None if too few are free.

        low: the fewest tokens that the row may have computed when the step is done. moves: see Advancing.
        """
        if self._is_single and not self._zeroed:  # what nearly all models have
            table = tables[0]
            count = -(-num_tokens // self.block_size) - len(table)
            if count <= 0:
                return []
            if count > self._pool.num_free:
                return None
            blocks = self._pool.reserve(count)
            table += blocks
            return [blocks]
        new = self._advancing.append(tables, num_tokens, low, moves)
        if new:
            for index in self._zeroed:
                self._fresh += [] if index in moves else filter(None, new[index])
        return new

    def _find_peak(self, num_tokens: int, max_new: int) -> int:
        pairs = zip(self._num_blocks, self._policies, strict=True)
        return sum([num * policy.peak_entries(num_tokens, max_new, drafts=self._has_drafts) for num, policy in pairs])

    def _slide(self, entry: _Entry, position: int) -> None:
        """Replace by null what no query from `position` on reads."""
        for group, policy in self._sliding:
            end, first = policy.first_needed(position), entry.num_dead[group]
            if first < end:
                table, num = entry.tables[group], self._num_blocks[group]
                self._pool.release(table[first * num : end * num])
                table[first * num : end * num] = [NULL_BLOCK] * ((end - first) * num)
                entry.num_dead[group] = end

    def _publish(self, request: Request, entry: _Entry, up_to: int) -> None:
        if not self._enable_prefix_caching:
            return
        hashes, tokens = request.block_hashes, request.tokens
        num_full = min(up_to // self.block_size, self._chain.num_named(len(tokens)))
        if num_full <= entry.num_published:
            return
        self._chain.extend(hashes, tokens, request.cache_salt, num_full)
        for group, ratio in enumerate(self._ratios):
            first, last = entry.num_published // ratio, num_full // ratio
            if group in self._unshared:
                policy = self._policies[group]
                for index in range(first, last):
                    if policy.keeps(index, request.num_prompt) and policy.is_whole(index, up_to):
                        self._being_written.setdefault(request.request_id, []).append((group, index))
            elif first < last:
                self._publish_entries(entry, group, first, last)
        entry.num_published = num_full

    def _publish_entries(self, entry: _Entry, group: int, first: int, last: int) -> None:
        table = entry.tables[group]
        if entry.hidden:
            table = [NULL_BLOCK if block in entry.hidden else block for block in table]
        self._prefixes.publish(table, entry.request.block_hashes, group, first, last)

    def _publish_states(self, entry: _Entry) -> None:
        """Let hashes find the states that were written, and the last one, which a longer request can continue from."""
        for group in self._states:
            last = entry.num_published // self._ratios[group]
            if last:
                self._publish_entries(entry, group, last - 1, last)
        for group, index in self._being_written.pop(entry.request.request_id, ()):
            self._publish_entries(entry, group, index, index + 1)

    def _publish_last(self, request: Request, entry: _Entry, up_to: int) -> None:
        """`_publish` for one group, where the last block of the tokens is full and mostly the only one to publish."""
        done, hashes, start = entry.num_published, request.block_hashes, up_to - self.block_size
        if not done or done * self.block_size != start or len(hashes) != done or request.num_tokens < up_to:
            self._publish(request, entry, up_to)
            return
        hashes.append(self._chain.after(hashes[-1], request.packed(start, up_to)))
        self._pool.publish(entry.tables[0][done : done + 1], 0, hashes[-1:])
        entry.num_published = done + 1

    def _release(self, request: Request) -> None:
        self._being_written.pop(request.request_id, None)
        entry = self._entries.pop(request.request_id, None)
        if entry is not None:
            self._pool.release(self._tail_first(entry))
            if entry.num_published == _NEVER:
                request.block_hashes.clear()  # of an earlier version

    def _tail_first(self, entry: _Entry) -> Iterable[int]:
        """All groups together: a hit needs all groups, and the head of a chain is worth most."""
        if len(entry.tables) == 1:
            return reversed(entry.tables[0])
        if self._are_alike:
            return (block for blocks in zip(*map(reversed, entry.tables), strict=True) for block in blocks)
        return self._advancing.tail_first(entry.tables, entry.num_dead)
