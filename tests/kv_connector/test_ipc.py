"""Blocks out of memory that a peer shares: what is mapped, what is refused, and when it is let go of."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from mapped_memory import MappedMemory
from octavo.config.kv_transfer import read_kv_transfer
from octavo.config.settings import ConfigError
from octavo.kv_connector.orders import Order
from octavo.kv_connector.peers.description import CacheDescription
from octavo.kv_connector.table import make_kind
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job
from octavo.kv_connector.worker.pair import Done, Pair, TransferError, UnlikeError
from octavo.kv_connector.worker.ways import ipc_memory
from octavo.kv_connector.worker.ways.ipc import IpcWay
from octavo.kv_connector.worker.ways.nixl import NixlWay
from octavo.kv_connector.worker.ways.regions import Region, joined_blocks, joined_runs, num_joined
from patience import patient


class Sides(NamedTuple):
    giver: IpcWay
    taker: IpcWay
    theirs: torch.Tensor
    own: torch.Tensor
    pair: Pair  # of the taker
    other: Pair

    @property
    def open_ones(self) -> list[int]:
        memory: Any = self.taker._memory
        found: list[int] = memory.open_ones
        return found

    def take(self, told: bytes, blocks: list[int]) -> None:
        self.taker.take(self.pair, told, Job(Order(number=1, is_load=True, blocks=blocks)), [blocks])


@pytest.fixture(params=[(3, 3), (1, 1), (3, 1), (1, 3)], ids=str)
def pages(request: pytest.FixtureRequest) -> tuple[int, int]:
    found: tuple[int, int] = request.param
    return found


@contextlib.contextmanager
def made(pages: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Sides]:
    """pages: there, and here."""
    monkeypatch.setattr(IpcWay, "memory", MappedMemory)
    caches = [torch.randint(256, (count, 20, 48 // count), dtype=torch.uint8) for count in pages]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        pair, other = Pair(client, 60.0), Pair(listener.accept()[0], 60.0)
    pair.theirs = CacheDescription(layout="LBNHC", block_bytes=48, groups=[], facts={})
    ways = [IpcWay(CacheBytes(cache, 1 << 30), gives=gives) for cache, gives in zip(caches, (True, False), strict=True)]
    with contextlib.closing(pair), contextlib.closing(other):
        yield Sides(*ways, *caches, pair, other)
    for way in ways:
        way.close()


def test_P_4_blocks_are_copied_out_of_mapped_memory_and_no_other_byte_changes(pages, monkeypatch):
    with made(pages, monkeypatch) as sides:
        expected, blocks, asked = sides.own.clone(), [4, 5, 6, 17, 2, 9], [7, 8, 9, 0, 19, 3]
        for here, there in zip(blocks, asked, strict=True):
            expected[:, here] = sides.theirs[:, there].reshape(expected[:, here].shape)
        for _ in range(2):
            sides.take(sides.giver.tell(asked), blocks)
            assert len(sides.open_ones) == 1, "a peer's memory is mapped once"
        assert torch.equal(sides.own, expected)
        rows = [row.clone() for row in sides.taker.rows(sides.pair, sides.giver.tell(asked), [4, 2])]
        assert torch.equal(torch.cat(rows), sides.theirs[:, asked].transpose(0, 1).reshape(6, 48))
        sides.pair.close()
        assert not sides.open_ones, "it ends with the connection"


def test_N_4_runs_are_joined_where_blocks_follow_each_other_on_both_sides():
    facts: dict[str, Any] = {"agent": b"", "kind": "VRAM", "device": 0, "num_blocks": 20, "page_bytes": 16}
    own = Region(base=0, num_pages=2, blocks=[6, 4, 5, 9, 10], **facts)
    theirs = Region(base=10_000, num_pages=2, blocks=[12, 10, 11, 3, 7], **facts)
    here, there = joined_runs(own, theirs)
    assert here.tolist() == [[64, 48], [144, 16], [160, 16], [384, 48], [464, 16], [480, 16]]
    assert there[:, 0].tolist() == [10160, 10048, 10112, 10480, 10368, 10432]
    together = msgspec.structs.replace(theirs, num_pages=1, page_bytes=32)
    here, there = joined_runs(own, together)
    assert here[:5].tolist() == [[96, 16], [64, 16], [80, 16], [144, 16], [160, 16]]
    assert there[:, 0].tolist() == [10_000 + 32 * b + 16 * part for part in range(2) for b in theirs.blocks]


@pytest.mark.parametrize(
    ("own", "theirs", "firsts", "counts"),
    [
        ([4, 5, 6], [9, 10, 11], [[4], [9]], [3]),
        ([4, 5, 6], [9, 11, 12], [[4, 5], [9, 11]], [1, 2]),
        ([6, 5, 4], [11, 10, 9], [[4], [9]], [3]),
        ([4], [9], [[4], [9]], [1]),
        ([], [], [[], []], []),
    ],
    ids=str,
)
def test_N_4_blocks_that_follow_each_other_are_found_in_a_new_cache_and_in_an_old_one(own, theirs, firsts, counts):
    found = joined_blocks(own, theirs)
    assert [each.tolist() for each in found] == [firsts, counts] and found[0].shape == (2, len(counts))


def test_nixl_orders_few_runs_in_the_engines_thread_and_leaves_many_to_another():
    way: Any = NixlWay.__new__(NixlWay)
    way._own = Region(agent=b"", base=0, kind="VRAM", device=0, num_pages=36, num_blocks=100, page_bytes=16, blocks=[])
    assert way.orders_at_once(range(1, 64), range(2, 65))
    assert not way.orders_at_once(range(1, 64), [*range(2, 40), *range(50, 75)]), "two runs of 36 pages"


def test_nixl_waits_in_a_thread_that_a_library_may_work_in_and_ends_a_read_before_its_blocks_are_let_go() -> None:
    happened: list[Any] = []

    def fails(_: object) -> None:
        happened.append(("wait", threading.get_ident()))
        raise TransferError("late")

    said: Any = SimpleNamespace
    facts: dict[str, Any] = {"agent": b"", "base": 0, "kind": "VRAM", "device": 0, "num_blocks": 9, "page_bytes": 16}
    way: Any = NixlWay.__new__(NixlWay)
    region = Region(num_pages=2, blocks=[3], **facts)
    way._own, way._cache = region, said(enter_thread=lambda: happened.append(("enter", threading.get_ident())))
    way._reader = lambda *_: said(name="", agent=said(begin=lambda *_: fails))
    pair = said(mark=lambda _: None, drop_state=lambda: happened.append("dropped"))
    job = said(touch=lambda: happened.append("touched"), leave=lambda: happened.append("left"))
    wait = way._order(pair, region, job, [4])

    def rest() -> None:
        with pytest.raises(TransferError):
            wait()

    other = threading.Thread(target=rest)
    other.start()
    other.join()
    assert happened == ["touched", ("enter", other.ident), ("wait", other.ident), "dropped", "left"]


def test_a_copy_is_not_looked_at_before_it_may_have_ended_as_counted_from_its_launch(monkeypatch):
    """A wait that begins late sleeps for what is left; who looks lets others go on between two looks."""
    now, done = [10.0], list[str]()

    def sleep(seconds: float) -> None:
        assert seconds > 0
        now[0] += seconds
        done.append("slept")

    monkeypatch.setattr(ipc_memory, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    copy: Any = SimpleNamespace(query=lambda: done.append("looked") or len(done) > 4)
    ipc_memory._wait(copy, 10.5, lambda: done.append("meanwhile"))
    assert done == ["slept", "looked", "meanwhile", "looked", "meanwhile", "looked"] and 10.4 < now[0] < 10.5
    now[0], done[:] = 11.0, []
    copy.query = lambda: True
    ipc_memory._wait(copy, 10.5)
    assert not done and now == [11.0]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"host": "elsewhere"}, UnlikeError, "backend ipc is for two engines of one host"),
        ({"lacking": 1}, TransferError, "tells of 1024 bytes, and 1023 are mapped"),
        ({"num_blocks": 21}, TransferError, "tells of 1072 bytes, and 1024 are mapped"),
        ({"blocks": [20]}, TransferError, "tells of blocks that its 20 do not have"),
        ({"blocks": [-1]}, TransferError, "tells of blocks that its 20 do not have"),
        ({"blocks": []}, TransferError, "tells of 0 blocks, not of 1"),
        ({"page_bytes": 49}, TransferError, "has blocks of 1 pages of 49 bytes"),
        ({"agent": b"nonsense"}, TransferError, "speaks another protocol"),
    ],
    ids=str,
)
def test_P_3_what_a_peer_tells_is_checked_before_a_byte_is_read(change, error, text, monkeypatch):
    memory = {name: value for name, value in change.items() if hasattr(MappedMemory, name)}
    for name, value in memory.items():
        monkeypatch.setattr(MappedMemory, name, value)
    with made((1, 1), monkeypatch) as sides:
        before, told = sides.own.clone(), msgspec.msgpack.decode(sides.giver.tell([3]), type=Region)
        rest = {name: value for name, value in change.items() if name not in memory}
        with pytest.raises(error, match=text):
            sides.take(msgspec.msgpack.encode(msgspec.structs.replace(told, **rest)), [1])
        assert torch.equal(sides.own, before)


def test_N_2_the_memory_of_a_peer_that_has_gone_is_let_go_of_though_nobody_asks(monkeypatch):
    """Its GPU is to have room for an engine that is started anew."""
    with made((1, 1), monkeypatch) as sides:
        sides.take(sides.giver.tell([3]), [1])
        sides.other.send(Done())  # a word is no end
        time.sleep(0.05)
        assert sides.open_ones
        sides.other.close()
        until = time.monotonic() + patient(30)
        while sides.open_ones and time.monotonic() < until:
            time.sleep(0.01)
        assert not sides.open_ones
        with pytest.raises(EOFError, match="has closed the connection"):
            sides.take(sides.giver.tell([3]), [1])


def test_memory_is_not_unmapped_while_blocks_are_copied_out_of_it(monkeypatch):
    began, ends, copy = threading.Event(), threading.Event(), MappedMemory.copy

    def slow(*args: Any) -> None:
        began.set()
        assert ends.wait(patient(30))
        copy(*args)

    with made((1, 1), monkeypatch) as sides:
        monkeypatch.setattr(MappedMemory, "copy", slow)
        taking = threading.Thread(target=sides.take, args=(sides.giver.tell([3]), [1]))
        taking.start()
        assert began.wait(patient(30))
        closing = threading.Thread(target=sides.pair.state.close)
        closing.start()
        closing.join(0.1)
        assert closing.is_alive() and sides.open_ones
        ends.set()
        for thread in (taking, closing):
            thread.join(patient(30))
        assert torch.equal(sides.own[:, 1], sides.theirs[:, 3]) and not sides.open_ones


class _Gpu:
    """A cache that is said to be a GPU's."""

    on_gpu, moves, device = True, True, torch.device("cpu")
    data = torch.zeros((1, 2, 16), dtype=torch.uint8)
    num_pages, num_blocks, page_bytes = data.shape


