"""The products on a CUDA device: against the reference implementation, and a row's bits at every number of rows."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from matmul_rig import DTYPES, TILES, check_fused, check_reference, distance, heavy_tailed
from octavo.ops import gemm as matmul
from octavo.ops.activation import gated_activation
from octavo.ops.gemm import fused, gemv, gpu, held_gemm, pack_linear, skinny_gemm
from octavo.ops.gemm.gpu import linear
from octavo.ops.norm import rms_norm

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
# (N, K) of a 0.6B and an 8B model: qkv, o, gate and up, down, head; and two that no tile divides.
SHAPES = (
    (4096, 1024),
    (1024, 2048),
    (6144, 1024),
    (1024, 3072),
    (151936, 1024),
    (6144, 4096),
    (4096, 4096),
    (24576, 4096),
    (4096, 12288),
    (151936, 4096),
    (12288, 3072),
    (16384, 2048),
    (16384, 3072),
    (9216, 4096),
    (1000, 328),
    (33, 72),
)
SIZES = (*range(1, 131), *(1 << power for power in range(8, 15)))


def _row_bits(n: int, k: int, dtype: torch.dtype, sizes: tuple[int, ...], out_dtype: torch.dtype) -> None:
    """At every size one row, at a random place among others, equals its product alone."""
    weight = pack_linear(heavy_tailed(n, k, dtype=dtype, seed=1, device="cuda"))
    x = heavy_tailed(max(sizes), k, dtype=dtype, seed=2, device="cuda")
    row = heavy_tailed(1, k, dtype=dtype, seed=3, device="cuda")
    alone = matmul.linear(row, weight, out_dtype=out_dtype)[0]
    assert distance(matmul.linear(row, weight, out_dtype=torch.float32), row, weight.storage) < 1e-5
    place, wrong = random.Random(n), []
    for size in sizes:
        start, index = place.randrange(max(sizes) - size + 1), place.randrange(size)
        rows = x[start : start + size].clone()
        rows[index] = row[0]
        if not torch.equal(matmul.linear(rows, weight, out_dtype=out_dtype)[index], alone):
            wrong.append(size)
    assert not wrong, wrong


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_row_bits_do_not_depend_on_the_rows_beside_it(n: int, k: int) -> None:
    _row_bits(n, k, BF16, SIZES, torch.float32)


@pytest.mark.parametrize(("n", "k", "channels"), [(4096, 1024, 2048), (6144, 4096, 4096), (1000, 328, 17)])
def test_a_weight_behind_some_channels_gives_the_others(n: int, k: int, channels: int) -> None:
    weight = pack_linear(heavy_tailed(n, k, dtype=BF16, seed=1, device="cuda"))
    rest, x = weight.behind(channels), heavy_tailed(8192, k, dtype=BF16, seed=2, device="cuda")
    assert rest is not None and rest.storage.data_ptr() == weight.storage[channels].data_ptr()
    for size in (1, 5, 40, 300, 512, 8192):
        assert torch.equal(matmul.linear(x[:size], rest), matmul.linear(x[:size], weight)[:, channels:]), size


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("n", "k"), SHAPES[:4])
def test_row_bits_in_other_dtypes(n: int, k: int, dtype: torch.dtype) -> None:
    _row_bits(n, k, dtype, (*range(1, 131, 3), 256, 1024, 2048), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_and_instruction_families_do_not_move_bits(dtype: torch.dtype) -> None:
    weight, x = (heavy_tailed(rows, 1024, dtype=dtype, seed=rows, device="cuda") for rows in (512, 130))
    expected = linear(x, weight, None, torch.empty(130, 512, device="cuda"))
    for tile in TILES:
        assert torch.equal(linear(x, weight, None, torch.empty_like(expected), tile), expected), tile


@pytest.mark.parametrize(("n", "k"), SHAPES[:14])
def test_the_library_is_used_where_it_keeps_the_order(
    n: int, k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared now, not as kept before; then kept, for this library and driver can be named."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gpu, "_checked", set())
    assert gpu.check_library(heavy_tailed(n, k, dtype=BF16, seed=1, device="cuda"))
    assert len(list((tmp_path / "octavo" / "products").iterdir())) == 1


def test_the_fast_numerics_are_caught() -> None:
    """The positive control: the library's free choice moves the bits of some row."""
    n, k = 4096, 12288
    weight = pack_linear(heavy_tailed(n, k, dtype=BF16, seed=1, device="cuda"))
    x = heavy_tailed(600, k, dtype=BF16, seed=2, device="cuda")
    expected = matmul.linear(x, weight, out_dtype=torch.float32)
    gpu.select("fast")
    try:
        differing = [
            m
            for m in (1, 16, 64, 256, 600)
            if not torch.equal(matmul.linear(x[:m], weight, out_dtype=torch.float32), expected[:m])
        ]
    finally:
        gpu.select("reproducible")
    assert differing
    assert torch.equal(matmul.linear(x, weight, out_dtype=torch.float32), expected)


