"""Products of few rows by weights of many channels in the kernel in Gluon, run in torch: every row, and nothing beside.

All products are summed in one order there, so a row's bits are those that it has alone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attention"))
import gluon_in_torch
from octavo.ops.gemm import gemv, streamed_gemm

BF16 = torch.bfloat16


@pytest.mark.parametrize(("num_rows", "channels", "dtype"), [(2, 640, torch.float32), (5, 192, BF16), (8, 64, BF16)])
def test_rows_are_multiplied_as_each_alone(
    num_rows: int, channels: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By programs of several groups of channels, of one, and by one alone."""
    kernel: Any = streamed_gemm._streamed_rows
    monkeypatch.setattr(streamed_gemm, "_streamed_rows", gluon_in_torch.InTorch(kernel))
    monkeypatch.setattr(streamed_gemm, "LEAST_CHANNELS", 0)
    monkeypatch.setattr(streamed_gemm, "chained", lambda device: {"PDL": True})
    monkeypatch.setattr(gemv, "_device", lambda index: {"multiprocessor_count": 2})
    streamed_gemm.tile_for.cache_clear()
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, 2 * 1024, generator=generator).to(BF16)[:, :1024]
    weight = torch.randn(channels, 1024, generator=generator).to(BF16)
    out = torch.full((num_rows + 1, channels), 7.0, dtype=dtype)
    streamed_gemm.product(x, weight, out[:num_rows])
    expected = gluon_in_torch._mma(x, weight.t().contiguous(), torch.zeros(num_rows, channels))
    assert torch.equal(out[:num_rows], expected.to(dtype))
    assert (out[num_rows] == 7).all()
    streamed_gemm.tile_for.cache_clear()


@pytest.mark.parametrize(
    ("n", "k", "expected"),
    [
        (151936, 1024, streamed_gemm.Tile(264, 6)),
        (151936, 4096, streamed_gemm.Tile(132, 10)),
        (32000, 2048, streamed_gemm.Tile(264, 5)),
        (151936, 1152, None),
        (16384, 1024, None),
        (151936, 12288, None),  # a ring would be too short
    ],
)
def test_two_programs_share_a_processor_where_rings_are_long(n: int, k: int, expected: Any) -> None:
    assert streamed_gemm.tile_for(n, k, 132) == expected
