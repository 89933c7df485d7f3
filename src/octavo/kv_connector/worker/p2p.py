"""The worker's half of `p2p`: offers that peers fetch, and fetches from peers.

Owns the listening socket, on which a fetch is asked for, and the process group of two that its bytes go over. One
connection serves one fetch at a time. Invariants: whoever waits has a deadline, and an error that names the peer; an
offer has ended when its peer says that it has all, and a fetch that breaks off leaves the offer open for another.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from octavo.config.kv_transfer import KVTransferConfig, refuse
from octavo.kv_connector import ConnectorStats
from octavo.kv_connector.offers import Wanted
from octavo.kv_connector.orders import Order, Report
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job, Mover
from octavo.rl.transport.gloo import make_gloo

_LOG = logging.getLogger(__name__)
PROTOCOL = 1
_LENGTH = struct.Struct("<I")
_MAX_MESSAGE = 16 << 20
_PIECE_BYTES = 16 << 20  # of a send
_APPEARS = 5.0  # seconds in which an offer that a peer knows of has come here


class TransferError(RuntimeError):
    """A peer that fails, or says no."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Fetch: from who goes on with a request."""

    protocol: int = PROTOCOL
    identity: str
    block_bytes: int
    transfer_id: str
    digest: bytes
    places: list[tuple[int, int]]
    store_port: int = 0  # where the process group meets, if there is none on this connection


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: bytes follow, unless it says why not."""

    refused: str = ""


class Done(msgspec.Struct, frozen=True):
    """All bytes are there."""


class _Pair:
    """Two processes that send bytes to each other: a socket for messages, a process group for blocks."""

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        sock.settimeout(timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.timeout = sock, timeout
        self.peer = "{}:{}".format(*sock.getpeername()[:2])
        self.group: Any = None
        self._store: Any = None

    def send(self, message: msgspec.Struct) -> None:
        data = msgspec.msgpack.encode(message)
        self.sock.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, kind: type[Any]) -> Any:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > _MAX_MESSAGE:
            raise TransferError(f"{self.peer} sends a message of {length} bytes")
        try:
            return msgspec.msgpack.decode(self._exactly(length), type=kind)
        except ValueError as error:
            raise TransferError(f"{self.peer} speaks another protocol: {error}") from None

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            part = self.sock.recv(count - len(data))
            if not part:
                raise EOFError(f"{self.peer} has closed the connection")
            data += part
        return bytes(data)

    def meet(self, rank: int, host: str, port: int = 0) -> int:
        """Make the process group; rank 0 has made the store before, at the port that this gives."""
        limit = datetime.timedelta(seconds=self.timeout)
        if rank == 0 and self._store is None:
            self._store = TCPStore(host, 0, 2, True, limit, wait_for_workers=False)
            return int(self._store.port)
        if rank == 1:
            self._store = TCPStore(host, port, 2, False, limit, wait_for_workers=False)
        own = self.sock.getsockname()[0]
        self.group = make_gloo(PrefixStore("octavo blocks", self._store), rank, 2, limit, own)
        return 0

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        self.group = self._store = None


class P2PWorker:
    """See WorkerConnector."""

    def __init__(self, cache: CacheBytes, transfer: KVTransferConfig, identity: str, num_threads: int) -> None:
        """Listens, where blocks go out. Raises ConfigError for an address that cannot be had."""
        self._cache, self._identity, self._timeout = cache, identity, transfer.timeout
        self._mover = Mover(_Fetches(cache, identity, transfer.timeout), cache.block_bytes, num_threads)
        self._offers: dict[str, Job] = {}
        self._numbers: dict[int, str] = {}  # order -> its transfer id
        self._ended: list[Report] = []
        self._changed = threading.Condition()
        self._pairs: set[_Pair] = set()
        self._threads: list[threading.Thread] = []
        self._closing = False
        self._sent_blocks, self._send_seconds = 0, 0.0
        self._listener: socket.socket | None = None
        if transfer.produces:
            try:
                self._listener = socket.create_server((transfer.kv_ip, transfer.kv_port), backlog=64)
            except OSError as error:
                address = f"{transfer.kv_ip}:{transfer.kv_port}"
                limit = f"cannot be listened on: {error.strerror}"
                raise refuse("kv_port", address, limit, "change kv_ip or kv_port; 0: any port") from None
            self._run(self._accept)

    def address(self) -> tuple[str, int]:
        """Where peers find this worker's offers."""
        assert self._listener is not None, "a consumer offers nothing"
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def begin(self, order: Order) -> None:
        """See WorkerConnector."""
        if order.is_load:
            self._mover.begin(order)
            return
        wanted = msgspec.msgpack.decode(order.payload, type=Wanted)
        with self._changed:
            self._offers[wanted.transfer_id] = Job(order)
            self._numbers[order.number] = wanted.transfer_id
            self._changed.notify_all()

    def take(self) -> Sequence[Report]:
        """See WorkerConnector."""
        with self._changed:
            ended, self._ended = self._ended, []
        return [*self._mover.take(), *ended]

    def cancel(self, number: int) -> bool:
        """See WorkerConnector."""
        with self._changed:
            transfer_id = self._numbers.get(number)
            if transfer_id is None:
                return self._mover.cancel(number) and all(report.number != number for report in self._ended)
            if not self._offers[transfer_id].cancel():
                return False
            del self._offers[transfer_id], self._numbers[number]
            return True

    def wait(self, seconds: float) -> None:
        """See WorkerConnector."""
        self._mover.wait(seconds)

    def reset(self) -> bool:
        """See WorkerConnector. Nothing is stored."""
        return True

    def stats(self) -> ConnectorStats:
        """See WorkerConnector."""
        stats = self._mover.stats()
        return ConnectorStats(
            num_saved_blocks=self._sent_blocks,
            num_loaded_blocks=stats.num_loaded_blocks,
            saved_bytes=self._sent_blocks * self._cache.block_bytes,
            loaded_bytes=stats.loaded_bytes,
            save_seconds=self._send_seconds,
            load_seconds=stats.load_seconds,
        )

    def close(self) -> None:
        """See WorkerConnector."""
        self._closing = True
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for pair in list(self._pairs):
            pair.close()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:  # a process group that outlives the interpreter would end it by abort()
            thread.join(self._timeout)
        self._mover.close()

    # What peers ask for, each connection on a thread of its own.

    def _run(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, name="octavo-kv-serve", daemon=True)
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
        thread.start()

    def _accept(self) -> None:
        assert self._listener is not None, "it is made before"
        while not self._closing:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._run(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        try:
            pair = _Pair(sock, self._timeout)
        except OSError:
            sock.close()
            return
        self._pairs.add(pair)
        try:
            while not self._closing:
                sock.settimeout(None)  # until the peer wants something again, if it ever does
                ask = pair.receive(Ask)
                sock.settimeout(self._timeout)
                self._answer(pair, ask)
        except EOFError:
            pass
        except Exception as error:  # the peer's, or of the way to it: it asks again, or computes
            if not self._closing:
                _LOG.warning("blocks for %s did not arrive: %s: %s", pair.peer, type(error).__name__, error)
        finally:
            self._pairs.discard(pair)
            pair.close()

    def _answer(self, pair: _Pair, ask: Ask) -> None:
        refused, job, blocks = self._find(ask)
        pair.send(Told(refused=refused))
        if job is None:
            return
        if pair.group is None:
            pair.meet(1, pair.peer.rpartition(":")[0], ask.store_port)
        started = time.monotonic()
        for piece in _pieces(blocks, self._cache):
            rows = self._cache.host_memory(len(piece), self._cache.block_bytes)
            with job.touching():
                self._cache.read(piece, list(rows))
            with _deadline(pair, "take"):
                pair.group.send([rows.view(-1)], 0, 0).wait(datetime.timedelta(seconds=self._timeout))
        pair.receive(Done)
        with self._changed:
            if job.finish():
                self._offers.pop(ask.transfer_id, None)
                self._numbers.pop(job.order.number, None)
                self._ended.append(Report(number=job.order.number))
            self._sent_blocks += len(blocks)
            self._send_seconds += time.monotonic() - started

    def _find(self, ask: Ask) -> tuple[str, Job | None, list[int]]:
        """Why there is nothing, or the offer and its blocks in the order that is asked for."""
        if ask.identity != self._identity:
            return f"its cache follows from {self._identity}, yours from {ask.identity}", None, []
        with self._changed:
            self._changed.wait_for(lambda: ask.transfer_id in self._offers or self._closing, _APPEARS)
            job = self._offers.get(ask.transfer_id)
        if job is None:
            return f"it offers no transfer {ask.transfer_id!r} (any more)", None, []
        wanted = msgspec.msgpack.decode(job.order.payload, type=Wanted)
        if wanted.digest != ask.digest or ask.block_bytes != self._cache.block_bytes:
            return f"transfer {ask.transfer_id!r} is of other tokens, salts or versions of the weights", None, []
        found = dict(zip(wanted.places, job.order.blocks, strict=True))
        missing = [place for place in ask.places if place not in found]
        if missing:
            return f"transfer {ask.transfer_id!r} has no block at {missing[0]}", None, []
        return "", job, [found[place] for place in ask.places]


class _Fetches:
    """See Handler: loads from peers, over connections that are kept."""

    stored_bytes = 0
    num_evicted = 0

    def __init__(self, cache: CacheBytes, identity: str, timeout: float) -> None:
        self._cache, self._identity, self._timeout = cache, identity, timeout
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, int], list[_Pair]] = {}

    def reset(self) -> bool:
        return True

    def close(self) -> None:
        for pairs in self._idle.values():
            for pair in pairs:
                pair.close()

    def handle(self, job: Job) -> Report:
        wanted = msgspec.msgpack.decode(job.order.payload, type=Wanted)
        address = wanted.host, wanted.port
        with self._lock:
            pairs = self._idle.get(address, [])
            kept = pairs.pop() if pairs else None
        if kept is not None:
            try:
                return self._fetch(kept, address, job, wanted)
            except (OSError, EOFError):  # the peer was started anew: once more, over a new connection
                kept.close()
        try:
            sock = socket.create_connection(address, self._timeout)
        except OSError as error:
            raise TransferError(f"{wanted.host}:{wanted.port} cannot be reached: {error}") from None
        return self._fetch(_Pair(sock, self._timeout), address, job, wanted)

    def _fetch(self, pair: _Pair, address: tuple[str, int], job: Job, wanted: Wanted) -> Report:
        try:
            port = pair.meet(0, pair.sock.getsockname()[0]) if pair.group is None else 0
            pair.send(
                Ask(
                    identity=self._identity,
                    block_bytes=self._cache.block_bytes,
                    transfer_id=wanted.transfer_id,
                    digest=wanted.digest,
                    places=wanted.places,
                    store_port=port,
                )
            )
            told = pair.receive(Told)
            if told.refused:
                raise TransferError(f"{pair.peer}: {told.refused}")
            if pair.group is None:
                pair.meet(0, pair.sock.getsockname()[0])
            for piece in _pieces(job.order.blocks, self._cache):
                rows = self._cache.host_memory(len(piece), self._cache.block_bytes)
                with _deadline(pair, "send"):
                    pair.group.recv([rows.view(-1)], 1, 0).wait(datetime.timedelta(seconds=self._timeout))
                with job.touching():
                    self._cache.write(piece, list(rows))
            pair.send(Done())
        except BaseException:
            pair.close()
            raise
        with self._lock:
            self._idle.setdefault(address, []).append(pair)
        return Report(number=job.order.number)


@contextlib.contextmanager
def _deadline(pair: _Pair, what: str) -> Iterator[None]:
    """Within: a peer has to do something in time. Raises TransferError."""
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())[:200]
        raise TransferError(f"{pair.peer} did not {what} blocks within {pair.timeout:g} s: {text}") from None


def _pieces(blocks: Sequence[int], cache: CacheBytes) -> list[Sequence[int]]:
    count = max(_PIECE_BYTES // cache.block_bytes, 1)
    return [blocks[start : start + count] for start in range(0, len(blocks), count)]
