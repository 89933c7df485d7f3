"""Whole blocks as bytes (O.1, E.4): of every layout, at every split into kernel blocks."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from octavo.cache.groups import CacheGroup, TableSpec
from octavo.cache.layout import LAYOUTS
from octavo.cache.pool import KVCachePool
from octavo.kv_connector.orders import Order
from octavo.kv_connector.worker import cache_bytes, host_memory
from octavo.kv_connector.worker.cache_bytes import CacheBytes, joined
from octavo.kv_connector.worker.mover import Job
from octavo.ops import copying
from octavo.ops.arrivals import NO_GATES, Gates, make_gates

BLOCK, HEADS, HEAD = 16, 2, 8


def make_pool(layout: str, ratio: int) -> KVCachePool:
    group = CacheGroup(kind="full", block_size=BLOCK, layers=(0, 1, 2), num_heads=HEADS, num_channels=2 * HEAD)
    table = TableSpec(group=0, layers=(0, 1, 2), backend="reference", kernel_block_size=BLOCK // ratio)
    pool = KVCachePool(
        [group], num_blocks=9, dtype=torch.bfloat16, device=torch.device("cpu"), layout=LAYOUTS[layout], tables=[table]
    )
    pool.buffer.copy_(torch.randn(pool.buffer.shape, generator=torch.Generator().manual_seed(1)))
    return pool


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ratio", [1, 2, 8])
def test_O_1_a_row_is_exactly_one_block_of_all_layers(layout, ratio):
    pool = make_pool(layout, ratio)
    cache = CacheBytes(pool.data, 1 << 30)
    assert cache.block_bytes == pool.block_bytes == 3 * 2 * BLOCK * HEADS * HEAD * 2
    assert cache.num_pages == (1 if LAYOUTS[layout].block_outermost else 3), "one copy where a block lies together"
    memory = cache.host_memory(4, cache.block_bytes)
    cache.read([1, 7, 3, 8], list(memory))
    assert torch.equal(cache.gather([1, 7, 3, 8]), memory)
    before = pool.buffer.clone()
    expected = [pool.block_view(layer)[[1, 7, 3, 8]].clone() for layer in range(3)]
    for write in (cache.write, lambda blocks, rows: cache.scatter(blocks, torch.stack(rows))):
        pool.data[:, [1, 3, 7, 8]] = 255
        write([8, 1, 7, 3], list(memory))
        for layer in range(3):
            assert torch.equal(pool.block_view(layer)[[8, 1, 7, 3]], expected[layer])
    untouched = [0, 2, 4, 5, 6]
    assert torch.equal(pool.data[:, untouched], before.view(torch.uint8).view(pool.data.shape)[:, untouched])


def test_O_3_slots_take_hardly_more_pinned_memory_than_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch rounds an allocation of it up to a power of two."""
    pool, taken = make_pool("LBNHC", 1), list[int]()
    cache = CacheBytes(pool.data, 1 << 30)
    allocate, num_slots = cache.host_memory, 11

    def counted(num_rows: int, row_bytes: int) -> torch.Tensor:
        taken.append(1 << (num_rows * row_bytes - 1).bit_length())
        return allocate(num_rows, row_bytes)

    monkeypatch.setattr(cache, "host_memory", counted)
    monkeypatch.setattr(host_memory, "_PART_BYTES", 1 << 14)
    handler = host_memory.HostHandler(cache, num_slots, None)
    assert sum(taken) <= 1.1 * num_slots * cache.block_bytes
    blocks, expected = list(range(9)), pool.buffer.clone()
    slots = [3, 8, 0, 4, 10, 1, 5, 2, 6]  # of all parts
    handler.handle(Job(Order(number=1, is_load=False, blocks=blocks, slots=slots)))
    pool.buffer.zero_()
    handler.handle(Job(Order(number=2, is_load=True, blocks=blocks, keys=[b""] * 9, slots=slots)))
    assert torch.equal(pool.buffer, expected)


def test_rows_that_lie_one_behind_the_other_are_one_copy() -> None:
    memory, other = torch.arange(60).view(10, 6), torch.arange(100, 112).view(2, 6)
    rows = [memory[place] for place in (3, 4, 5, 9, 0, 1, 8)] + [other[1]]
    found = list(joined(rows))
    assert [(place, len(lines)) for place, lines in found] == [(0, 3), (3, 1), (4, 2), (6, 1), (7, 1)]
    assert torch.equal(torch.cat([lines for _, lines in found]), torch.stack(rows))
    found[0][1].fill_(-1)
    assert (memory[3:6] == -1).all() and memory[2:7].min(1).values.tolist() == [12, -1, -1, -1, 36]
    assert list(joined([])) == []


