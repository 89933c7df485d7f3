"""Kernel blocks: which size is chosen, and that ids, slots and views follow."""

from __future__ import annotations

import dataclasses
import random
from typing import cast

import numpy as np
import pytest
import torch

from octavo.cache.groups import CacheGroup, table_of_each
from octavo.cache.kernel_blocks import (
    BlockMap,
    MultipleOf,
    backend_block_size,
    group_kernel_blocks,
    prepare_kernel_block_sizes,
    select_common_block_size,
    states_per_block,
)
from octavo.cache.layout import LAYOUTS, extract_blocks
from octavo.cache.pool import KVCachePool
from octavo.device.block_table import BlockTables
from octavo.device.staging import HostQueue, PinnedRing, WriteQueue
from octavo.ops.inputs import gather_inputs
from octavo.ops.inputs.tensors import GroupTables, RowTensors, StepInputs
from octavo.plan import NewBlocks, StepLimits

CPU = torch.device("cpu")
FULL = CacheGroup(kind="full", window=0, block_size=128, layers=(0, 1))
SLIDING = CacheGroup(kind="sliding", window=100, block_size=128, layers=(2,))
LISTED = (16, 32, 64)
ANY = (MultipleOf(1),)


def make_pool(
    layout: str = "LBHNC", sizes: tuple = (64, 64), num_blocks: int = 8, block_size: int = 128, heads: int = 2
) -> KVCachePool:
    shape = {"block_size": block_size, "num_heads": heads, "num_channels": 8}
    groups = [dataclasses.replace(group, **shape) for group in (FULL, SLIDING)]
    pool = KVCachePool(
        groups,
        num_blocks=num_blocks,
        dtype=torch.float32,
        device=CPU,
        layout=LAYOUTS[layout],
        tables=table_of_each(groups, sizes),
    )
    pool.buffer.copy_(torch.arange(pool.buffer.numel(), dtype=torch.float32))
    return pool


QUEUE = HostQueue()


def make_tables(*maps: BlockMap, max_model_len: int = 1024, rows: int = 4) -> BlockTables:
    groups = [dataclasses.replace(FULL, block_size=m.kernel_block_size * m.ratio) for m in maps]
    limits = StepLimits(max_num_rows=rows, max_num_tokens=max_model_len, max_model_len=max_model_len)
    return BlockTables(groups, limits, device=CPU, block_maps=maps, queue=QUEUE)


def begin(tables: BlockTables, row: int, blocks: list[list[int]]) -> None:
    tables.begin(np.array([row]), [blocks])


def extend(tables: BlockTables, row: int, blocks: list[list[int]]) -> None:
    tables.extend([NewBlocks(np.full(len(own), row), np.array(own, np.int64)) for own in blocks])


def ids(tables: BlockTables, group: int, row: int, count: int) -> list[int]:
    QUEUE.apply()
    return tables.tables[group].data[row, :count].tolist()


def test_B2_1_blocks_of_128_over_kernel_blocks_of_64() -> None:
    sizes = prepare_kernel_block_sizes([FULL, SLIDING], [{"a": LISTED}] * 2)
    assert sizes == [64, 64]
    pool = make_pool(sizes=tuple(sizes))
    assert [block_map.ratio for block_map in pool.block_maps] == [2, 2]
    tables = make_tables(*pool.block_maps)
    begin(tables, 1, [[3, 7], [1]])
    assert ids(tables, 0, 1, 4) == [6, 7, 14, 15] and ids(tables, 1, 1, 2) == [2, 3]
    for view in pool.views:
        assert view.shape == (16, 2, 64, 8)


