"""Blocks by torch.distributed: over TCP, through host memory, in a process group of two.

Invariants: a piece has come when its last bytes have, which say so; a peer that sends more than was asked for loses its
connection, and nothing else here ends by it.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed import BroadcastOptions, PrefixStore, TCPStore  # type: ignore[attr-defined]

from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job
from octavo.kv_connector.worker.pair import NOT_AHEAD, PIECE_BYTES, Ahead, Pair, TransferError
from octavo.process_groups import ending, thrown
from octavo.process_groups.works import Left, wait_for
from octavo.rl.transport.gloo import make_gloo

TAKES, GIVES = 0, 1  # ranks of a group of two
_LAST = np.frombuffer(b"octavo: all here", np.uint8)  # of a piece: gloo does not say how much has come


class GlooWay:
    """See Way. The side that wants blocks has the store, where the group meets; it stays while the connection does."""

    name = "gloo"
    piece_bytes = PIECE_BYTES

    def __init__(self, cache: CacheBytes) -> None:
        """Nobody is met."""
        self._cache = cache
        thrown.catch()

    def ask(self, pair: Pair, num_bytes: int) -> bytes:
        """See Way: the store's port, or nothing where the group is there."""
        if pair.state is not None:
            return b""
        store = TCPStore(pair.own_host, 0, 2, True, datetime.timedelta(seconds=pair.left), wait_for_workers=False)
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
            limit = datetime.timedelta(seconds=pair.left)
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
        limit = datetime.timedelta(seconds=pair.left)
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
        memory, rows = self._memory(len(piece), self._cache.block_bytes)
        memory.numpy()[-len(_LAST) :] = _LAST
        with job.touching():
            self._cache.read(piece, list(rows))
        with deadline(pair, "take"):
            pair.state.broadcast(memory, pair)

    def _receive(self, pair: Pair, count: int) -> torch.Tensor:
        memory, rows = self._memory(count, pair.theirs.block_bytes)
        last = memory.numpy()[-len(_LAST) :]
        last.fill(0)
        with deadline(pair, "send"):
            pair.state.broadcast(memory, pair)
        if not np.array_equal(last, _LAST):
            raise TransferError(f"{pair.peer} sent less than the {rows.numel()} bytes of {count} blocks")
        return rows

    def _memory(self, count: int, block_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What passes at a time, and the blocks in it: uint8 [count, block_bytes]."""
        memory = self._cache.host_memory(1, count * block_bytes + len(_LAST))[0]
        return memory, memory[: -len(_LAST)].view(count, block_bytes)

    def close(self) -> None:
        """See Way."""


class Member:
    """This side of a group of two, which ends with the connection."""

    def __init__(self, store: Any, group: Any) -> None:
        """The group is made."""
        self.store, self.group = store, group
        self._threads = thrown.threads_of(group)
        self._works: list[Any] = []  # on their way
        ending.ends(self)

    def broadcast(self, memory: torch.Tensor, pair: Pair) -> None:
        """From the side that gives to the one that takes, until it is there. Raises as `Pair.receive`, RuntimeError."""
        options = BroadcastOptions()
        options.rootRank, options.timeout = GIVES, datetime.timedelta(seconds=pair.left)

        def check() -> None:
            if (said := thrown.said_by(self._threads)) is not None:
                raise TransferError(f"{pair.peer} sent other than the {memory.numel()} bytes that were due: {said}")
            if pair.is_broken_off:
                raise EOFError(f"{pair.peer} has closed the connection")

        with ending.inside():
            self._works.append(self.group.broadcast([memory], options))
        wait_for(self._works[0], time.monotonic() + pair.left, check, is_cuda=False)
        with ending.inside():
            self._works.clear()

    @property
    def is_quiet(self) -> bool:
        """See ending.Ends."""
        return all(work.is_completed() for work in self._works)

    def end(self) -> None:
        """See ending.Ends."""
        if self.is_quiet:
            self.close()
        else:
            ending.keep(self.group, *self._works)

    def close(self) -> None:
        """Leave; a group with blocks on their way is left meanwhile. May be called twice."""
        works, self._works = self._works, []
        left = Left(self.group, self._threads, works)
        self.group = self.store = None  # nobody else has them
        if left.is_quiet:
            left.end()
        else:
            threading.Thread(target=left.leave, args=(True,), daemon=True, name="octavo-leaving").start()

    def __del__(self) -> None:
        """A group of NCCL's waits for its peer otherwise."""
        if self.group is not None:
            self.close()


def _reach(pair: Pair, port: int) -> None:
    """See that the peer listens: where nobody does the store would try until its limit, and print its stack.

    Raises RuntimeError.
    """
    try:
        socket.create_connection((pair.peer_host, port), pair.left).close()
    except OSError as error:
        raise RuntimeError(f"port {port} cannot be reached: {error.strerror or 'no answer'}") from None


@contextlib.contextmanager
def deadline(pair: Pair, what: str) -> Iterator[None]:
    """Within: a peer has to do something in time. Raises TransferError."""
    try:
        yield
    except TransferError:
        raise
    except RuntimeError as error:
        text = " ".join(str(error).split())[:200]
        raise TransferError(f"{pair.peer} did not {what} blocks within {pair.timeout:g} s: {text}") from None
