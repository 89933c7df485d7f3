"""Blocks by Mooncake's transfer engine: the side that goes on reads the other one's cache, over TCP or RDMA.

Owns the engines, the registration of the whole cache, and the reads. Knows blocks as runs of bytes. A read that was
given up goes on inside the library, and what arrives late is written all the same. So blocks arrive in memory of the
connection, and a connection has an engine of its own: when one ends so does the other, and no byte comes after.
"""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job
from octavo.kv_connector.worker.pair import NOT_AHEAD, PIECE_BYTES, Ahead, Pair, TransferError
from octavo.kv_connector.worker.ways.regions import Region, read_region, region_of, until_read

_MAX_RUNS = 2048  # of a batch: with more on their way to one peer the library refuses it, and all that follow
_LEAST_BYTES = 16 << 20  # of the memory of a connection
_LEAST_SECONDS = 5  # that the library gives a batch


class MooncakeWay:
    """See Way."""

    piece_bytes = PIECE_BYTES

    def __init__(self, cache: CacheBytes, host: str, protocol: str, timeout: float, *, gives: bool) -> None:
        """host: where peers find this one. gives: registers the cache's memory. Raises RuntimeError."""
        self._cache, self._protocol, self._timeout = cache, protocol, timeout
        self.name = f"mooncake over {protocol}"
        self._engine = self._make(host, cache.data.data_ptr(), cache.data.numel()) if gives else None

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

    def ask(self, pair: Pair, num_bytes: int) -> bytes:
        """See Way."""
        return b""

    def tell(self, blocks: Sequence[int]) -> bytes:
        """See Way: where they are."""
        assert self._engine is not None, "who offers blocks has registered them"
        return msgspec.msgpack.encode(region_of(self._cache, str(self._engine.get_rpc_port()).encode(), blocks))

    def orders_at_once(self, theirs: Sequence[int], blocks: Sequence[int]) -> bool:
        """See Way."""
        return False

    def read_ahead(self, pair: Pair, theirs: Sequence[int], job: Job, blocks: Sequence[int]) -> Ahead:
        """See Way: not here."""
        return NOT_AHEAD

    def give(self, pair: Pair, asked: bytes, job: Job, pieces: Sequence[Sequence[int]]) -> None:
        """See Way: the library's threads do it."""
        until_read(pair, job, pair.timeout, lambda: None)

    def take(self, pair: Pair, told: bytes, job: Job, pieces: Sequence[Sequence[int]]) -> None:
        """See Way: read them."""
        for piece, rows in zip(pieces, self.rows(pair, told, list(map(len, pieces))), strict=True):
            with job.touching():
                self._cache.write(piece, list(rows))

    def rows(self, pair: Pair, told: bytes, pieces: Sequence[int]) -> Generator[torch.Tensor]:
        """See Way: read them into the memory of the connection."""
        theirs, size, start = read_region(told, pair, sum(pieces)), pair.theirs.block_bytes, 0
        num_bytes = max(pieces, default=0) * size
        if pair.state is None or pair.state.data.numel() < num_bytes:
            pair.state = _Memory(self, pair.own_host, max(num_bytes, _LEAST_BYTES))
        memory = pair.state
        here = msgspec.structs.replace(theirs, base=memory.data.data_ptr(), num_pages=1, page_bytes=size)
        for count in pieces:
            remote = theirs.runs(theirs.blocks[start : start + count], theirs.num_pages)
            self._read(pair, memory.engine, theirs, here.runs(range(count), theirs.num_pages), remote)
            yield memory.data[: count * size].view(count, size)
            start += count

    def _read(self, pair: Pair, engine: Any, theirs: Region, local: np.ndarray, remote: np.ndarray) -> None:
        """local, remote: of as many runs, see Region."""
        segment = f"{pair.peer_host}:{int(theirs.agent)}"
        for start in range(0, len(local), _MAX_RUNS):
            part = slice(start, start + _MAX_RUNS)
            code = engine.batch_transfer_sync_read(
                segment, local[part, 0].tolist(), remote[part, 0].tolist(), local[part, 1].tolist()
            )
            if code:
                raise TransferError(
                    f"{pair.peer} did not send blocks: Mooncake's read from {segment} ended with {code}"
                )

    def new_memory(self, host: str, num_bytes: int) -> tuple[torch.Tensor, Any]:
        """Memory of a connection, and an engine that fills it."""
        data = self._cache.host_memory(1, num_bytes)[0]
        return data, self._make(host, data.data_ptr(), num_bytes)

    def close(self) -> None:
        """See Way."""
        self._engine = None


class _Memory:
    """Where blocks arrive. It outlives its engine."""

    def __init__(self, way: MooncakeWay, host: str, num_bytes: int) -> None:
        self.data, self.engine = way.new_memory(host, num_bytes)

    def __del__(self) -> None:
        self.engine = None
