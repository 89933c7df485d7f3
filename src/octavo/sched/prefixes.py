"""Prefixes: what of a request's tokens the cache has already, in all groups together.

Owns the search for a hit that suits all groups, and under which names an entry's blocks are found. Knows names, and
neither requests nor references. An entry may have several blocks, one for each of its columns: they are found together
or not at all. Invariant: a hit is the longest that every group's policy can continue from.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from octavo.cache.groups import CacheGroup
from octavo.cache.policies import Policy
from octavo.sched.block_pool import NULL_BLOCK, BlockPool


class Hit(NamedTuple):
    """A prefix found in the cache. Holds no references: it is good until the pool changes."""

    num_tokens: int  # a multiple of every block size of tokens
    tables: list[list[int]]  # per group the blocks of so many tokens; null where no later query reads


class _Columns:
    """The names under which all blocks of an entry are found, where an entry has several."""

    def __init__(self, columns: Sequence[Mapping[bytes, int]]) -> None:
        self._columns = columns

    def __contains__(self, name: object) -> bool:
        return all(name in column for column in self._columns)


class _Lookup(NamedTuple):
    """How a group's entries are found."""

    group: CacheGroup
    policy: Policy
    first: int  # column of the pool
    columns: list[Mapping[bytes, int]]  # per block of an entry: name -> block
    cached: Container[bytes]  # names of whole entries
    ratio: int  # names of the smallest block size in one of its own


class Prefixes:
    """The names of all groups. `unit`: nobody continues inside a block of tokens, so a hit has a multiple of it."""

    def __init__(self, groups: Sequence[CacheGroup], policies: Sequence[Policy], pool: BlockPool) -> None:
        """`pool` has a column for each block of an entry of each group, in order."""
        self._pool = pool
        self.unit = max(group.block_size for group in groups if group.kind != "state")
        smallest, first = min(group.block_size for group in groups), 0
        self._lookups: list[_Lookup] = []
        for group, policy in zip(groups, policies, strict=True):
            columns = [pool.cached(first + j) for j in range(group.parts.blocks)]
            cached = columns[0] if len(columns) == 1 else _Columns(columns)
            self._lookups.append(_Lookup(group, policy, first, columns, cached, group.block_size // smallest))
            first += len(columns)

    def match(self, hashes: Sequence[bytes], num_tokens: int) -> Hit:
        """The longest hit of at most `num_tokens`. hashes: their names, in the smallest block size.

        Each policy can only shorten the hit, so going round until none does ends at the longest common one.
        """
        unit, settled = self.unit, -1
        names_of = [hashes[lookup.ratio - 1 :: lookup.ratio] for lookup in self._lookups]
        while settled != num_tokens:
            settled = num_tokens
            for lookup, names in zip(self._lookups, names_of, strict=True):
                num_tokens = lookup.policy.longest_hit(lookup.cached, names, num_tokens) // unit * unit
            if len(names_of) == 1:
                break
        tables = []
        for lookup, names in zip(self._lookups, names_of, strict=True):
            num_entries = lookup.group.num_entries(num_tokens)
            first = min(lookup.policy.first_needed(num_tokens), num_entries)
            found = [column[name] for name in names[first:num_entries] for column in lookup.columns]
            tables.append([NULL_BLOCK] * (first * len(lookup.columns)) + found)
        return Hit(num_tokens, tables)

    def publish(self, table: Sequence[int], hashes: Sequence[bytes], index: int, first: int, last: int) -> None:
        """Let names find entries `first` to `last` of the table of group `index`. Null blocks are skipped."""
        _, _, column, columns, _, ratio = self._lookups[index]
        names, num = hashes[(first + 1) * ratio - 1 : last * ratio : ratio], len(columns)
        if num == 1:
            self._pool.publish(table[first:last], column, names)
            return
        for at, name in zip(range(first * num, last * num, num), names, strict=True):
            self._pool.publish_entry(table[at : at + num], column, name)
