"""Mask rows from block tables, compared with a brute-force token mask on thousands of random tables; their bounds."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

import octavo.attention as A
from mixtures import MAX_LONG, MIXTURES, NUM_ROWS, NUM_TOKENS, padded
from octavo.attention.base import AttentionInputs, Setup
from octavo.attention.flex.backend import FlexBackend
from octavo.attention.flex.block_sizes import FlexSizes
from octavo.attention.flex.kernel import make_mods
from octavo.attention.mods import AttentionMods, bound
from octavo.attention.reference import ReferenceBackend
from octavo.cache.specs import AttentionSpec
from octavo.ops import flex as ops
from octavo.ops.flex.mask_rows import NOWHERE, Geometry, Kind, MaskRows

CPU = torch.device("cpu")
GARBAGE = 2**31 - 1
PLAIN = AttentionSpec(num_heads=8, num_kv_heads=2, head_size=16, scale=0.25)
FIELDS = {"prefix_len": torch.arange(0, 41 * 9, 9, dtype=torch.int32)}
MODS = [
    AttentionMods(),
    A.sliding_window(40),
    A.chunked(48),
    A.rswa(20),
    A.or_(A.sinks(5), A.sliding_window(17)),
    A.and_(A.dilated(3), A.sliding_window(70)),
    AttentionMods(mask_mod=lambda b, h, q_idx, kv_idx: (kv_idx // 16 + q_idx // 16) % 3 != 1),
    AttentionMods(mask_mod=lambda b, h, q_idx, kv_idx: kv_idx < 60, causal=False),
]


class Batch:
    """Requests whose tables share prefixes, repeat null blocks and end in garbage."""

    def __init__(self, rng: random.Random, block: int, *, most: int = 40, longest: int = 400) -> None:
        num, self.block = rng.randrange(1, most + 1), block
        self.lengths = [rng.randrange(1, longest) for _ in range(num)]
        self.queries = [min(length, rng.choice([1, 1, 2, 7, rng.randrange(1, 60)])) for length in self.lengths]
        width = -(-longest // block) + 1
        ids = list(range(1, num * width + 1))
        rng.shuffle(ids)
        self.num_blocks = num * width + 1
        table = torch.full((num, width), GARBAGE, dtype=torch.int32)
        for row, length in enumerate(self.lengths):
            count = -(-length // block)
            mine = [ids.pop() for _ in range(count)]
            if row and rng.random() < 0.3:  # a prefix hit
                shared = min(count, -(-self.lengths[row - 1] // block), rng.randrange(5))
                mine[:shared] = table[row - 1, :shared].tolist()
            table[row, :count] = torch.tensor(mine, dtype=torch.int32)
            table[row, count:] = torch.randint(0, self.num_blocks, (width - count,), dtype=torch.int32)
        self.table = table
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32)
        self.query_start = torch.tensor([0, *self.queries]).cumsum(0).int()

    def places(self, row: int, starts: range, unit: int) -> list[int]:
        """Where the units of a request that begin at such positions lie; -1: nowhere."""
        found = []
        for start in starts:
            id = int(self.table[row, start // self.block]) if start < self.lengths[row] else 0
            found.append(id * (self.block // unit) + start % self.block // unit if id else -1)
        return found

    def plan(self, shape: Geometry, mods: AttentionMods, *, slack: int = 0) -> tuple[MaskRows, int, int]:
        tiles = ops.max_tiles(len(self.lengths), sum(self.queries), max(self.queries), shape.tokens)
        leaves = -(-(max(self.lengths) + slack) // shape.leaf)
        rows = MaskRows(tiles * leaves, shape, CPU)
        with bound(FIELDS):
            count = ops.plan_mask_rows(
                rows,
                shape,
                num_tiles=tiles,
                num_leaves=leaves,
                query_start=self.query_start,
                seq_lens=self.seq_lens,
                block_table=self.table,
                table_rows=torch.arange(len(self.lengths)),
                kind=Kind.ALL,
                some=mods.some_visible,
                every=mods.all_visible,
            )
        return rows, count, leaves


def visible(mods: AttentionMods, row: int, q: torch.Tensor, length: int) -> torch.Tensor:
    """The token mask of queries at positions q, [queries, length]."""
    kv = torch.arange(length)
    with bound(FIELDS):
        return mods.visible(torch.tensor(row), torch.tensor(0), q[:, None], kv[None, :]).expand(len(q), length)


def shape_of(rng: random.Random, block: int, **others: int) -> Geometry:
    """Mask blocks of a size of their own: a part of a block, a block, several, or parts of two."""
    kv_block = rng.choice([16, 32, 64])
    sizes = {"group": rng.choice([1, 4]), "lines": 16, "stride": 1, "columns": rng.choice([2, 3, 100]), "q_block": 16}
    return Geometry(block=block, kv_block=kv_block, unit=math.gcd(block, kv_block), **(sizes | others))


def entries(lists: torch.Tensor, num: torch.Tensor, z: int, shape: Geometry) -> dict[int, list[int]]:
    """Of a list: its mask blocks' numbers, in order, and where their units lie. The rest of it must be safe."""
    whole, used = lists[z, 0, 0].unflatten(0, (-1, shape.entry)), int(num[z])
    assert whole.shape[0] == shape.columns + 1 and whole[used:].eq(0).all()
    found = {int(entry[0]): entry[1:].tolist() for entry in whole[:used]}
    assert list(found) == sorted(found) and len(found) == used
    return found


