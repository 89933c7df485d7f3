"""The worker's half of `p2p` and its kin: offers that peers fetch, and fetches from peers.

Owns the offers, and the answers to who asks for them; the bytes go the way that both sides are set to. One
connection serves one fetch at a time. Invariants: whoever waits has a deadline, and an error that names the peer; an
offer has ended when all ranks of a peer say that they have all, or when it is released and nobody reads it; a fetch
that breaks off leaves it open for another, and for a short time if the peer has gone; a fetch counts when each rank's
lease says that the blocks were on offer until then, or its answer does.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import functools
import itertools
import logging
import threading
import time
from collections.abc import Iterator, Sequence

import msgspec

from octavo.config.kv_transfer import KVTransferConfig, refuse
from octavo.kv_connector import ConnectorStats
from octavo.kv_connector.guard import Troubles, ends_within
from octavo.kv_connector.orders import Order, Report
from octavo.kv_connector.peers.description import NO_DESCRIPTION, CacheDescription, differences, flaws
from octavo.kv_connector.peers.offers import Wanted
from octavo.kv_connector.worker import NO_WORKER_CONNECTOR
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.connections.listener import Listener
from octavo.kv_connector.worker.connections.releases import Releases
from octavo.kv_connector.worker.fetches import MAX_DIFFERENCES, Fetches
from octavo.kv_connector.worker.mover import Job, Mover
from octavo.kv_connector.worker.pair import PROTOCOL, Ask, Done, Hello, Pair, Told, TransferError, Way, Welcome

_LOG = logging.getLogger(__name__)
_APPEARS = 5.0  # seconds in which an offer that a peer knows of has come here
_MAX_ENDED = 1 << 12  # transfer ids whose offers have ended
_GIVES_WAY = 0.0005  # seconds: longer than it takes to ask over a connection that is there


@dataclasses.dataclass(eq=False, slots=True)
class _Offer:
    """Blocks that peers fetch."""

    job: Job
    wanted: Wanted
    fetched: dict[str, set[int]] = dataclasses.field(default_factory=dict)  # fetch -> ranks that have all
    num_readers: int = 0  # connections over which it is fetched now
    is_released: bool = False  # nobody else will fetch it
    left_at: float | None = None  # on the monotonic clock: when a peer went away over its fetch


def _peer_of(order: Order) -> tuple[str, int] | None:
    """Whom a load waits for: loads from others do not wait for it."""
    return order.wanted.addresses[0] if order.wanted is not None and order.wanted.addresses else None


def _hello(cache: CacheDescription, way: str, engine_id: str, gives_up: list[str]) -> Hello:
    own = msgspec.Raw(msgspec.msgpack.encode(cache))
    return Hello(way=way, cache=own, gives_up=gives_up, engine_id=engine_id)


class P2PWorker:
    """See WorkerConnector."""

    begin_now, arrivals = NO_WORKER_CONNECTOR.begin_now, NO_WORKER_CONNECTOR.arrivals

    def __init__(self, cache: CacheBytes, transfer: KVTransferConfig, way: Way, *, num_threads: int) -> None:
        """Listens, where blocks go out. Raises ConfigError for an address that cannot be had."""
        self._cache, self._timeout, self._way = cache, transfer.timeout, way
        self._engine_id = transfer.engine_id
        fetches, troubles = (
            Fetches(cache, transfer.timeout, way),
            Troubles(transfer.kv_connector, period=0),
        )  # each is one request's
        self._mover = Mover(
            fetches,
            cache.block_bytes,
            num_threads,
            timeout=transfer.timeout,
            troubles=troubles,
            gives_way=_GIVES_WAY,
            start=fetches.start,
            lane=_peer_of,
        )
        self._offers: dict[str, _Offer] = {}
        self._numbers: dict[int, str] = {}  # order -> its transfer id
        self._ended: list[Report] = []
        self._ended_ids = collections.OrderedDict[str, None]()
        self._releases = Releases(functools.partial(_hello, cache.description, way.name), transfer.timeout)
        self._changed = threading.Condition()
        self._sent_blocks, self._send_seconds = 0, 0.0
        self._listener: Listener | None = None
        if transfer.produces:
            often = Troubles(transfer.kv_connector)
            try:
                self._listener = Listener(
                    transfer.kv_ip, transfer.kv_port, transfer.timeout, self._serve, often, transfer.peers
                )
            except OSError as error:
                if (error.errno or 0) < 0 or error.errno == errno.EADDRNOTAVAIL:  # below 0: of the name's look-up
                    limit = "is no IPv4 address of this machine"
                    raise refuse("kv_ip", transfer.kv_ip, limit, "change kv_ip") from None
                address = f"{transfer.kv_ip}:{transfer.kv_port}"
                limit = f"cannot be listened on: {error.strerror}"
                raise refuse("kv_port", address, limit, "change kv_ip or kv_port; 0: any port") from None

    def address(self) -> tuple[str, int]:
        """Where peers find this worker's offers."""
        assert self._listener is not None, "a consumer offers nothing"
        return self._listener.address()

    def begin(self, order: Order) -> None:
        """See WorkerConnector."""
        if order.is_load:
            self._mover.begin(order)
            return
        wanted = order.wanted
        assert wanted is not None, "an offer says what it is called"
        with self._changed:
            self._offers[wanted.transfer_id] = _Offer(Job(order), wanted)
            self._ended_ids.pop(wanted.transfer_id, None)
            self._numbers[order.number] = wanted.transfer_id
            self._changed.notify_all()

    def take(self) -> Sequence[Report]:
        """See WorkerConnector."""
        with self._changed:
            self._release_left()
            ended, self._ended = self._ended, []
        return [*self._mover.take(), *ended]

    def cancel(self, number: int) -> bool:
        """See WorkerConnector."""
        with self._changed:
            transfer_id = self._numbers.get(number)
            if transfer_id is None:
                return self._mover.cancel(number) and all(report.number != number for report in self._ended)
            if not self._offers[transfer_id].job.cancel():
                return False
            self._forget(self._offers[transfer_id])
            return True

    def _forget(self, offer: _Offer) -> None:
        del self._offers[offer.wanted.transfer_id], self._numbers[offer.job.order.number]
        self._ended_ids[offer.wanted.transfer_id] = None
        while len(self._ended_ids) > _MAX_ENDED:
            self._ended_ids.popitem(last=False)
        self._changed.notify_all()

    def give_up(self, addresses: Sequence[tuple[str, int]], engine_id: str, transfer_id: str) -> None:
        """Tell the ranks of a peer that what they have on offer will not be fetched. Does not wait for them."""
        if self._cache.description.rank == 0:  # one word is enough
            self._releases.give(addresses, engine_id, transfer_id)

    def release(self, transfer_ids: Sequence[str]) -> None:
        """Nobody will fetch these offers: each ends when nobody reads it. Unknown ids are ignored."""
        with self._changed:
            for offer in filter(None, map(self._offers.get, transfer_ids)):
                offer.is_released = True
                self._end_released(offer)

    def _end_released(self, offer: _Offer) -> None:
        is_open = self._offers.get(offer.wanted.transfer_id) is offer
        if offer.is_released and not offer.num_readers and is_open and offer.job.finish():
            self._forget(offer)
            self._ended.append(Report(number=offer.job.order.number))

    def _release_left(self) -> None:
        """Offers whose reader has gone, and which nobody has asked for since, end."""
        latest = time.monotonic() - _APPEARS
        for offer in list(self._offers.values()):
            if offer.left_at is not None and offer.left_at <= latest:
                offer.is_released = True
                self._end_released(offer)

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
            num_errors=stats.num_errors,
        )

    def close(self) -> None:
        """See WorkerConnector."""
        if self._listener is not None:
            self._listener.close()
        with self._changed:
            self._changed.notify_all()
        if self._listener is not None:
            self._listener.join(self._timeout)
        self._releases.close()
        self._mover.close()
        ends_within(self._timeout, self._mover.troubles, f"the end of {self._way.name}", self._way.close)

    # What peers ask for, each connection on a thread of its own.

    @property
    def _is_closing(self) -> bool:
        return self._listener is not None and self._listener.is_closing

    def _serve(self, pair: Pair, hello: Hello) -> None:
        if hello.gives_up:
            self._hear(hello)
            return
        self._meet(pair, hello)
        while not self._is_closing:
            pair.await_word()  # until the peer wants something again, if it ever does
            ask = pair.receive(Ask)
            pair.mark("asked")
            self._answer(pair, ask)
            _LOG.debug("%d blocks for %s: ms: %s", len(ask.places), pair.peer, pair.marked())

    def _hear(self, hello: Hello) -> None:
        """A peer will not fetch what is on offer here, or will be soon: whatever its cache is, it may say so."""
        if hello.engine_id not in ("", self._engine_id):
            return
        until, ids = time.monotonic() + _APPEARS, hello.gives_up
        self.release(ids)
        with self._changed:
            self._changed.wait_for(
                lambda: all(each in self._offers or each in self._ended_ids for each in ids) or self._is_closing,
                max(until - time.monotonic(), 0.0),
            )
        self.release(ids)

    def _meet(self, pair: Pair, hello: Hello) -> None:
        """Tell of the cache here, where the peer's is like it. Raises TransferError where no block can pass."""
        refused = self._refuse(hello)
        cache = NO_DESCRIPTION if refused else self._cache.description
        pair.send(Welcome(refused=refused, cache=cache, engine_id=self._engine_id))
        if refused:
            raise TransferError(f"it was told: {refused}")
        pair.theirs = msgspec.msgpack.decode(hello.cache, type=CacheDescription)

    def _refuse(self, hello: Hello) -> str:
        """Why no block of this cache can pass; empty: they can."""
        if hello.protocol != PROTOCOL:
            return f"it speaks protocol {PROTOCOL} of octavo's, you speak {hello.protocol}"
        if hello.way != self._way.name:
            return f"its blocks go by {self._way.name}, yours come by {hello.way}"
        theirs = msgspec.msgpack.decode(hello.cache, type=CacheDescription)
        return "; ".join((flaws(theirs) or differences(self._cache.description, theirs))[:MAX_DIFFERENCES])

    def _answer(self, pair: Pair, ask: Ask) -> None:
        refused, offer, is_unlike = self._find(ask)
        if offer is None:
            pair.send(Told(refused=refused, is_unlike=is_unlike))
            return
        with self._reading(offer), self._leased(pair, offer):
            self._give(pair, ask, offer)

    @contextlib.contextmanager
    def _reading(self, offer: _Offer) -> Iterator[None]:
        """Within: a peer reads an offer, which does not end but by this fetch, or when its time is over."""
        with self._changed:
            if self._offers.get(offer.wanted.transfer_id) is not offer:
                raise TransferError(f"transfer {offer.wanted.transfer_id!r} ended before it was fetched")
            offer.num_readers += 1
            offer.left_at = None
        left = False
        try:
            yield
        except (EOFError, ConnectionError):
            left = True
            raise
        finally:
            with self._changed:
                offer.num_readers -= 1
                offer.left_at = time.monotonic() if left and not offer.num_readers else None
                self._end_released(offer)

    @contextlib.contextmanager
    def _leased(self, pair: Pair, offer: _Offer) -> Iterator[None]:
        """Within: nobody else is given the blocks. A reader whose connection is there behind its copy knows that."""
        with offer.job.touching():
            try:
                yield
            except BaseException:
                pair.close()
                raise

    def _give(self, pair: Pair, ask: Ask, offer: _Offer) -> None:
        found = dict(zip(offer.wanted.places, offer.job.order.blocks, strict=True))
        lacking = [index for index, place in enumerate(ask.places) if place not in found]
        ends = itertools.accumulate(ask.pieces)
        cut = (ask.places[end - count : end] for end, count in zip(ends, ask.pieces, strict=True))
        pieces = [own for piece in cut if (own := [found[place] for place in piece if place in found])]
        blocks = [block for piece in pieces for block in piece]
        told, name = self._way.tell(blocks) if pieces else b"", offer.wanted.offer
        pair.send(Told(lacking=lacking, told=told, offer=name, lease=pair.timeout))
        pair.mark("told")
        if lacking:  # then the peer decides whether the rest will do
            pair.receive(Done)
        started = time.monotonic()
        if pieces:
            self._way.give(pair, ask.told, offer.job, pieces)
        pair.mark("given")
        pair.receive(Done)
        with self._changed:
            if self._offers.get(ask.transfer_id) is not offer:
                raise TransferError(f"transfer {ask.transfer_id!r} ended before it was fetched")
            ranks = offer.fetched.setdefault(ask.fetch, set())
            ranks.add(pair.theirs.rank)
            offer.is_released |= len(ranks) == pair.theirs.num_ranks  # it ends when nobody reads it
            self._sent_blocks += len(blocks)
            self._send_seconds += time.monotonic() - started
        pair.send(Done())
        pair.mark("ended")

    def _has_room(self, ask: Ask) -> bool:
        """Whether no piece has a block twice: so none is larger than what there is."""
        ends = itertools.accumulate(ask.pieces)
        cut = (ask.places[end - count : end] for end, count in zip(ends, ask.pieces, strict=True))
        return all(len(set(piece)) == len(piece) for piece in cut)

    def _find(self, ask: Ask) -> tuple[str, _Offer | None, bool]:
        """Why there is nothing, or the offer; and whether it is nothing next time, too."""
        with self._changed:
            self._changed.wait_for(lambda: ask.transfer_id in self._offers or self._is_closing, _APPEARS)
            offer = self._offers.get(ask.transfer_id)
        if offer is None:
            return f"it offers no transfer {ask.transfer_id!r} (any more)", None, False
        version = offer.wanted.version
        if offer.wanted.digest != ask.digest and ask.version not in ("", version):
            return f"its weights are of version {version!r}, yours {ask.version!r}", None, True
        if offer.wanted.digest != ask.digest:
            return f"transfer {ask.transfer_id!r} is of other tokens, salts or versions of the weights", None, False
        if sum(ask.pieces) != len(ask.places) or min([1, *ask.pieces]) < 1 or not self._has_room(ask):
            return f"pieces of {ask.pieces[:4]} are no division of {len(ask.places)} blocks", None, False
        return "", offer, False
