"""Gates and ups of many rows in one kernel on Hopper: the bits of the separate operators, and which calls it takes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from matmul_rig import heavy_tailed
from octavo.ops import fused
from octavo.ops.activation import gated_activation
from octavo.ops.gpu import gated_product, matmul
from octavo.ops.gpu.gated_product import gated_linear, serves
from octavo.ops.matmul import pack_linear

pytestmark = pytest.mark.gpu
BF16, F16 = torch.bfloat16, torch.float16
# (N, K) of gate_up of a 0.6B and an 8B model, and one whose last stages and programs are few.
SHAPES = ((6144, 1024), (24576, 4096), (384, 192))


def _weight(n: int, k: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Sums are of all sizes: activations of many binades, few of them infinite."""
    return heavy_tailed(n, k, dtype=torch.float32, seed=1, device="cuda").div(1024 * k**0.5).to(dtype)


def _expected(x: torch.Tensor, weight: torch.Tensor, kind: str = "silu") -> torch.Tensor:
    """By the separate operators, in Triton tiles: one accumulator that walks K in order."""
    tile = matmul.tile_for(16, *weight.shape, x.dtype)
    return gated_activation(matmul.linear(x, weight, None, x.new_empty(x.shape[0], weight.shape[0]), tile), kind)


@pytest.mark.parametrize(("kind", "dtype"), [("silu", BF16), ("gelu_tanh", F16)])
def test_it_has_the_bits_of_the_separate_operators(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where programs have several tiles, one after the other."""
    n, k = SHAPES[-1]
    weight, x = _weight(n, k, dtype), heavy_tailed(300, k, dtype=dtype, seed=2, device="cuda")
    expected = _expected(x, weight, kind)
    assert expected.isfinite().float().mean() > 0.9
    assert (expected != 0).float().mean() > 0.5
    for processors in (132, 2):
        monkeypatch.setattr(gated_product, "_processors", lambda _, count=processors: count)
        for rows in (1, 64, 300):
            out = gated_linear(x[:rows], weight, kind)
            assert torch.equal(out.view(torch.int16), expected[:rows].view(torch.int16)), rows


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_has_its_bits_at_every_number_of_rows(n: int, k: int) -> None:
    """As a model runs it, from a row on; rows of a wider tensor too."""
    weight, wide = pack_linear(_weight(n, k)), heavy_tailed(3000, k + 8, dtype=BF16, seed=3, device="cuda")
    x = wide[:, 8:]
    expected = _expected(x, weight.storage).view(torch.int16)
    for rows in (1, 4, 5, 33, 64, 128, 500, 512, 513, 520, 3000):
        out = fused.gated_linear(x[:rows], weight, "silu")
        assert torch.equal(out.view(torch.int16), expected[:rows]), rows


def test_captured_behind_the_kernel_that_makes_its_rows() -> None:
    """Weights are read before that kernel is done, rows are not."""
    n, k = 6144, 1024
    weight, gates = _weight(n, k), heavy_tailed(512, 2 * k, dtype=BF16, seed=5, device="cuda")
    for rows in (64, 512):
        out = weight.new_empty(rows, n // 2)

        def call(rows: int = rows, out: torch.Tensor = out) -> None:
            for _ in range(8):
                out.copy_(gated_linear(gated_activation(gates[:rows], "silu"), weight, "silu"))
                gates[:rows].mul_(-1.0)

        call()
        expected = _expected(gated_activation(gates[:rows], "silu"), weight)
        assert not torch.equal(out, expected), "the last round reads what the one before left"
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        gates.mul_(-1.0)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.view(torch.int16), expected.view(torch.int16)), rows


def test_what_it_takes() -> None:
    weight, x = torch.empty(6144, 1024, dtype=BF16, device="cuda"), torch.empty(600, 1032, dtype=BF16, device="cuda")
    assert serves(x[:, :1024], weight)
    assert serves(x[:513, 8:], weight)
    assert not serves(x[:512, :1024], weight), "few rows"
    assert not serves(x[:, 1:1025], weight), "the copy engine steps over 16 bytes"
    assert not serves(x[:, :1024].float(), weight)
    assert not serves(x[:, :1024].half(), weight)
    assert not serves(x[:, :1000], weight[:, :1000].contiguous()), "K is whole stages"
    assert not serves(x[:, :1024], weight[:6112]), "channels are whole tiles"
    matmul.select("fast")
    try:
        assert not serves(x[:, :1024], weight)
    finally:
        matmul.select("reproducible")


def test_nothing_beyond_the_rows_is_written() -> None:
    """The memory behind a result of any number of rows is left alone, and so are rows that are NaN behind the input."""
    weight, x = _weight(384, 192), heavy_tailed(128, 192, dtype=BF16, seed=6, device="cuda")
    expected = _expected(x, weight)
    x[70:] = float("nan")
    room = torch.full((128, 192), 7.0, dtype=BF16, device="cuda")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gated_product.torch, "empty", lambda *_, **__: room[:70])
        out = gated_linear(x[:70], weight, "silu")
    assert out.data_ptr() == room.data_ptr()
    assert torch.equal(out.view(torch.int16), expected[:70].view(torch.int16))
    assert bool((room[70:] == 7.0).all())
