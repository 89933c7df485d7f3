"""Advancing: how requests with several groups get blocks, and how states of rows that decode go on in those they have.

Owns which entries get blocks, which state may take those of the one before it, and what running rows need yet. A new
state lies elsewhere than the one that it follows from wherever somebody may still want that one: a snapshot is to be
found, drafts may be rejected, a form may hold the row. Where nobody does, both would double what each row takes, and
rows that cross a border together would not fit. Operators read what they need of a state before they write the next
one, where a row has one token in the step. Invariant: blocks that are taken over have one owner, and no hash finds them
from then on.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from octavo.cache.groups import CacheGroup
from octavo.cache.policies import Policy, most_decoding
from octavo.plan import IntArray
from octavo.request.request import Request
from octavo.sched.block_pool import NULL_BLOCK, BlockPool

Moves = Mapping[int, list[int]]  # by group: the blocks that the last entry of a row gives to its next one
NO_MOVES: Moves = {}
_MOST_KNOWN = 4096  # answers that rows of equal lengths share


class Advancing:
    """Of all requests of a KVManager."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        policies: Sequence[Policy],
        pool: BlockPool,
        *,
        is_on: bool,
        num_unsure: int = 2,
    ) -> None:
        """policies: of the groups, in order.

        is_on: no row has drafts, no connector reads its states, and no step is tried twice. num_unsure: the most tokens
        by which a row's blocks are ahead of what is known of it.
        """
        self._groups, self._pool, self._is_on = list(zip(groups, policies, strict=True)), pool, is_on
        self._num_plain = sum(group.parts.blocks for group in groups if group.is_attention)
        self._size, self._num_unsure = min(group.block_size for group in groups), num_unsure
        self._inputs = [group for group in groups if group.kind == "inputs"]
        self._states = [(index, group) for index, group in enumerate(groups) if group.kind == "state"]
        # of states that get blocks within a block of tokens: (tokens of a chunk, the last of it in which they do)
        self._late = {(group.block_size, group.unit) for _, group in self._states if group.unit < self._size}
        assert num_unsure > 2 or not self._late, "rows without drafts are looked at where a block of tokens ends alone"
        of_states = [*self._inputs, *(group for _, group in self._states)]
        self._most = {group: most_decoding(group, 0 if is_on else num_unsure) for group in of_states}
        chunks = [group.parts.blocks * -(-group.chunk // group.block_size) for group in self._inputs]
        self._written = functools.lru_cache(_MOST_KNOWN)(self._find_written)
        self._needed = self._num_plain + sum(chunks) + sum([group.parts.blocks for _, group in self._states])

    def is_exact(self, request: Request) -> bool:
        """Whether no result takes back what a plan counts as computed of a request."""
        params = request.params  # a form may hold its row, which computes a token again
        return self._is_on and params.structured_outputs is None and params.thinking is None

    def moves(self, request: Request, tables: Sequence[Sequence[int]], start: int, end: int) -> Moves:
        """What may move where a request goes from `start` to `end` tokens: the states that it reads until the next.

        Of rows that decode: they cross the border with a step of one token.
        """
        known = request.num_tokens + request.num_in_flight
        if not self._states or end != start + 1 or end != known or not self.is_exact(request):
            return NO_MOVES
        found = {}
        for index, group in self._states:
            num, table = group.parts.blocks, tables[index]
            have = len(table) // num
            if have and group.num_entries(end) == have + 1:
                blocks = list(table[-num:])
                if blocks[0] != NULL_BLOCK and self._pool.are_sole(blocks):
                    found[index] = blocks
        return found

    def append(self, tables: Sequence[list[int]], num_tokens: int, low: int, moves: Moves) -> list[list[int]] | None:
        """Blocks that tables lack for so many tokens, per group; empty if there is room; None if too few are free.

        low: the fewest tokens that the row may have computed when the step is done.
        """
        written = self._written(tuple(map(len, tables)), num_tokens, low)
        if not any(written):
            return []
        pairs = zip(written, self._groups, strict=True)
        counts = [0 if i in moves else sum(own) * group.parts.blocks for i, (own, (group, _)) in enumerate(pairs)]
        if sum(counts) > self._pool.num_free:
            return None
        reserved, end, new = self._pool.reserve(sum(counts)), 0, []
        for index, (own, table) in enumerate(zip(written, tables, strict=True)):
            if index in moves:
                blocks = moves[index]
                table[-len(blocks) :] = [NULL_BLOCK] * len(blocks)  # nobody but the row reads there, until it goes on
                self._pool.forget(blocks)
            else:
                start, end = end, end + counts[index]
                blocks = reserved[start:end]
                if not all(own):
                    rest, none = iter(blocks), itertools.repeat(NULL_BLOCK)
                    num = self._groups[index][0].parts.blocks
                    blocks = [next(rest if is_written else none) for is_written in own for _ in range(num)]
            table += blocks
            new.append(blocks)
        return new

    def tail_first(self, tables: Sequence[Sequence[int]], num_dead: Sequence[int]) -> Iterable[int]:
        """All blocks of a request, entry by entry, those that hold its last tokens first. num_dead: see KVManager."""
        ends: list[tuple[int, Sequence[int]]] = []  # of each entry: where its tokens end, its blocks
        for (group, _), table, first in zip(self._groups, tables, num_dead, strict=True):
            num, size = group.parts.blocks, group.block_size
            last = len(table) // num
            ends += [((index + 1) * size, table[index * num : (index + 1) * num]) for index in range(first, last)]
        ends.sort(key=operator.itemgetter(0), reverse=True)
        return itertools.chain.from_iterable([blocks for _, blocks in ends])

    def _find_written(self, lengths: tuple[int, ...], num_tokens: int, low: int) -> list[list[bool]]:
        """Per group the entries that tables of so many blocks lack for so many tokens: whether each is written."""
        written = []
        for (group, policy), length in zip(self._groups, lengths, strict=True):
            entries = range(length // group.parts.blocks, group.num_entries(num_tokens))
            written.append([policy.is_written(index, low) for index in entries])
        return written

    def room_of(self, num_tokens: int) -> int:
        """Up to how many tokens a row with drafts that has the blocks of `num_tokens` needs no look.

        Beyond it lacks blocks; or it has surely passed a border, so that it can give back the state before and the
        inputs of the chunk between.
        """
        room = -(-num_tokens // self._size) * self._size
        for chunk, unit in self._late:
            num_states = -(-num_tokens // unit) * unit // chunk
            room = min(room, (num_states + 1) * chunk - unit)
            passed = num_tokens // chunk * chunk + self._num_unsure
            if chunk <= num_tokens < passed:
                room = min(room, passed - 1)
        return room

    def has_room(self, num_requests: int) -> bool:
        """Whether enough blocks are free that each request may have a state more, and an open chunk beside it."""
        return self._pool.num_free >= num_requests * self._needed

    def headroom(self, num: int, computed: IntArray) -> int:
        """Blocks that rows which have `computed` so many tokens each, [N], soon need.

        Of attention `num` blocks of tokens; of states what they lack of all that they have at once: see most_decoding.
        """
        total = num * len(computed) * self._num_plain
        for group in self._inputs:
            opened = -(-computed // group.block_size) - computed // group.chunk * group.chunk // group.block_size
            total += group.parts.blocks * int((self._most[group] - opened).clip(min=0).sum())
        for _, group in self._states:
            dead = np.maximum((computed - 1) // group.block_size - 1, 0)
            held = -(-computed // group.unit) * group.unit // group.block_size - dead
            total += group.parts.blocks * int((self._most[group] - held).clip(min=0).sum())
        return total

    def growth(self, computed: IntArray, num_new: int) -> int:
        """The most blocks that rows which have `computed` so many tokens each, [N], take for `num_new` more."""
        total, ends = 0, computed + num_new
        for group, _ in self._groups:
            if group.kind == "encoder_only":
                continue
            unit = group.unit if group.kind == "state" else group.block_size
            before, behind = (-(-tokens // unit) * unit // group.block_size for tokens in (computed, ends))
            total += group.parts.blocks * int((behind - before).sum())
        return total