class _Bus:
    """Stands for CUDA's streams and events, and for its copies, which are made when somebody waits for them."""

    cuda_stream = 7

    def __init__(self, *_: object, **__: object) -> None:
        self._ordered: list[tuple[int, int, int]] = []
        self._num_made = 0
        self._bound = threading.local()  # by torch's calls, never by the driver's
        self.sizes: list[int] = []  # pieces of each call
        self.waits: list[tuple[int, int]] = []  # calls that there were, and pieces that were waited for

    def query(self) -> None:
        self._bound.is_here = True

    def order(self, targets: np.ndarray, sources: np.ndarray, num_bytes: int, stream: int) -> None:
        assert getattr(self._bound, "is_here", False), "the driver's own calls need a context of the calling thread"
        assert stream == self.cuda_stream and len(targets) == len(sources)
        self.sizes.append(len(targets))
        self._ordered += [(int(a), int(b), num_bytes) for a, b in zip(targets, sources, strict=True)]

    def synchronize(self) -> None:
        self.wait_for(len(self._ordered))

    def wait_for(self, count: int) -> None:
        """The first `count` copies since the start are made."""
        self.waits.append((len(self.sizes), count))
        for target, source, num_bytes in self._ordered[self._num_made : count]:
            ctypes.memmove(target, source, num_bytes)
        self._num_made = max(self._num_made, count)

    @property
    def num_under_way(self) -> int:
        return len(self._ordered) - self._num_made

    def event(self, **_: object) -> _Event:
        return _Event(self)


class _Event:
    """Of such a bus: a stream that waits for it waits at once."""

    def __init__(self, bus: _Bus) -> None:
        self._bus, self._count = bus, 0

    def record(self, stream: object) -> None:
        self._count = len(self._bus._ordered)

    def query(self) -> bool:
        return self._bus._num_made >= self._count

    def synchronize(self) -> None:
        self._bus.wait_for(self._count)

    wait = synchronize

    def elapsed_time(self, end: _Event) -> float:
        return float(end._count - self._count)


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> _Bus:
    """A GPU of which caches on the CPU are told."""
    own = _Bus()
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: own)
    monkeypatch.setattr(torch.cuda, "Event", own.event)
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    monkeypatch.setattr(cache_bytes, "can_copy_pieces", lambda device: True)
    monkeypatch.setattr(cache_bytes, "copy_pieces", own.order)
    return own


@pytest.mark.parametrize("least", [1, 1 << 30], ids=["pieces", "staged"])
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_O_1_what_crosses_the_bus_in_pieces_or_gathered_is_each_block(layout, least, bus, monkeypatch):
    """Of every layout: the bytes of `read` and `write` without a GPU, and no byte of another block."""
    monkeypatch.setattr(cache_bytes, "_LEAST_PIECE", least)
    pool = make_pool(layout, 2)
    cache = CacheBytes(pool.data, 1 << 30)
    monkeypatch.setattr(cache_bytes, "_STAGING_BYTES", 2 * cache.block_bytes)
    monkeypatch.setattr(cache_bytes, "_WINDOW_BYTES", 4 * cache.page_bytes)
    lanes = [cache_bytes._Lane(cache, 1.0, bool) for _ in range(2)]
    blocks, places = [8, 1, 5, 2, 6], [3, 0, 4, 5, 1]
    expected, memory = cache.host_memory(5, cache.block_bytes), cache.host_memory(6, cache.block_bytes).fill_(7)
    cache.read(blocks, list(expected))
    before = pool.data.clone()
    lanes[0].run(blocks, [memory[place] for place in places], to_cache=False)
    assert torch.equal(memory[places], expected) and (memory[2] == 7).all() and torch.equal(pool.data, before)
    pool.data[:, blocks] = 255
    lanes[1].run(blocks, [memory[place] for place in places], to_cache=True)
    assert torch.equal(pool.data, before)
    whole = LAYOUTS[layout].block_outermost
    assert bus.sizes == (2 * ([4, 1] if whole else [4, 4, 4, 3]) if least == 1 else [])
    lanes[0].run([], [], to_cache=False)
    pool.data[:, blocks] = 255
    with ThreadPoolExecutor(1) as other:
        run = torch.inference_mode()(lanes[1].run)
        other.submit(run, blocks, [memory[place] for place in places], to_cache=True).result()
    assert torch.equal(pool.data, before)


