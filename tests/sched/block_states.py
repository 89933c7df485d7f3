"""Where a block is in its life, seen from what a pool counts: the words of `octavo.sched.block_pool`."""

from __future__ import annotations

import enum

from octavo.sched.block_pool import BlockPool


class BlockState(enum.Enum):
    """What a test expects of a block."""

    FREE = "free"
    CACHED = "cached"  # free, and found by its hash
    RESERVED = "reserved"
    PUBLISHED = "published"
    HELD = "held"


def state_of(pool: BlockPool, block: int) -> BlockState:
    """The state of `block`, which is not the null block."""
    assert block, "the null block has no life"
    named, references = block in pool._hashes, 1 + pool._extra.get(block, 0)
    if block in pool._free_uncached or block in pool._free_cached:
        return BlockState.CACHED if named else BlockState.FREE
    if references == pool._holds[block]:
        return BlockState.HELD
    return BlockState.PUBLISHED if named else BlockState.RESERVED