@pytest.mark.parametrize("seed", range(20))
def test_B2_2_INV_1_slots_do_not_change_when_blocks_are_split(seed: int) -> None:
    rng = random.Random(seed)
    ratio, kernel = rng.choice([1, 2, 4, 8]), rng.choice([1, 8, 16, 64])
    whole, split = (
        BlockMap(kernel_block_size=ratio * kernel),
        BlockMap(kernel_block_size=kernel, ratio=ratio, stride=ratio),
    )
    tables = make_tables(whole, split, max_model_len=8 * ratio * kernel)
    for row in range(4):
        blocks = [rng.randrange(1, 10**6) for _ in range(8)]
        begin(tables, row, [blocks, blocks])
    QUEUE.apply()
    length = 8 * ratio * kernel
    ends = np.cumsum([0] + [rng.randrange(1, length + 1) for _ in range(4)])
    num_tokens = int(ends[-1])
    groups = GroupTables(
        [table.data for table in tables.tables],
        [torch.empty_like(table.data) for table in tables.tables],
        torch.zeros(2, num_tokens, dtype=torch.int64),
        tables.block_sizes,
    )
    lengths, tokens = torch.zeros(4, dtype=torch.int32), torch.zeros(2, num_tokens, dtype=torch.int64)
    step = StepInputs(
        max_query_len=length,
        rows=torch.arange(4),
        query_start=torch.from_numpy(ends).int(),
        input_ids=tokens[0],
        positions=tokens[1],
        seq_lens=lengths.clone(),
        next_positions=lengths.long(),
        turn=lengths[:1].clone(),
        results=torch.zeros(2, 4, 1, dtype=torch.int64),
        counts=torch.zeros(2, 4, dtype=torch.int64),
    )
    gather_inputs(step, RowTensors(torch.zeros(4, length, dtype=torch.int32), lengths, lengths), groups)
    slots = groups.slots
    assert slots.unique().numel() > 1
    assert torch.equal(slots[0], slots[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_B2_3_an_unsplit_block_costs_nothing(layout: str) -> None:
    block_ids = [5, 2]
    assert BlockMap(kernel_block_size=16).expand(block_ids) is block_ids
    plain, explicit = make_pool(layout, sizes=()), make_pool(layout, sizes=(128, 128))
    for layer in range(3):
        plain_view, view = plain.views[layer], explicit.views[layer]
        assert view.shape == plain_view.shape == (8, 2, 128, 8) and view.stride() == plain_view.stride()
        assert explicit.block_view(layer) is view
    assert [block_map.stride for block_map in explicit.block_maps] == [1, 1]


def test_B2_4_appending_continues_in_units_of_the_table() -> None:
    maps = [BlockMap(kernel_block_size=64, ratio=ratio, stride=ratio) for ratio in (1, 2, 8)]
    tables = make_tables(*maps)
    begin(tables, 2, [[3], [3], [3]])
    assert not any(table.data.any() for table in tables.tables), "staged until apply"
    extend(tables, 2, [[5], [5], [5]])
    assert ids(tables, 0, 2, 2) == [3, 5] and ids(tables, 1, 2, 4) == [6, 7, 10, 11]
    assert tables.tables[2].data.shape[1] == 16 and ids(tables, 2, 2, 16) == [*range(24, 32), *range(40, 48)]
    begin(tables, 2, [[9], [9], [9]])
    extend(tables, 2, [[1], [], []])
    assert ids(tables, 0, 2, 2) == [9, 1] and ids(tables, 1, 2, 2) == [18, 19]


@pytest.mark.parametrize(
    ("block_size", "backends", "expected"),
    [
        (128, {"a": (128,)}, 128),
        (128, {"a": (MultipleOf(16),)}, 128),
        (128, {"a": LISTED}, 64),
        (48, {"a": LISTED, "b": (MultipleOf(16),)}, 16),
        (128, {"a": (64, MultipleOf(48)), "b": LISTED}, 64),
        (128, {"a": (32, 64), "b": (16, 32)}, 32),
        (96, {"a": (16, 64)}, 16),
        (128, {}, 128),
    ],
)
def test_B2_5_B2_G4_the_largest_size_that_all_take(block_size: int, backends: dict, expected: int) -> None:
    assert select_common_block_size(block_size, backends) == expected


@pytest.mark.parametrize("backends", [{"a": (48,)}, {"a": (16,), "b": (32,)}, {"a": (MultipleOf(48),)}])
def test_B2_5_no_common_size(backends: dict) -> None:
    with pytest.raises(ValueError, match=r"No common block size for 128 \(a: \["):
        select_common_block_size(128, backends)


def test_B2_6_B2_G3_the_list_is_as_long_as_the_groups() -> None:
    kinds = [dataclasses.replace(FULL, kind=kind) for kind in ("encoder_only", "full", "state", "sliding")]
    supported: list[dict] = [{}, {"a": LISTED}, {}, {"a": (MultipleOf(16),)}]
    assert prepare_kernel_block_sizes(kinds, supported) == [None, 64, None, 128]
    with pytest.raises(ValueError, match="unknown kind of cache group 'ring'"):
        prepare_kernel_block_sizes([dataclasses.replace(FULL, kind="ring")], [{}])


def test_a_users_size_is_taken_or_refused() -> None:
    assert prepare_kernel_block_sizes([FULL], [{"a": ANY}], wanted=32) == [32]
    with pytest.raises(ValueError, match="a does not take kernel_block_size=8"):
        prepare_kernel_block_sizes([FULL], [{"a": LISTED}], wanted=8)
    with pytest.raises(ValueError, match="Kernel block size 48 must divide KV cache block size 128"):
        prepare_kernel_block_sizes([FULL], [{"a": ANY}], wanted=48)


@pytest.mark.parametrize("ratio", [1, 2, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_B2_7_B2_G2_whole_blocks_move_at_any_ratio(layout: str, ratio: int) -> None:
    pool = make_pool(layout, sizes=(128 // ratio,) * 2)
    before = [pool.block_view(layer).clone() for layer in range(3)]
    data = pool.extract([6, 2])
    assert data.shape == (2, 2 * 2 * 128 * 8 * 4)  # layer slots, heads, tokens, channels, bytes
    pool.inject([1, 7], data)
    for layer in range(3):
        after = pool.block_view(layer)
        assert torch.equal(after[[1, 7]], before[layer][[6, 2]])
        assert torch.equal(after[[0, 2, 3, 4, 5, 6]], before[layer][[0, 2, 3, 4, 5, 6]])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_B2_7_tokens_move_between_pools_of_other_block_sizes(layout: str) -> None:
    """A sender with blocks of 64 and a receiver with blocks of 128 over kernel blocks of 64 and 32."""
    sender, receiver = make_pool(layout, (64, 64), 9, 64), make_pool(layout, (64, 32), 8)
    receiver.buffer.zero_()

    def tokens(pool: KVCachePool, layer: int, blocks: list[int]) -> torch.Tensor:
        index = pool.block_maps[pool.group_of_layer[layer]].expand(blocks)
        return pool.views[layer][torch.tensor(index)].transpose(1, 2).flatten(0, 1)  # [tokens, heads, channels]

    for layer in range(3):
        wanted = tokens(sender, layer, [8, 3, 5, 2])
        block_map = receiver.block_maps[receiver.group_of_layer[layer]]
        index = torch.tensor(block_map.expand([4, 6]))
        parts = wanted.unflatten(0, (-1, block_map.kernel_block_size)).transpose(1, 2)
        receiver.views[layer][index] = parts
        assert torch.equal(tokens(receiver, layer, [4, 6]), wanted)
    held = extract_blocks(receiver.data, [1, 2, 3, 5, 7])
    assert not held.any(), "no other block changed"


def test_B2_8_mixed_backends_of_one_group() -> None:
    assert select_common_block_size(128, {"a": (64,), "b": (MultipleOf(16),)}) == 64


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_backend_of_a_group_may_need_smaller_blocks(layout: str) -> None:
    assert backend_block_size(128, "a", ANY, LAYOUTS[layout], num_heads=8) == 128
    assert backend_block_size(128, "a", (64,), LAYOUTS[layout], num_heads=1) == 64
    if LAYOUTS[layout].token_major:
        assert backend_block_size(128, "a", (64,), LAYOUTS[layout], num_heads=8) == 64
    else:
        with pytest.raises(ValueError, match=rf"a needs 64-token kernel blocks, which 128-token.*{layout}.*LBNHC"):
            backend_block_size(128, "a", (64,), LAYOUTS[layout], num_heads=8)


@pytest.mark.parametrize("layout", [name for name, layout in LAYOUTS.items() if layout.token_major])
def test_token_major_bytes_are_the_same_at_every_kernel_block_size(layout: str) -> None:
    pools = [make_pool(layout, (size, size)) for size in (128, 64, 16)]
    for layer in range(3):
        tokens = [
            pool.block_view(layer).unflatten(0, (8, -1)) if pool is pools[0] else pool.block_view(layer)
            for pool in pools
        ]
        flat = [view.transpose(2, 3).flatten(1, 2) for view in tokens]
        assert torch.equal(flat[0], flat[1]) and torch.equal(flat[0], flat[2])


def test_rows_without_blocks_leave_a_device_alone() -> None:
    """Its queue has no empty writes."""
    queue = WriteQueue(cast(PinnedRing, object()))  # nothing passes it
    limits = StepLimits(max_num_rows=4, max_num_tokens=64, max_model_len=256)
    tables = BlockTables([FULL], limits, device=CPU, queue=queue)
    begin(tables, 1, [[]])
    queue.apply()


def test_B2_10_a_write_past_the_row_is_refused() -> None:
    tables = make_tables(
        BlockMap(kernel_block_size=128), BlockMap(kernel_block_size=64, ratio=2, stride=2), max_model_len=256
    )
    begin(tables, 1, [[1, 2], [1, 2]])
    begin(tables, 0, [[4], [4]])
    with pytest.raises(RuntimeError, match=r"row 1, group 0 exceeds row capacity \(3 > 2\)"):
        extend(tables, 1, [[3], [3]])
    with pytest.raises(RuntimeError, match=r"row 3, group 1 exceeds row capacity \(6 > 4\)"):
        tables.begin(np.array([2, 3, 1]), [[[5], [5]], [[1, 2], [1, 2, 3]], [[1], [1]]])
    with pytest.raises(RuntimeError, match=r"row 1, group 1 exceeds row capacity \(6 > 4\)"):
        extend(tables, 1, [[], [3]])
    assert ids(tables, 1, 1, 4) == [2, 3, 4, 5] and ids(tables, 1, 0, 2) == [8, 9], "nothing of it was staged"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ratio", [1, 2, 8])
def test_B2_11_grouped_views_share_the_bytes(layout: str, ratio: int) -> None:
    pool = make_pool(layout, sizes=(128 // ratio,) * 2)
    for layer in range(3):
        view, grouped = pool.views[layer], pool.block_view(layer)
        assert grouped.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
        if ratio == 1:
            assert grouped is view
            continue
        assert grouped.shape == (8, ratio, 2, 128 // ratio, 8)
        block_map = pool.block_maps[pool.group_of_layer[layer]]
        for block in (0, 5, 7):
            assert torch.equal(grouped[block], view[torch.tensor(block_map.expand([block]))])


def test_B2_11_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="Kernel block size 96 must divide KV cache block size 128"):
        prepare_kernel_block_sizes([FULL], [{"a": ANY}], wanted=96)
    with pytest.raises(ValueError, match="10 kernel blocks are not a whole number for each of 4 blocks"):
        group_kernel_blocks(torch.zeros(10, 1, 2, 2), 4)


def test_B2_G1_compressed_states_are_not_cut() -> None:
    assert states_per_block(64, 4) == 16
    group = dataclasses.replace(FULL, tokens_per_state=4)
    assert prepare_kernel_block_sizes([group], [{"a": LISTED}]) == [64]
    for size in (2, 0):
        with pytest.raises(ValueError, match=f"Kernel block size {size} must be a multiple of tokens_per_state=4"):
            states_per_block(size, 4)
    with pytest.raises(ValueError, match="Kernel block size 2 must be a multiple of tokens_per_state=4"):
        prepare_kernel_block_sizes([group], [{"a": ANY}], wanted=2)


def test_kernel_block_ids_that_a_table_cannot_hold_are_refused() -> None:
    group = CacheGroup(kind="full", block_size=128, layers=tuple(range(64)), num_channels=2)
    with pytest.raises(ValueError, match=r"300000 blocks of 8192 kernel blocks each pass"):
        KVCachePool(
            [group],
            num_blocks=300_000,
            dtype=torch.float32,
            device=torch.device("meta"),
            layout=LAYOUTS["BLHNC"],
            tables=table_of_each([group], [1]),
        )
