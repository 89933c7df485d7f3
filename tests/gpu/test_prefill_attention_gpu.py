"""Attention of prompts on Hopper: the bits of `attend_tiles`, and which calls it takes."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attention"))

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from batches import Batch, History, make_batch
from hopper_rig import BF16, DEVICE, HEADS, MASKS, in_a_large_pool, with_strided_queries
from octavo.ops.attention import paged as operator
from octavo.ops.attention import paged_plan
from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.attention.paged_plan import Tile
from paged_rig import attend, attend_by, heavy_history, narrowed, to_device

pytestmark = pytest.mark.gpu
PLAIN = Tile(128, 8, 2, 128)  # a plan with a tile of its own runs `attend_tiles`
FULL_MACHINE = 1  # processors to plan for: no tile is split


def _served(batch: Batch, processors: int = FULL_MACHINE, **options) -> tuple[torch.Tensor, bool]:
    return attend_by("prefill", batch, processors, **options)


def _same_bits(batch: Batch, **options) -> None:
    expected = attend(batch, tile=PLAIN, processors=FULL_MACHINE, **dict(options))
    assert not expected.isnan().any()
    for processors in (FULL_MACHINE, 7):
        out, was_served = _served(batch, processors, **dict(options))
        assert was_served or processors != FULL_MACHINE
        assert torch.equal(out, expected), (processors, (out != expected).sum())


def _rows(seed: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> list[tuple[History, int, int]]:
    """Prompts, chunks behind contexts, decode rows and short ones."""
    rng = random.Random(seed)
    history = heavy_history(2100, heads, kv_heads, size, dtype)
    rows = [(history, 2100, 1300), (history, 64, 64), (history, 1025, 1), (history, 1537, 33), (history, 1, 1)]
    for _ in range(4):
        length = rng.randrange(2, 2100)
        rows.append((history, length, rng.choice([1, length, rng.randrange(1, length + 1)])))
    rng.shuffle(rows)
    return rows


@pytest.mark.parametrize(("block_size", "options"), [*MASKS, (16, {"window": 70})])
def test_the_bits_of_plain_tiles(block_size: int, options: dict) -> None:
    _same_bits(to_device(make_batch(_rows(block_size, 8, 2, 128, BF16), block_size), DEVICE), **options)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dtype", "block_size", "heads_last"),
    [*HEADS, (6, 2, 128, BF16, 48, True), (7, 1, 64, BF16, 64, False)],
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
        (6, 2, 128, torch.float16, 48, True),
        (4, 4, 64, BF16, 128, False),
        (7, 1, 64, torch.float16, 32, False),
    ],
)
def test_caches_of_8_bits(stored, heads, kv_heads, size, dtype, block_size, heads_last) -> None:
    """With scales of a head, masks, a soft cap and sinks."""
    rows = _rows(heads, heads, kv_heads, size, dtype)
    batch = narrowed(to_device(make_batch(rows, block_size, seed=heads, heads_last=heads_last), DEVICE), stored)
    scales = {
        "key_scale": torch.linspace(0.5, 1.5, kv_heads, device=DEVICE),
        "value_scale": torch.linspace(2.0, 0.3, kv_heads, device=DEVICE),
    }
    for options in (
        {},
        {"window": 70},
        {"chunk": 300, "soft_cap": 20.0},
        {"sinks": torch.linspace(-2.0, 3.0, heads, device=DEVICE)},
    ):
        _same_bits(batch, **scales, **options)


def test_sinks_and_queries_of_another_stride() -> None:
    batch = with_strided_queries(to_device(make_batch(_rows(3, 8, 2, 128, BF16), 64), DEVICE))
    _same_bits(batch, sinks=torch.linspace(-2.0, 3.0, 8, device=DEVICE))


def test_few_long_rows_among_many_short_and_empty_ones() -> None:
    """As in a step of prompts and decode, and in a graph for more rows than the step has."""
    history = heavy_history(900, 8, 2, 128)
    rows = [(history, 700, 1) if place % 3 else (history, 5, 0) for place in range(600)]
    rows[7], rows[411] = (history, 900, 640), (history, 333, 200)
    batch = to_device(make_batch(rows, 64), DEVICE)
    _same_bits(batch)
    batch.query_start[:], batch.seq_lens[:] = 0, 0  # no tile at all
    scratch, mask_spec = paged_plan.Scratch(DEVICE), MaskSpec(scale=1.0)
    plan = paged_plan.Planner(paged_plan.Heads(8, 2, 128), mask_spec, BF16, DEVICE, scratch, FULL_MACHINE).plan(
        batch.query_start, batch.seq_lens, num_tokens=len(batch.q), max_query_len=640, max_seq_len=900
    )
    out = torch.full_like(batch.q, 7.0)
    operator.paged_attention(*batch.args(), out, mask_spec=mask_spec, plan=plan, scratch=scratch)
    assert plan.prompts and (out == 7.0).all()


def test_a_pool_beyond_32_bit_offsets() -> None:
    batch = to_device(make_batch([(heavy_history(900, 16, 8, 128), 900, 700)], 64), DEVICE)
    expected = attend(batch, tile=PLAIN, processors=FULL_MACHINE)
    out, was_served = _served(in_a_large_pool(batch, (900,)))
    assert was_served and torch.equal(out, expected)


def test_layers_of_one_pool_and_a_row_without_tokens() -> None:
    """Blocks of several layers lie together; a padding row of length 0 becomes zeros."""
    batch = to_device(
        make_batch([(heavy_history(500, 8, 2, 128), 500, 300), (heavy_history(90, 8, 2, 128), 90, 40)], 64), DEVICE
    )
    pool = torch.full((len(batch.kv), 3, *batch.kv.shape[1:]), float("nan"), dtype=BF16, device=DEVICE)
    pool[:, 1] = batch.kv
    batch.kv = pool[:, 1]
    batch.seq_lens[1] = 0
    batch.block_table[1] = 2**31 - 1
    out, was_served = _served(batch)
    assert was_served and (out[300:] == 0).all()
    assert torch.equal(out, attend(batch, tile=PLAIN, processors=FULL_MACHINE))


def test_a_captured_launch_follows_lengths_and_tables() -> None:
    history = heavy_history(1500, 8, 2, 128)
    batch = to_device(make_batch([(history, 1500, 900), (history, 700, 200)], 64), DEVICE)
    other = to_device(make_batch([(history, 1100, 900), (history, 300, 200)], 64, seed=5), DEVICE)
    scratch = paged_plan.Scratch(DEVICE)
    heads, mask_spec = paged_plan.Heads(8, 2, 128), MaskSpec(scale=128**-0.5)
    plan = paged_plan.Planner(heads, mask_spec, BF16, DEVICE, scratch, FULL_MACHINE).plan(
        batch.query_start, batch.seq_lens, num_tokens=1100, max_query_len=900, max_seq_len=1500, for_capture=True
    )
    out = torch.empty_like(batch.q)
    call = {"mask_spec": mask_spec, "plan": plan, "scratch": scratch}
    operator.paged_attention(*batch.args(), out, **call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operator.paged_attention(*batch.args(), out, **call)
    batch.q.copy_(other.q)
    batch.seq_lens.copy_(other.seq_lens)
    batch.kv[: len(other.kv)].copy_(other.kv)
    batch.block_table[:, : other.block_table.shape[1]].copy_(other.block_table)
    for _ in range(2):
        out.fill_(7.0)
        graph.replay()
        assert torch.equal(out, attend(other, tile=PLAIN, processors=FULL_MACHINE))


def test_what_it_does_not_take_runs_plain_tiles() -> None:
    history = heavy_history(300, 8, 2, 128)
    batch = to_device(make_batch([(history, 300, 200)], 64), DEVICE)
    expected = attend(batch, tile=PLAIN, processors=FULL_MACHINE)
    odd = torch.zeros(len(batch.kv), 2, 64, 260, dtype=BF16, device=DEVICE)[..., :256]  # 520 bytes from token to token
    odd.copy_(batch.kv)
    batch.kv = odd
    out, was_served = _served(batch)
    assert not was_served and torch.equal(out, expected)
