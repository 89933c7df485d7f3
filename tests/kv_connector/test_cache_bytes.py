"""Whole blocks as bytes (O.1, E.4): of every layout, at every split into kernel blocks."""

from __future__ import annotations

import pytest
import torch

from octavo.cache.groups import CacheGroup, TableSpec
from octavo.cache.layout import LAYOUTS
from octavo.cache.pool import KVCachePool
from octavo.kv_connector.orders import Order
from octavo.kv_connector.worker import host_memory
from octavo.kv_connector.worker.cache_bytes import CacheBytes, joined
from octavo.kv_connector.worker.mover import Job

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
