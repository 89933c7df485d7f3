"""Ranks of two engines pass blocks on: each a worker of its own, by the messages that one-rank engines use (T.1)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from cache_sides import Side, make_side, numbers, slice_of
from octavo.config.kv_transfer import read_kv_transfer
from octavo.kv_connector.orders import Order, Report
from octavo.kv_connector.peers.mapping import Place, Tokens
from octavo.kv_connector.peers.offers import Wanted
from octavo.kv_connector.worker import fetches
from octavo.kv_connector.worker.p2p import P2PWorker
from octavo.kv_connector.worker.ways.gloo import GlooWay
from patience import patient

TOKENS = 75


@contextlib.contextmanager
def worker(side: Side, role: str) -> Iterator[P2PWorker]:
    given = {"kv_connector": "p2p", "kv_role": role, "kv_port": 0, "kv_transfer_timeout": 20}
    made = P2PWorker(side.bytes, read_kv_transfer(given), GlooWay(side.bytes), num_threads=1)
    try:
        yield made
    finally:
        made.close()


def order(side: Side, number: int, places: Sequence[Place], *, is_load: bool, **said: object) -> Order:
    wanted = Wanted(transfer_id="t", digest=b"d", places=list(places), end=TOKENS, **said)  # type: ignore[arg-type]
    return Order(number=number, is_load=is_load, blocks=side.blocks(places), wanted=wanted)


def ended(one: P2PWorker) -> list[Report]:
    until = time.monotonic() + 60
    while not (found := list(one.take())) and time.monotonic() < until:
        one.wait(0.01)
    return found


@pytest.mark.parametrize(("heads", "givers", "takers"), [(4, 2, 4), (2, 4, 2), (4, 4, 1)])
def test_T_1_P_5_every_rank_fetches_its_heads_and_an_offer_ends_when_all_ranks_have_theirs(heads, givers, takers):
    values = numbers(heads, TOKENS)
    theirs = [make_side("LBHNC", 16, 2, heads=heads, rank=r, ranks=givers, tokens=TOKENS) for r in range(givers)]
    ours = [make_side("BLNHC", 64, 1, heads=heads, rank=r, ranks=takers, tokens=TOKENS) for r in range(takers)]
    for rank, side in enumerate(theirs):
        side.fill(slice_of(values, rank, givers))
    with contextlib.ExitStack() as stack:
        producers = [stack.enter_context(worker(side, "kv_producer")) for side in theirs]
        consumers = [stack.enter_context(worker(side, "kv_consumer")) for side in ours]
        for side, producer in zip(theirs, producers, strict=True):
            producer.begin(order(side, 7, side.places(Tokens(0, TOKENS)), is_load=False))
        addresses = [producer.address() for producer in producers]
        for rank, (side, consumer) in enumerate(zip(ours, consumers, strict=True)):
            assert not any(producer.take() for producer in producers), "not all ranks have fetched"
            places = side.places(Tokens(0, TOKENS))
            said = {"fetch": "f", "position": TOKENS - 1, "addresses": addresses}
            consumer.begin(order(side, 3, places, is_load=True, **said))
            assert ended(consumer) == [Report(number=3)]
            assert np.array_equal(side.values(TOKENS), slice_of(values, rank, takers))
        assert all(ended(producer) == [Report(number=7)] for producer in producers)


def test_T_2_a_block_that_two_batches_need_comes_twice(monkeypatch):
    monkeypatch.setattr(fetches, "PIECE_BYTES", 1)
    values = numbers(2, TOKENS)
    theirs, ours = make_side("LBHNC", 528, 1, tokens=TOKENS), make_side("LBNHC", 16, 1, tokens=TOKENS)
    theirs.fill(values)
    with worker(theirs, "kv_producer") as producer, worker(ours, "kv_consumer") as consumer:
        producer.begin(order(theirs, 7, theirs.places(Tokens(0, TOKENS)), is_load=False))
        said = {"fetch": "f", "position": TOKENS - 1, "addresses": [producer.address()]}
        consumer.begin(order(ours, 3, ours.places(Tokens(0, TOKENS)), is_load=True, **said))
        assert ended(consumer) == [Report(number=3)] and ended(producer) == [Report(number=7)]
        assert np.array_equal(ours.values(TOKENS), values)
        assert producer.stats().num_saved_blocks == 5


def let_go(producer: P2PWorker, number: int) -> None:
    """Of an offer that nobody has fetched, once who was told no has gone: the other side may hear of it before."""
    assert not producer.take()
    until = time.monotonic() + patient(10)
    while not producer.cancel(number):
        assert time.monotonic() < until and not producer.take(), "the offer is held, or has ended"
        time.sleep(0.001)


def test_D_8_a_rank_that_dies_or_lacks_what_is_read_fails_the_load_and_the_others_keep_their_offers(caplog):
    theirs = [make_side("LBHNC", 16, 1, rank=rank, ranks=2) for rank in range(2)]
    ours = make_side("LBHNC", 32, 1)
    places, wanted = theirs[0].places(Tokens(0, TOKENS)), ours.places(Tokens(0, TOKENS))
    with worker(theirs[1], "kv_producer") as second, worker(ours, "kv_consumer") as consumer:
        second.begin(order(theirs[1], 8, places, is_load=False))
        with worker(theirs[0], "kv_producer") as first:
            addresses = [first.address(), second.address()]
            said = {"fetch": "f", "position": TOKENS - 1, "addresses": addresses}
            first.begin(order(theirs[0], 7, places[1:], is_load=False))  # as of a window that has slid on
            consumer.begin(order(ours, 3, wanted, is_load=True, **said))
            assert ended(consumer)[0].failed == ours.blocks(wanted)
            assert f"127.0.0.1:{addresses[0][1]}: transfer 't' has no block at (0, 0)" in caplog.text
            let_go(first, 7)
        consumer.begin(order(ours, 4, wanted, is_load=True, **said))
        assert ended(consumer)[0].failed == ours.blocks(wanted)
        assert f"127.0.0.1:{addresses[0][1]} cannot be reached" in caplog.text
        let_go(second, 8)


def test_T_1_a_rank_that_is_not_there_fails_the_load_by_its_address(caplog):
    theirs, ours = make_side("LBHNC", 16, 1, rank=0, ranks=2), make_side("LBHNC", 16, 1)
    with worker(theirs, "kv_producer") as producer, worker(ours, "kv_consumer") as consumer:
        places = ours.places(Tokens(0, TOKENS))
        producer.begin(order(theirs, 7, places, is_load=False))
        said = {"fetch": "f", "position": TOKENS - 1, "addresses": [producer.address()]}
        consumer.begin(order(ours, 3, places, is_load=True, **said))
        (report,) = ended(consumer)
        assert report.failed == ours.blocks(places)
        assert f"127.0.0.1:{producer.address()[1]} has nothing of KV head 1 of layer 0" in caplog.text
        let_go(producer, 7)