def test_few_windows_are_under_way(bus, monkeypatch) -> None:
    monkeypatch.setattr(cache_bytes, "_LEAST_PIECE", 1)
    monkeypatch.setattr(cache_bytes, "_MAX_WINDOWS", 2)
    pool = make_pool("LBNHC", 1)
    cache = CacheBytes(pool.data, 1 << 30)
    monkeypatch.setattr(cache_bytes, "_WINDOW_BYTES", 10 * cache.page_bytes)
    memory = cache.host_memory(9, cache.block_bytes)
    cache_bytes._Lane(cache, 1.0, bool).run(range(9), list(memory), to_cache=False)
    assert bus.sizes == [10, 10, 7] and bus.waits == [(2, 10), (3, 27)], (
        "for the first ahead of the third, and at the end"
    )
    assert torch.equal(memory, cache.gather(range(9)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_gated", [3, 2])
@torch.inference_mode()
def test_O_2_a_gate_opens_behind_its_layers_pages_and_no_others(layout, num_gated, bus, monkeypatch) -> None:
    """All copies are ordered at once, in the order of layers; those of a drafter's layers come last."""
    monkeypatch.setattr(cache_bytes, "_LEAST_PIECE", 1)
    pool = make_pool(layout, 2)
    cache, gates = CacheBytes(pool.data, 1 << 30, pool.views), Gates(num_gated, [bus.event() for _ in range(num_gated)])
    blocks, rows = [8, 1, 5], list(cache.host_memory(3, cache.block_bytes))
    cache.read(blocks, rows)
    expected = [pool.block_view(layer)[blocks].clone() for layer in range(3)]
    before = pool.data.clone()
    pool.data[:, blocks] = 255
    lane = cache_bytes._Lane(cache, 0.5, lambda: True)
    bus.query()  # a thread that issues steps has a context
    arrivals = lane.bring(blocks, rows, gates.in_turn(cache._page_of_layer()))
    whole = LAYOUTS[layout].block_outermost
    assert arrivals and bus.sizes == ([3] if whole else [3, 3, 3]) and not bus.waits and not arrivals.have_come()
    for layer in range(num_gated):
        gates.before(layer)
        assert torch.equal(pool.block_view(layer)[blocks], expected[layer])
        assert bus._num_made == (3 if whole else 3 * (layer + 1))
    gates.before(7)  # a layer that keeps nothing
    assert arrivals.have_come() == (whole or num_gated == 3)
    arrivals.before_all()
    assert arrivals.have_come() and torch.equal(pool.data, before)
    assert arrivals.seconds == bus._num_made / 1e3
    with lane._lock:
        assert lane.bring(blocks, rows, ()) is None, "another transfer is being ordered"


def test_gates_stand_before_as_many_layers_each(bus) -> None:
    """And open behind the last of their pages, however those of layers lie."""
    gates = Gates(7, [bus.event() for _ in range(3)])
    assert gates and [layer for layer in range(9) if layer in gates._of_first] == [0, 2, 4]
    assert [pages for pages, _ in gates.in_turn(range(8))] == [2, 4, 7]
    assert [pages for pages, _ in gates.in_turn([3, 0, 1, 2, 2, 4, 4, 5])] == [4, 4, 5]
    few = Gates(2, [bus.event() for _ in range(3)])
    assert sorted(few._of_first) == [0, 1] and [pages for pages, _ in few.in_turn(range(2))] == [0, 1, 2]
    assert not NO_GATES and not list(NO_GATES.in_turn(range(3)))
    assert make_gates(4, torch.device("cpu")) is NO_GATES
    NO_GATES.before(0)


@torch.inference_mode()
def test_an_order_that_fails_leaves_no_copy_on_its_way(bus, monkeypatch) -> None:
    """Its blocks are given to others as soon as it is reported."""
    monkeypatch.setattr(cache_bytes, "_LEAST_PIECE", 1)
    pool, order = make_pool("LBNHC", 1), bus.order

    def fails(*args: object) -> None:
        if len(bus.sizes) % 2:
            raise RuntimeError("the driver failed")
        order(*args)

    monkeypatch.setattr(cache_bytes, "copy_pieces", fails)
    cache = CacheBytes(pool.data, 1 << 30)
    monkeypatch.setattr(cache_bytes, "_WINDOW_BYTES", 2 * cache.page_bytes)
    rows, lane = list(cache.host_memory(4, cache.block_bytes)), cache_bytes._Lane(cache, 1.0, bool)
    with pytest.raises(RuntimeError, match="the driver failed"):
        lane.run([1, 2, 3, 4], rows, to_cache=True)
    assert bus.sizes == [2] and not bus.num_under_way
    bus.sizes.clear()
    with pytest.raises(RuntimeError, match="the driver failed"):
        lane.bring([1, 2, 3, 4], rows, [(1, bus.event())])
    assert bus.sizes == [4] and not bus.num_under_way and not lane._lock.locked()


def test_a_cpu_has_no_bus() -> None:
    assert not copying.can_copy_pieces(torch.device("cpu"))
