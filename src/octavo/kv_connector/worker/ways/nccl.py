"""Blocks by NCCL: from GPU to GPU, in a process group of two whose engines have a GPU each.

Owns the copies between the cache and what goes over the link, on a stream of its own. What an order touches is done
when it begins, and what came lies in the cache when its piece ends: the stream is waited for, and no step is. While
one piece is on the link the next one is gathered there, and the last one scattered here.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed import BroadcastOptions

from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job
from octavo.kv_connector.worker.pair import Pair
from octavo.kv_connector.worker.ways.gloo import GIVES, TAKES, GlooWay, Member, deadline
from octavo.rl.transport.group import MakeGroup
from octavo.rl.transport.nccl import make_nccl

_POLL = 2e-5  # seconds between two looks: what torch waits with looks every ten milliseconds
_LOOK = 0.05  # seconds between two looks at whether the peer is there
_AHEAD = 2  # pieces that are on their way behind the one that is waited for
_Item = TypeVar("_Item")
_Begun = TypeVar("_Begun")


class _Sent:
    """Blocks in memory beside the cache, on their way to or from a peer."""

    def __init__(self, rows: torch.Tensor, work: Any) -> None:
        self.rows, self._work = rows, work

    def wait(self, pair: Pair, what: str) -> None:
        """Until they have arrived, for the current stream too. Raises TransferError."""
        until = time.monotonic() + pair.left
        with deadline(pair, what):
            looks_at = time.monotonic() + _LOOK
            while not self._work.is_completed() and time.monotonic() < until:
                if time.monotonic() >= looks_at:
                    looks_at += _LOOK
                    if pair.is_broken_off:
                        raise EOFError(f"{pair.peer} has closed the connection")
                time.sleep(_POLL)
            self._work.wait(datetime.timedelta(milliseconds=1))


class NcclWay(GlooWay):
    """See Way."""

    name = "nccl"
    piece_bytes = 96 << 20
    make: MakeGroup = staticmethod(make_nccl)

    def __init__(self, cache: CacheBytes) -> None:
        """Nobody is met."""
        super().__init__(cache)
        self._stream = torch.cuda.Stream(cache.device) if cache.on_gpu else None

    def take(self, pair: Pair, told: bytes, job: Job, pieces: Sequence[Sequence[int]]) -> None:
        """See Way."""
        self._meet(pair, pair.state, TAKES)
        with self._beside():
            for piece, coming in begun_ahead(pieces, lambda piece: self._begin(pair, self._empty(pair, len(piece)))):
                coming.wait(pair, "send")
                pair.mark("came")
                with job.touching():
                    self._cache.scatter(piece, coming.rows)
                    self._settle()

    def _make(self, pair: Pair, store: Any, rank: int, limit: datetime.timedelta) -> Any:
        return type(self).make(store, rank, 2, limit, pair.own_host)

    def _meet(self, pair: Pair, store: object, rank: int) -> None:
        if not isinstance(store, Member):
            with self._beside():
                super()._meet(pair, store, rank)

    def _send_all(self, pair: Pair, job: Job, pieces: Sequence[Sequence[int]]) -> None:
        with self._beside():
            for _, going in begun_ahead(pieces, lambda piece: self._begin(pair, self._gathered(job, piece))):
                going.wait(pair, "take")
                pair.mark("went")

    def _gathered(self, job: Job, piece: Sequence[int]) -> torch.Tensor:
        with job.touching():
            rows = self._cache.gather(piece)
            self._settle()
        return rows

    def _receive(self, pair: Pair, count: int) -> torch.Tensor:
        rows = self._cache.host_memory(count, pair.theirs.block_bytes)
        with self._beside(), torch.inference_mode():
            coming = self._begin(pair, self._empty(pair, count))
            coming.wait(pair, "send")
            rows.copy_(coming.rows, non_blocking=True)
        return rows

    def _empty(self, pair: Pair, count: int) -> torch.Tensor:
        with torch.inference_mode():
            return torch.empty((count, pair.theirs.block_bytes), dtype=torch.uint8, device=self._cache.device)

    def _begin(self, pair: Pair, rows: torch.Tensor) -> _Sent:
        """The peer that has them sends rows: over the connection that the meeting made, which a send would not use."""
        options = BroadcastOptions()
        options.rootRank, options.timeout = GIVES, datetime.timedelta(seconds=pair.left)
        with deadline(pair, "move"):
            return _Sent(rows, pair.state.group.broadcast([rows.view(-1)], options))

    def _settle(self) -> None:
        """Wait for what was begun on the own stream."""
        if self._stream is not None:
            self._stream.synchronize()

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        """Within: the current stream is its own; what was begun there has ended behind."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._cache.device), torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()


def begun_ahead(items: Iterable[_Item], begin: Callable[[_Item], _Begun]) -> Iterator[tuple[_Item, _Begun]]:
    """Each item with what `begin` gives for it, which by then is asked for the next ones too."""
    begun = collections.deque[tuple[_Item, _Begun]]()
    for item in items:
        begun.append((item, begin(item)))
        if len(begun) > _AHEAD:
            yield begun.popleft()
    while begun:
        yield begun.popleft()
