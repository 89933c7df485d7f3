"""Products of 5 to 512 rows on Hopper, gates and ups of more: the separate operators' bits, which calls are taken."""

from __future__ import annotations

import functools
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from matmul_rig import WALKED, clustered, heavy_tailed
from octavo.ops import decoder
from octavo.ops.activation import activate
from octavo.ops.gemm import cluster_gemm, fused, linear, load_kernels, pack_linear
from octavo.ops.gemm import gpu as matmul
from octavo.ops.gemm.cluster_gemm import Tile, _Kind, product, serves, tile_for
from octavo.ops.norm import rms_norm

pytestmark = pytest.mark.gpu
BF16, F16 = torch.bfloat16, torch.float16
# (N, K) of a 0.6B model's layer, three of an 8B one's, and one whose tiles and stages are few.
SHAPES = ((4096, 1024), (1024, 2048), (6144, 1024), (6144, 4096), (4096, 4096), (4096, 12288), (192, 192))


def _weight(n: int, k: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Sums are of all sizes: activations of many binades, few of them infinite."""
    return heavy_tailed(n, k, dtype=torch.float32, seed=1, device="cuda").div(1024 * k**0.5).to(dtype)


def _expected(x: torch.Tensor, weight: torch.Tensor, activation: str | None = None) -> torch.Tensor:
    """By the separate operators, in Triton tiles: one accumulator that walks K in order."""
    tile = matmul.tile_for(16, *weight.shape, x.dtype)
    plain = matmul.linear(x, weight, None, x.new_empty(x.shape[0], weight.shape[0]), tile)
    return plain if activation is None else activate(plain, activation)


def _added(product: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return (product.float() + residual.float()).to(product.dtype)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize(
    ("activation", "dtype"),
    [(None, BF16), (None, F16), ("silu", BF16), ("gelu_tanh", F16), ("relu2", BF16), ("relu2", F16)],
)
def test_every_tile_has_the_bits_of_the_canonical_order(
    activation: str | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with partial tiles of rows and channels, where clusters walk; what is behind the rows, in shared memory too,
    is neither read nor written."""
    monkeypatch.setattr(cluster_gemm, "_launch", functools.partial(cluster_gemm._launch, processors=2))
    n, k = 448, 1088
    weight, x = _weight(n, k, dtype), heavy_tailed(300, k, dtype=dtype, seed=2, device="cuda")
    expected = _expected(x, weight, activation)
    assert expected.isfinite().float().mean() > 0.9
    assert (expected != 0).float().mean() > 0.5
    x[290:] = float("nan")
    nothing = torch.full_like(x, float("nan"))
    residual = heavy_tailed(300, n + 8, dtype=dtype, seed=4, device="cuda")[:, 8:]
    residual *= expected.float().abs().median() / residual.float().abs().median()
    total = None if activation else _added(expected, residual)
    tiles = clustered(activation)
    with ThreadPoolExecutor(8) as pool:  # they are kept
        list(pool.map(lambda tile: cluster_gemm.compile_tile(tile, _Kind(dtype, activation)), tiles))
    for tile in tiles:
        for rows in (1, 13, 64, 200, 256, 257, 290):
            product(nothing, weight, torch.empty_like(expected), activation, tile)
            room = torch.full_like(expected, 7.0)
            product(x[:rows], weight, room[:rows], activation, tile)
            assert _same(room[:rows], expected[:rows]), (rows, tile)
            assert bool((room[rows:] == 7.0).all()), (rows, tile)
            if total is not None:
                product(x[:rows], weight, room[:rows], None, tile, residual[:rows])
                assert _same(room[:rows], total[:rows]), (rows, tile)
                assert bool((room[rows:] == 7.0).all()), (rows, tile)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_has_its_bits_at_every_number_of_rows(n: int, k: int) -> None:
    """As a model runs it, from fewer rows to many, of gates and ups too; rows of a wider tensor."""
    weight, wide = pack_linear(_weight(n, k)), heavy_tailed(2600, k + 8, dtype=BF16, seed=3, device="cuda")
    x = wide[:, 8:]
    expected, gated = _expected(x, weight.storage), _expected(x, weight.storage, "silu") if n in (192, 6144) else None
    squared = _expected(x, weight.storage, "relu2") if n in (192, 6144) else None
    residual = heavy_tailed(2600, n + 8, dtype=BF16, seed=9, device="cuda").div(1024)[:, :n]
    total = _added(expected, residual)
    tens = 144, 160, 176, 191, 192, 200, 208, 224, 240, 255, 256, 257, 320, 400, 500, 512, 520
    for rows in (*range(1, 131), *tens, 1023, 1024, 1025, 1279, 1300, 1537, 2048, 2600):
        assert serves(x[:rows], weight.storage, None) == (tile_for(rows, n, k, gated=False) is not None)
        assert _same(linear(x[:rows], weight), expected[:rows]), rows
        assert _same(fused.linear_add(x[:rows], weight, None, residual[:rows]), total[:rows]), rows
        if gated is not None:
            assert _same(fused.activated_linear(x[:rows], weight, "silu"), gated[:rows]), rows
        if squared is not None:
            assert _same(fused.activated_linear(x[:rows], weight, "relu2"), squared[:rows]), rows


def test_captured_behind_the_kernel_that_makes_its_rows() -> None:
    """Weights are read before that kernel is done, rows and what is added are not; no result is overwritten early."""
    n, k, turned = 4096, 1024, Tile(1, 64, 1, 2)
    torch.manual_seed(5)
    shapes = (n, k), (k, n), (k, k)
    weight, back, square = (torch.randn(shape, device="cuda").div(shape[1] ** 0.5).to(BF16) for shape in shapes)
    for rows in (8, 72, 256, 512):
        x = torch.randn(rows, k, device="cuda").to(BF16)
        assert serves(x, weight, None)
        out, middle, sums = torch.empty_like(x), x.new_empty(rows, n), x.new_empty(8, rows, k)
        product(out, square, sums[0], tile=tile_for(rows, k, k, gated=False))

        def call(
            x: torch.Tensor = x, out: torch.Tensor = out, middle: torch.Tensor = middle, sums: torch.Tensor = sums
        ) -> None:
            for turn in range(8):
                product(x if not turn else sums[turn - 1], weight, middle)
                product(middle, back, out, tile=turned)
                product(out, square, sums[turn], residual=out)

        expected = x
        for _ in range(8):
            row = _expected(_expected(expected, weight), back)
            expected = _added(_expected(row, square), row)
        assert expected.float().std() > 0.1, "of many rounds something is left"
        call()
        assert _same(sums[7], expected), rows
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        sums.zero_()
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        assert _same(sums[7], expected), rows


@pytest.mark.parametrize("tile", WALKED[:3], ids=str)
def test_walks_captured_behind_the_kernel_that_makes_their_rows(tile: Tile) -> None:
    rows, k = 2100, 1024
    torch.manual_seed(8)
    weight = torch.randn(2 * k, k, device="cuda").div(k**0.5).to(BF16)
    x, ones = torch.randn(rows, k, device="cuda").to(BF16), torch.ones(k, device="cuda")
    middle, out = torch.empty_like(x), torch.empty_like(x)

    def call() -> None:
        out.copy_(x)
        for _ in range(4):
            product(rms_norm(out, ones, 1e-6), weight, middle, "silu", tile)
            product(rms_norm(middle, ones, 1e-6), weight, out, "silu", tile)

    expected = x
    for _ in range(8):
        expected = _expected(rms_norm(expected, ones, 1e-6), weight, "silu")
    assert expected.float().std() > 0.1
    call()
    assert _same(out, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    out.zero_()
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    assert _same(out, expected)


def test_what_it_takes() -> None:
    weight, x = torch.empty(4096, 1024, dtype=BF16, device="cuda"), torch.empty(72, 1032, dtype=BF16, device="cuda")
    out = torch.empty(72, 4096, dtype=BF16, device="cuda")
    assert serves(x[:, :1024], weight, out)
    assert serves(x[:5, 8:], weight, None)
    assert serves(x[:, :1024], weight, None, "silu")
    assert not serves(x[:4, :1024], weight, None), "few rows"
    assert not serves(x[:, 1:1025], weight, None), "the copy engine steps over 16 bytes"
    assert not serves(x[:, :1024], weight, out.float())
    assert not serves(x[:, :1024], weight, out.t())
    assert serves(x[:, :1024], weight, None, residual=out)
    assert not serves(x[:, :1024], weight, None, residual=out.t().contiguous().t())
    assert not serves(x[:, :1024], weight, None, residual=out.half())
    odd = torch.empty(72, 4100, dtype=BF16, device="cuda")
    assert not serves(x[:, :1024], weight, None, residual=odd[:, :4096]), "its rows are not 16 bytes apart"
    many = torch.empty(8100, 1024, dtype=BF16, device="cuda")
    assert not serves(many, weight, None), "the library is as fast"
    assert serves(many, weight, None, "silu")
    assert not serves(many[:520], weight, None, "silu"), "the library is faster"
    assert not serves(many[:, :448], weight[:, :448].contiguous(), None, "silu"), "a walk's steps are too few"
    assert not serves(x[:, :1024].float(), weight, None)
    assert not serves(x[:, :1024].half(), weight, None)
    assert not serves(x[:, :1000], weight[:, :1000].contiguous(), None), "K is whole stages"
    matmul.select("fast")
    try:
        assert not serves(x[:, :1024], weight, None)
    finally:
        matmul.select("reproducible")


@pytest.mark.parametrize("kinds", ["dense", "expert", "normed", "biased"])
@pytest.mark.parametrize(("size", "inner"), [(1024, 3072), (4096, 4160), (200, 192)])
def test_the_end_of_a_layer_has_the_separate_operators_bits(
    size: int, inner: int, kinds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output product, addition, norm, MLP and addition, whichever of these one kernel computes."""
    at_once = decoder.linear_add_at_once
    layer = _layer(size, inner, kinds)
    attended = heavy_tailed(600, size, dtype=BF16, seed=11, device="cuda").div(256).view(600, -1, 8)
    residual = heavy_tailed(600, size, dtype=BF16, seed=12, device="cuda").div(256)
    for rows in (1, 3, 4, 5, 16, 33, 72, 130, 256, 300, 513, 600):
        monkeypatch.setattr(decoder, "linear_add_at_once", lambda *_: None)
        x, total = decoder.leave_attention_composed(layer, attended[:rows], residual[:rows])
        assert total is not None
        monkeypatch.setattr(decoder, "linear_add_at_once", at_once)
        found, left = decoder.leave_attention_composed(layer, attended[:rows], residual[:rows])
        if left is None:
            assert kinds in ("dense", "biased")
            x, left = _added(x, total), total
        assert _same(found, x), rows
        assert _same(left, total), rows


def _layer(size: int, inner: int, kinds: str) -> decoder.DecoderLayerOperands:
    """An end of a layer; its beginning is of no use here."""

    def vector(name: str) -> torch.Tensor | None:
        return torch.rand(size, device="cuda") + 0.5 if kinds == name else None

    dense = kinds != "expert"
    norm, output = torch.rand(size, device="cuda") + 0.5, pack_linear(_weight(size, size))
    return decoder.DecoderLayerOperands(
        num_heads=size // 8, num_kv_heads=size // 8, head_size=8, eps=1e-6, input_norm=norm, qkv=output,
        keys_values=None, qkv_bias=None, q_norm=None, k_norm=None, head_eps=1e-6, cos_sin=norm, output=output,
        output_bias=vector("biased"), attention_norm=vector("normed"), mlp_norm=norm,
        gate_up=pack_linear(_weight(2 * inner, size)) if dense else None,
        down=pack_linear(_weight(size, inner)) if dense else None, activation="silu", mlp_out_norm=vector("normed"),
        scale=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("why", ["other bits", "does not load", "no compiler"])
def test_a_kernel_that_cannot_be_had_is_told_once_and_others_serve(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    tile = tile_for(72, 4096, 1024, gated=False)
    _forget(monkeypatch)
    if why == "other bits":  # compared now, not as kept before
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        rows, channels, plain = cluster_gemm._example(BF16, torch.device("cuda", 0))
        monkeypatch.setattr(cluster_gemm, "_example", lambda *_: (rows, channels.flip(0), plain))
    elif why == "does not load":
        monkeypatch.setattr(cluster_gemm, "_machine_codes", lambda *_: dict.fromkeys([tile], b"none"))
    else:

        def refuse(*_: object) -> bytes:
            raise cluster_gemm.nvrtc.CompileError("there is no compiler")

        monkeypatch.setattr(cluster_gemm, "_machine_codes", refuse)
    weight, x = pack_linear(_weight(4096, 1024)), heavy_tailed(72, 1024, dtype=BF16, seed=6, device="cuda")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert not serves(x, weight.storage, None)
    assert len(caplog.records) == 1
    assert _same(linear(x, weight), _expected(x, weight.storage))


def test_a_graph_finds_the_kernels_that_were_loaded_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is loaded while it is captured."""
    weight, x = _weight(4096, 1024), heavy_tailed(600, 1024, dtype=BF16, seed=7, device="cuda")
    _forget(monkeypatch)
    assert not serves(x, weight, None), "too many rows"
    assert serves(x[:512], weight, None)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert serves(x[:512], weight, None)
        assert not serves(x[:72], weight, None)
        x.neg_()
    load_kernels(72)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert serves(x[:72], weight, None)
        x.neg_()


def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_gemm, "_functions", {})
    monkeypatch.setattr(cluster_gemm, "_met", {})