def test_equals_the_reference() -> None:
    check_reference("cuda", DTYPES)


def test_fused_products_have_the_bits_of_the_separate_operators() -> None:
    check_fused("cuda", (BF16, torch.float16), exact=True)


@pytest.mark.parametrize(("n", "k"), [shape for shape in SHAPES[:14] if shape[0] < 65536])
def test_fused_products_of_model_shapes(n: int, k: int) -> None:
    """At every number of rows that a kernel with what is beside it serves, with heavy tails."""
    weight = pack_linear(heavy_tailed(n, k, dtype=BF16, seed=1, device="cuda"))
    scale = torch.rand(k, device="cuda") + 0.5
    for rows in range(1, held_gemm.MAX_ROWS + 2):
        x = heavy_tailed(rows, k, dtype=BF16, seed=rows, device="cuda")
        residual = heavy_tailed(rows, n, dtype=BF16, seed=rows + 50, device="cuda")
        few = 1 if k > 3072 and torch.cuda.get_device_capability()[0] == 9 else skinny_gemm.MAX_ROWS
        assert fused.runs_fused(x, weight) or rows > few
        normed = matmul.linear(rms_norm(x, scale, 1e-6), weight)
        assert torch.equal(fused.normed_linear(x, scale, 1e-6, weight), normed)
        gated = gated_activation(normed, "silu")
        assert torch.equal(fused.normed_linear(x, scale, 1e-6, weight, activation="silu"), gated)
        total = (matmul.linear(x, weight).float() + residual.float()).to(BF16)
        assert torch.equal(fused.linear_add(x, weight, None, residual), total)


def test_a_row_alone_has_kernels_of_its_own() -> None:
    x, two = torch.empty(1, 12289, dtype=BF16, device="cuda"), torch.empty(2, 12289, dtype=BF16, device="cuda")
    whole = ((4096, 1024, None, True), (6144, 1024, "silu", True), (1024, 2048, None, False), (1024, 3072, None, False))
    streamed = (
        (6144, 4096, None, True),
        (18560, 4096, None, True),
        (24576, 4096, "silu", True),
        (4096, 4096, None, False),
    )
    cases = (*whole, *streamed, (4096, 12288, None, False))
    for n, k, activation, normed in cases:
        weight = torch.empty(n, k, dtype=BF16, device="cuda")
        small = x[:, :k]
        assert gemv.serves(small, weight, None, activation, normed=normed, out_dtype=BF16)
        assert not gemv.serves(x[:, 1 : k + 1], weight, None, activation, normed=normed, out_dtype=BF16), (
            "copies of 16 bytes"
        )
        assert not gemv.serves(small, weight, torch.zeros(n), activation, normed=normed, out_dtype=BF16)
        assert not gemv.serves(two[:, :k], weight, None, activation, normed=normed, out_dtype=BF16)
    wide = torch.empty(4096, 12288, dtype=BF16, device="cuda")
    assert not gemv.serves(x[:, :12288], wide, None, None, normed=True, out_dtype=BF16), (
        "its norm would fill the registers"
    )


def test_few_rows_by_weights_that_fit_have_a_kernel_of_their_own() -> None:
    cases = ((4096, 1024, None, True), (6144, 1024, "silu", True), (1024, 2048, None, False), (1024, 3072, None, False))
    for n, k, activation, normed in cases:
        weight = torch.empty(n, k, dtype=BF16, device="cuda")
        for rows in (2, 5, 8):
            x = torch.empty(rows, k, dtype=BF16, device="cuda")
            assert held_gemm.serves(x, weight, None, activation, normed=normed)
            assert not held_gemm.serves(x, weight, torch.zeros(n), activation, normed=normed)
        for rows in (1, 9):
            x = torch.empty(rows, k, dtype=BF16, device="cuda")
            assert not held_gemm.serves(x, weight, None, activation, normed=normed)


def test_float32_products_are_not_rounded_to_tf32() -> None:
    """The reference implementation in float64 is within float32's error, far below tf32's."""
    x, weight = (torch.randn(64, 1024, device="cuda") for _ in range(2))
    y = linear(x, weight, None, torch.empty(64, 64, device="cuda"))
    exact = x.double() @ weight.double().t()
    assert ((y - exact).norm() / exact.norm()).item() < 1e-6
