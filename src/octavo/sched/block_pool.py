"""BlockPool: the state of every block, and what full blocks can be found again by their content.

Owns the reference counts, the free blocks in the order of their reuse, the map from (group, hash) to block, and the
hash chain that names a block's content. Knows nothing of requests, windows or tensors. Block 0 is the null block: it
is never handed out, released or hashed.

A block is in one state. *Free*: no reference; *cached* if a hash still finds it, until it is handed out again. Blocks
that were freed without a hash are handed out before all others, the last one freed first; then those with one, the
first one freed first. *Reserved*: referenced, its content is being made and no hash finds it. *Published*: referenced,
and found by its hash; who writes to it writes what it holds. *Held*: its owner has gone, and somebody outside of the
order of plans still reads or writes it; it may be found, and it is free only when its hold is released. Invariant:
every block but 0 is in exactly one of these, `num_free + num_used == num_blocks - 1`, and only a free block is handed
out.
"""

from __future__ import annotations

import collections
import secrets
import struct
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b

NULL_BLOCK = 0
HASH_SIZE = 16  # bytes


class HashChain:
    """Names of full blocks: a keyed hash of the block's tokens and of the block before it.

    Where an entry follows from `num_ahead` tokens behind its own as well, as in some drafters' layers, so does its
    block's name. Texts that part at a block's border then have two blocks in front of it.

    The secret keeps names from being guessed, or made to collide, from outside. It is drawn per process; processes that
    are given one name equal blocks alike. `identity` separates what the tokens do not show (see CacheIdentity); a
    request's cache salt separates tenants.
    """

    def __init__(self, block_size: int, *, secret: bytes = b"", identity: bytes = b"", num_ahead: int = 0) -> None:
        """`secret`: up to 64 bytes, the same in every run that shall have the same names; empty: drawn."""
        self.block_size, self.num_ahead = block_size, num_ahead
        self._secret = secret or secrets.token_bytes(32)
        self._keyed = blake2b(key=self._secret, digest_size=HASH_SIZE)  # copied: the key is set up once
        self._identity = identity
        self._root = self.root("")
        self._pack = struct.Struct(f"<{block_size + num_ahead}I").pack

    def set_identity(self, identity: bytes) -> None:
        """Name blocks by another one from now on."""
        self._identity = identity
        self._root = self.root("")

    def root(self, salt: str) -> bytes:
        """The parent of the first block. The personalization keeps roots apart from blocks of any content."""
        message = struct.pack("<Q", len(self._identity)) + self._identity + salt.encode()
        return blake2b(message, key=self._secret, digest_size=HASH_SIZE, person=b"octavo.root").digest()

    def num_named(self, num_tokens: int) -> int:
        """How many blocks of a text have a name, of which so many tokens are known."""
        return max(num_tokens - self.num_ahead, 0) // self.block_size

    def extend(self, hashes: list[bytes], tokens: list[int], salt: str, num_blocks: int) -> None:
        """Append to `hashes` the names of the blocks from `len(hashes)` up to `num_blocks`."""
        size, pack, ahead = self.block_size, self._pack, self.num_ahead
        first, last = len(hashes) * size, num_blocks * size
        if first >= last:
            return
        assert len(tokens) >= last + ahead, "only full blocks of known tokens have a name"
        parent = hashes[-1] if hashes else self.root(salt) if salt else self._root
        for start in range(first, last, size):
            parent = self.after(parent, pack(*tokens[start : start + size + ahead]))
            hashes.append(parent)

    def after(self, parent: bytes, tokens: bytes) -> bytes:
        """The name of the block behind the one named `parent`. tokens: of its name, 32-bit words, little-endian."""
        digest = self._keyed.copy()
        digest.update(parent + tokens)
        return digest.digest()


