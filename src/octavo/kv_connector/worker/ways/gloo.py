"""Blocks by torch.distributed: over TCP, through host memory, in a process group of two."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Generator, Iterator, Sequence

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job
from octavo.kv_connector.worker.pair import Pair, TransferError
from octavo.rl.transport.gloo import make_gloo


class GlooWay:
    """See Way. The side that wants blocks has the store, where the group meets; it stays while the connection does."""

    name = "gloo"

    def __init__(self, cache: CacheBytes) -> None:
        """Nobody is met."""
        self._cache = cache

    def ask(self, pair: Pair) -> bytes:
        """See Way: the store's port, or nothing where the group is there."""
        if pair.state is not None:
            return b""
        store = TCPStore(pair.own_host, 0, 2, True, datetime.timedelta(seconds=pair.timeout), wait_for_workers=False)
        pair.state = store
        return str(store.port).encode()

    def tell(self, blocks: Sequence[int]) -> bytes:
        """See Way."""
        return b""

    def give(self, pair: Pair, asked: bytes, job: Job, pieces: Sequence[Sequence[int]]) -> None:
        """See Way."""
        limit = datetime.timedelta(seconds=pair.timeout)
        with _deadline(pair, "take"):
            if asked:
                store = TCPStore(pair.peer_host, int(asked), 2, False, limit, wait_for_workers=False)
                pair.state = store, make_gloo(PrefixStore("octavo blocks", store), 1, 2, limit, pair.own_host)
            _, group = pair.state
        for piece in pieces:
            rows = self._cache.host_memory(len(piece), self._cache.block_bytes)
            with job.touching():
                self._cache.read(piece, list(rows))
            with _deadline(pair, "take"):
                group.send([rows.view(-1)], 0, 0).wait(limit)

    def take(self, pair: Pair, told: bytes, job: Job, pieces: Sequence[Sequence[int]]) -> None:
        """See Way."""
        for piece, rows in zip(pieces, self.rows(pair, told, list(map(len, pieces))), strict=True):
            with job.touching():
                self._cache.write(piece, list(rows))

    def rows(self, pair: Pair, told: bytes, pieces: Sequence[int]) -> Generator[torch.Tensor]:
        """See Way."""
        limit = datetime.timedelta(seconds=pair.timeout)
        with _deadline(pair, "send"):
            if not isinstance(pair.state, tuple):
                store = pair.state
                pair.state = store, make_gloo(PrefixStore("octavo blocks", store), 0, 2, limit, pair.own_host)
            _, group = pair.state
        for count in pieces:
            rows = self._cache.host_memory(count, pair.theirs.block_bytes)
            with _deadline(pair, "send"):
                group.recv([rows.view(-1)], 1, 0).wait(limit)
            yield rows

    def close(self) -> None:
        """See Way."""


@contextlib.contextmanager
def _deadline(pair: Pair, what: str) -> Iterator[None]:
    """Within: a peer has to do something in time. Raises TransferError."""
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())[:200]
        raise TransferError(f"{pair.peer} did not {what} blocks within {pair.timeout:g} s: {text}") from None
