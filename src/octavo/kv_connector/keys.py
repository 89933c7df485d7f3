"""Keys: what a block is called outside of its cache, and which blocks are moved by their names.

Owns the form of a key, the file that a key names, and of each cache group which entries are worth moving. A key is the
name of an entry's content and a column: which of the blocks it is that the groups' entries have, one group's behind
those of the group before. Of layers with states those states move that hashes find again; what the tokens of an open
chunk bring stays: it is many times a token's K and V, so what is found elsewhere ends at a border.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from octavo.cache.groups import CacheGroup
from octavo.cache.policies import Policy, make_policies
from octavo.kv_connector import Transfer

SUFFIX = ".safetensors"
MAX_HEADER_BYTES = 4096  # of a file, before its block
_NAME_BYTES = 16


class Pair(NamedTuple):
    """A block of the cache, and what its content is called elsewhere."""

    block: int
    key: bytes


def make_key(name: bytes, column: int) -> bytes:
    """The key of the block of an entry in `column`."""
    return name + column.to_bytes(1 if column < 256 else 4, "big")


def file_path(folder: str, key: bytes) -> str:
    """Where the file of a key is: its name in hexadecimal digits, and its column."""
    digits, column = key[:_NAME_BYTES].hex(), int.from_bytes(key[_NAME_BYTES:], "big")
    return f"{folder}/{digits[:2]}/{digits}-{column}{SUFFIX}"


class GroupKeys(NamedTuple):
    """What the entries of one cache group are called, and which of them move."""

    number: int  # among the groups
    group: CacheGroup
    policy: Policy
    columns: range  # of the blocks of an entry; empty: none of them moves
    ratio: int  # names of the smallest block size in one of its own

    def names(self, hashes: Sequence[bytes]) -> Sequence[bytes]:
        """Of its entries."""
        return hashes[self.ratio - 1 :: self.ratio]

    def keys(self, name: bytes) -> list[bytes]:
        """Of the blocks of an entry."""
        return [make_key(name, column) for column in self.columns]

    def loaded(self, load: Transfer) -> Iterator[Pair]:
        """What a load brings: of states the one that is read next."""
        size, end = self.group.block_size, load.end
        first = load.start // size
        if self.group.kind == "state":
            end = min(end, load.request.num_tokens - 1)
            first = max(first, self.policy.first_needed(end))
        return self._pairs(load, range(first, end // size))

    def saved(self, save: Transfer, end: int, *, has_ended: bool) -> Iterator[Pair]:
        """What a save of tokens up to `end` keeps: of states those that hashes find."""
        size = self.group.block_size
        places: Iterable[int] = range(save.start // size, end // size)
        if self.group.kind == "state":
            kept = {place for place in places if self.policy.keeps(place, save.request.num_prompt)}
            if has_ended and end >= size:
                kept.add(end // size - 1)  # which a longer request can continue from
            places = sorted(kept)
        return self._pairs(save, places)

    def _pairs(self, transfer: Transfer, places: Iterable[int]) -> Iterator[Pair]:
        """Of these entries, as far as they have blocks and names."""
        table, names = transfer.blocks[self.number], self.names(transfer.names)
        num = len(self.columns)
        for place in places if num else ():
            blocks = table[place * num : (place + 1) * num]
            if place < len(names) and blocks and blocks[0]:
                yield from map(Pair, blocks, self.keys(names[place]))


def group_keys(groups: Sequence[CacheGroup]) -> list[GroupKeys]:
    """Of each group."""
    smallest, first, found = min(group.block_size for group in groups), 0, []
    for number, (group, policy) in enumerate(zip(groups, make_policies(groups), strict=True)):
        num = group.parts.blocks
        columns = range(first, first + num) if group.kind != "inputs" else range(0)
        found.append(GroupKeys(number, group, policy, columns, group.block_size // smallest))
        first += num
    return found
