"""Peers that stand still, or say and send what is not so: a load of theirs fails by itself, and nothing else does."""

from __future__ import annotations

import contextlib
import errno
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from octavo.config.kv_peers import NO_PEERS, Peers, read_peers
from octavo.config.kv_transfer import read_kv_transfer
from octavo.kv_connector.guard import Troubles
from octavo.kv_connector.orders import Order, Report
from octavo.kv_connector.peers.description import CacheDescription, GroupDescription, flaws
from octavo.kv_connector.peers.offers import Wanted
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.connections import listener
from octavo.kv_connector.worker.connections.listener import Listener
from octavo.kv_connector.worker.p2p import P2PWorker
from octavo.kv_connector.worker.pair import Hello, Pair, Welcome
from octavo.kv_connector.worker.ways.gloo import GlooWay
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
CACHE = CacheDescription(layout="LBNHC", block_bytes=PAGES * PAGE_BYTES, groups=[GROUP], facts={"dtype": "float32"})
Address = tuple[str, int]


class Side:
    """A worker, and the memory that it moves."""

    def __init__(self, role: str, *, timeout: float = 20.0, num_threads: int = 1) -> None:
        self.data = torch.randint(1, 256, (PAGES, BLOCKS, PAGE_BYTES), dtype=torch.uint8)
        cache = CacheBytes(self.data, 1 << 30, description=CACHE)
        said = {"kv_connector": "p2p", "kv_role": role, "kv_port": 0, "kv_transfer_timeout": timeout}
        self.worker = P2PWorker(cache, read_kv_transfer(said), GlooWay(cache), num_threads=num_threads)

    def offer(self, number: int) -> None:
        self.worker.begin(order(number, THEIRS, is_load=False))

    def load(self, number: int, *addresses: Address) -> None:
        self.worker.begin(order(number, OWN, addresses=list(addresses), fetch=f"fetch {number}", position=9))

    def loaded(self) -> Report:
        until = time.monotonic() + patient(60)
        while not (found := list(self.worker.take())) and time.monotonic() < until:
            self.worker.wait(0.01)
        (report,) = found
        return report


def order(number: int, blocks: list[int], /, *, is_load: bool = True, **more: Any) -> Order:
    places = [(0, place) for place in range(len(blocks))]
    wanted = Wanted(transfer_id=f"transfer {number}", places=places, digest=b"", end=4 * len(blocks), **more)
    return Order(number=number, is_load=is_load, blocks=blocks, wanted=wanted)


@pytest.fixture
def make_side() -> Iterator[Callable[..., Side]]:
    with contextlib.ExitStack() as ends:

        def make(role: str, **more: Any) -> Side:
            side = Side(role, **more)
            ends.callback(side.worker.close)
            return side

        yield make


@pytest.fixture
def rogue() -> Iterator[Callable[[Callable[[Pair], None]], Address]]:
    """Makes a peer that does this with each of its connections."""
    with contextlib.ExitStack() as ends:

        def make(act: Callable[[Pair], None]) -> Address:
            sock = ends.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))

            def run(pair: Pair) -> None:
                with contextlib.suppress(OSError, EOFError, ValueError):  # it was closed
                    act(pair)

            def accept() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        pair = Pair(sock.accept()[0], patient(60))
                        ends.callback(pair.close)
                        threading.Thread(target=run, args=(pair,), daemon=True).start()

            threading.Thread(target=accept, daemon=True).start()
            ends.callback(sock.shutdown, socket.SHUT_RDWR)
            return str(sock.getsockname()[0]), int(sock.getsockname()[1])

        yield make


def says(cache: CacheDescription, heard: list[bool]) -> Callable[[Pair], None]:
    """A peer that tells of such a cache, and notes whether it is asked for anything."""

    def act(pair: Pair) -> None:
        pair.receive(Hello)
        pair.send(Welcome(cache=cache, engine_id="rogue"))
        heard.append(pair.says_something(patient(60)) and not pair.is_broken_off)

    return act


def changed(**fields: Any) -> CacheDescription:
    return msgspec.structs.replace(CACHE, groups=[msgspec.structs.replace(GROUP, **fields)])


