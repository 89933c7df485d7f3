"""Blocks by NIXL, pushed: the side that has them writes them into host memory of the side that goes on.

Owns the memory in which blocks arrive, an agent's and a connection's own, and the words that pass between two pieces. A
peer that goes on writing late so writes nowhere: never into the cache, whose blocks may be somebody else's by then.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Generator, Sequence

import msgspec
import torch

from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job
from octavo.kv_connector.worker.pair import NOT_AHEAD, PIECE_BYTES, Ahead, Done, Pair, TransferError
from octavo.kv_connector.worker.ways.nixl import host_region, runs_of
from octavo.kv_connector.worker.ways.nixl_agent import POLL, NixlAgent
from octavo.kv_connector.worker.ways.regions import Region, region_of

_LEAST_BYTES = 16 << 20  # of the memory of a connection


class NixlPushWay:
    """See Way."""

    name = "nixl, pushed"
    piece_bytes = PIECE_BYTES

    def __init__(self, cache: CacheBytes, *, gives: bool) -> None:
        """gives: this side writes what its cache has."""
        self._cache, self._agent = cache, NixlAgent()
        self._own = region_of(cache, b"", ())
        if gives:
            self._agent.register(self._own.base, cache.data.numel(), self._own.device, self._own.kind)

    def ask(self, pair: Pair, num_bytes: int) -> bytes:
        """See Way: where to write."""
        if pair.state is None or pair.state.memory.numel() < num_bytes:
            pair.drop_state()
            pair.state = _Inbox(self._cache.host_memory(1, max(num_bytes, _LEAST_BYTES)))
        told: bytes = pair.state.told
        return told

    def tell(self, blocks: Sequence[int]) -> bytes:
        """See Way."""
        return b""

    def orders_at_once(self, theirs: Sequence[int], blocks: Sequence[int]) -> bool:
        """See Way."""
        return False

    def read_ahead(self, pair: Pair, theirs: Sequence[int], job: Job, blocks: Sequence[int]) -> Ahead:
        """See Way: bytes come when they are written."""
        return NOT_AHEAD

    def give(self, pair: Pair, asked: bytes, job: Job, pieces: Sequence[Sequence[int]]) -> None:
        """See Way: write a piece and say so; the next one when its memory is free again."""
        self._cache.enter_thread()
        theirs = msgspec.msgpack.decode(asked, type=Region)
        if pair.state is None or pair.state.metadata != theirs.agent:
            pair.drop_state()
            pair.state = _Peer(self._agent, theirs.agent)
        size, pages = self._cache.block_bytes, self._own.num_pages
        for number, piece in enumerate(pieces):
            if number:
                pair.receive(Done)
            if len(piece) * size > theirs.page_bytes:
                raise TransferError(f"{pair.peer} has {theirs.page_bytes} bytes for {len(piece)} blocks of {size}")
            there = msgspec.structs.replace(theirs, num_blocks=len(piece), page_bytes=size)
            remote = runs_of(there, range(len(piece)), pages)
            with job.touching():
                self._agent.move("WRITE", runs_of(self._own, piece, pages), remote, pair.state.name, pair)
            pair.send(Done())

    def take(self, pair: Pair, told: bytes, job: Job, pieces: Sequence[Sequence[int]]) -> None:
        """See Way."""
        for piece, rows in zip(pieces, self.rows(pair, told, list(map(len, pieces))), strict=True):
            with job.touching():
                self._cache.write(piece, list(rows))

    def rows(self, pair: Pair, told: bytes, pieces: Sequence[int]) -> Generator[torch.Tensor]:
        """See Way: what the peer has written."""
        inbox, size = pair.state, pair.theirs.block_bytes
        for number, count in enumerate(pieces):
            if number:
                pair.send(Done())
            _wait(pair, inbox.agent)
            yield inbox.memory.view(-1)[: count * size].view(count, size)

    def close(self) -> None:
        """See Way."""
        self._agent.close()


def _wait(pair: Pair, agent: NixlAgent) -> None:
    """Until the peer says that it has written; NIXL works meanwhile. Raises TransferError."""
    until = time.monotonic() + pair.left
    while not pair.says_something(POLL):
        agent.work()
        if time.monotonic() > until:
            raise TransferError(f"{pair.peer} did not send blocks within {pair.timeout:g} s")
    pair.receive(Done)


class _Inbox:
    """Where the blocks of a connection arrive."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.agent = memory, NixlAgent()
        own = host_region(memory)
        self.agent.register(own.base, memory.numel(), own.device, own.kind)
        self.told = msgspec.msgpack.encode(msgspec.structs.replace(own, agent=self.agent.metadata()))

    def close(self) -> None:
        """Nothing arrives any more."""
        self.agent.close()


class _Peer:
    """The other side's agent, while its connection lasts."""

    def __init__(self, agent: NixlAgent, metadata: bytes) -> None:
        self.metadata, self.name = metadata, agent.meet(metadata)
        self.close = functools.partial(agent.part, self.name)
