"""Dense products on a GPU: which kernel, with which tile, for a shape and a number of rows.

Owns the launch parameters and the canonical order: an output is one float32 accumulator that walks K in order, in the
16-wide steps of the matrix units (in single fused multiply-adds for float32), then the bias, then one rounding. K is
never split. It knows nothing of layers. Invariant: a row's bits depend on that row, the weight and the order above
only, so every choice made here is free to follow the number of rows.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from octavo.ops.gpu.matmul_kernels import product


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes and how it is compiled. Changes no bit."""

    rows: int
    channels: int
    depth: int  # k of one step of the pipeline
    warps: int
    stages: int
    swap: bool = False  # channels are the first side of the matrix unit, whose second may be 8 rows only
    group: int = 8  # row tiles that share a sweep over the channels


def tile_for(num_rows: int, n: int, k: int, dtype: torch.dtype) -> Tile:
    """The tile for a shape and a number of rows."""
    if dtype == torch.float32:
        return Tile(16, 32, 32, 4, 3) if num_rows <= 16 else Tile(64, 64, 32, 8, 3)
    if num_rows <= 16:
        return Tile(16, 32, 128, 4, 4)
    if num_rows <= 64:
        return Tile(64, 64, 64, 4, 4)
    return Tile(128, 128, 64, 8, 4) if num_rows <= 1024 else Tile(128, 256, 64, 8, 3)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: Tile | None = None) -> Tensor:
    """`x @ weight.T + bias` into out [M, N]: see `octavo.ops.matmul.linear`. tile: other than the table's."""
    num_rows, k = x.shape
    n = weight.shape[0]
    assert weight.is_contiguous() and x.stride(1) == out.stride(1) == 1, "last axes are contiguous, weights whole"
    assert x.dtype == weight.dtype or x.dtype == torch.float32, "activations are as wide as the weights, or float32"
    if not num_rows:
        return out
    tile = tile or tile_for(num_rows, n, k, x.dtype)
    programs = -(-num_rows // tile.rows) * -(-n // tile.channels)
    product[(programs,)](
        x, weight, out if bias is None else bias, out, num_rows, x.stride(0), out.stride(0), N=n, K=k, BM=tile.rows,
        BN=tile.channels, BK=tile.depth, GROUP=tile.group, STAGES=tile.stages, SWAP=tile.swap,
        HAS_BIAS=bias is not None, PRECISION="ieee", num_warps=tile.warps,
    )  # fmt: skip
    return out
