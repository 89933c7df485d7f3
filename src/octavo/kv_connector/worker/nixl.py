"""Blocks by NIXL: the side that goes on reads the other one's cache, from memory to memory.

Owns the agent, the registration of the whole cache, and the reads. Knows blocks as runs of bytes. NIXL's own threads
are off: who has the blocks asks NIXL again and again while it is read, since a read goes on only then.
"""

from __future__ import annotations

import select
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config

from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job
from octavo.kv_connector.worker.pair import Pair, TransferError

_POLL = 0.0002  # seconds between two questions


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """What is told of a cache: where its blocks are."""

    agent: bytes  # NIXL's metadata
    base: int  # address
    device: int
    num_pages: int
    num_blocks: int
    page_bytes: int
    blocks: list[int]  # in the order that was asked for


class NixlWay:
    """See Way."""

    name = "nixl"

    def __init__(self, cache: CacheBytes) -> None:
        """Registers the cache's memory."""
        self._cache, self._lock = cache, threading.Lock()
        self._kind = "VRAM" if cache.on_gpu else "DRAM"
        self._device = cache.device.index or 0
        config = nixl_agent_config(enable_prog_thread=False, enable_listen_thread=False, backends=["UCX"])
        self._agent = nixl_agent(f"octavo-{uuid.uuid4()}", config)
        data = cache.data
        run = [(data.data_ptr(), data.numel(), self._device, "")]
        self._registered = self._agent.register_memory(run, self._kind)

    def ask(self, pair: Pair) -> bytes:
        """See Way."""
        return b""

    def tell(self, blocks: Sequence[int]) -> bytes:
        """See Way: where they are."""
        cache = self._cache
        with self._lock:
            agent = self._agent.get_agent_metadata()
        return msgspec.msgpack.encode(
            Cache(
                agent=agent,
                base=cache.data.data_ptr(),
                device=self._device,
                num_pages=cache.num_pages,
                num_blocks=cache.num_blocks,
                page_bytes=cache.page_bytes,
                blocks=list(blocks),
            )
        )

    def give(self, pair: Pair, asked: bytes, job: Job, blocks: Sequence[int]) -> None:
        """See Way: let NIXL work until the peer says something."""
        until = time.monotonic() + pair.timeout
        with job.touching():
            while not select.select([pair.sock], [], [], _POLL)[0]:
                with self._lock:
                    self._agent.get_new_notifs()
                if time.monotonic() > until:
                    raise TransferError(f"{pair.peer} did not take blocks within {pair.timeout:g} s")

    def take(self, pair: Pair, told: bytes, job: Job, blocks: Sequence[int]) -> None:
        """See Way: read them."""
        theirs, own = msgspec.msgpack.decode(told, type=Cache), self._cache
        if (theirs.num_pages, theirs.page_bytes) != (own.num_pages, own.page_bytes):
            raise TransferError(f"{pair.peer} has blocks of {theirs.num_pages} pages of {theirs.page_bytes} bytes")
        local = _runs(own.data.data_ptr(), own.num_pages, own.num_blocks, own.page_bytes, blocks, self._device)
        remote = _runs(
            theirs.base, theirs.num_pages, theirs.num_blocks, theirs.page_bytes, theirs.blocks, theirs.device
        )
        until = time.monotonic() + pair.timeout
        with job.touching():
            with self._lock:
                if pair.state is None:
                    pair.state = self._agent.add_remote_agent(theirs.agent)
                handle = self._agent.initialize_xfer(
                    "READ", self._descs(local), self._descs(remote), pair.state, b"octavo"
                )
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

    def _descs(self, runs: np.ndarray) -> Any:
        return self._agent.get_xfer_descs(runs, self._kind)

    def close(self) -> None:
        """See Way."""
        with self._lock:
            self._agent.deregister_memory(self._registered)


def _runs(base: int, pages: int, num_blocks: int, size: int, blocks: Sequence[int], device: int) -> np.ndarray:
    """(address, bytes, device) of each page of each block."""
    page, block = np.meshgrid(np.arange(pages, dtype=np.uint64), np.array(blocks, np.uint64), indexing="ij")
    addresses = np.uint64(base) + (page * np.uint64(num_blocks) + block).ravel() * np.uint64(size)
    rest = np.full((len(addresses), 2), (size, device), np.uint64)
    return np.column_stack([addresses, rest])