@pytest.mark.parametrize(
    ("cache", "named"),
    [
        (changed(block_size=-16), "block_size of group 0 is -16: must be from 1"),
        (changed(block_size=0), "block_size of group 0 is 0"),
        (changed(tokens_per_state=0), "tokens_per_state of group 0 is 0"),
        (changed(num_heads=-1), "num_heads of group 0 is -1"),
        (changed(head_bytes=0), "head_bytes of group 0 is 0"),
        (changed(layers=[0]), "kernel_block_sizes of group 0"),
        (changed(kernel_block_sizes=[3] * PAGES), "kernel_block_sizes of group 0"),
        (changed(block_size=8, kernel_block_sizes=[8] * PAGES), "block_bytes are 48"),
        (msgspec.structs.replace(CACHE, groups=[]), "has no group of layers"),
        (msgspec.structs.replace(CACHE, layout="N"), "its layout is 'N'"),
        (msgspec.structs.replace(CACHE, facts={"dtype": "bfloat16"}), "its dtype is 'bfloat16', yours 'float32'"),
        (changed(window=8), "its window of layer 0 is 8, yours 0"),
    ],
)
def test_P_3_what_a_peer_says_of_its_cache_is_checked_before_it_is_asked(cache, named, make_side, rogue) -> None:
    heard: list[bool] = []
    second = make_side("kv_consumer")
    before = second.data.clone()
    second.load(1, rogue(says(cache, heard)))
    report = second.loaded()
    assert report.failed == OWN and named in report.refusal
    assert torch.equal(second.data, before) and not any(heard)


def test_the_own_description_has_no_flaw() -> None:
    assert not flaws(CACHE)


