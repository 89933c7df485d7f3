"""Gates and ups of many rows by weights of a short K with their activation, in one kernel on Hopper GPUs.

Owns which calls it serves, and the launch; `gated_product_kernel` does the work. It is for more rows than
`cluster_product` takes. Does not know layers. Invariant: the bits are those of `matmul.linear` and
`activation.gated_activation`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from octavo.ops.activation import GATED_KINDS
from octavo.ops.gpu import matmul
from octavo.ops.gpu.launch import Direct, chained
from octavo.ops.gpu.tensor_maps import ALIGNED, describe, takes_gluon

DEPTH, CHANNELS, SIDE = 64, 64, 8  # as the kernel's: k of a stage, channels of a group, gates side by side
MIN_ROWS = 513  # fewer are `cluster_product`'s
_ROWS, _STAGES = 128, 5  # of a tile; of the ring
_TILE_CHANNELS = 3 * CHANNELS
_SHORT_K = 2048  # up to which gates and ups that are not written and read again are a good part of the time
_REGISTERS, _AT_LAUNCH = 160, 128  # of a thread that multiplies


def has_shape(num_rows: int, n: int, k: int) -> bool:
    """Whether rows and a weight [n, k] are what the kernel is for, and its tiles divide the weight."""
    return num_rows >= MIN_ROWS and k <= _SHORT_K and k % DEPTH == n % _TILE_CHANNELS == 0


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether rows x [M, K] by a weight [2 I, K], gates before ups, run here."""
    (num_rows, k), n = x.shape, weight.shape[0]
    if not x.is_cuda or x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    aligned = not (x.stride(0) * x.element_size() % ALIGNED or (x.data_ptr() | weight.data_ptr()) % ALIGNED)
    is_plain = aligned and x.stride(1) == 1 and weight.is_contiguous() and matmul.is_reproducible()
    return is_plain and has_shape(num_rows, n, k) and takes_gluon(x.device)


@functools.cache
def _kernel() -> Any:
    from octavo.ops.gpu.gated_product_kernel import gated_product

    return Direct(gated_product)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def gated_linear(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """[M, I]: `gated_activation` of `linear` of x [M, K] by weight [2 I, K]."""
    (num_rows, k), n = x.shape, weight.shape[0]
    out = torch.empty((num_rows, n // 2), dtype=x.dtype, device=x.device)
    programs = -(-num_rows // _ROWS) * (n // _TILE_CHANNELS)
    of_x = describe(x.data_ptr(), x.dtype, (num_rows, k), (x.stride(0), 1), (_ROWS, DEPTH))
    of_weight = describe(
        weight.data_ptr(), x.dtype, (n // (2 * SIDE), 2, SIDE, k), (SIDE * k, n // 2 * k, k, 1),
        (CHANNELS // (2 * SIDE), 2, SIDE, DEPTH),
    )  # fmt: skip
    of_out = describe(
        out.data_ptr(), x.dtype, (num_rows, n // 2), (n // 2, 1), (_ROWS, CHANNELS // 2), swizzle=CHANNELS
    )
    _kernel()[(min(programs, _processors(x.device)),)](
        of_x, of_weight, of_out, num_rows, N=n, K=k, BM=_ROWS, STAGES=_STAGES, TANH=GATED_KINDS[activation] == 1,
        REGISTERS=_REGISTERS, num_warps=4, maxnreg=_AT_LAUNCH, enable_fp_fusion=False, **chained(x.device),
    )  # fmt: skip
    return out
