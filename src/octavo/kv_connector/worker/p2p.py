"""The worker's half of `p2p` and its kin: offers that peers fetch, and fetches from peers.

Owns the listening socket, on which a fetch is asked for; its bytes go the way that both sides are set to. One
connection serves one fetch at a time. Invariants: whoever waits has a deadline, and an error that names the peer; an
offer has ended when its peer says that it has all, and a fetch that breaks off leaves the offer open for another; a
fetch counts when the peer answers that the blocks were on offer until then.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from octavo.config.kv_transfer import KVTransferConfig, refuse
from octavo.kv_connector import ConnectorStats
from octavo.kv_connector.offers import Wanted
from octavo.kv_connector.orders import Order, Report
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job, Mover
from octavo.kv_connector.worker.pair import PROTOCOL, Ask, Done, Pair, Told, TransferError, Way

_LOG = logging.getLogger(__name__)
_APPEARS = 5.0  # seconds in which an offer that a peer knows of has come here


class P2PWorker:
    """See WorkerConnector."""

    def __init__(
        self, cache: CacheBytes, transfer: KVTransferConfig, identity: str, way: Way, *, num_threads: int
    ) -> None:
        """Listens, where blocks go out. Raises ConfigError for an address that cannot be had."""
        self._cache, self._identity, self._timeout, self._way = cache, identity, transfer.timeout, way
        self._mover = Mover(_Fetches(cache, identity, transfer.timeout, way), cache.block_bytes, num_threads)
        self._offers: dict[str, Job] = {}
        self._numbers: dict[int, str] = {}  # order -> its transfer id
        self._ended: list[Report] = []
        self._changed = threading.Condition()
        self._pairs: set[Pair] = set()
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
        self._way.close()

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
            pair = Pair(sock, self._timeout)
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

    def _answer(self, pair: Pair, ask: Ask) -> None:
        refused, job, blocks = self._find(ask)
        pair.send(Told(refused=refused, told=b"" if job is None else self._way.tell(blocks)))
        if job is None:
            return
        started = time.monotonic()
        self._way.give(pair, ask.told, job, blocks)
        pair.receive(Done)
        with self._changed:
            if self._offers.get(ask.transfer_id) is not job or not job.finish():
                raise TransferError(f"transfer {ask.transfer_id!r} ended before it was fetched")
            del self._offers[ask.transfer_id], self._numbers[job.order.number]
            self._ended.append(Report(number=job.order.number))
            self._sent_blocks += len(blocks)
            self._send_seconds += time.monotonic() - started
        pair.send(Done())

    def _find(self, ask: Ask) -> tuple[str, Job | None, list[int]]:
        """Why there is nothing, or the offer and its blocks in the order that is asked for."""
        if ask.protocol != PROTOCOL:
            return f"it speaks protocol {PROTOCOL} of octavo's, you speak {ask.protocol}", None, []
        if ask.identity != self._identity:
            return f"its cache follows from {self._identity}, yours from {ask.identity}", None, []
        if ask.way != self._way.name:
            return f"its blocks go by {self._way.name}, yours come by {ask.way}", None, []
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

    def __init__(self, cache: CacheBytes, identity: str, timeout: float, way: Way) -> None:
        self._cache, self._identity, self._timeout, self._way = cache, identity, timeout, way
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, int], list[Pair]] = {}

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
            except TimeoutError:
                raise
            except (OSError, EOFError):  # the peer was started anew: once more, over a new connection
                kept.close()
        try:
            sock = socket.create_connection(address, self._timeout)
        except OSError as error:
            raise TransferError(f"{wanted.host}:{wanted.port} cannot be reached: {error}") from None
        return self._fetch(Pair(sock, self._timeout), address, job, wanted)

    def _fetch(self, pair: Pair, address: tuple[str, int], job: Job, wanted: Wanted) -> Report:
        try:
            pair.send(
                Ask(
                    identity=self._identity,
                    block_bytes=self._cache.block_bytes,
                    transfer_id=wanted.transfer_id,
                    digest=wanted.digest,
                    places=wanted.places,
                    way=self._way.name,
                    told=self._way.ask(pair),
                )
            )
            told = pair.receive(Told)
            if told.refused:
                raise TransferError(f"{pair.peer}: {told.refused}")
            self._way.take(pair, told.told, job, job.order.blocks)
            pair.send(Done())
            pair.receive(Done)
        except BaseException:
            pair.close()
            raise
        with self._lock:
            self._idle.setdefault(address, []).append(pair)
        return Report(number=job.order.number)
