"""Blocks by memory that both processes map: the side that goes on copies out of the other one's cache, on one host.

Owns what a peer is told of the cache's memory, what was mapped of peers, and a thread that lets go of peers which have
gone: their GPU would else have no room for the next engine. Invariants: nothing is read outside of what the driver says
was mapped, if it says so; a mapping ends with its connection, and not while blocks are copied out of it.
"""

from __future__ import annotations

import logging
import select
import threading
from collections.abc import Callable, Generator, Sequence
from typing import ClassVar

import msgspec
import torch

from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job
from octavo.kv_connector.worker.pair import (
    NOT_AHEAD,
    PIECE_BYTES,
    Ahead,
    Meanwhile,
    Pair,
    TransferError,
    UnlikeError,
    yield_interpreter,
)
from octavo.kv_connector.worker.ways.ipc_memory import DeviceMemory, Memory, Shared, host_name
from octavo.kv_connector.worker.ways.regions import Region, foreseen, read_region, region_of, until_read

_LOG = logging.getLogger(__name__)
_LOOK = 1.0  # seconds between two looks whether a peer has gone


class IpcWay:
    """See Way."""

    name = "ipc"
    piece_bytes = PIECE_BYTES
    memory: ClassVar[Callable[[torch.device], Memory]] = DeviceMemory

    def __init__(self, cache: CacheBytes, *, gives: bool) -> None:
        """gives: peers may map the cache's memory. Raises RuntimeError where they cannot."""
        self._cache, self._memory = cache, type(self).memory(cache.device)
        self._own = region_of(cache, b"", ())
        self._shared = msgspec.msgpack.encode(self._memory.share(cache.data)) if gives else b""
        self._lock = threading.Lock()
        self._mapped: set[_Mapped] = set()
        self._watch: threading.Thread | None = None

    def ask(self, pair: Pair, num_bytes: int) -> bytes:
        """See Way."""
        return b""

    def tell(self, blocks: Sequence[int]) -> bytes:
        """See Way: where they are, and what that is mapped by."""
        return msgspec.msgpack.encode(msgspec.structs.replace(self._own, agent=self._shared, blocks=list(blocks)))

    def orders_at_once(self, theirs: Sequence[int], blocks: Sequence[int]) -> bool:
        """See Way: a launch."""
        return True

    def read_ahead(self, pair: Pair, theirs: Sequence[int], job: Job, blocks: Sequence[int]) -> Ahead:
        """See Way."""
        region = foreseen(pair, theirs)
        if region is None:
            return NOT_AHEAD
        wait = self._order(pair, region, job, blocks)
        return Ahead(msgspec.msgpack.encode(region), wait)

    def give(self, pair: Pair, asked: bytes, job: Job, pieces: Sequence[Sequence[int]]) -> None:
        """See Way: the peer does it."""
        until_read(pair, job, pair.timeout, lambda: None)

    def take(self, pair: Pair, told: bytes, job: Job, pieces: Sequence[Sequence[int]]) -> None:
        """See Way: all at once."""
        blocks = [block for piece in pieces for block in piece]
        self._order(pair, read_region(told, pair, len(blocks)), job, blocks)()

    def _order(self, pair: Pair, theirs: Region, job: Job, blocks: Sequence[int]) -> Callable[..., object]:
        """Begin to copy; the wait, by any thread, until which the peer's memory is not unmapped."""
        mapped = self._mapping(pair, theirs)
        mapped.lock.acquire()
        try:
            source = mapped.of(theirs)
            pair.mark("mapped")
            job.touch()
            try:
                wait = self._memory.order(self._cache.data, self._own.of(blocks), source)
            except BaseException:
                job.leave()
                raise
        except BaseException:
            mapped.lock.release()
            raise
        pair.mark("ordered")

        def end(meanwhile: Meanwhile = yield_interpreter) -> None:
            try:
                wait(meanwhile)
            finally:
                job.leave()
                mapped.lock.release()

        return end

    def rows(self, pair: Pair, told: bytes, pieces: Sequence[int]) -> Generator[torch.Tensor]:
        """See Way: copied beside the cache, and from there to the host."""
        size, start = pair.theirs.block_bytes, 0
        with torch.inference_mode():
            beside = torch.empty((max(pieces, default=0), size), dtype=torch.uint8, device=self._cache.device)
        rows = self._cache.host_memory(*beside.shape)
        own = msgspec.structs.replace(
            self._own, base=beside.data_ptr(), num_pages=1, num_blocks=len(beside), page_bytes=size
        )
        theirs = read_region(told, pair, sum(pieces))
        for count in pieces:
            mapped, there = self._mapping(pair, theirs), theirs.of(theirs.blocks[start : start + count])
            with mapped.lock:
                self._memory.order(beside, own.of(range(count)), mapped.of(there))()
            with torch.inference_mode():
                rows[:count].copy_(beside[:count])
            yield rows[:count]
            start += count

    def _mapping(self, pair: Pair, theirs: Region) -> _Mapped:
        """The peer's memory, mapped. Raises TransferError."""
        if pair.state is None or pair.state.shared != theirs.agent:
            pair.drop_state()
            pair.state = self._map(pair, theirs.agent)
        mapped: _Mapped = pair.state
        return mapped

    def _map(self, pair: Pair, told: bytes) -> _Mapped:
        try:
            shared = msgspec.msgpack.decode(told, type=Shared)
        except ValueError as error:
            raise TransferError(f"{pair.peer} speaks another protocol: {error}") from None
        if shared.host != host_name():
            raise UnlikeError(f"{pair.peer}: backend ipc is for two engines of one host, and it runs on another one")
        try:
            address, num_bytes = self._memory.open(shared)
        except RuntimeError as error:
            raise TransferError(f"{pair.peer}: the memory of its cache cannot be mapped here: {error}") from None
        mapped = _Mapped(self, pair, told, address=address, num_bytes=num_bytes, offset=shared.offset)
        with self._lock:
            self._mapped.add(mapped)
            if self._watch is None:
                self._watch = threading.Thread(target=self._let_go, name="octavo-kv-mapped", daemon=True)
                self._watch.start()
        return mapped

    def unmap(self, mapped: _Mapped) -> None:
        """Its connection has ended, and nothing is copied out of it."""
        with self._lock:
            self._mapped.discard(mapped)
        try:
            self._memory.close(mapped.address)
        except RuntimeError as error:  # of a driver that ends, or is broken
            _LOG.warning("the memory of a peer's cache stays mapped: %s", error)

    def _let_go(self) -> None:
        """Unmap what is of peers that have gone, until nothing is mapped."""
        while True:
            with self._lock:
                watched = list(self._mapped)
                if not watched:
                    self._watch = None
                    return
            poll = select.poll()
            for mapped in watched:
                if (number := mapped.pair.sock.fileno()) >= 0:
                    poll.register(number, select.POLLRDHUP)
            gone = {number for number, _ in poll.poll(_LOOK * 1000)}
            for mapped in watched:
                if mapped.pair.sock.fileno() in gone:
                    mapped.close()

    def close(self) -> None:
        """See Way."""
        with self._lock:
            mapped = list(self._mapped)
        for each in mapped:
            each.close()


class _Mapped:
    """A peer's memory as it is mapped for a connection."""

    def __init__(self, way: IpcWay, pair: Pair, shared: bytes, *, address: int, num_bytes: int, offset: int) -> None:
        """shared: what it was opened by. offset: of the cache, in what was opened."""
        self._way, self.pair, self.shared = way, pair, shared
        self.address, self.num_bytes, self.offset = address, num_bytes, offset
        self.lock = threading.Lock()  # while blocks are copied out of it
        self.is_closed = False

    def of(self, theirs: Region) -> Region:
        """Where a peer's blocks are here, under the lock. Raises TransferError, EOFError."""
        if self.is_closed:
            raise EOFError(f"{self.pair.peer} has closed the connection")
        end = self.offset + theirs.num_pages * theirs.num_blocks * theirs.page_bytes
        if not 0 <= self.offset <= end or 0 < self.num_bytes < end:
            raise TransferError(f"{self.pair.peer} tells of {end} bytes, and {self.num_bytes} are mapped")
        return theirs.of(theirs.blocks, self.address + self.offset)

    def close(self) -> None:
        """The connection has ended. May be called twice."""
        with self.lock:
            if self.is_closed:
                return
            self.is_closed = True
        self._way.unmap(self)
