"""Blocks by torch.distributed: over TCP, through host memory, in a process group of two."""

from __future__ import annotations

import contextlib
import datetime
import socket
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job
from octavo.kv_connector.worker.pair import NOT_AHEAD, PIECE_BYTES, Ahead, Pair, TransferError
from octavo.rl.transport.gloo import make_gloo

TAKES, GIVES = 0, 1  # ranks of a group of two


class GlooWay:
    """See Way. The side that wants blocks has the store, where the group meets; it stays while the connection does."""

    name = "gloo"
    piece_bytes = PIECE_BYTES

    def __init__(self, cache: CacheBytes) -> None:
        """Nobody is met."""
        self._cache = cache

    def ask(self, pair: Pair, num_bytes: int) -> bytes:
        """See Way: the store's port, or nothing where the group is there."""
        if pair.state is not None:
            return b""
        store = TCPStore(pair.own_host, 0, 2, True, datetime.timedelta(seconds=pair.timeout), wait_for_workers=False)
        pair.state = store
        return str(store.port).encode()

    def tell(self, blocks: Sequence[int]) -> bytes:
        """See Way."""
        return b""

    def orders_at_once(self, theirs: Sequence[int], blocks: Sequence[int]) -> bool:
        """See Way."""
        return False

    def read_ahead(self, pair: Pair, theirs: Sequence[int], job: Job, blocks: Sequence[int]) -> Ahead:
        """See Way: bytes come when they are sent."""
        return NOT_AHEAD

    def give(self, pair: Pair, asked: bytes, job: Job, pieces: Sequence[Sequence[int]]) -> None:
        """See Way."""
        if asked:
            limit = datetime.timedelta(seconds=pair.timeout)
            with deadline(pair, "take"):
                _reach(pair, int(asked))
                store = TCPStore(pair.peer_host, int(asked), 2, False, limit, wait_for_workers=False)
            self._meet(pair, store, GIVES)
        self._send_all(pair, job, pieces)

    def _send_all(self, pair: Pair, job: Job, pieces: Sequence[Sequence[int]]) -> None:
        for piece in pieces:
            self._send(pair, job, piece)

    def take(self, pair: Pair, told: bytes, job: Job, pieces: Sequence[Sequence[int]]) -> None:
        """See Way."""
        for piece, rows in zip(pieces, self.rows(pair, told, list(map(len, pieces))), strict=True):
            with job.touching():
                self._cache.write(piece, list(rows))

    def rows(self, pair: Pair, told: bytes, pieces: Sequence[int]) -> Generator[torch.Tensor]:
        """See Way."""
        self._meet(pair, pair.state, TAKES)
        for count in pieces:
            yield self._receive(pair, count)

    def _meet(self, pair: Pair, store: Any, rank: int) -> None:
        """Make the group of both, if it is not there. Raises TransferError."""
        if isinstance(store, Member):
            return
        limit = datetime.timedelta(seconds=pair.timeout)
        with deadline(pair, "take" if rank == GIVES else "send"):
            group = self._make(pair, PrefixStore("octavo blocks", store), rank, limit)
        pair.state = Member(store, group)

    def _make(self, pair: Pair, store: Any, rank: int, limit: datetime.timedelta) -> Any:
        """Raises EOFError where the peer goes away meanwhile.

        It says nothing to a store here any more, and with one that is there the store goes too.
        """

        def check() -> None:
            if rank == TAKES and pair.is_broken_off:
                raise EOFError(f"{pair.peer} has closed the connection")

        return make_gloo(store, rank, 2, limit, pair.own_host, check)

    def _send(self, pair: Pair, job: Job, piece: Sequence[int]) -> None:
        rows = self._cache.host_memory(len(piece), self._cache.block_bytes)
        with job.touching():
            self._cache.read(piece, list(rows))
        limit = datetime.timedelta(seconds=pair.timeout)
        with deadline(pair, "take"):
            pair.state.group.send([rows.view(-1)], TAKES, 0).wait(limit)

    def _receive(self, pair: Pair, count: int) -> torch.Tensor:
        rows = self._cache.host_memory(count, pair.theirs.block_bytes)
        limit = datetime.timedelta(seconds=pair.timeout)
        with deadline(pair, "send"):
            pair.state.group.recv([rows.view(-1)], GIVES, 0).wait(limit)
        return rows

    def close(self) -> None:
        """See Way."""


class Member:
    """This side of a group of two, which ends with the connection."""

    def __init__(self, store: Any, group: Any) -> None:
        """The group is made."""
        self.store, self.group = store, group

    def __del__(self) -> None:
        """A group of NCCL's waits for its peer otherwise."""
        getattr(self.group, "abort", lambda: None)()


def _reach(pair: Pair, port: int) -> None:
    """See that the peer listens: where nobody does the store would try until its limit, and print its stack.

    Raises RuntimeError.
    """
    try:
        socket.create_connection((pair.peer_host, port), pair.timeout).close()
    except OSError as error:
        raise RuntimeError(f"port {port} cannot be reached: {error.strerror or 'no answer'}") from None


@contextlib.contextmanager
def deadline(pair: Pair, what: str) -> Iterator[None]:
    """Within: a peer has to do something in time. Raises TransferError."""
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())[:200]
        raise TransferError(f"{pair.peer} did not {what} blocks within {pair.timeout:g} s: {text}") from None
