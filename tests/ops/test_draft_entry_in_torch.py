"""A drafter's entry and its first product, of one row, the kernel in Gluon, run in torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attention"))
import gluon_in_torch
from octavo.ops.embedding import beside_gemv
from octavo.ops.gemm import gemv

BF16, EPS = torch.bfloat16, 1e-6
SIZE = 1024


@pytest.fixture(autouse=True)
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs in torch."""
    monkeypatch.setattr(beside_gemv, "_entry_product", gluon_in_torch.InTorch(beside_gemv._entry_product))
    monkeypatch.setattr(beside_gemv, "chained", lambda device: {"PDL": True})
    for wait in ("begin_whole", "end_before", "wait_before"):
        monkeypatch.setattr(beside_gemv, wait, lambda pdl: None)
    monkeypatch.setattr(gemv, "_device", lambda index: {"multiprocessor_count": 132})


def normed(x: Tensor, scale: Tensor) -> Tensor:
    """As `octavo.ops.norm.gpu` sums: neighbours three times, then halves."""
    squares = x.float() * x.float()
    for _ in range(3):
        squares = squares.view(-1, 2).sum(1)
    while len(squares) > 1:
        squares = squares.view(2, -1).sum(0)
    return (x.float() * (1 / torch.sqrt(squares / len(x) + EPS)) * scale).to(BF16)


@pytest.mark.parametrize(("warps", "stages", "keeps"), [(2, 5, True), (1, 8, False), (1, 3, True)])
def test_an_entry_is_normed_and_multiplied_as_by_separate_kernels(
    warps: int, stages: int, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rings that hold a program's weights, and such as are filled again."""
    monkeypatch.setattr(beside_gemv, "tile_for", lambda *shape: beside_gemv.Tile(warps, stages))
    generator = torch.Generator().manual_seed(warps + stages)
    table, state = (torch.randn(n, SIZE, generator=generator).to(BF16) for n in (5, 1))
    weight = torch.randn(64, 2 * SIZE, generator=generator).to(BF16)
    norms = torch.rand(SIZE, generator=generator) + 0.5, torch.rand(SIZE, generator=generator) + 0.5
    given = norms, EPS, weight
    out, own = beside_gemv.project(torch.tensor([3]), table, state, *given, None, normed=keeps, behind_draw=True)
    both = torch.cat([normed(table[3], norms[0]), normed(state[0], norms[1])])[None]
    assert torch.equal(own, both[:, SIZE:] if keeps else state)
    assert torch.equal(out, gluon_in_torch._mma(weight, both.t().contiguous(), torch.zeros(64, 1)).t().to(BF16))
    several = torch.randn(4, 2 * SIZE, generator=generator).to(BF16)[:, :SIZE]
    several[2] = state
    ids, pick = torch.tensor([0, 1, 3, 4]), torch.tensor([2])
    again, own = beside_gemv.project(ids, table, several, *given, pick, normed=keeps, behind_draw=False)
    assert torch.equal(again, out) and torch.equal(own, both[:, SIZE:] if keeps else state)