def test_memory_that_nobody_can_map_is_refused_by_name(monkeypatch):
    config = {"kv_connector": "p2p", "kv_role": "kv_producer", "kv_connector_extra_config": {"backend": "ipc"}}
    cache: Any = _Gpu()
    with pytest.raises(ConfigError, match=r"backend='ipc': lets peers map .* enable_sleep_mode takes it away"):
        make_kind(read_kv_transfer(config)).worker_half(cache, "")
    cache.moves = False

    def refuses(self: MappedMemory, tensor: torch.Tensor) -> None:
        raise RuntimeError("cuIpcGetMemHandle failed with 1")

    monkeypatch.setattr(IpcWay, "memory", MappedMemory)
    monkeypatch.setattr(MappedMemory, "share", refuses)
    with pytest.raises(ConfigError, match="the driver does not: cuIpcGetMemHandle failed with 1; set nccl"):
        make_kind(read_kv_transfer(config)).worker_half(cache, "")


@pytest.mark.parametrize(("num_pages", "there"), [(36, 36), (1, 1), (1, 4), (4, 1)])
@pytest.mark.parametrize("blocks", [[3], [3, 4, 5], [3, 4, 7], [5, 4, 3]])
def test_runs_of_blocks_that_lie_together_are_those_of_any_blocks(
    num_pages: int, there: int, blocks: list[int]
) -> None:
    """Byte for byte: which address is read for which."""

    def region(base: int, pages: int, found: list[int]) -> Region:
        size = 144 // pages
        facts: dict[str, Any] = {"agent": b"", "kind": "VRAM", "device": 0, "num_blocks": 9, "page_bytes": size}
        return Region(base=base, num_pages=pages, blocks=found, **facts)

    def pairs(sides: tuple[np.ndarray, np.ndarray]) -> set[tuple[int, int]]:
        own, others = (side.tolist() for side in sides)
        return {
            (a + byte, b + byte)
            for (a, size), (b, same) in zip(own, others, strict=True)
            for byte in range(size)
            if size == same
        }

    own, others = region(1 << 20, num_pages, blocks), region(1 << 40, there, [block + 1 for block in blocks])
    parts = max(num_pages, there)
    apart = own.runs(own.blocks, parts), others.runs(others.blocks, parts)
    assert pairs(joined_runs(own, others)) == pairs(apart) and len(pairs(apart)) == 144 * len(blocks)
    assert num_joined(own.blocks, others.blocks) == len(joined_blocks(own.blocks, others.blocks)[1])
