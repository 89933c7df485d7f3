"""Blocks by NCCL: from GPU to GPU, in a process group of two whose engines have a GPU each.

Owns the copies between the cache and what goes over the link, on a stream of its own. What an order touches is done
when it begins, and what came lies in the cache when its piece ends: the stream is waited for, and no step is.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed import BroadcastOptions

from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job
from octavo.kv_connector.worker.pair import Pair
from octavo.kv_connector.worker.ways.gloo import GIVES, TAKES, GlooWay, Member, deadline
from octavo.rl.transport.group import MakeGroup
from octavo.rl.transport.nccl import make_nccl


class NcclWay(GlooWay):
    """See Way."""

    name = "nccl"
    make: MakeGroup = staticmethod(make_nccl)

    def __init__(self, cache: CacheBytes) -> None:
        """Nobody is met."""
        super().__init__(cache)
        self._stream = torch.cuda.Stream(cache.device) if cache.on_gpu else None

    def take(self, pair: Pair, told: bytes, job: Job, pieces: Sequence[Sequence[int]]) -> None:
        """See Way."""
        self._meet(pair, pair.state, TAKES)
        for piece in pieces:
            with self._beside():
                rows = self._arrived(pair, len(piece))
                with job.touching(), self._beside():
                    self._cache.scatter(piece, rows)

    def _make(self, pair: Pair, store: Any, rank: int, limit: datetime.timedelta) -> Any:
        return type(self).make(store, rank, 2, limit, pair.own_host)

    def _meet(self, pair: Pair, store: object, rank: int) -> None:
        if not isinstance(store, Member):
            with self._beside():
                super()._meet(pair, store, rank)

    def _send(self, pair: Pair, job: Job, piece: Sequence[int]) -> None:
        with self._beside():
            with job.touching(), self._beside():
                rows = self._cache.gather(piece)
            self._broadcast(pair, rows, "take")

    def _receive(self, pair: Pair, count: int) -> torch.Tensor:
        rows = self._cache.host_memory(count, pair.theirs.block_bytes)
        with self._beside(), torch.inference_mode():
            rows.copy_(self._arrived(pair, count), non_blocking=True)
        return rows

    def _arrived(self, pair: Pair, count: int) -> torch.Tensor:
        """The peer's next blocks, on the GPU."""
        with torch.inference_mode():
            rows = torch.empty((count, pair.theirs.block_bytes), dtype=torch.uint8, device=self._cache.device)
        self._broadcast(pair, rows, "send")
        return rows

    def _broadcast(self, pair: Pair, rows: torch.Tensor, what: str) -> None:
        """The peer that has them sends rows: over the connection that the meeting made, which a send would not use."""
        limit, options = datetime.timedelta(seconds=pair.timeout), BroadcastOptions()
        options.rootRank, options.timeout = GIVES, limit
        with deadline(pair, what):
            pair.state.group.broadcast([rows.view(-1)], options).wait(limit)

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Within: the current stream is its own; what was begun there has ended behind."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._cache.device), torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()
