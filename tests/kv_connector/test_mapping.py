"""From one cache to another whose blocks lie in another way (T): global head numbers and plain numpy are the reference.

What a cache holds is written and read through the views that attention has of it, never through the mapping.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from cache_sides import FACTS, HEAD, LAYERS, Side, make_side, numbers, slice_of
from octavo.cache.groups import CacheGroup, TableSpec
from octavo.cache.layout import LAYOUTS
from octavo.cache.policies import make_policies
from octavo.kv_connector.peers.description import CacheDescription, describe, differences, has_same_rows
from octavo.kv_connector.peers.mapping import Tokens, batches, copy, divide, first_read, needed_places


def move(givers: Sequence[Side], taker: Side, tokens: Tokens, room: int = 1 << 20) -> None:
    """By batches, as a worker does."""
    described = [giver.described for giver in givers]
    divided = divide(taker.described, described)
    for part_of in batches(taker.described, described, tokens, room):
        size = taker.described.groups[0].block_size
        start = part_of.start // size * size
        targets = taker.places(Tokens(start, part_of.end))
        rows = np.zeros((len(targets), taker.cache.block_bytes), np.uint8)
        for giver, parts in zip(givers, divided, strict=True):
            places = needed_places(giver.described, taker.described, parts, targets, Tokens(start, part_of.end))
            sources = places, giver.rows(places)
            copy(giver.described, taker.described, parts, sources, (targets, rows), part_of)
        taker.take(targets, rows)


def check(giver: Side, taker: Side, tokens: Tokens, room: int = 1 << 20) -> None:
    values = numbers(giver.described.groups[0].total_heads, tokens.end)
    giver.fill(values)
    before = taker.cache.buffer.clone()
    move([giver], taker, tokens, room)
    size = taker.described.groups[0].block_size
    expected = np.zeros_like(taker.values(len(taker.table) * size))
    expected[:, :, tokens.start : tokens.end] = values[:, :, tokens.start :]
    first, last = tokens.start // size, -(-tokens.end // size)
    found = taker.values(len(taker.table) * size)
    assert np.array_equal(found[:, :, first * size : last * size], expected[:, :, first * size : last * size])
    unused = [b for b in range(taker.cache.num_blocks) if b not in taker.table[first:last]]
    rows = before.view(torch.uint8).view(taker.cache.data.shape)
    assert torch.equal(taker.cache.data[:, unused], rows[:, unused]), "other blocks are as they were"


SIZES = (16, 32, 64, 128)
LAYOUT_PAIRS = list(itertools.product(LAYOUTS, repeat=2))


@pytest.mark.parametrize("ratios", list(itertools.product((1, 2, 8), repeat=2)), ids=str)
def test_T_2_T_3_T_4_B2_7_blocks_of_all_sizes_both_ways_in_every_pair_of_layouts(ratios):
    """The rest of the last block is zero, and no block that nothing was asked for is touched."""
    rng = random.Random(str(ratios))
    for sizes, layouts in itertools.product(itertools.product(SIZES, repeat=2), LAYOUT_PAIRS):
        giver = make_side(layouts[0], sizes[0], ratios[0])
        taker = make_side(layouts[1], sizes[1], ratios[1])
        start = rng.randrange(0, 130 // sizes[1] + 1) * sizes[1]
        tokens = Tokens(start, rng.randrange(start + 1, 200))
        check(giver, taker, tokens, room=rng.choice((1, 1 << 20)))


@pytest.mark.parametrize("sizes", [(48, 64), (528, 48), (16, 48), (144, 128)])
@pytest.mark.parametrize("room", [1, 1 << 16, 1 << 20])
def test_T_2_sizes_with_few_common_multiples_take_no_more_room(sizes, room):
    """A block there that lies in two batches is asked for twice."""
    giver, taker = make_side("LBHNC", sizes[0], 1), make_side("BLNHC", sizes[1], 1)
    check(giver, taker, Tokens(0, 187), room)
    most = max(giver.cache.block_bytes, taker.cache.block_bytes)
    for part in batches(taker.described, [giver.described], Tokens(0, 10**5), room):
        assert part.num_tokens / sizes[1] * taker.cache.block_bytes <= 5 * max(room, most)


def test_T_1_each_rank_gets_the_slice_that_its_global_head_numbers_say():
    rng = random.Random(1)
    sizes = (1, 2, 4, 8)
    for heads, num_givers, num_takers in itertools.product(range(1, 9), sizes, sizes):
        if any(heads % ranks and ranks % heads for ranks in (num_givers, num_takers)):
            continue  # neither a whole number of heads for a rank, nor of ranks for a head
        layouts, blocks = rng.choice(LAYOUT_PAIRS), (rng.choice(SIZES), rng.choice(SIZES))
        values = numbers(heads, 75)
        givers = [
            make_side(layouts[0], blocks[0], rng.choice((1, 2)), heads=heads, rank=rank, ranks=num_givers, tokens=75)
            for rank in range(num_givers)
        ]
        for rank, giver in enumerate(givers):
            giver.fill(slice_of(values, rank, num_givers))
        for rank in range(num_takers):
            taker = make_side(layouts[1], blocks[1], 2, heads=heads, rank=rank, ranks=num_takers, tokens=75)
            move(givers, taker, Tokens(0, 75))
            expected = slice_of(values, rank, num_takers)
            assert np.array_equal(taker.values(75), expected), (heads, num_givers, num_takers)


def test_T_1_readers_share_the_ranks_that_have_the_same_head():
    givers = [make_side("LBHNC", 16, 1, heads=2, rank=rank, ranks=8).described for rank in range(8)]
    read = []
    for rank in range(4):
        taker = make_side("LBHNC", 16, 1, heads=2, rank=rank, ranks=4)
        read += [number for number, parts in enumerate(divide(taker.described, givers)) if parts]
    assert len(set(read)) == 4


def test_T_6_layers_may_be_divided_in_another_way_than_heads():
    taker = make_side("BLHNC", 32, 1)
    whole = make_side("LBNHC", 16, 1).described
    group = whole.groups[0]
    stages = [
        describe(
            [CacheGroup(kind="full", block_size=16, layers=(layer,), num_heads=2, num_channels=2 * HEAD)],
            [TableSpec(0, (layer,), 16)],
            "LBNHC",
            block_bytes=group.page_bytes,
            itemsize=4,
            facts=FACTS,
        )
        for layer in range(LAYERS)
    ]
    values, tokens = numbers(2, 40), Tokens(0, 40)
    targets = taker.places(tokens)
    rows = np.zeros((len(targets), taker.cache.block_bytes), np.uint8)
    for layer, parts in enumerate(divide(taker.described, stages)):
        places = needed_places(stages[layer], taker.described, parts, targets, tokens)
        assert places == [(0, 0), (0, 1), (0, 2)]
        blocks = np.zeros((3, 16, 2, 2 * HEAD), np.float32)
        blocks.reshape(48, 2, -1)[:40] = values[layer].transpose(1, 0, 2)
        sources = places, blocks.reshape(3, -1).view(np.uint8)
        copy(stages[layer], taker.described, parts, sources, (targets, rows), tokens)
    taker.take(targets, rows)
    assert np.array_equal(taker.values(40), values)


def test_what_nobody_has_is_said_by_head_and_layer():
    taker = make_side("LBHNC", 16, 1, heads=4, rank=1, ranks=2)
    giver = make_side("LBHNC", 16, 1, heads=4, rank=0, ranks=2)
    with pytest.raises(ValueError, match="nothing of KV head 2 of layer 0"):
        divide(taker.described, [giver.described])


@pytest.mark.parametrize(
    "kind", [{"kind": "full"}, {"kind": "sliding", "window": 21}, {"kind": "chunked", "chunk": 48}]
)
def test_what_is_read_first_is_what_the_policies_say(kind):
    group = CacheGroup(block_size=16, layers=(0,), **kind)
    described = describe([group], [TableSpec(0, (0,), 16)], "LBHNC", block_bytes=0, itemsize=4, facts={}).groups[0]
    (policy,) = make_policies([group])
    for position in range(200):
        assert first_read(described, position) // 16 == policy.first_needed(position)


def test_sides_whose_blocks_mean_the_same_pass_them_as_they_are():
    def same(*sides: tuple[str, int, int], heads: int = 2) -> bool:
        first, second = (make_side(*side, heads=heads).described for side in sides)
        return has_same_rows(first, second)

    assert same(("LBHNC", 32, 2), ("BLHNC", 32, 2)) and same(("LBNHC", 32, 1), ("BLNHC", 32, 8))
    assert same(("LBHNC", 32, 2), ("BLNHC", 32, 1), heads=1)
    assert not same(("LBHNC", 32, 2), ("LBHNC", 32, 1)) and not same(("LBHNC", 32, 1), ("LBNHC", 32, 1))
    assert not same(("LBHNC", 32, 1), ("LBHNC", 16, 1))


def test_what_may_not_differ_is_said_with_both_values():
    def with_facts(head: int, **facts: str) -> CacheDescription:
        group = CacheGroup(kind="full", block_size=16, layers=(3,), num_heads=2, num_channels=2 * head)
        return describe([group], [TableSpec(0, (3,), 16)], "LBHNC", block_bytes=0, itemsize=2, facts=facts)

    assert not differences(with_facts(4, dtype="a"), with_facts(4, dtype="a"))
    assert differences(with_facts(8, dtype="a"), with_facts(4, dtype="b", model="m")) == [
        "its dtype is 'a', yours 'b'",
        "its model is 'nothing', yours 'm'",
        "its head_bytes of layer 3 is 32, yours 16",
    ]
