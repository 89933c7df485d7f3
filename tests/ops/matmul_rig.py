"""What the tests of the GPU products share, and what Triton's interpreter checks of them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from octavo.ops.activation import GATED_KINDS
from octavo.ops.activation import gpu as activation
from octavo.ops.gemm import LinearWeight, cluster_gemm, linear_reference, skinny_gemm
from octavo.ops.gemm.gpu import Tile, linear
from octavo.ops.norm import gpu as norm

TILES = (Tile(16, 16, 32, 1, 2), Tile(8, 64, 64, 4, 3, swap=True), Tile(64, 32, 16, 4, 2, group=2, ahead=3))
# Of `octavo.ops.gemm.cluster_gemm`: every way of sharing, on each side; one and two parts, one to three groups.
CLUSTERED = tuple(
    cluster_gemm.Tile(*numbers, rows_first=rows_first)
    for rows_first, tiles in (
        (
            False,
            ((1, 16), (1, 48, 1, 2), (1, 256), (2, 128, 1, 1, 2), (2, 80, 1, 2), (3, 192), (3, 128, 2), (3, 112, 2, 2)),
        ),
        (True, ((1, 144), (1, 192, 1, 2), (2, 192, 1, 1, 2), (3, 96, 1, 2))),
    )
    for numbers in tiles
)
# Over which clusters walk.
WALKED = (
    *(dataclasses.replace(tile, band=2) for tile in cluster_gemm.WALKED),
    cluster_gemm.Tile(2, 256, first_shared=2, band=1),
    cluster_gemm.Tile(2, 64, band=3),
)
DTYPES = (torch.float16, torch.float32, torch.bfloat16)


def clustered(activation: str | None) -> list[cluster_gemm.Tile]:
    """Tiles that compute plain products, gates and ups, which are first lines, or products through an activation."""
    if activation in GATED_KINDS:
        return [*WALKED, *(tile for tile in CLUSTERED if not tile.rows_first)]
    return list(CLUSTERED) if activation is None else [*WALKED, *CLUSTERED]


def heavy_tailed(*shape: int, dtype: torch.dtype, seed: int, device: str = "cpu") -> Tensor:
    """Signed values over 16 binades: a change of summation order shows."""
    generator = torch.Generator(device).manual_seed(seed)
    exponents = torch.empty(shape, device=device).uniform_(-8, 8, generator=generator)
    return (torch.randn(shape, generator=generator, device=device) * torch.exp2(exponents)).to(dtype)


def plain_weight(values: Tensor) -> LinearWeight:
    return LinearWeight(*values.shape, str(values.dtype).removeprefix("torch."), values)


def distance(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> float:
    """The largest error of y, float32, against the reference, relative to the sum of absolute products."""
    expected = linear_reference(x, plain_weight(weight), bias, torch.float32)
    scale = x.float().abs() @ weight.float().abs().t() + (0 if bias is None else bias.abs())
    return ((y - expected).abs() / scale.clamp(min=1e-30)).max().item()


def check_reference(device: str = "cpu", dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    for dtype in dtypes:
        for n, k in ((48, 64), (33, 40), (70, 176)):
            weight, bias = heavy_tailed(n, k, dtype=dtype, seed=1, device=device), torch.randn(n, device=device)
            wide = heavy_tailed(21, k + 5, dtype=dtype, seed=2, device=device)
            for x in (wide[:, :k], wide[:3, 5:].contiguous(), wide[:1, :k]):
                for tile in (None, *TILES):
                    room = torch.full((x.shape[0], n + 7), 7.0, device=device)
                    linear(x, weight, bias, room[:, :n], tile)
                    assert distance(room[:, :n], x, weight, bias) < 1e-5, (dtype, n, k, tile)
                    assert bool((room[:, n:] == 7.0).all()), "it wrote beyond the output"


def check_float32_rows_read_a_narrower_weight() -> None:
    x, weight = heavy_tailed(5, 64, dtype=torch.float32, seed=3), heavy_tailed(32, 64, dtype=torch.bfloat16, seed=4)
    assert distance(linear(x, weight, None, torch.empty(5, 32)), x, weight) < 1e-5


def check_the_result_is_rounded_once() -> None:
    x, weight = (torch.randn(20, 64).half() for _ in range(2))
    exact = linear(x, weight, None, torch.empty(20, 20))
    assert torch.equal(linear(x, weight, None, torch.empty(20, 20, dtype=torch.float16)), exact.half())


def check_fused(
    device: str = "cpu",
    dtypes: tuple[torch.dtype, ...] = DTYPES[:1],
    exact: bool = False,
    shapes: tuple[tuple[int, int, bool], ...] = ((64, 512, False), (128, 256, True), (64, 1024, False)),
    numbers: tuple[int, ...] = (1, 3, 4),
) -> None:
    """Products in one kernel with what is beside them, against the separate operators, of some numbers of rows.

    shapes: N, K, with a bias.
    """
    for dtype in dtypes:
        for n, k, has_bias in shapes:
            bias = heavy_tailed(n, dtype=torch.float32, seed=6, device=device) if has_bias else None
            weight = heavy_tailed(n, k, dtype=dtype, seed=7, device=device) / 256
            scale = torch.rand(k, device=device) + 0.5
            for rows in numbers:
                x = heavy_tailed(rows, k, dtype=dtype, seed=8, device=device)
                residual = heavy_tailed(rows, n, dtype=dtype, seed=9, device=device)
                normed = linear(norm.rms_norm(x, scale, 1e-6), weight, bias, torch.empty_like(residual))
                pairs = [(skinny_gemm.normed_linear(x, scale, 1e-6, weight, bias, None), normed)]
                for kind in ("silu", "gelu_tanh"):
                    gated = activation.gated_activation(normed, tanh=kind == "gelu_tanh")
                    pairs.append((skinny_gemm.normed_linear(x, scale, 1e-6, weight, bias, kind), gated))
                squared = activation.squared_relu(normed)
                pairs.append((skinny_gemm.normed_linear(x, scale, 1e-6, weight, bias, "relu2"), squared))
                product = linear(x, weight, bias, torch.empty_like(residual))
                total = (product.float() + residual.float()).to(dtype)
                pairs.append((skinny_gemm.linear_add(x, weight, bias, residual), total))
                for place, (ours, expected) in enumerate(pairs):
                    if exact:
                        assert torch.equal(ours, expected), (dtype, n, rows, place)
                    torch.testing.assert_close(ours, expected, rtol=2e-2, atol=1e-2 * expected.abs().max().item())


def check_no_rows() -> None:
    assert linear(torch.empty(0, 64), torch.randn(32, 64), None, torch.empty(0, 32)).shape == (0, 32)


INTERPRETED = {name: check for name, check in list(globals().items()) if name.startswith("check_")}
