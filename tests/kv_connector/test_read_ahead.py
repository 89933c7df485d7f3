"""Fetches from mapped memory: what is read before its side answers, what a lease spares, and when offers end."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from mapped_memory import MappedMemory
from octavo.config.kv_transfer import read_kv_transfer
from octavo.kv_connector.orders import Order, Report
from octavo.kv_connector.p2p import _named
from octavo.kv_connector.peers.description import CacheDescription, GroupDescription
from octavo.kv_connector.peers.offers import Wanted
from octavo.kv_connector.worker import fetches
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.connections.listener import Listener
from octavo.kv_connector.worker.fetches import Fetches
from octavo.kv_connector.worker.mover import Begun, Job
from octavo.kv_connector.worker.p2p import P2PWorker
from octavo.kv_connector.worker.pair import Done, Pair, Told, TransferError
from octavo.kv_connector.worker.ways.ipc import IpcWay, _Mapped
from patience import patient

PAGES, BLOCKS, PAGE_BYTES = 3, 20, 16
THEIRS, OWN = [4, 5, 9], [7, 8, 2]
GROUP = GroupDescription(
    kind="full",
    block_size=4,
    layers=list(range(PAGES)),
    kernel_block_sizes=[4] * PAGES,
    num_heads=1,
    total_heads=1,
    head_bytes=4,
)
CACHE = CacheDescription(layout="LBNHC", block_bytes=PAGES * PAGE_BYTES, groups=[GROUP], facts={})


class Sides(NamedTuple):
    giver: P2PWorker
    takers: list[P2PWorker]
    theirs: torch.Tensor
    own: list[torch.Tensor]
    copies: list[list[int]]  # of each copy the blocks that were read

    def offer(self, number: int, blocks: list[int]) -> None:
        self.giver.begin(_order(number, number, blocks, is_load=False))

    def load(self, number: int, offered: int, taker: int = 0, **more: Any) -> None:
        address = self.giver.address()
        fetch = f"{taker} {number}"
        self.takers[taker].begin(_order(number, offered, OWN, addresses=[address], fetch=fetch, position=9, **more))

    def loaded(self, taker: int = 0) -> Report:
        (report,) = taken(self.takers[taker])
        return report

    def meet(self, taker: int = 0) -> None:
        """A first load, which makes the connection."""
        self.offer(taker, THEIRS)
        self.load(taker, taker, taker)
        assert not self.loaded(taker).failed and taken(self.giver)
        until = time.monotonic() + patient(30)
        while not self.connection(taker).settle_now() and time.monotonic() < until:
            time.sleep(0.001)
        self.own[taker].zero_()
        self.copies.clear()

    def connection(self, taker: int = 0) -> Pair:
        """The one that is kept."""
        handler: Any = self.takers[taker]._mover._handler
        ((pair,),) = handler._idle.values()
        return pair

    def holds(self, blocks: list[int], taker: int = 0) -> bool:
        """Whether these of the peer's have come, and nothing else."""
        expected = torch.zeros_like(self.own[taker])
        expected[:, OWN] = self.theirs[:, blocks]
        return torch.equal(self.own[taker], expected)


def _order(number: int, offered: int, blocks: list[int], /, *, is_load: bool = True, **more: Any) -> Order:
    places = [(0, place) for place in range(len(blocks))]
    fields: dict[str, Any] = {"offer": f"offer {offered}", "digest": b"", "end": 4 * len(blocks), **more}
    wanted = Wanted(transfer_id=f"transfer {offered}", places=places, **fields)
    return Order(number=number, is_load=is_load, blocks=blocks, wanted=wanted)


def taken(worker: P2PWorker) -> list[Report]:
    until = time.monotonic() + patient(30)
    while not (found := list(worker.take())) and time.monotonic() < until:
        worker.wait(0.01)
    return found


def _listener(sides: Sides) -> Listener:
    found = sides.giver._listener
    assert found is not None
    return found


