"""Blocks by Mooncake's transfer engine: the side that goes on reads the other one's cache, over TCP or RDMA.

Owns the engines, the registration of the whole cache, and the reads. Knows blocks as runs of bytes. A read that was
given up goes on inside the library, and what arrives late is written all the same. So blocks arrive in memory of the
connection, and a connection has an engine of its own: when one ends so does the other, and no byte comes after.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job
from octavo.kv_connector.worker.pair import Pair, TransferError
from octavo.kv_connector.worker.ways.regions import read_region, region_of, until_read

_MAX_RUNS = 2048  # of a batch: with more on their way to one peer the library refuses it, and all that follow
_PIECE_BYTES = 16 << 20  # of the memory of a connection
_LEAST_SECONDS = 5  # that the library gives a batch


class MooncakeWay:
    """See Way."""

    def __init__(self, cache: CacheBytes, host: str, protocol: str, timeout: float, *, gives: bool) -> None:
        """host: where peers find this one. gives: registers the cache's memory. Raises RuntimeError."""
        self._cache, self._protocol, self._timeout = cache, protocol, timeout
        self.name = f"mooncake over {protocol}"
        self._engine = self._make(host, cache.data.data_ptr(), cache.data.numel()) if gives else None
        row_bytes = cache.block_bytes
        self._count = max(min(_PIECE_BYTES // row_bytes, _MAX_RUNS // cache.num_pages), 1)

    def _make(self, host: str, address: int, num_bytes: int) -> Any:
        """An engine that may move this memory."""
        from mooncake.engine import TransferEngine

        limit = max(_LEAST_SECONDS, math.ceil(self._timeout))
        os.environ["MC_TRANSFER_TIMEOUT"] = str(limit)  # it is read when an engine is made
        engine = TransferEngine()
        if code := engine.initialize(host, "P2PHANDSHAKE", self._protocol, ""):
            raise RuntimeError(f"Mooncake's transfer engine does not start on {host} over {self._protocol}: {code}")
        if code := engine.register_memory(address, num_bytes):
            raise RuntimeError(f"Mooncake's transfer engine does not take {num_bytes} bytes of memory: {code}")
        return engine

    def ask(self, pair: Pair) -> bytes:
        """See Way."""
        return b""

    def tell(self, blocks: Sequence[int]) -> bytes:
        """See Way: where they are."""
        assert self._engine is not None, "who offers blocks has registered them"
        return msgspec.msgpack.encode(region_of(self._cache, str(self._engine.get_rpc_port()).encode(), blocks))

    def give(self, pair: Pair, asked: bytes, job: Job, blocks: Sequence[int]) -> None:
        """See Way: the library's threads do it."""
        until_read(pair, job, pair.timeout, lambda: None)

    def take(self, pair: Pair, told: bytes, job: Job, blocks: Sequence[int]) -> None:
        """See Way: read them."""
        theirs = read_region(told, pair, self._cache, len(blocks))
        if pair.state is None:
            pair.state = _Memory(self, pair.own_host)
        memory = pair.state
        segment = f"{pair.peer_host}:{int(theirs.agent)}"
        for start in range(0, len(blocks), self._count):
            part = slice(start, start + self._count)
            self._read(pair, memory, segment, theirs.addresses(theirs.blocks[part]))
            with job.touching():
                self._cache.write(blocks[part], list(memory.rows[: len(blocks[part])]))

    def _read(self, pair: Pair, memory: _Memory, segment: str, remote: np.ndarray) -> None:
        """remote: uint64 [num_pages, blocks]."""
        size = self._cache.page_bytes
        page, block = np.meshgrid(*map(np.arange, remote.shape), indexing="ij")
        local = memory.rows.data_ptr() + block * self._cache.block_bytes + page * size
        own, others = local.ravel().tolist(), remote.ravel().tolist()
        for start in range(0, len(own), _MAX_RUNS):
            run = slice(start, start + _MAX_RUNS)
            code = memory.engine.batch_transfer_sync_read(segment, own[run], others[run], [size] * len(own[run]))
            if code:
                raise TransferError(
                    f"{pair.peer} did not send blocks: Mooncake's read from {segment} ended with {code}"
                )

    def new_memory(self, host: str) -> tuple[Any, Any]:
        """Memory of a connection, and an engine that fills it."""
        rows = self._cache.host_memory(self._count, self._cache.block_bytes)
        return rows, self._make(host, rows.data_ptr(), rows.numel())

    def close(self) -> None:
        """See Way."""
        self._engine = None


class _Memory:
    """Where blocks arrive. It outlives its engine."""

    def __init__(self, way: MooncakeWay, host: str) -> None:
        self.rows, self.engine = way.new_memory(host)

    def __del__(self) -> None:
        self.engine = None
