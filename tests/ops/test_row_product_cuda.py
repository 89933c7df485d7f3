"""Products of one row in CUDA C++ on a CPU: compiled by the system's compiler, with lanes.h for instructions."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from octavo.ops import norm
from octavo.ops.activation import activate
from octavo.ops.compile import nvrtc
from octavo.ops.gemm.row import row_entry, row_product

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
BF16 = torch.bfloat16
_RUN = """
static Told given;
extern "C" void run(const Told* told, u32 count, u32 threads) {
    given = *told;
    body = [] { KERNEL(given); };
    num_blocks = count;
    for (block_id = 0; block_id < count; ++block_id) run_block(threads);
}
"""


def library(folder: Path, kernel: str, macros: dict[str, int | str]) -> ctypes.CDLL:
    tests, text = Path(__file__).resolve().parents[1], row_product.own_source(kernel)
    source = folder / "kernel.cpp"
    source.write_text((tests / "states" / "lanes.h").read_text() + text + _RUN.replace("KERNEL", kernel))
    assert COMPILER is not None
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-ffp-contract=off"]
    flags += [f"-D{name}={value}" for name, value in macros.items()]
    subprocess.run([COMPILER, *flags, str(source), "-o", str(source.with_suffix(".so"))], check=True)
    return ctypes.CDLL(str(source.with_suffix(".so")))


@pytest.mark.skipif(COMPILER is None, reason="needs a compiler")
@pytest.mark.parametrize(
    ("k", "lines", "normed", "activation", "adds"),
    [(1024, 8, False, None, True), (1024, 48, True, "silu", False), (3072, 16, False, None, False)],
)
def test_it_gives_what_separate_operators_do(
    k: int, lines: int, normed: bool, activation: str | None, adds: bool, tmp_path: Path
) -> None:
    gated, generator, n = activation is not None, torch.Generator().manual_seed(k), 2 * lines
    built = library(tmp_path, "row_product", row_product.macros(k, lines, normed=normed, gated=gated, adds=adds))
    x, weight = torch.randn(1, k, generator=generator).to(BF16), torch.randn(n, k, generator=generator).to(BF16) / 16
    scale, residual = torch.rand(k, generator=generator) + 0.5, torch.randn(1, n, generator=generator).to(BF16)
    out = torch.zeros(1, n // (1 + gated), dtype=BF16)
    told = row_product.told_of(x, weight, out, scale if normed else None, 1e-6, residual if adds else None, gated)
    built.run(ctypes.byref(told), 2, 128)
    row = norm.rms_norm(x, scale, 1e-6) if normed else x
    expected = (row.double() @ weight.double().t()).to(BF16)
    if activation is not None:
        expected = activate(expected, activation)
    if adds:
        expected = (expected.float() + residual.float()).to(BF16)
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("n", "k", "gated", "lines"),
    [
        (1024, 2048, False, 8),
        (1024, 3072, False, 8),
        (4096, 1024, False, 32),
        (6144, 1024, True, 48),
        (152064, 1024, False, 0),
    ],
)
def test_each_processor_has_a_block_at_most(n: int, k: int, gated: bool, lines: int) -> None:
    assert row_product.lines_for(n, k, gated, 132) == lines
    if lines:
        own = row_product.macros(k, lines, normed=k == 1024, gated=gated, adds=k > 1024)
        _, told = nvrtc.compile_told(row_product.source(lines), own, "sm_90a", "--ptxas-options=-v")
        assert "0 bytes spill stores" in told and row_product.shared_bytes(own) <= 113 << 10


@pytest.mark.skipif(COMPILER is None, reason="needs a compiler")
@pytest.mark.parametrize(("normed", "whole"), [(True, False), (False, True)])
def test_an_entry_is_normed_and_multiplied(normed: bool, whole: bool, tmp_path: Path) -> None:
    """Behind a draw of a row, and of one of several, whose state is kept."""
    size, n, generator = 1024, 64, torch.Generator().manual_seed(1)
    built = library(tmp_path, "row_entry", row_entry.macros(size, whole=whole))
    table, states = (torch.randn(4, count, generator=generator).to(BF16) for count in (size, 2 * size))
    weight = torch.randn(n, 2 * size, generator=generator).to(BF16) / 16
    norms = torch.rand(size, generator=generator) + 0.5, torch.rand(size, generator=generator) + 0.5
    ids, pick, states = torch.tensor([1, 0, 3, 2]), torch.tensor([2]), states[:, :size]
    own, out = torch.zeros(1, size, dtype=BF16), torch.zeros(1, n, dtype=BF16)
    place = 2 if whole else 0
    told = row_entry.told_of(ids, table, states, norms, 1e-6, weight, pick if whole else None, out, own, normed)
    built.run(ctypes.byref(told), n // 32, 128)
    state = states[place : place + 1].contiguous()
    both = [norm.rms_norm(table[ids[place]][None], norms[0], 1e-6), norm.rms_norm(state, norms[1], 1e-6)]
    expected = (torch.cat(both, 1).double() @ weight.double().t()).to(BF16)
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(own, both[1] if normed else state, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("whole", [True, False])
def test_attention_has_room_beside_an_entry(whole: bool) -> None:
    from octavo.ops.attention import rope_decode_kernel

    own = row_entry.macros(1024, whole=whole)
    _, told = nvrtc.compile_told(row_entry.source(), own, "sm_90a", "--ptxas-options=-v")
    assert "0 bytes spill stores" in told and "serialized" not in told
    assert row_entry.shared_bytes(1024) + rope_decode_kernel._SHARED_BYTES + 2048 <= 228 << 10
