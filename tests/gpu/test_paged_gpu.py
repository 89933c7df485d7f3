"""The Triton attention on a CUDA device: against its reference implementation, and the bits that must not move."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attention"))

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from batches import Batch, History, make_batch, make_history
from octavo.attention.base import BACKENDS, AttentionInputs
from octavo.cache.specs import AttentionSpec
from octavo.ops.attention import paged_attention_eager
from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.attention.paged import paged_attention
from octavo.ops.attention.paged_plan import Heads, Planner, Scratch, Tile
from octavo.ops.attention.paged_workload import LEAF
from paged_rig import (
    FEATURES,
    FEW,
    MANY,
    attend,
    compare_few_with_divided,
    compare_with_reference,
    run_backend,
    to_device,
)

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
LENGTH = 1200
EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, LEAF - 1, LEAF, LEAF + 1, 2 * LEAF + 5, LENGTH)


def _history(dtype: torch.dtype = BF16, heads: int = 8, kv_heads: int = 2, head_size: int = 128) -> History:
    """Heavy-tailed, so that another order of a sum shows."""
    history = make_history(5, LENGTH, heads, kv_heads, head_size, dtype)
    generator = torch.Generator().manual_seed(6)
    factor = torch.exp2(6 * torch.rand(LENGTH, kv_heads, 1, generator=generator) - 4)
    history.kv = (history.kv.float() * factor).to(dtype)
    return history


def _batch(rows: list[tuple[History, int, int]], block_size: int = 16, **options) -> Batch:
    return to_device(make_batch(rows, block_size, **options), DEVICE)


@pytest.mark.parametrize("seed", range(12))
def test_equals_the_reference(seed: int) -> None:
    compare_with_reference(seed, DEVICE, [BF16, torch.float16, torch.float32], 2500)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_size", "options"),
    [
        (BF16, 8, 2, 128, {}),
        (BF16, 8, 2, 128, {"window": 70}),
        (BF16, 6, 2, 64, {"window": 600, "soft_cap": 20.0}),
        (torch.float16, 4, 4, 80, {}),
        (BF16, 4, 1, 256, {}),
        (torch.float32, 4, 2, 64, {}),
    ],
)
def test_decode_prefill_and_chunks_have_the_same_bits(dtype, heads, kv_heads, head_size, options) -> None:
    history = _history(dtype, heads, kv_heads, head_size)
    whole = attend(_batch([(history, LENGTH, LENGTH)]), **options)
    last = [end - 1 for end in EDGES]
    for block_size in (16, 48, 64, 128) if options == {} and dtype == BF16 else (16, 64):
        rows = _batch([(history, end, 1) for end in EDGES], block_size, seed=block_size, heads_last=block_size > 48)
        for processors in (FEW, MANY):
            assert torch.equal(attend(rows, processors=processors, **options), whole[last]), (block_size, processors)
    position = 0
    for chunk in (3, 13, 48, 64, 500, 572):
        position += chunk
        for processors in (FEW, MANY):
            out = attend(_batch([(history, position, chunk)], 64), processors=processors, **options)
            assert torch.equal(out, whole[position - chunk : position]), (position, processors)


@pytest.mark.parametrize("tile", [Tile(128, 8, 2), Tile(64, 4, 2), Tile(16, 4, 3), Tile(32, 2, 2)])
def test_tiles_and_instruction_families_do_not_move_bits(tile: Tile) -> None:
    batch = _batch([(_history(), LENGTH, 300)], 64)
    assert torch.equal(attend(batch, tile=tile), attend(batch))


@pytest.mark.parametrize("options", FEATURES, ids=str)
def test_few_rows_have_the_bits_of_divided_ones(options: dict) -> None:
    compare_few_with_divided(_history(heads=4), 64, DEVICE, options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_few_rows_of_other_types_have_the_bits_of_divided_ones(dtype: torch.dtype) -> None:
    history = _history(BF16 if dtype == torch.float8_e4m3fn else dtype, heads=4)
    history.kv = history.kv.clamp(-400, 400).to(dtype)
    compare_few_with_divided(history, 64, DEVICE, {})


@pytest.mark.parametrize("dtype", [BF16, torch.float8_e4m3fn])
@pytest.mark.parametrize("length", [1300, 9000])
def test_few_rows_in_a_replayed_graph_follow_their_lengths(length: int, dtype: torch.dtype) -> None:
    """One capture serves every length up to its bound, and leaves its counters at 0 for the next replay."""
    history = make_history(3, length, 32, 8, 128, BF16)
    history.kv = history.kv.to(dtype)
    batch = _batch([(history, length, 1), (history, length // 3, 1), (history, 1, 1)], 64)
    heads, mask_spec, scratch = Heads(32, 8, 128), MaskSpec(scale=128**-0.5), Scratch(DEVICE)
    bounds = {"num_tokens": 3, "max_query_len": 1, "max_seq_len": length}
    planner = Planner(heads, mask_spec, BF16, DEVICE, scratch, cache_dtype=dtype)
    out = torch.empty_like(batch.q)

    def run(**options: bool) -> None:
        plan = planner.plan(batch.query_start, batch.seq_lens, **bounds, **options)
        paged_attention(*batch.args(), out, mask_spec=mask_spec, plan=plan, scratch=scratch)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # as layers follow each other
            run(for_capture=True)
    for first in (length, 255, 256, 257, 1, 0, 1023, 1024, 1025, length - 1):
        batch.seq_lens[0] = first
        graph.replay()
        expected = torch.empty_like(out)
        divided = Planner(heads, mask_spec, BF16, DEVICE, Scratch(DEVICE), 1, cache_dtype=dtype)
        plan = divided.plan(batch.query_start, batch.seq_lens, **bounds)
        paged_attention(*batch.args(), expected, mask_spec=mask_spec, plan=plan, scratch=divided._scratch)
        assert torch.equal(out, expected), first


def test_neighbours_do_not_move_bits() -> None:
    history = _history()
    whole = attend(_batch([(history, LENGTH, LENGTH)]))
    crowd = attend(_batch([(history, 900, 3), (history, 17, 1), (history, 1111, 70), (history, 640, 5)], seed=1))
    expected = torch.cat([whole[897:900], whole[16:17], whole[1041:1111], whole[635:640]])
    assert torch.equal(crowd, expected)


def test_backend_equals_reference() -> None:
    for ours, expected in zip(run_backend("paged", BF16, DEVICE), run_backend("reference", BF16, DEVICE), strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-2, rtol=0)


def test_a_pool_beyond_32_bit_offsets() -> None:
    """L3.G1: the live blocks lie at the end of a pool of 2 GiB channels and more."""
    batch = _batch([(_history(heads=32, kv_heads=8), 600, 1)], 64)
    expected = attend(batch)
    num_blocks = 17_000  # of 8 * 64 * 256 elements: past 2^31
    pool = torch.empty(num_blocks, *batch.kv.shape[1:], dtype=BF16, device=DEVICE)
    live = len(batch.kv)
    pool[-live:] = batch.kv
    needed = -(-600 // 64)
    batch.block_table[0, :needed] += num_blocks - live
    assert torch.equal(attend(Batch(batch.q, pool, batch.query_start, batch.seq_lens, batch.block_table)), expected)


def test_float8_cache_with_scales() -> None:
    batch = _batch([(_history(), 700, 1), (_history(), 300, 100)], 64)
    stored = batch.kv.nan_to_num().clamp(-400, 400).to(torch.float8_e4m3fn)
    expected = torch.empty(batch.q.shape, device=DEVICE)
    values = torch.cat([stored.float()[..., :128] * 0.5, stored.float()[..., 128:] * 2.0], dim=-1)
    paged_attention_eager(
        batch.q.float(),
        values,
        batch.query_start,
        batch.seq_lens,
        batch.block_table,
        expected,
        mask_spec=MaskSpec(128**-0.5),
    )
    batch.kv = stored
    scales = {"key_scale": torch.full((2,), 0.5, device=DEVICE), "value_scale": torch.full((2,), 2.0, device=DEVICE)}
    for processors in (FEW, MANY):
        out = attend(batch, processors=processors, **scales).float()
        assert (out - expected).norm() / expected.norm() < 1e-2


def test_a_captured_graph_follows_lengths_and_tables() -> None:
    history = _history()
    spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_size=128, scale=128**-0.5)
    batch = _batch([(history, 1100, 1), (history, 40, 1)], 16)
    backend = BACKENDS.resolve("paged")((spec,), BF16, DEVICE)
    inputs = AttentionInputs(
        num_rows=2,
        num_tokens=2,
        max_query_len=1,
        max_seq_len=1100,
        block_size=16,
        query_start=batch.query_start,
        seq_lens=batch.seq_lens,
        block_table=batch.block_table,
        slot_mapping=torch.full((2,), -1, dtype=torch.int64, device=DEVICE),
    )
    out = torch.empty_like(batch.q)
    backend.prepare(inputs, for_capture=True)
    backend.run(batch.q, batch.kv, spec, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.run(batch.q, batch.kv, spec, out)
    batch.seq_lens.copy_(torch.tensor([700, 33]))
    graph.replay()
    shorter = attend(Batch(batch.q, batch.kv, batch.query_start, batch.seq_lens, batch.block_table))
    assert torch.equal(out, shorter)