def test_P_3_a_peer_that_sends_less_fails_the_load(make_side, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make_side("kv_producer"), make_side("kv_consumer")
    before, broadcast = second.data.clone(), GlooWay._send

    def less(self: GlooWay, pair: Pair, job: Any, piece: Any) -> None:
        whole = pair.state.broadcast
        monkeypatch.setattr(pair.state, "broadcast", lambda memory, own: whole(memory[:-20], own))
        broadcast(self, pair, job, piece)

    monkeypatch.setattr(GlooWay, "_send", less)
    first.offer(1)
    second.load(1, first.worker.address())
    assert second.loaded().failed == OWN and torch.equal(second.data, before)


MORE = """
import torch
from test_rogue_peers import Side
from octavo.kv_connector.worker.ways.gloo import GlooWay
if __name__ == "__main__":
    first, other, second = Side("kv_producer"), Side("kv_producer"), Side("kv_consumer")
    memory = GlooWay._memory
    def more(self, count, block_bytes):
        if self is not first.worker._way:
            return memory(self, count, block_bytes)
        return memory(self, count + 1, block_bytes)[0], memory(self, count, block_bytes)[1]
    GlooWay._memory = more
    first.offer(1)
    second.load(1, first.worker.address())
    print(bool(second.loaded().failed), flush=True)
    other.offer(2)
    second.load(2, other.worker.address())
    print(bool(second.loaded().failed), torch.equal(second.data[:, [7, 8, 2]], other.data[:, [4, 5, 9]]), flush=True)
    for side in (second, other, first):
        side.worker.close()
"""


def test_P_3_a_peer_that_sends_more_fails_its_load_alone_and_the_process_goes_on_and_ends_as_ever() -> None:
    here = str(Path(__file__).parent)
    paths = [here, str(Path(__file__).parents[1]), *sys.path]
    code = f"import sys; sys.path[:0] = {paths!r}\n{MORE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=patient(120))
    assert (done.stdout.splitlines(), done.returncode) == (["True", "False True"], 0), done.stderr
    assert "sent other than the" in done.stderr


def drips(pair: Pair) -> None:
    """A byte of a long message from time to time: each of them in time."""
    pair.sock.sendall((1 << 20).to_bytes(4, "little"))
    while True:
        pair.sock.sendall(b"x")
        time.sleep(0.05)


def answers_late(pair: Pair) -> None:
    """In time, if the time were its own."""
    pair.receive(Hello)
    time.sleep(0.5)
    pair.send(Welcome(cache=CACHE, engine_id="late"))
    stands(pair)


def stands(pair: Pair) -> None:
    """Says nothing, until its connection ends."""
    pair.sock.settimeout(None)
    while pair.sock.recv(1 << 16):
        pass


def test_D_8_a_load_has_one_deadline_however_a_peer_drips_and_however_many_there_are(make_side, rogue) -> None:
    limit = 1.0
    second = make_side("kv_consumer", timeout=limit)
    many = [rogue(answers_late)] * 60
    for number, addresses in enumerate([[rogue(drips)], many], 1):
        began = time.monotonic()
        second.load(number, *addresses)
        assert second.loaded().failed == OWN
        assert limit <= time.monotonic() - began < limit + patient(4)


def test_D_8_a_silent_peer_takes_no_one_elses_turn(make_side, rogue) -> None:
    """With one thread a peer: two loads wait for the silent one, and others' end meanwhile."""
    first, second = make_side("kv_producer"), make_side("kv_consumer", timeout=patient(60))
    silent = rogue(stands)
    for number in (1, 2):
        second.load(number, silent)
    first.offer(3)
    second.load(3, first.worker.address())
    report = second.loaded()
    assert (report.number, report.failed) == (3, []) and not second.worker.take()
    for number in (1, 2):
        assert second.worker.cancel(number)


def test_D_8_what_a_cancelled_load_waits_for_is_cut(make_side, rogue) -> None:
    met, ended = threading.Event(), threading.Event()

    def waits(pair: Pair) -> None:
        met.set()
        with contextlib.suppress(OSError):
            stands(pair)
        ended.set()

    second = make_side("kv_consumer", timeout=patient(60))
    second.load(1, rogue(waits))
    assert met.wait(patient(30)) and not ended.is_set()
    assert second.worker.cancel(1) and ended.wait(patient(30))
    assert not second.worker.take() and not second.worker.stats().num_errors


class Heard:
    """A listener, and what it has served."""

    def __init__(self, peers: Peers = NO_PEERS) -> None:
        self.served = threading.Semaphore(0)
        self.troubles = Troubles("p2p")
        self.listener = Listener("127.0.0.1", 0, patient(30), self._serve, self.troubles, peers)

    def _serve(self, pair: Pair, hello: Hello) -> None:
        self.served.release()

    def greets(self) -> bool:
        """Whether somebody who comes now is heard."""
        with contextlib.closing(Pair(socket.create_connection(self.listener.address()), patient(30))) as pair:
            pair.send(Hello(way="gloo", cache=msgspec.Raw(msgspec.msgpack.encode(CACHE))))
            return self.served.acquire(timeout=patient(30))


@pytest.fixture
def heard() -> Iterator[Heard]:
    made = Heard()
    yield made
    made.listener.close()
    made.listener.join(patient(30))


def test_P_3_a_listener_goes_on_when_no_connection_or_thread_can_be_had(heard: Heard, monkeypatch) -> None:
    accept, start, fails = socket.socket.accept, threading.Thread.start, threading.Semaphore(0)

    def refuses(self: socket.socket) -> Any:
        if fails.acquire(blocking=False):
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    def lacks(self: threading.Thread) -> None:
        if self.name == "octavo-kv-serve" and fails.acquire(blocking=False):
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", lacks)
    fails.release()
    with contextlib.closing(socket.create_connection(heard.listener.address())) as sock:
        sock.settimeout(patient(30))
        assert sock.recv(1) == b"", "there is no thread for it"
    assert heard.greets()
    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(socket.socket, "accept", refuses)
    assert heard.greets(), "the call that waits meanwhile is the one from before"
    for _ in range(3):
        fails.release()
    assert heard.greets() and heard.greets()
    assert heard.troubles.num >= 2


def test_P_3_connections_are_bounded_and_what_says_nothing_gives_way(heard: Heard, monkeypatch) -> None:
    monkeypatch.setattr(listener, "_MOST", 3)
    silent = [socket.create_connection(heard.listener.address()) for _ in range(10)]
    try:
        assert heard.greets()
        silent[0].settimeout(patient(30))
        assert silent[0].recv(1) == b"" and len(heard.listener._open) <= 3
    finally:
        for sock in silent:
            sock.close()


def test_P_3_a_connection_that_says_nothing_is_closed(monkeypatch) -> None:
    monkeypatch.setattr(listener, "_FIRST_WORD", 0.05)
    made = Heard()
    with contextlib.closing(socket.create_connection(made.listener.address())) as sock:
        sock.settimeout(patient(10))
        sock.sendall(b"\0")
        assert sock.recv(1) == b""
    made.listener.close()
    made.listener.join(patient(30))


@pytest.mark.parametrize(("peers", "comes"), [(["10.0.0.0/8"], False), (["127.0.0.0/8"], True)])
def test_P_9_who_may_come_for_blocks_is_who_is_named(peers: list[str], comes: bool) -> None:
    made = Heard(read_peers({"kv_peers": peers}))
    if comes:
        assert made.greets()
    else:
        with contextlib.closing(socket.create_connection(made.listener.address())) as sock:
            sock.settimeout(patient(30))
            Pair(sock, patient(30)).send(Hello(way="gloo", cache=msgspec.Raw(msgspec.msgpack.encode(CACHE))))
            with contextlib.suppress(ConnectionError):
                assert sock.recv(1) == b""
            assert made.troubles.num == 1 and not made.served.acquire(timeout=0.1)
    made.listener.close()
    made.listener.join(patient(30))