def config(role: str) -> Any:
    return read_kv_transfer({"kv_connector": "p2p", "kv_role": role, "kv_port": 0, "kv_transfer_timeout": patient(20)})


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sides]:
    copy, copies = MappedMemory.copy, list[list[int]]()

    def noted(self: MappedMemory, own: torch.Tensor, target: Any, source: Any) -> None:
        copy(self, own, target, source)
        copies.append(source.blocks)

    monkeypatch.setattr(IpcWay, "memory", MappedMemory)
    monkeypatch.setattr(MappedMemory, "copy", noted)
    theirs = torch.randint(256, (PAGES, BLOCKS, PAGE_BYTES), dtype=torch.uint8)
    own = [torch.zeros_like(theirs) for _ in range(2)]
    caches = [CacheBytes(data, 1 << 30, description=CACHE) for data in (theirs, *own)]
    roles = ["kv_producer", "kv_consumer", "kv_consumer"]
    workers = [
        P2PWorker(cache, config(role), IpcWay(cache, gives=role == "kv_producer"), num_threads=1)
        for cache, role in zip(caches, roles, strict=True)
    ]
    with contextlib.ExitStack() as ends:
        for worker in workers:
            ends.callback(worker.close)
        yield Sides(workers[0], workers[1:], theirs, own, copies)


def test_P_4_named_blocks_are_read_before_their_side_has_found_the_offer(sides: Sides) -> None:
    sides.meet()
    sides.load(5, 5, blocks=[3, 11, 12])
    until = time.monotonic() + patient(30)
    while not sides.copies and time.monotonic() < until:
        time.sleep(0.01)
    assert sides.copies == [[3, 11, 12]] and not sides.takers[0].take(), "nobody has answered yet"
    sides.offer(5, [3, 11, 12])
    assert not sides.loaded().failed and sides.holds([3, 11, 12])
    assert len(sides.copies) == 1 and taken(sides.giver)[0].number == 5


@pytest.mark.parametrize(
    ("more", "ahead"),
    [
        ({"blocks": [3, 11, 13]}, [[3, 11, 13]]),  # they were others
        ({"blocks": [3, 11, 12], "offer": "an older one"}, [[3, 11, 12]]),  # of the same blocks, and other content
        ({"blocks": [3, 11, BLOCKS]}, []),
        ({"blocks": [0, 11, 12]}, []),
        ({}, []),
    ],
    ids=str,
)
def test_P_3_what_was_read_by_wrong_names_is_read_again(sides: Sides, more: dict[str, Any], ahead: list[Any]) -> None:
    sides.meet()
    sides.offer(5, [3, 11, 12])
    sides.load(5, 5, **more)
    assert not sides.loaded().failed and sides.holds([3, 11, 12])
    assert sides.copies == [*ahead, [3, 11, 12]]


