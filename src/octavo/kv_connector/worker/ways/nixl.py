"""Blocks by NIXL: the side that goes on reads the other one's cache, from memory to memory.

Owns the agent, the registration of the whole cache, and the reads. Knows blocks as runs of bytes. NIXL's own threads
are off: who has the blocks asks NIXL again and again while it is read, since a read goes on only then.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Generator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from nixl_cu12._api import nixl_agent, nixl_agent_config

from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job
from octavo.kv_connector.worker.pair import Pair, TransferError
from octavo.kv_connector.worker.ways.regions import Region, read_region, region_of, until_read

_POLL = 0.0002  # seconds between two questions


class NixlWay:
    """See Way."""

    name = "nixl"

    def __init__(self, cache: CacheBytes) -> None:
        """Registers the cache's memory."""
        self._cache, self._lock = cache, threading.Lock()
        self._kind = "VRAM" if cache.on_gpu else "DRAM"
        config = nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"])
        self._agent = nixl_agent(f"octavo-{uuid.uuid4()}", config)
        own = region_of(cache, b"", ())
        self._registered = self._agent.register_memory([(own.base, cache.data.numel(), own.device, "")], self._kind)

    def ask(self, pair: Pair) -> bytes:
        """See Way."""
        return b""

    def tell(self, blocks: Sequence[int]) -> bytes:
        """See Way: where they are."""
        with self._lock:
            agent = self._agent.get_agent_metadata()
        return msgspec.msgpack.encode(region_of(self._cache, agent, blocks))

    def give(self, pair: Pair, asked: bytes, job: Job, pieces: Sequence[Sequence[int]]) -> None:
        """See Way: let NIXL work until the peer says something."""
        until_read(pair, job, _POLL, self._work)

    def _work(self) -> None:
        with self._lock:
            self._agent.get_new_notifs()

    def take(self, pair: Pair, told: bytes, job: Job, pieces: Sequence[Sequence[int]]) -> None:
        """See Way: read them, all at once."""
        blocks = [block for piece in pieces for block in piece]
        theirs, own = read_region(told, pair, len(blocks)), region_of(self._cache, b"", blocks)
        pages = max(own.num_pages, theirs.num_pages)  # of a block: they lie apart on one side, or on both
        local = self._descs(own.runs(blocks, pages), own.device, own.kind)
        remote = self._descs(theirs.runs(theirs.blocks, pages), theirs.device, theirs.kind)
        with job.touching():
            self._read(pair, theirs, local, remote)

    def rows(self, pair: Pair, told: bytes, pieces: Sequence[int]) -> Generator[torch.Tensor]:
        """See Way: read them into host memory."""
        theirs, size = read_region(told, pair, sum(pieces)), pair.theirs.block_bytes
        memory, start = self._cache.host_memory(max(pieces, default=0), size), 0
        here = msgspec.structs.replace(theirs, base=memory.data_ptr(), num_pages=1, page_bytes=size)
        with self._lock:
            registered = self._agent.register_memory([(memory.data_ptr(), memory.numel(), 0, "")], "DRAM")
        try:
            for count in pieces:
                local = self._descs(here.runs(range(count), theirs.num_pages), 0, "DRAM")
                runs = theirs.runs(theirs.blocks[start : start + count], theirs.num_pages)
                self._read(pair, theirs, local, self._descs(runs, theirs.device, theirs.kind))
                yield memory[:count]
                start += count
        finally:
            with self._lock:
                self._agent.deregister_memory(registered)

    def _read(self, pair: Pair, theirs: Region, local: Any, remote: Any) -> None:
        """local, remote: descriptors of as many runs."""
        until = time.monotonic() + pair.timeout
        with self._lock:
            if pair.state is None:
                pair.state = self._agent.add_remote_agent(theirs.agent)
            handle = self._agent.initialize_xfer("READ", local, remote, pair.state, b"octavo")
            state = self._agent.transfer(handle)
        try:
            while state == "PROC":
                if time.monotonic() > until:
                    raise TransferError(f"{pair.peer} did not send blocks within {pair.timeout:g} s")
                time.sleep(_POLL)
                with self._lock:
                    state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise TransferError(f"{pair.peer}: a read of blocks ended with {state}")
        finally:
            with self._lock:
                self._agent.release_xfer_handle(handle)

    def _descs(self, runs: np.ndarray, device: int, kind: str) -> Any:
        """runs: (address, bytes) of each."""
        return self._agent.get_xfer_descs(np.column_stack([runs, np.full(len(runs), device, np.uint64)]), kind)

    def close(self) -> None:
        """See Way."""
        with self._lock:
            self._agent.deregister_memory(self._registered)