class BlockPool:
    """Blocks 1 .. num_blocks - 1, shared by all cache groups.

    A hash finds at most one block per group. A second block of the same content stays without a hash: it is worth
    nothing once it is free, and is then the first to be handed out again.
    """

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        """`num_blocks` counts the null block."""
        assert num_blocks >= 2, "a pool has the null block and at least one more"
        self.num_blocks = num_blocks
        self._extra: dict[int, int] = {}  # block -> references beyond the first, of such that have more than one
        self._hashes: dict[int, tuple[int, bytes]] = {}  # published block -> (group, hash)
        self._cached: list[dict[bytes, int]] = [{} for _ in range(num_groups)]
        # free, freed without a hash: the next to be handed out last
        self._free_uncached = list(range(num_blocks - 1, 0, -1))
        # free, freed with a hash: the next to be handed out first
        self._free_cached = collections.OrderedDict[int, None]()
        self._holds = collections.Counter[int]()  # block -> references of it that are holds

    @property
    def num_free(self) -> int:
        """Free blocks, cached or not."""
        return len(self._free_uncached) + len(self._free_cached)

    @property
    def usage(self) -> float:
        """Share of the blocks that are not free, 0 to 1."""
        return 1.0 - self.num_free / (self.num_blocks - 1)

    def cached(self, group: int) -> Mapping[bytes, int]:
        """Hash -> block of one group, free or not."""
        return self._cached[group]

    @property
    def num_held(self) -> int:
        """Blocks that nothing but holds keeps from being free."""
        return sum(1 + self._extra.get(block, 0) == count for block, count in self._holds.items())

    def is_free(self, block: int) -> bool:
        """Whether a block that was found by its hash has no reference."""
        return block in self._free_cached

    def reserve(self, count: int) -> list[int]:
        """Hand out `count` free blocks with one reference each; what they had before is found no longer."""
        assert count <= self.num_free, "the caller looks at num_free first"
        blank = self._free_uncached
        left = max(len(blank) - count, 0)
        blocks = blank[left:]
        del blank[left:]
        blocks.reverse()
        while len(blocks) < count:
            block, _ = self._free_cached.popitem(last=False)
            if block in self._hashes:
                self._unpublish(block)
            blocks.append(block)
        return blocks

    def share(self, block: int) -> None:
        """One more reference to a block that was found by its hash."""
        if block in self._free_cached:
            del self._free_cached[block]
        else:
            self._extra[block] = self._extra.get(block, 0) + 1

    def release(self, blocks: Iterable[int]) -> None:
        """Give back one reference each; null blocks are skipped. Of those now free the first is reused first."""
        owned = [*filter(None, blocks)]
        extra, names, blank, kept = self._extra, self._hashes, self._free_uncached, self._free_cached
        if not extra and not names:  # as without a prefix cache: states have hundreds of blocks
            blank += owned
            return
        for block in owned:
            if block in extra:
                extra[block] -= 1
                if not extra[block]:
                    del extra[block]
            elif block in names:
                kept[block] = None
            else:
                blank.append(block)

    def hold(self, blocks: Iterable[int]) -> list[int]:
        """Let a hold take over the references of an owner that goes, one each. Returns what `release_held` takes."""
        held = [block for block in blocks if block != NULL_BLOCK]
        self._holds.update(held)
        return held

    def release_held(self, blocks: Sequence[int]) -> None:
        """Give back the references of a hold."""
        for block in blocks:
            self._holds[block] -= 1
            assert self._holds[block] >= 0, f"block {block} is not held"
            if not self._holds[block]:
                del self._holds[block]
        self.release(blocks)

    def publish(self, blocks: Iterable[int], group: int, names: Iterable[bytes]) -> None:
        """Let hashes find reserved blocks, each unless another of the same content is. Null blocks are skipped."""
        cached, found = self._cached[group], self._hashes
        for block, name in zip(blocks, names, strict=True):
            if block != NULL_BLOCK and name not in cached:
                cached[name] = block
                found[block] = (group, name)

    def publish_entry(self, blocks: Iterable[int], first: int, name: bytes) -> None:
        """`publish` of an entry that has a block in each group from `first` on."""
        found = self._hashes
        for group, (block, cached) in enumerate(zip(blocks, self._cached[first:], strict=False), first):
            if block != NULL_BLOCK and name not in cached:
                cached[name] = block
                found[block] = (group, name)

    def unpublish(self, block_hash: bytes) -> None:
        """Let the content be found in no group. Who has references to its blocks keeps them."""
        for cached in self._cached:
            block = cached.get(block_hash, NULL_BLOCK)
            if block != NULL_BLOCK:
                self._unpublish(block)

    def are_sole(self, blocks: Iterable[int]) -> bool:
        """Whether each of these blocks, which all have an owner, has no second one."""
        return self._extra.keys().isdisjoint(blocks)

    def forget(self, blocks: Iterable[int]) -> None:
        """Let no hash find these blocks; who has references to them keeps them."""
        for block in [*filter(self._hashes.__contains__, blocks)]:
            self._unpublish(block)

    def reset_prefix_cache(self) -> bool:
        """Let no block be found. False, and nothing changes, unless all are free."""
        if self.num_free != self.num_blocks - 1:
            return False
        for cached in self._cached:
            cached.clear()
        self._hashes.clear()
        return True

    def check(self, tables: Iterable[Iterable[int]], holds: Iterable[Iterable[int]] = ()) -> None:
        """Assert the invariants, given every block list of every owner and of every hold.

        Linear in the pool: for tests and audits.
        """
        held = collections.Counter(block for blocks in holds for block in blocks)
        assert held == self._holds, "holds and what they hold differ"
        expected = held + collections.Counter(block for table in tables for block in table if block != NULL_BLOCK)
        free = {*self._free_uncached, *self._free_cached}
        assert len(free) == self.num_free, "a block is free twice"
        for block in range(1, self.num_blocks):
            references = 0 if block in free else 1 + self._extra.get(block, 0)
            assert references == expected[block], f"block {block}: {references} references, {expected[block]} owners"
        assert free.isdisjoint(self._extra), "a block is both free and held"
        assert not {NULL_BLOCK} & (free | self._extra.keys()), "the null block is in use"
        assert NULL_BLOCK not in self._hashes, "the null block has a name"
        found = {block: (g, h) for g, cached in enumerate(self._cached) for h, block in cached.items()}
        assert self._hashes == found, "the names of blocks and the map from names to blocks differ"

    def _unpublish(self, block: int) -> None:
        group, block_hash = self._hashes.pop(block)
        del self._cached[group][block_hash]
