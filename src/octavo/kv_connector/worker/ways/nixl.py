"""Blocks by NIXL: the side that goes on reads the other one's cache, from memory to memory.

Owns who reads with which agent, and where to. Knows blocks as runs of bytes. Each connection of the side that reads has
an agent of its own: when a read is given up so is the agent, and no byte comes after.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import msgspec
import torch

from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job
from octavo.kv_connector.worker.pair import NOT_AHEAD, PIECE_BYTES, Ahead, Meanwhile, Pair, yield_interpreter
from octavo.kv_connector.worker.ways.nixl_agent import POLL, NixlAgent, Runs
from octavo.kv_connector.worker.ways.regions import (
    Region,
    foreseen,
    joined_runs,
    num_joined,
    read_region,
    region_of,
    until_read,
)

_RUNS_AT_ONCE = 64  # that the engine's thread orders by itself: the library takes 5 us each, and to wake one 100


class NixlWay:
    """See Way."""

    name = "nixl"
    piece_bytes = PIECE_BYTES

    def __init__(self, cache: CacheBytes, *, gives: bool) -> None:
        """gives: peers may read the cache's memory."""
        self._cache = cache
        self._own = region_of(cache, b"", ())
        self._agent, self._spare = NixlAgent(), [self._make_reader()]
        self._metadata = b""
        if gives:
            self._register(self._agent)
            self._metadata = self._agent.metadata()

    def _register(self, agent: NixlAgent) -> None:
        agent.register(self._own.base, self._cache.data.numel(), self._own.device, self._own.kind)

    def _make_reader(self) -> NixlAgent:
        agent = NixlAgent()
        self._register(agent)
        return agent

    def ask(self, pair: Pair, num_bytes: int) -> bytes:
        """See Way."""
        return b""

    def tell(self, blocks: Sequence[int]) -> bytes:
        """See Way: where they are."""
        return msgspec.msgpack.encode(msgspec.structs.replace(self._own, agent=self._metadata, blocks=list(blocks)))

    def orders_at_once(self, theirs: Sequence[int], blocks: Sequence[int]) -> bool:
        """See Way."""
        return num_joined(blocks, theirs) * self._own.num_pages <= _RUNS_AT_ONCE

    def read_ahead(self, pair: Pair, theirs: Sequence[int], job: Job, blocks: Sequence[int]) -> Ahead:
        """See Way."""
        region = foreseen(pair, theirs)
        if region is None:
            return NOT_AHEAD
        wait = self._order(pair, region, job, blocks)
        return Ahead(msgspec.msgpack.encode(region), wait)

    def give(self, pair: Pair, asked: bytes, job: Job, pieces: Sequence[Sequence[int]]) -> None:
        """See Way: let NIXL work until the peer says something."""
        self._cache.enter_thread()
        until_read(pair, job, POLL, self._agent.work)

    def take(self, pair: Pair, told: bytes, job: Job, pieces: Sequence[Sequence[int]]) -> None:
        """See Way: read them, all at once."""
        blocks = [block for piece in pieces for block in piece]
        self._order(pair, read_region(told, pair, len(blocks)), job, blocks)()

    def _order(self, pair: Pair, theirs: Region, job: Job, blocks: Sequence[int]) -> Callable[..., object]:
        """Begin to read; the wait."""
        reader, own = self._reader(pair, theirs), self._own.of(blocks)
        sides = zip(joined_runs(own, theirs), (own, theirs), strict=True)
        pair.mark("mapped")
        local, remote = (Runs(places, region.device, region.kind) for places, region in sides)
        job.touch()
        try:
            wait = reader.agent.begin("READ", local, remote, reader.name, pair)
        except BaseException:
            job.leave()
            raise
        pair.mark("ordered")

        def end(meanwhile: Meanwhile = yield_interpreter) -> None:
            try:
                self._cache.enter_thread()  # another one than ordered it, perhaps
                wait(meanwhile)
            except BaseException:  # no byte comes behind its agent's end: then the blocks may be somebody else's
                pair.drop_state()
                raise
            finally:
                job.leave()

        return end

    def rows(self, pair: Pair, told: bytes, pieces: Sequence[int]) -> Generator[torch.Tensor]:
        """See Way: read them into host memory."""
        theirs, size = read_region(told, pair, sum(pieces)), pair.theirs.block_bytes
        memory, start = self._cache.host_memory(max(pieces, default=0), size), 0
        here = host_region(memory)
        reader = self._reader(pair, theirs)
        registered = reader.agent.register(here.base, memory.numel(), here.device, here.kind)
        try:
            for count in pieces:
                remote = runs_of(theirs, theirs.blocks[start : start + count], theirs.num_pages)
                reader.agent.move("READ", runs_of(here, range(count), theirs.num_pages), remote, reader.name, pair)
                yield memory[:count]
                start += count
        finally:
            reader.agent.forget(registered)

    def _reader(self, pair: Pair, theirs: Region) -> Met:
        """The agent of a connection, for this thread."""
        self._cache.enter_thread()
        if pair.state is None:
            agent = self._spare.pop() if self._spare else self._make_reader()
            pair.state = Met(agent, agent.meet(theirs.agent))
        state: Met = pair.state
        return state

    def close(self) -> None:
        """See Way."""
        for agent in (self._agent, *self._spare):
            agent.close()


class Met:
    """An agent of a connection's own, and the name of the other side's."""

    def __init__(self, agent: NixlAgent, name: str) -> None:
        """They have met."""
        self.agent, self.name = agent, name

    def close(self) -> None:
        """The connection ends, and all that was under way on it."""
        self.agent.close()


def host_region(memory: torch.Tensor) -> Region:
    """Rows of host memory, uint8 [rows, bytes], as blocks whose pages lie together."""
    return Region(
        agent=b"",
        base=memory.data_ptr(),
        kind="DRAM",
        device=0,
        num_pages=1,
        num_blocks=memory.shape[0],
        page_bytes=memory.shape[1],
        blocks=[],
    )


def runs_of(region: Region, blocks: Sequence[int], num_pages: int) -> Runs:
    """Of each of the `num_pages` parts of each block."""
    return Runs(region.runs(blocks, num_pages), region.device, region.kind)
