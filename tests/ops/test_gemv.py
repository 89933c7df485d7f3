"""Products of one row: which tiles the rule chooses, on whatever device, and what a kernel in Gluon gives, in torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attention"))
import gluon_in_torch
from octavo.ops.gemm import gemv
from octavo.ops.gemm.gemv import tile_for


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("streams", [False, True])
def test_a_step_is_on_its_way_while_another_one_is_multiplied(normed: bool, gated: bool, streams: bool) -> None:
    """In a ring of one stage it would be multiplied before it has come. Gates of Llama-3.2's sizes among them."""
    stages = set()
    for n in (*range(2048, 40_000, 64), 151_936):
        for k in range(1024, 16_384 + 1, 1024):
            tile = tile_for(n, k, normed, gated, 132, streams)
            if tile is not None and tile.stages:
                stages.add(tile.stages)
                assert k % tile.part == 0
    assert stages and min(stages) >= 2


@pytest.mark.parametrize(("n", "k", "programs"), [(64, 1024, 4), (40, 3072, 5), (8, 2048, 1)])
@pytest.mark.parametrize("adds", [True, False])
def test_channels_are_lines_or_columns_of_the_matrix_unit(
    n: int, k: int, programs: int, adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of weights that wait in shared memory, in torch: products and sums of a row."""
    monkeypatch.setattr(gemv, "_product", gluon_in_torch.InTorch(gemv._product))
    monkeypatch.setattr(gemv, "chained", lambda device: {"PDL": True})
    monkeypatch.setattr(gemv, "_device", lambda index: {"multiprocessor_count": 2})
    monkeypatch.setattr(gemv, "tile_for", lambda *shape: gemv.Tile(n // programs, 1, programs, 0))
    generator = torch.Generator().manual_seed(n)
    x, residual = (torch.randn(1, size, generator=generator).to(torch.bfloat16) for size in (k, n))
    weight = torch.randn(n, k, generator=generator).to(torch.bfloat16)
    out = torch.full((n + 1,), 7.0, dtype=torch.bfloat16)
    gemv.product(x, weight, out[None, :n], residual=residual if adds else None)
    expected = gluon_in_torch._mma(weight, x.t().contiguous(), torch.zeros(n, 1)).t().to(torch.bfloat16)
    if adds:
        expected = (expected.float() + residual.float()).to(torch.bfloat16)
    assert torch.equal(out[:n], expected[0]) and out[n] == 7


def test_few_channels_are_shared_among_all_processors() -> None:
    """Products behind attention and at the end of an MLP of 1,024 channels; wider ones fill the processors anyway."""
    assert [tile_for(1024, k, False, False, 132) for k in (2048, 3072)] == [gemv.Tile(8, 1, 128, 0)] * 2
    assert tile_for(1024, 1024, True, False, 132) is None
    assert tile_for(2048, 2048, False, False, 132) == gemv.Tile(16, 1, 128, 0)