@pytest.mark.parametrize("seed", range(20))
def test_F1_8_and_F1_9_mask_rows_against_a_brute_force_token_mask(seed: int) -> None:
    """20 x 8 batches of 1 to 40 tables. Blocks are never under-selected, full ones are wholly visible, lists are
    in order, without repeats, and end in a safe entry (F1.7, F1.G3); tiles never mix requests (K4.G7)."""
    rng = random.Random(seed)
    for mods in MODS:
        block = rng.choice([16, 32, 48])
        shape = shape_of(rng, block)
        size, columns, batch = shape.kv_block, shape.columns, Batch(rng, block)
        rows, count, leaves = batch.plan(shape, mods, slack=rng.choice([0, 500]))
        seen_tokens = []
        for z in range(count):
            low, high, row, first = (int(x[z]) for x in (rows.low, rows.high, rows.row, rows.first))
            part, full = (
                entries(*pair, z, shape) for pair in ((rows.partial, rows.partial_num), (rows.full, rows.full_num))
            )
            if high < low:
                assert not part and not full
                continue
            length, leaf = batch.lengths[row], z % leaves
            assert first % shape.tokens == 0 and first <= low and high < first + shape.tokens
            start = length - batch.queries[row]
            if leaf == 0:
                seen_tokens += range(int(rows.token[z]), int(rows.token[z]) + high - low + 1)
                assert int(rows.token[z]) == int(batch.query_start[row]) + low - start
            mask = visible(mods, row, torch.arange(low, high + 1), length)
            for column in range(leaf * columns, min((leaf + 1) * columns, -(-length // size))):
                keys = mask[:, column * size : (column + 1) * size]
                places = batch.places(row, range(column * size, (column + 1) * size, shape.unit), shape.unit)
                if column in full:
                    assert keys.all() and keys.shape[1] == size and full[column] == places
                elif column in part:
                    instead = ~max(places)  # of a unit that is not there
                    assert part[column] == [instead if place < 0 else place for place in places]
                else:
                    assert not keys.any()
            assert not set(part) & set(full) and all(at // columns == leaf for at in [*part, *full])
        assert sorted(seen_tokens) == list(range(sum(batch.queries))), "every query is in one tile"


@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_K4_7_tiles_of_every_size_tell_the_same_blocks_full(group: int) -> None:
    """A kernel walks partly visible blocks first, so a block's kind is part of the order of a query's sums."""
    rng = random.Random(group)
    for mods in MODS:
        batch = Batch(rng, 16, most=8)
        full: list[dict[tuple[int, int], list[int]]] = []
        for lines in (16, 32, 128):
            shape = Geometry(group=group, lines=lines, block=16, stride=1, columns=100, q_block=128, kv_block=16)
            rows, count, _ = batch.plan(shape, mods)
            seen = {}
            for z in range(count):
                numbers = list(entries(rows.full, rows.full_num, z, shape))
                seen |= {(int(rows.row[z]), at): numbers for at in range(int(rows.low[z]), int(rows.high[z]) + 1)}
            full.append(seen)
        assert full[0] == full[1] == full[2] and len(full[0]) == sum(batch.queries)


def test_lists_name_the_same_mask_blocks_at_every_block_size() -> None:
    """Which there are, of which kind, in which order: the order of a query's sums. Only where they lie differs."""
    for mods in MODS:
        told = []
        for block in (16, 32, 48, 64, 128, 144, 256, 528):
            batch = Batch(random.Random(3), block, most=8)
            shape = shape_of(random.Random(1), block, columns=5, group=4)
            rows, count, _ = batch.plan(shape, mods)
            lists = (rows.partial, rows.partial_num), (rows.full, rows.full_num)
            told.append([[list(entries(*pair, z, shape)) for pair in lists] for z in range(count)])
        assert all(one == told[0] for one in told)


def test_F1_9_a_kernels_own_indices_lead_to_the_logical_mask() -> None:
    """Keys past a request's end and those that the cache has not are hidden, and no mod is asked about them."""
    rng = random.Random(5)
    for mods in MODS:
        shape = shape_of(rng, 16, group=4, stride=3, columns=8)
        batch = Batch(rng, 16, most=6, longest=120)
        rows, count, leaves = batch.plan(shape, mods)
        asked: list[int] = []

        def looked_up(b, h, q_idx, kv_idx, mods=mods, asked=asked):
            asked += [int(q_idx), *kv_idx.tolist()]
            return mods.mask_mod(b, h, q_idx, kv_idx) if mods.mask_mod else kv_idx >= 0

        asking = dataclasses.replace(mods, mask_mod=looked_up)
        mask, _ = make_mods(asking, shape, rows.row, rows.first, rows.length)
        for z in range(0, count, leaves):
            low, high, row, first = (int(x[z]) for x in (rows.low, rows.high, rows.row, rows.first))
            for q in range(low, high + 1):
                expected = visible(mods, row, torch.tensor([q]), batch.lengths[row])[0]
                lists = (rows.partial, rows.partial_num), (rows.full, rows.full_num)
                seen = torch.zeros_like(expected)
                for number in [at for pair in lists for at in entries(*pair, z, shape)]:
                    n = number * shape.kv_block + torch.arange(shape.kv_block)
                    with bound(FIELDS):
                        keys = mask(torch.tensor(z), torch.tensor(0), torch.tensor((q - first) * 4), n)
                        nowhere = mask(torch.tensor(z), torch.tensor(0), torch.tensor(15), torch.tensor([NOWHERE]))
                    assert not keys[n >= len(expected)].any() and not nowhere.any()
                    seen[n[n < len(expected)]] = keys[n < len(expected)]
                reach = slice(0, shape.leaf)  # of the first leaf
                assert torch.equal(seen[reach], expected[reach])
        assert not asked or (min(asked) >= 0 and max(asked) < max(batch.lengths))


def test_F1_6_places_of_physical_blocks() -> None:
    """Only live entries count; a block that a table repeats stands at each of its places; the null block at none."""
    for table, length, expected in (
        ([3, 5, 1, 9, 9], 33, {0: [3 * 4, 5 * 4, 1 * 4, ~20]}),
        ([2, 4, 2, 7, 0], 80, {0: [2 * 4, 4 * 4, 2 * 4, 7 * 4]}),
        ([0, 0, 6, 0, 8], 80, {0: [~24, ~24, 24, ~24], 1: [32, ~32, ~32, ~32]}),
    ):
        shape = Geometry(group=1, lines=16, block=16, stride=4, columns=2, q_block=16)
        rows, tests = MaskRows(2, shape, CPU), AttentionMods()
        ops.plan_mask_rows(
            rows,
            shape,
            num_tiles=2,
            num_leaves=1,
            query_start=torch.tensor([0, 1]).int(),
            seq_lens=torch.tensor([length]).int(),
            block_table=torch.tensor([table]).int(),
            table_rows=torch.tensor([0]),
            kind=Kind.ALL,
            some=tests.some_visible,
            every=tests.all_visible,
        )
        part, full = (entries(*x, 0, shape) for x in ((rows.partial, rows.partial_num), (rows.full, rows.full_num)))
        assert part | full == expected and (0 in full) == (length == 80 and table[0] == 2)


def test_F1_1_and_F1_2_the_numbers_that_failed_upstream() -> None:
    """F1.G1: 16,384 tokens, 4,096 of a request, blocks of 16: buffers are made, smaller than [1024, 4096]; odd ones."""
    for tokens, longest, block in ((16384, 4096, 16), (1000, 1000, 48)):
        setup = Setup(max_num_rows=256, max_num_tokens=tokens, max_model_len=longest, num_blocks=50, block_size=block)
        backend = FlexBackend([PLAIN], torch.bfloat16, CPU, setup)
        run_step(backend, [min(longest, 90)] * 3, block)
        for rows in backend._buffers.values():
            assert rows.capacity >= -(-tokens // 16) and rows.columns == -(-min(longest, 2048) // 64)
            assert rows.partial.shape[-1] == (rows.columns + 1) * (1 + 64 // 16)
            if tokens == 16384:
                assert rows.partial.numel() + rows.full.numel() < 1024 * 4096


def test_F1_3_every_legal_batch_fits() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        tokens, budget = rng.choice([1, 4, 16, 64]), rng.randrange(1, 600)
        queries, starts = [], []
        while budget > 0 and len(queries) < 40:
            queries.append(rng.randrange(1, budget + 1) if rng.random() < 0.3 else 1)
            starts.append(rng.randrange(1000))
            budget -= queries[-1]
        used = sum((s + n - 1) // tokens - s // tokens + 1 for s, n in zip(starts, queries, strict=True))
        assert used <= ops.max_tiles(len(queries), sum(queries), max(queries), tokens)
        assert ops.max_tiles(len(queries), sum(queries), max(queries), tokens) <= ops.max_tiles(40, 640, 640, tokens)


def run_step(
    backend: FlexBackend, lengths: list[int], block: int, num_blocks: int = 50, spec: AttentionSpec = PLAIN
) -> torch.Tensor:
    """One decode step over a cache of zeros."""
    rows, width = len(lengths), -(-max(lengths) // block)
    inputs = AttentionInputs(
        num_rows=rows,
        num_tokens=rows,
        max_query_len=1,
        max_seq_len=max(lengths),
        block_size=block,
        query_start=torch.arange(rows + 1, dtype=torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=torch.arange(rows * width, dtype=torch.int32).view(rows, width) % (num_blocks - 1) + 1,
        slot_mapping=torch.full((rows,), -1),
    )
    kv = torch.zeros(num_blocks, block, 2, 32, dtype=torch.bfloat16).transpose(1, 2)
    out = torch.empty(rows, 8, 16, dtype=torch.bfloat16)
    backend.prepare(inputs)
    backend.run(torch.ones(rows, 8, 16, dtype=torch.bfloat16), kv, spec, out)
    return out


def test_F1_4_addresses_and_strides_stay_over_steps_of_any_size() -> None:
    setup = Setup(max_num_rows=8, max_num_tokens=64, max_model_len=500, num_blocks=50, block_size=16)
    backend = FlexBackend([PLAIN], torch.bfloat16, CPU, setup)
    seen = set()
    for lengths in ([90] * 3, [1], [500], [17, 300, 4, 4, 4, 4, 4, 4]):
        run_step(backend, lengths, 16)
        (rows,) = backend._buffers.values()
        lists = rows.partial, rows.full, rows.partial_num, rows.full_num, rows.row, rows.first
        seen.add(tuple((x.data_ptr(), x.stride()) for x in lists))
    assert len(seen) == 1


def test_F1_G5_masks_that_torch_evaluates_lie_in_the_same_buffers() -> None:
    """Hints of a user's own have no kernel; their mask rows are copied to where a graph looks for them."""
    hinted = AttentionMods(mask_mod=lambda b, h, q, kv: kv >= 0, some=lambda b, q, q_last, kv, kv_last: kv >= 0)
    spec = dataclasses.replace(PLAIN, mods=hinted)
    setup = Setup(max_num_rows=8, max_num_tokens=64, max_model_len=500, num_blocks=50, block_size=16)
    backend = FlexBackend([spec], torch.bfloat16, CPU, setup)
    seen, outs = set(), []
    for lengths in ([90] * 3, [1], [500], [17, 300]):
        outs.append((run_step(backend, lengths, 16, spec=spec), run_step(plain_backend(setup), lengths, 16)))
        (rows,) = backend._buffers.values()
        seen.add(tuple((x.data_ptr(), x.stride()) for x in (rows.partial, rows.full, rows.partial_num, rows.full_num)))
    assert len(seen) == 1 and all(torch.equal(*pair) for pair in outs)


def plain_backend(setup: Setup) -> FlexBackend:
    return FlexBackend([PLAIN], torch.bfloat16, CPU, setup)


class TwoTiles(FlexBackend):
    """As on a GPU, where prompts have larger tiles than decode."""

    def sizes(self, spec: AttentionSpec, block_size: int) -> FlexSizes:
        return dataclasses.replace(super().sizes(spec, block_size), prefill_lines=64)


def test_rows_of_one_query_beside_prompts_have_the_tile_of_decode() -> None:
    lengths, queries = [37, 5, 90, 60], [1, 1, 30, 60]
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    setup = Setup(max_num_rows=4, max_num_tokens=128, max_model_len=100, num_blocks=50, block_size=16)
    inputs = AttentionInputs(
        num_rows=4,
        num_tokens=92,
        max_query_len=60,
        max_seq_len=90,
        block_size=16,
        query_start=starts,
        seq_lens=torch.tensor(lengths).int(),
        block_table=torch.randperm(49)[:24].add(1).view(4, 6).int(),
        slot_mapping=torch.full((92,), -1),
    )
    q, kv = torch.randn(92, 8, 16), torch.randn(50, 2, 16, 32)
    outs = []
    for cls, most, tiles in ((ReferenceBackend, None, []), (TwoTiles, None, [64]), (TwoTiles, 2, [16, 64])):
        inputs.max_long = most
        backend = cls([PLAIN], torch.float32, CPU, setup)
        outs.append(torch.full_like(q, float("nan")))
        backend.prepare(inputs)
        backend.run(q, kv, PLAIN, outs[-1])
        assert not tiles or [plan.shape.lines for plan in backend._plans[PLAIN]] == tiles
    torch.testing.assert_close(outs[1], outs[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outs[2], outs[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixed_step_padded_as_in_a_graph_has_the_same_bits(name: str) -> None:
    lengths, queries = zip(*MIXTURES[name], strict=True)
    rows, tokens = len(lengths), sum(queries)
    setup = Setup(max_num_rows=NUM_ROWS, max_num_tokens=NUM_TOKENS, max_model_len=208, num_blocks=200, block_size=16)
    inputs = AttentionInputs(
        num_rows=rows,
        num_tokens=tokens,
        max_query_len=max(queries),
        max_seq_len=max(lengths),
        block_size=16,
        query_start=torch.tensor([0, *queries]).cumsum(0).int(),
        seq_lens=torch.tensor(lengths).int(),
        block_table=torch.randperm(199)[: 13 * rows].add(1).view(rows, 13).int(),
        slot_mapping=torch.full((tokens,), -1),
        rows=torch.arange(rows),
        max_long=sum(n > 1 for n in queries),
    )
    q, kv, outs = torch.randn(NUM_TOKENS, 8, 16), torch.randn(200, 2, 16, 32), []
    for cls, given in ((ReferenceBackend, inputs), (TwoTiles, inputs), (TwoTiles, padded(inputs))):
        backend = cls([PLAIN], torch.float32, CPU, setup)
        outs.append(torch.full_like(q, 7.0))
        backend.prepare(given)
        backend.run(q, kv, PLAIN, outs[-1])
    assert torch.equal(outs[2], outs[1])
    torch.testing.assert_close(outs[1], outs[0], atol=1e-5, rtol=1e-5)
    assert [plan.num_tiles for plan in backend._plans[PLAIN]] == [NUM_ROWS, NUM_TOKENS // 16 + 2 * MAX_LONG]


@pytest.mark.parametrize(("length", "tiles"), [(100, 2), (2049, 1), (5000, 1)])
def test_a_request_alone_has_one_tile_of_several_leaves(length: int, tiles: int) -> None:
    """But two tiles of one leaf, since torch compiles anew for a mask row that is alone."""
    setup = Setup(max_num_rows=4, max_num_tokens=64, max_model_len=8192, num_blocks=320, block_size=16)
    inputs = AttentionInputs(
        num_rows=1,
        num_tokens=1,
        max_query_len=1,
        max_seq_len=length,
        block_size=16,
        query_start=torch.tensor([0, 1]).int(),
        seq_lens=torch.tensor([length]).int(),
        block_table=torch.randperm(319)[None].add(1).int(),
        slot_mapping=torch.full((1,), -1),
    )
    q, kv, outs = torch.randn(1, 8, 16), torch.randn(320, 2, 16, 32), []
    for cls in (FlexBackend, ReferenceBackend):
        backend = cls([PLAIN], torch.float32, CPU, setup)
        outs.append(torch.full_like(q, float("nan")))
        backend.prepare(inputs)
        backend.run(q, kv, PLAIN, outs[-1])
        assert cls is ReferenceBackend or backend._plans[PLAIN][0].num_tiles == tiles
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)


def test_F1_G2_memory_does_not_grow_with_the_pool() -> None:
    sizes = []
    for num_blocks in (50, 200_000):
        setup = Setup(max_num_rows=8, max_num_tokens=64, max_model_len=500, num_blocks=num_blocks, block_size=16)
        backend = FlexBackend([PLAIN], torch.bfloat16, CPU, setup)
        run_step(backend, [300, 5], 16)
        (rows,) = backend._buffers.values()
        sizes.append(sum(x.numel() for x in vars(rows).values() if isinstance(x, torch.Tensor)))
        sizes[-1] += sum(x.numel() for x in vars(backend).values() if isinstance(x, torch.Tensor))
    assert sizes[0] == sizes[1]


def test_F1_G7_too_many_mask_rows_are_refused_with_both_numbers() -> None:
    rows = MaskRows(10, Geometry(group=1, lines=16, block=16, stride=1, columns=4, q_block=16), CPU)
    with pytest.raises(ValueError, match=r"11 mask rows of 5 blocks exceed the buffers' 10.*max_num_batched_tokens"):
        rows.check(11)
