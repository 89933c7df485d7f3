"""Both ends of a drafter's pass of one row, kernels in Gluon, run in torch: entry and product, head and draw."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton.experimental.gluon")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attention"))
import gluon_in_torch
from octavo.ops.compile.stream_scratch import StreamScratch
from octavo.ops.embedding import beside_gemv
from octavo.ops.gemm import gemv
from octavo.ops.inputs.tensors import DraftRows, RowTensors
from octavo.ops.sampling import drafts_head
from octavo.ops.sampling.gpu import DrawScratch

BF16, F32, EPS = torch.bfloat16, torch.float32, 1e-6
SIZE, PROCESSORS = 1024, 3


@pytest.fixture(autouse=True)
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of both modules run in torch, on a device of few processors."""
    for module, kernel in ((beside_gemv, "_entry_product"), (drafts_head, "_product_and_draw")):
        monkeypatch.setattr(module, kernel, gluon_in_torch.InTorch(getattr(module, kernel)))
        monkeypatch.setattr(module, "chained", lambda device: {"PDL": True})
        monkeypatch.setattr(module, "begin_whole", lambda pdl: None)
    for wait in ("end_before", "wait_before"):
        monkeypatch.setattr(beside_gemv, wait, lambda pdl: None)
    monkeypatch.setattr(gemv, "_device", lambda index: {"multiprocessor_count": PROCESSORS})


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


@pytest.mark.parametrize("room", [True, False])
@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_head_draws_what_its_logits_say(
    temperature: float, ids: bool, room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs of several groups and of one; ties, of which the lower id of the target counts; a row without room."""
    channels = 64 * (2 * PROCESSORS + 1)
    scratch = DrawScratch(torch.zeros(512), torch.zeros(512, dtype=torch.int32), torch.zeros(4, dtype=torch.int32))
    noise = torch.rand(4 * channels, generator=torch.Generator().manual_seed(1)).round(decimals=2)
    monkeypatch.setattr(drafts_head, "SCRATCH", StreamScratch(lambda device: scratch))
    monkeypatch.setattr(drafts_head, "stream_key", lambda seed, position: (seed, position))
    monkeypatch.setattr(drafts_head, "_noise_of", lambda token, low, high, amount: noise[token.long()] * amount)
    monkeypatch.setattr(drafts_head, "ready_before", lambda x, pdl: x)
    monkeypatch.setattr(drafts_head, "_tile", lambda *given: gemv.Tile(64, 4, 2 * PROCESSORS, 3, 128))
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(channels, SIZE, generator=generator).to(BF16)
    weight[7:300:9] = weight[7]  # ties, without noise
    x, norm = torch.randn(1, SIZE, generator=generator).to(BF16), torch.rand(SIZE, generator=generator) + 0.5
    if float(weight[7].float() @ normed(x[0], norm).float()) < 0:
        x = -x
    weight[7:300:9] *= 4
    target_ids = torch.randperm(4 * channels, generator=generator)[:channels]
    total, width = torch.tensor([3, 9 if room else 11], dtype=torch.int32), 12
    token_ids = torch.full((2, width), -1, dtype=torch.int32)
    of = DraftRows(
        rows=torch.tensor([1]),
        live=(torch.tensor([0], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)),
        table=RowTensors(token_ids, total, total),
        place=1,
        temperatures=torch.tensor([9.0, temperature]),
        seeds=torch.tensor([1, 2]),
        noise=1.0,
        vocab_size=4 * channels,
    )
    found = drafts_head.draw(x, norm, EPS, weight, target_ids if ids else None, of)
    logits = gluon_in_torch._mma(weight, normed(x[0], norm)[:, None], torch.zeros(channels, 1))[:, 0]
    tokens = target_ids if ids else torch.arange(channels)
    scores = logits * (1 / temperature) + noise[tokens] if temperature else logits
    expected = int(tokens[scores == scores.max()].min())
    assert found.tolist() == [expected] and math.isfinite(float(scores.max()))
    written = torch.full((2, width), -1, dtype=torch.int32)
    if room:
        written[1, 10] = expected
    assert torch.equal(token_ids, written) and not scratch.arrived.any()
