"""Where the blocks of a cache lie: what a peer that reads another one's memory is told.

Owns the message and the addresses in it. Knows blocks as runs of bytes, and no library that reads them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

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

    def of(self, blocks: Sequence[int], base: int | None = None) -> Region:
        """The same memory, and other blocks of it; base: mapped there."""
        base = self.base if base is None else base
        return msgspec.structs.replace(self, blocks=list(blocks), base=base)

    def strides(self, num_parts: int) -> tuple[int, int]:
        """Bytes from one of the `num_parts` parts of a block to the next, and from one block to the next.

        num_parts: the pages, or where all pages of a block lie together as one, how many that one has.
        """
        if num_parts == self.num_pages:
            return self.num_blocks * self.page_bytes, self.page_bytes
        return self.page_bytes // num_parts, self.page_bytes

    def runs(self, blocks: Sequence[int], num_parts: int) -> np.ndarray:
        """(address, bytes) of each part of each block, part by part: uint64 [runs, 2]. num_parts: see `strides`."""
        return self._runs(np.array(blocks, np.int64), np.ones(len(blocks), np.int64), num_parts)

    def run(self, num_parts: int) -> np.ndarray:
        """`runs` of all blocks, which follow each other, as one."""
        part_stride, block_stride = self.strides(num_parts)
        runs = np.empty((num_parts, 2), np.uint64)
        np.add(_offsets(num_parts, part_stride), self.base + self.blocks[0] * block_stride, out=runs[:, 0])
        runs[:, 1] = len(self.blocks) * (self.page_bytes * self.num_pages // num_parts)
        return runs

    def _runs(self, blocks: np.ndarray, counts: np.ndarray, num_parts: int) -> np.ndarray:
        """Of so many blocks behind each other, which lie together."""
        part_stride, block_stride = self.strides(num_parts)
        runs = np.empty((num_parts, len(blocks), 2), np.uint64)
        first = self.base + np.arange(num_parts, dtype=np.int64)[:, None] * part_stride
        np.add(first, blocks * block_stride, out=runs[:, :, 0], casting="unsafe")
        runs[:, :, 1] = counts * (self.page_bytes * self.num_pages // num_parts)
        return runs.reshape(-1, 2)


@functools.lru_cache(16)
def _offsets(num_parts: int, stride: int) -> NDArray[np.uint64]:
    """Of the parts of a block."""
    return np.arange(num_parts, dtype=np.uint64) * np.uint64(stride)


def _is_run(blocks: Sequence[int]) -> bool:
    """Whether they follow each other, as in a cache that is new. Takes a tenth of what it spares."""
    return bool(blocks) and list(blocks) == list(range(blocks[0], blocks[0] + len(blocks)))


def joined_blocks(own: Sequence[int], others: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Blocks that follow each other on both sides as one: the first of each run [2, runs], and how many they are."""
    if _is_run(own) and _is_run(others):
        return np.array([own[:1], others[:1]], np.int64), np.array([len(own)], np.int64)
    both = np.array([own, others], np.int64)
    both = both[:, both[0].argsort()]
    begins = np.ones(both.shape[1] + 1, np.bool_)
    begins[1:-1] = (both[:, 1:] - both[:, :-1] != 1).any(0)
    starts = begins.nonzero()[0]
    return both[:, starts[:-1]], starts[1:] - starts[:-1]


def num_joined(own: Sequence[int], others: Sequence[int]) -> int:
    """How many runs `joined_blocks` gives."""
    return 1 if _is_run(own) and _is_run(others) else len(joined_blocks(own, others)[1])


def joined_runs(own: Region, others: Region) -> tuple[np.ndarray, np.ndarray]:
    """`Region.runs` of the blocks of both: those that follow each other on both sides as one, where pages do so."""
    parts = max(own.num_pages, others.num_pages)  # of a block: they lie apart on one side, or on both
    if own.num_pages != others.num_pages:
        return own.runs(own.blocks, parts), others.runs(others.blocks, parts)
    if _is_run(own.blocks) and _is_run(others.blocks):  # a load's copy waits for this: few calls
        return own.run(parts), others.run(parts)
    (here, there), counts = joined_blocks(own.blocks, others.blocks)
    return own._runs(here, counts, parts), others._runs(there, counts, parts)


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
    if theirs.num_pages < 1 or theirs.num_pages * theirs.page_bytes != pair.theirs.block_bytes:
        raise TransferError(f"{pair.peer} has blocks of {theirs.num_pages} pages of {theirs.page_bytes} bytes")
    if theirs.blocks and not 0 <= min(theirs.blocks) <= max(theirs.blocks) < theirs.num_blocks:
        raise TransferError(f"{pair.peer} tells of blocks that its {theirs.num_blocks} do not have")
    pair.region = theirs
    return theirs


def foreseen(pair: Pair, blocks: Sequence[int]) -> Region | None:
    """What a peer will tell of these blocks, if it tells of the region that it told of last; None: of none yet."""
    known: Region | None = pair.region
    if known is None or not blocks or not 0 < min(blocks) <= max(blocks) < known.num_blocks:
        return None
    return known.of(blocks)


def until_read(pair: Pair, job: Job, every: float, work: Callable[[], object]) -> None:
    """Keep blocks until the peer says something; meanwhile `work`, every so many seconds. Raises TransferError."""
    until = time.monotonic() + pair.left
    with job.touching():
        while not pair.says_something(every):
            work()
            if time.monotonic() > until:
                raise TransferError(f"{pair.peer} did not take blocks within {pair.timeout:g} s")
