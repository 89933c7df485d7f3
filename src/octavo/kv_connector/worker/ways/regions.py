"""Where the blocks of a cache lie: what a peer that reads another one's memory is told.

Owns the message and the addresses in it. Knows blocks as runs of bytes, and no library that reads them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job
from octavo.kv_connector.worker.pair import Pair, TransferError


class Region(msgspec.Struct, frozen=True, kw_only=True):
    """A cache's memory."""

    agent: bytes  # how the library finds it
    base: int  # address
    kind: str  # of memory, in NIXL's words
    device: int
    num_pages: int
    num_blocks: int
    page_bytes: int
    blocks: list[int]  # in the order that was asked for

    def runs(self, blocks: Sequence[int], num_pages: int) -> np.ndarray:
        """(address, bytes) of each of the `num_pages` parts of each block, part by part: uint64 [runs, 2].

        num_pages: those that there are, or where all pages of a block lie together as one, how many that one has.
        """
        parts = num_pages // self.num_pages
        size = self.page_bytes // parts
        page, block = np.meshgrid(np.arange(num_pages), np.array(blocks, np.int64), indexing="ij")
        offsets = (page // parts * self.num_blocks + block) * self.page_bytes + page % parts * size
        addresses = np.uint64(self.base) + offsets.ravel().astype(np.uint64)
        return np.column_stack([addresses, np.full(len(addresses), size, np.uint64)])


def region_of(cache: CacheBytes, agent: bytes, blocks: Sequence[int]) -> Region:
    """Where blocks of a cache are."""
    return Region(
        agent=agent,
        base=cache.data.data_ptr(),
        kind="VRAM" if cache.on_gpu else "DRAM",
        device=cache.device.index or 0,
        num_pages=cache.num_pages,
        num_blocks=cache.num_blocks,
        page_bytes=cache.page_bytes,
        blocks=list(blocks),
    )


def read_region(told: bytes, pair: Pair, count: int) -> Region:
    """What a peer told of `count` blocks. Raises TransferError where they are not those of its cache."""
    theirs = msgspec.msgpack.decode(told, type=Region)
    if len(theirs.blocks) != count:
        raise TransferError(f"{pair.peer} tells of {len(theirs.blocks)} blocks, not of {count}")
    if theirs.num_pages * theirs.page_bytes != pair.theirs.block_bytes:
        raise TransferError(f"{pair.peer} has blocks of {theirs.num_pages} pages of {theirs.page_bytes} bytes")
    return theirs


def until_read(pair: Pair, job: Job, every: float, work: Callable[[], object]) -> None:
    """Keep blocks until the peer says something; meanwhile `work`, every so many seconds. Raises TransferError."""
    until = time.monotonic() + pair.timeout
    with job.touching():
        while not pair.says_something(every):
            work()
            if time.monotonic() > until:
                raise TransferError(f"{pair.peer} did not take blocks within {pair.timeout:g} s")