def test_a_load_is_begun_by_who_gives_its_order_and_over_a_new_connection_where_the_old_one_ended(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides.meet()
    order, threads = MappedMemory.order, list[int]()

    def noted(self: MappedMemory, *args: Any) -> Any:
        threads.append(threading.get_ident())
        return order(self, *args)

    monkeypatch.setattr(MappedMemory, "order", noted)
    for number in (5, 6):
        sides.offer(number, [3, 11, 12])
        sides.load(number, number, blocks=[3, 11, 12])
        assert not sides.loaded().failed and sides.holds([3, 11, 12])
        assert (threads[-1] == threading.get_ident()) == (number == 5), "without a connection a thread makes one"
        for pair in list(_listener(sides)._open):
            pair.cut()  # as any thread may: one that was closed is another one to who still waits on it
        threads.clear()
        sides.own[0].zero_()


@pytest.mark.parametrize("at_once", [True, False], ids=["engine's thread", "load's thread"])
def test_N_2_of_a_peer_that_is_gone_nothing_is_read(
    at_once: bool, sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By NIXL that would end the process; the last answer of the load before is still to be heard, ahead of the end."""
    orders = list[int]()
    monkeypatch.setattr(IpcWay, "orders_at_once", lambda *_: at_once)
    monkeypatch.setattr(IpcWay, "_let_go", lambda _: None)  # which finds it too, and NIXL has no such watch
    monkeypatch.setattr(MappedMemory, "order", lambda *_: orders.append(1) or (lambda *_: None))
    sides.meet()
    sides.offer(4, THEIRS)
    sides.load(4, 4)
    assert not sides.loaded().failed and taken(sides.giver)
    orders.clear()
    kept = sides.connection()
    address = sides.giver.address()
    monkeypatch.setattr(sides.giver, "address", lambda: address)
    sides.giver.close()
    until = time.monotonic() + patient(30)
    while not _ended(kept.sock) and time.monotonic() < until:
        time.sleep(0.01)
    sides.load(5, 5, blocks=[3, 11, 12])
    assert sides.loaded().failed == OWN and not orders


def _ended(sock: socket.socket) -> bool:
    """Whether all that is to come of the other side is here, and its end."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))


def test_a_load_that_is_cancelled_in_the_queue_lets_go_of_its_connection(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peer was asked, and would keep what is on offer for a reader who does not come, until kv_transfer_timeout."""
    sides.meet()
    mover, cancelled = sides.takers[0]._mover, list[bool]()
    start = mover._start

    def starting(job: Job) -> Begun | None:
        begun = start(job)
        assert begun is not None
        cancelled.append(sides.takers[0].cancel(job.order.number))
        return begun

    monkeypatch.setattr(mover, "_start", starting)
    sides.offer(5, [3, 11, 12])
    sides.load(5, 5, blocks=[3, 11, BLOCKS])  # nothing of this can be ordered ahead, so nothing touches the cache
    until = time.monotonic() + patient(10)
    mapped = sides.takers[0]._way._mapped  # type: ignore[attr-defined]
    while (_listener(sides)._open or mapped) and time.monotonic() < until:  # two threads let go of the two
        time.sleep(0.01)
    assert cancelled == [True] and not _listener(sides)._open and not sides.takers[0].take()
    assert not mapped, "nor is its memory mapped any more"


def test_the_next_load_says_the_last_word_of_the_one_before_where_its_thread_has_not(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report comes before it: whoever hears that may begin the next load at once, over the same connection."""
    sides.meet()
    pay, may_pay = fetches._pay, threading.Event()

    def late(pairs: Any) -> None:
        assert may_pay.wait(patient(30))
        pay(pairs)

    monkeypatch.setattr(fetches, "_pay", late)
    sides.takers[0]._mover._num_threads = 0  # nothing is begun by who orders, and the next one is the same thread's
    sides.offer(5, [3, 11, 12])
    sides.offer(6, THEIRS)
    sides.load(5, 5)
    assert not sides.loaded().failed
    kept = sides.connection()
    assert not kept.settle_now(), "it owes a word"
    assert not sides.giver.take()
    kept.settle()
    assert taken(sides.giver)[0].number == 5 and kept.settle_now()
    may_pay.set()
    sides.load(6, 6)
    assert not sides.loaded().failed and sides.holds(THEIRS)
    assert taken(sides.giver)[0].number == 6, "it was said once"


def test_the_answer_is_heard_while_blocks_come_and_what_it_says_counts_behind_them(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides.meet()
    heard = list[str]()

    def order(self: MappedMemory, own: torch.Tensor, target: Any, source: Any) -> Any:
        def wait(meanwhile: Any = bool) -> None:
            until = time.monotonic() + patient(30)
            while heard[-1:] != ["told"] and time.monotonic() < until:
                meanwhile()
            self.copy(own, target, source)
            heard.append("copied")

        return wait

    hear = Fetches._hear

    def noted(pair: Pair, num_asked: int) -> Told:
        heard.append("told")
        return hear(pair, num_asked)

    monkeypatch.setattr(MappedMemory, "order", order)
    monkeypatch.setattr(Fetches, "_hear", staticmethod(noted))
    sides.offer(5, [3, 11, 12])
    sides.load(5, 5, blocks=[3, 11, 12])
    assert not sides.loaded().failed and sides.holds([3, 11, 12]) and heard == ["told", "copied"]
    sides.offer(6, [3, 11, 12])
    sides.load(6, 6, blocks=[3, 11, 12], digest=b"other tokens")
    assert sides.loaded().failed == OWN and heard == ["told", "copied"] * 2, "no copy is left under way"


def test_P_3_what_was_read_of_blocks_that_are_not_on_offer_does_not_count(sides: Sides) -> None:
    sides.meet()
    sides.offer(5, [3, 11, 12])
    sides.load(5, 5, blocks=[3, 11, 12], digest=b"other tokens")
    assert sides.loaded().failed == OWN
    assert sides.copies == [[3, 11, 12]]


def test_a_lease_spares_the_wait_for_the_last_answer_and_the_connection_goes_on(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides.meet()
    answers, send = threading.Event(), Pair.send

    def slow(self: Pair, message: msgspec.Struct) -> None:
        if isinstance(message, Done) and self in _listener(sides)._open:
            assert answers.wait(patient(30))
        send(self, message)

    monkeypatch.setattr(Pair, "send", slow)
    sides.offer(5, [3, 11, 12])
    sides.load(5, 5)
    assert not sides.loaded().failed and not answers.is_set()
    answers.set()
    sides.offer(6, THEIRS)
    sides.load(6, 6)
    assert not sides.loaded().failed and sides.holds(THEIRS)
    assert len(_listener(sides)._open) == 1, "over the connection that was there"


def test_P_3_without_a_lease_the_last_answer_is_waited_for(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy may take longer than its blocks are kept: then they have to be on offer when it has ended."""
    sides.meet()
    send = Pair.send

    def short(self: Pair, message: msgspec.Struct) -> None:
        if isinstance(message, Told):
            message = msgspec.structs.replace(message, lease=0.0)
        if isinstance(message, Done) and self in _listener(sides)._open:
            self.close()
            raise EOFError
        send(self, message)

    monkeypatch.setattr(Pair, "send", short)
    sides.offer(5, [3, 11, 12])
    sides.load(5, 5)
    assert sides.loaded().failed == OWN


def test_D_6_an_offer_that_two_read_ends_when_both_have_ended(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one of them has not read yet is nobody else's, whoever has read it all."""
    began, ends, copy = threading.Event(), threading.Event(), MappedMemory.copy

    def slow(self: MappedMemory, own: torch.Tensor, *args: Any) -> None:
        if own is sides.own[1]:
            began.set()
            assert ends.wait(patient(30))
        copy(self, own, *args)

    for taker in range(2):
        sides.meet(taker)
    monkeypatch.setattr(MappedMemory, "copy", slow)
    sides.offer(5, [3, 11, 12])
    sides.load(5, 5, 1)
    assert began.wait(patient(30))
    sides.load(5, 5, 0)
    assert not sides.loaded(0).failed
    time.sleep(0.05)
    assert not sides.giver.take() and not sides.giver.cancel(5)
    ends.set()
    assert not sides.loaded(1).failed and sides.holds([3, 11, 12], 1)
    assert [report.number for report in taken(sides.giver)] == [5]


def test_P_3_blocks_that_are_given_up_go_when_their_reader_can_know(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees a closed connection behind its copy."""
    sides.meet()

    def gives_up(*args: Any) -> None:
        raise TransferError("it gives up")

    monkeypatch.setattr(IpcWay, "give", gives_up)
    copy, given_up = MappedMemory.copy, list[bool]()

    def late(*args: Any) -> None:
        copy(*args)
        until = time.monotonic() + patient(30)
        while _listener(sides)._open and time.monotonic() < until:
            time.sleep(0.01)
        given_up.append(True)

    monkeypatch.setattr(MappedMemory, "copy", late)
    sides.offer(5, [3, 11, 12])
    sides.load(5, 5)
    assert sides.loaded().failed == OWN and given_up


def test_a_driver_that_hangs_as_it_unmaps_does_not_keep_the_engine(
    sides: Sides, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sides.meet()
    ends, close, taker = threading.Event(), _Mapped.close, sides.takers[0]

    def hangs(self: _Mapped) -> None:
        assert ends.wait(patient(60))
        close(self)

    monkeypatch.setattr(_Mapped, "close", hangs)
    taker._timeout = taker._mover._timeout = 0.2
    started = time.monotonic()
    taker.close()
    ends.set()
    assert time.monotonic() - started < patient(10)
    assert "did not end within 0.2 s (see kv_transfer_timeout) and will not be waited for" in caplog.text


@pytest.mark.parametrize("tables", [[[1, 2, 3]], [[1, 2]], [[1, 0, 3]], [], [["x"]], 5, None], ids=str)
def test_P_1_blocks_are_named_all_or_none(tables: Any) -> None:
    places = [(0, 0), (0, 1), (0, 2)]
    good = [1, 2, 3] if tables == [[1, 2, 3]] else []
    assert _named({"remote_block_ids": tables, "remote_offer": "x"}, places) == good
    assert not _named({"remote_block_ids": tables}, places)
