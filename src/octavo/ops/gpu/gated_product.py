"""Gates and ups of many rows with their activation, in one kernel on Hopper GPUs.

Owns the choice of a tile, which calls have one, and the launch; `gated_product_kernel` does the work. It is for what
`cluster_product` does not take, or cannot have its kernel for. Does not know layers. Invariant: the bits are those of
`matmul.linear` and `activation.gated_activation`, whatever tile is chosen.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from octavo.ops.activation import GATED_KINDS
from octavo.ops.gpu import matmul
from octavo.ops.gpu.launch import Direct, chained
from octavo.ops.gpu.tensor_maps import ALIGNED, describe, takes_gluon

DEPTH, CHANNELS, SIDE = 64, 64, 8  # as the kernel's: k of a stage, channels of a group, gates side by side
MIN_ROWS, MAX_ROWS = 33, 512  # fewer are served by tiles of fewer rows, more by the library but for a short K
_SHORT_K = 2048  # up to which gates and ups that are not written and read again are a good part of the time
_FEW_ROWS = 128  # up to which weights are what is waited for, and idle processors cost little
_USEFUL_SHARE = 0.9  # of rows and processors, beyond


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Rows and groups of channels of a tile, and stages of the ring. Changes no bit."""

    rows: int
    groups: int  # of warps, with CHANNELS each
    stages: int

    @property
    def shared_bytes(self) -> int:
        """What the ring, the results and its barriers take."""
        stage = (self.rows + self.groups * CHANNELS) * DEPTH * 2
        return self.stages * stage + self.groups * self.rows * CHANNELS + 16 * self.stages


_MOST_ROWS = 256
_MANY_ROWS = Tile(128, 3, 5)
TILES = (Tile(64, 1, 10), Tile(64, 2, 8), Tile(64, 3, 6), _MANY_ROWS, Tile(_MOST_ROWS, 3, 3))


@functools.lru_cache(maxsize=4096)
def tile_for(num_rows: int, n: int, k: int, processors: int) -> Tile | None:
    """The tile for a weight [n, k]; None where separate operators are as fast, or no tile divides the weight.

    The one with which a processor copies least, if it wastes little: so much is alike in the sweeps on an H200.
    """
    if num_rows < MIN_ROWS or k % DEPTH:
        return None
    if num_rows > MAX_ROWS:
        return _MANY_ROWS if k <= _SHORT_K and n % (_MANY_ROWS.groups * CHANNELS) == 0 else None
    copied = {tile: _copied(tile, num_rows, n, processors) for tile in TILES if n % (tile.groups * CHANNELS) == 0}
    worth = {tile: count for tile, count in copied.items() if count is not None}
    return min(worth, key=lambda tile: worth[tile]) if worth else None


def _copied(tile: Tile, num_rows: int, n: int, processors: int) -> int | None:
    """Rows and channels that the busiest processor copies; None if too much of the machine, or of tiles, is idle."""
    row_tiles = -(-num_rows // tile.rows)
    programs = row_tiles * (n // (tile.groups * CHANNELS))
    waves = -(-programs // processors)
    share = num_rows * programs / (row_tiles * tile.rows * waves * processors)
    if waves > (2 if tile.rows == _MOST_ROWS else 1) or (num_rows > _FEW_ROWS and share < _USEFUL_SHARE):
        return None
    if tile.rows == _MOST_ROWS and row_tiles == 1:  # it waits for its weights, where two share them
        return None
    return waves * (tile.rows + tile.groups * CHANNELS)


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether rows x [M, K] by a weight [2 I, K], gates before ups, run here."""
    (num_rows, k), n = x.shape, weight.shape[0]
    if not x.is_cuda or x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    aligned = not (x.stride(0) * x.element_size() % ALIGNED or (x.data_ptr() | weight.data_ptr()) % ALIGNED)
    is_plain = aligned and x.stride(1) == 1 and weight.is_contiguous() and matmul.is_reproducible()
    return is_plain and takes_gluon(x.device) and tile_for(num_rows, n, k, _processors(x.device)) is not None


@functools.cache
def _kernel() -> Any:
    from octavo.ops.gpu.gated_product_kernel import gated_product

    return Direct(gated_product)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def gated_linear(x: Tensor, weight: Tensor, activation: str, tile: Tile | None = None) -> Tensor:
    """[M, I]: `gated_activation` of `linear` of x [M, K] by weight [2 I, K]. tile: this one instead of the table's."""
    (num_rows, k), n = x.shape, weight.shape[0]
    processors = _processors(x.device)
    tile = tile or tile_for(num_rows, n, k, processors)
    assert tile is not None, "ask `serves` first"
    out = torch.empty((num_rows, n // 2), dtype=x.dtype, device=x.device)
    programs = -(-num_rows // tile.rows) * (n // (tile.groups * CHANNELS))
    of_x = describe(x.data_ptr(), x.dtype, (num_rows, k), (x.stride(0), 1), (tile.rows, DEPTH))
    of_weight = describe(
        weight.data_ptr(), x.dtype, (n // (2 * SIDE), 2, SIDE, k), (SIDE * k, n // 2 * k, k, 1),
        (CHANNELS // (2 * SIDE), 2, SIDE, DEPTH),
    )  # fmt: skip
    of_out = describe(
        out.data_ptr(), x.dtype, (num_rows, n // 2), (n // 2, 1), (tile.rows, CHANNELS // 2), swizzle=CHANNELS
    )
    registers, at_launch = (160, 128) if tile.groups == 3 else (240, 168)
    _kernel()[(min(programs, processors),)](
        of_x, of_weight, of_out, num_rows, N=n, K=k, BM=tile.rows, STAGES=tile.stages, CONSUMERS=tile.groups,
        TANH=GATED_KINDS[activation] == 1, REGISTERS=registers, num_warps=4, maxnreg=at_launch,
        enable_fp_fusion=False, **chained(x.device),
    )  # fmt: skip
    return out
