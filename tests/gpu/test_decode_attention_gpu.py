"""Attention of decode rows on Hopper, fed by the copy engine: the bits of `attend_rows`, and which calls it takes."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attention"))

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from batches import Batch, History, make_batch, make_history
from hopper_rig import BF16, DEVICE, HEADS, MASKS, in_a_large_pool, with_strided_queries
from octavo.ops.attention import paged as operator
from octavo.ops.attention import paged_plan
from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.attention.paged_plan import Heads, Planner, Scratch
from octavo.ops.rope import qk_norm_rope_store, rope_table
from paged_rig import attend, attend_by, heavy_history, narrowed, to_device

pytestmark = pytest.mark.gpu


def _served(batch: Batch, processors: int, **options) -> tuple[torch.Tensor, bool]:
    return attend_by("decode", batch, processors, **options)


def _plain(batch: Batch, **options) -> torch.Tensor:
    with mock.patch.object(operator.decode, "can_serve", lambda *facts: False):
        return attend(batch, processors=1, **options)


def _same_bits(batch: Batch, **options) -> None:
    expected = _plain(batch, **dict(options))
    assert not expected.isnan().any()
    for processors in (1, 3):  # few, so that rows are not too few for them
        out, was_served = _served(batch, processors, **dict(options))
        assert was_served
        assert torch.equal(out, expected), (processors, (out != expected).sum())


def _rows(seed: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> list[tuple[History, int, int]]:
    """Decode rows at the edges of tiles and leaves, and rows of as many queries as a tile holds."""
    rng = random.Random(seed)
    history = heavy_history(2100, heads, kv_heads, size, dtype)
    queries = 8 // (heads // kv_heads)
    edges = (1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1024, 1025, 1536, 1537, 2100)
    rows = [(history, length, 1) for length in edges]
    rows += [(history, length, rng.randrange(1, queries + 1)) for length in (rng.randrange(8, 2100) for _ in range(9))]
    rng.shuffle(rows)
    return rows


@pytest.mark.parametrize(("block_size", "options"), [*MASKS, (48, {"window": 70})])
def test_the_bits_of_divided_rows(block_size: int, options: dict) -> None:
    _same_bits(to_device(make_batch(_rows(block_size, 8, 2, 128, BF16), block_size), DEVICE), **options)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dtype", "block_size", "heads_last"),
    [*HEADS, (16, 2, 128, BF16, 48, True), (8, 1, 64, BF16, 64, False)],
)
def test_heads_sizes_types_and_layouts(heads, kv_heads, size, dtype, block_size, heads_last) -> None:
    rows = _rows(heads, heads, kv_heads, size, dtype)
    _same_bits(to_device(make_batch(rows, block_size, seed=heads, heads_last=heads_last), DEVICE))


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dtype", "block_size", "heads_last"),
    [
        (8, 2, 128, BF16, 64, False),
        (16, 8, 128, BF16, 16, True),
        (16, 2, 128, torch.float16, 48, True),
        (4, 4, 64, BF16, 128, False),
        (8, 2, 64, torch.float16, 16, True),
    ],
)
def test_caches_of_8_bits(stored, heads, kv_heads, size, dtype, block_size, heads_last) -> None:
    """With scales of a head, masks, a soft cap and sinks; few rows too, which are divided here."""
    rows = _rows(heads, heads, kv_heads, size, dtype)
    scales = {
        "key_scale": torch.linspace(0.5, 1.5, kv_heads, device=DEVICE),
        "value_scale": torch.linspace(2.0, 0.3, kv_heads, device=DEVICE),
    }
    for some, options in (
        (rows, {}),
        (rows, {"window": 70}),
        (rows, {"chunk": 300, "soft_cap": 20.0}),
        (rows, {"sinks": torch.linspace(-2.0, 3.0, heads, device=DEVICE)}),
        (rows[:1], {}),
        (rows[2:5], {"window": 300}),
    ):
        plain = to_device(make_batch(some, block_size, seed=heads, heads_last=heads_last), DEVICE)
        _same_bits(narrowed(plain, stored), **scales, **options)
    with mock.patch.multiple(paged_plan, _FOLDS=4, _LONG=5):  # long rows are left to be merged
        plain = to_device(make_batch(rows, block_size, seed=heads, heads_last=heads_last), DEVICE)
        _same_bits(narrowed(plain, stored), **scales)


def test_a_prompt_over_a_cache_of_8_bits_has_the_bits_of_its_tokens_one_by_one() -> None:
    for stored in (torch.float8_e4m3fn, torch.int8):
        history = heavy_history(600, 8, 2, 128)
        whole = attend(narrowed(to_device(make_batch([(history, 600, 600)], 64), DEVICE), stored))
        rows = to_device(make_batch([(history, length, 1) for length in range(1, 601, 7)], 64), DEVICE)
        out, was_served = _served(narrowed(rows, stored), 3)
        assert was_served and torch.equal(out, whole[0:600:7])


def test_sinks_and_queries_of_another_stride() -> None:
    batch = with_strided_queries(to_device(make_batch(_rows(3, 8, 2, 128, BF16), 64), DEVICE))
    _same_bits(batch, sinks=torch.linspace(-2.0, 3.0, 8, device=DEVICE))


def test_long_rows_are_left_to_merge() -> None:
    batch = to_device(make_batch(_rows(5, 8, 2, 128, BF16), 64), DEVICE)
    expected = _plain(batch)
    with mock.patch.multiple(paged_plan, _FOLDS=4, _LONG=4):
        out, was_served = _served(batch, 3)
    assert was_served and torch.equal(out, expected)


def test_what_it_does_not_take_runs_plainly() -> None:
    for heads, kv_heads, size, dtype, options in (
        (6, 2, 128, BF16, {}),
        (4, 2, 80, BF16, {}),
        (4, 2, 128, torch.float32, {}),
        (4, 2, 128, BF16, {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE)}),
        (4, 2, 128, BF16, {"causal": False}),
    ):
        rows = [(make_history(2, 300, heads, kv_heads, size, dtype), length, 1) for length in (300, 70)]
        batch = to_device(make_batch(rows, 64), DEVICE)
        expected = _plain(batch, **dict(options))
        out, was_served = _served(batch, 1, **dict(options))
        assert not was_served and torch.equal(out, expected)


def test_a_replayed_graph_follows_its_lengths() -> None:
    """Counters are 0 again for the next layer and the next replay; padding rows of no queries cost nothing."""
    history = heavy_history(1300, 32, 8, 128)
    batch = to_device(make_batch([(history, 1300 - 13 * row, 1) for row in range(40)], 64), DEVICE)
    heads, mask_spec, scratch = Heads(32, 8, 128), MaskSpec(scale=128**-0.5), Scratch(DEVICE)
    planner, out = Planner(heads, mask_spec, BF16, DEVICE, scratch), torch.empty_like(batch.q)

    def run(**options: bool) -> None:
        plan = planner.plan(
            batch.query_start, batch.seq_lens, num_tokens=40, max_query_len=1, max_seq_len=4096, **options
        )
        operator.paged_attention(*batch.args(), out, mask_spec=mask_spec, plan=plan, scratch=scratch)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # as layers follow each other
            run(for_capture=True)
    whole = batch.seq_lens.clone()
    for lengths in (whole, whole.clamp(max=256), whole - 900, whole.flip(0).clamp(max=700), whole):
        batch.seq_lens.copy_(lengths.clamp(min=0))
        graph.replay()
        assert torch.equal(out, _plain(batch))


def test_what_is_read_before_the_kernel_ahead_is_done_is_there() -> None:
    """Behind the rotation that stores the last tokens, layer after layer in a graph, as in a step of the engine."""
    lengths = [1300 - 29 * row for row in range(40)]
    history = heavy_history(1300, 16, 8, 128)
    batch = to_device(make_batch([(history, length, 1) for length in lengths], 64), DEVICE)
    mask_spec, scratch = MaskSpec(scale=128**-0.5), Scratch(DEVICE)
    planner = Planner(Heads(16, 8, 128), mask_spec, BF16, DEVICE, scratch)
    caches = [batch.kv.clone() for _ in range(6)]
    qkv = torch.randn(len(caches), 40, 32 * 128, device=DEVICE, dtype=BF16)
    outs = torch.zeros(len(caches), 40, 16, 128, device=DEVICE, dtype=BF16)
    cos_sin = rope_table(128, 4096).to(DEVICE)

    def step(*, waits: bool, **options: bool) -> None:
        last = (batch.seq_lens - 1).long()
        slots = batch.block_table.gather(1, (last // 64)[:, None])[:, 0] * 64 + last % 64
        plan = planner.plan(
            batch.query_start, batch.seq_lens, num_tokens=40, max_query_len=1, max_seq_len=4096, **options
        )
        for kv, states, out in zip(caches, qkv, outs, strict=True):
            q = qk_norm_rope_store(states, last, cos_sin, None, None, 1e-6, 16, 8, 128, kv, slots)
            if waits:
                torch.cuda.synchronize()
            operator.paged_attention(
                q,
                kv,
                batch.query_start,
                batch.seq_lens,
                batch.block_table,
                out,
                mask_spec=mask_spec,
                plan=plan,
                scratch=scratch,
            )
            if waits:
                torch.cuda.synchronize()

    step(waits=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(waits=False, for_capture=True)
    for turn in range(8):
        batch.seq_lens.copy_(torch.tensor([max(length - 31 * turn, 1) for length in lengths], dtype=torch.int32))
        qkv.normal_()
        step(waits=True)
        expected = outs.clone()
        outs.zero_()
        graph.replay()
        assert torch.equal(outs, expected), turn


def test_a_pool_beyond_32_bit_offsets() -> None:
    rows = [(heavy_history(900, 16, 8, 128), length, 1) for length in (900, 333)]
    batch = to_device(make_batch(rows, 64), DEVICE)
    expected = _plain(batch)
    out, was_served = _served(in_a_large_pool(batch, (900, 333)), 1)
    assert was_served and torch.equal(out, expected)
