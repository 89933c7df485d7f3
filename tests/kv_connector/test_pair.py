"""A connection between two engines, with as many files open as a busy server has."""

from __future__ import annotations

import contextlib
import fcntl
import resource
import socket
import threading
import time
from types import SimpleNamespace
from typing import cast

import pytest

from octavo.kv_connector.orders import Order
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job
from octavo.kv_connector.worker.pair import Done, Pair, Told, TransferError, _framed
from octavo.kv_connector.worker.ways import regions
from octavo.kv_connector.worker.ways.gloo import GlooWay
from octavo.kv_connector.worker.ways.regions import until_read
from patience import patient

HIGH = 2000  # more than select() takes


@pytest.fixture
def pairs() -> tuple[Pair, Pair]:
    """Both ends of a connection, the first one with a high number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard <= HIGH:
        pytest.skip(f"the machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, HIGH + 100), hard))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        low = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    high = socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD, HIGH))
    low.close()
    return Pair(high, 0.05), Pair(other, 5.0)


def test_who_has_blocks_waits_for_the_reader_and_not_for_ever(pairs, monkeypatch):
    own, other = pairs
    job, now = Job(Order(number=1, is_load=False, blocks=[1])), [100.0]
    monkeypatch.setattr(regions, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def tick() -> None:
        now[0] += 0.02

    with pytest.raises(TransferError, match=r"did not take blocks within 0\.05 s"):
        until_read(own, job, 0.001, tick)
    assert now[0] == pytest.approx(100.06)
    own.timeout = 60.0
    thread = threading.Thread(target=until_read, args=(own, job, 0.001, lambda: None))
    thread.start()
    other.send(Done())
    thread.join(60)
    assert not thread.is_alive() and isinstance(own.receive(Done), Done)
    assert not own.has_gone
    other.close()
    assert own.says_something(60) and own.has_gone


def test_P_3_a_peer_that_dies_before_the_group_is_there_is_noticed_at_once():
    """Whoever is killed then says nothing to the store where the group was to meet; its connection ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = socket.create_connection(listener.getsockname())
        pair = Pair(listener.accept()[0], 60.0)
    way, started = GlooWay(cast(CacheBytes, None)), time.monotonic()
    other.send(b"a last word")
    assert not pair.is_broken_off
    pair.sock.recv(100)
    other.close()
    with contextlib.closing(pair), pytest.raises(EOFError, match=f"{pair.peer} has closed the connection"):
        next(way.rows(pair, way.ask(pair, 16), [1]))
    assert time.monotonic() - started < patient(30) and pair.is_broken_off


def test_half_a_message_is_not_waited_for_while_blocks_come(pairs):
    """Who waited would keep them from being given up as long as its peer stands still."""
    own, other = pairs
    word = _framed(Told(lacking=[1, 2, 3], offer="x"))
    assert not own.has_message
    for cut in (2, 4, len(word) - 1):
        other.sock.sendall(word[:cut])
        assert own.says_something(patient(5)) and not own.has_message
        other.sock.sendall(word[cut:])
        until = time.monotonic() + patient(5)
        while not own.has_message and time.monotonic() < until:
            time.sleep(0.001)
        assert own.receive(Told).offer == "x" and not own.has_message
    other.close()
    assert own.says_something(patient(5)) and own.has_message, "the end is heard at once"
    with pytest.raises(EOFError, match="has closed the connection"):
        own.receive(Told)


def test_what_is_due_is_taken_by_one_look_and_who_has_gone_or_speaks_out_of_turn_is_found(pairs):
    own, other = pairs
    assert own.settle_now(), "nothing is due"
    own.owe()
    assert not own.settle_now(), "nothing was said"
    own.pay()
    own.pay()
    assert isinstance(other.receive(Done), Done) and not other.says_something(0), "it is said once"
    assert not own.settle_now() and not own.has_gone, "its answer is due"
    other.send(Done())
    assert own.says_something(patient(5)) and own.settle_now() and own.settle_now()
    other.send(Done())
    assert own.says_something(patient(5))
    with pytest.raises(TransferError, match="speaks out of turn"):
        own.settle_now()
    own.sock.recv(64)  # the rest of that
    other.close()
    assert own.says_something(patient(5))
    with pytest.raises(EOFError, match="has closed the connection"):
        own.settle_now()
