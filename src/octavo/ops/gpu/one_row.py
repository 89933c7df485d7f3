"""Products of one row on a GPU, whose weights wait in shared memory while the kernel ahead ends.

Owns that kernel: what `octavo.ops.gpu.few_rows` computes, for one row of bfloat16 and weights that fit. What is left to
do once the row is there is the chain of matrix instructions over K, fed from shared memory at their own pace. Does not
know layers. Invariant: the bits are those of the separate operators: the same order over K, the same tree of squares,
and a rounding wherever those round.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import functools

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.runtime import driver

from octavo.ops.gpu.activation import gated_value
from octavo.ops.gpu.launch import chained
from octavo.ops.gpu.tree import padded_length, row_sums

_PART = 256  # k of a piece of the weights in shared memory
_MAX_BYTES = 100 << 10  # of a program's weights: two programs of different kernels share a processor
_MIN_PROGRAMS = 64  # fewer do not draw weights fast enough
_MULTIPLE = 1024  # of k: shapes that were not compared on a device are left to the other kernel


@gluon.jit
def _product(
    x, norm, weight, residual, out, eps, N: gl.constexpr, K: gl.constexpr, PADDED: gl.constexpr, LEVELS: gl.constexpr,
    BN: gl.constexpr, WARPS: gl.constexpr, BK: gl.constexpr, PART: gl.constexpr,
    NORM: gl.constexpr, GATED: gl.constexpr, ADD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """BN channels; if GATED, BN gates and their ups."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: gl.constexpr = out.dtype.element_ty
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [WARPS, 1], [1, 0])
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    first = gl.program_id(0) * BN
    # The weights set out.
    channel = (first + gl.arange(0, BN, gl.SliceLayout(1, lines))).to(gl.int64)
    at = weight + channel[:, None] * K + gl.arange(0, PART, gl.SliceLayout(0, lines))[None, :]
    tile = gl.allocate_shared_memory(dtype, [K // PART, BN, PART], swizzled)
    if GATED:
        ups = gl.allocate_shared_memory(dtype, [K // PART, BN, PART], swizzled)
    for part in gl.static_range(K // PART):
        async_copy.async_copy_global_to_shared(tile.index(part), at + part * PART)
        if GATED:
            async_copy.async_copy_global_to_shared(ups.index(part), at + (N // 2 * K + part * PART))
    async_copy.commit_group()
    row = gl.allocate_shared_memory(dtype, [1, PADDED], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    k = gl.arange(0, PADDED, gl.SliceLayout(0, lines))[None, :]
    if NORM:
        scale = gl.load(norm + k, mask=k < K, other=0.0)
    channel = first + gl.arange(0, BN, gl.SliceLayout(1, sums))
    column = gl.arange(0, 8, gl.SliceLayout(0, sums))  # of the matrix unit: the row is in each
    if PDL:
        tl.extra.cuda.gdc_wait()
    # The row is there.
    if ADD:
        before = gl.load(residual + channel).to(gl.float32)
    if NORM:
        value = gl.load(x + k, mask=k < K, other=0.0).to(gl.float32)
        square = gl.reshape(row_sums(value * value, LEVELS), (1, 1))
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square, K * 1.0) + eps))
        inverse = gl.convert_layout(inverse, lines)
        row.store((value * inverse * scale).to(dtype))
    else:
        async_copy.async_copy_global_to_shared(row, x + k, mask=k < K)
        async_copy.commit_group()
    async_copy.wait_group(0)
    tl.debug_barrier()
    total = gl.zeros([BN, 8], gl.float32, sums)
    if GATED:
        up = gl.zeros([BN, 8], gl.float32, sums)
    for start in gl.static_range(0, K, BK):
        b = row.slice(start, BK, dim=1).permute((1, 0)).load(right)
        b = gl.broadcast(b, gl.zeros([BK, 8], dtype, right))[0]
        total = mma_v2(tile.index(start // PART).slice(start % PART, BK, dim=1).load(left), b, total)
        if GATED:
            up = mma_v2(ups.index(start // PART).slice(start % PART, BK, dim=1).load(left), b, up)
    total = total.to(dtype)
    if GATED:
        total = gated_value(total.to(gl.float32), up.to(dtype).to(gl.float32), False).to(dtype)
    if ADD:
        total = (total.to(gl.float32) + before[:, None]).to(dtype)
    gl.store(out + channel[:, None] + column[None, :], total, mask=(column == 0)[None, :])


def _tile(n: int, k: int, normed: bool, gated: bool) -> tuple[int, int] | None:
    """(channels of a program, of gates if gated, and its warps), the best of a sweep on an H200; None: not served."""
    channels, warps = (32, 2) if normed and not gated else (16, 1)
    programs, left = divmod(n // 2 if gated else n, channels)
    num_bytes = 2 * k * channels * (2 if gated else 1)
    served = not left and programs >= _MIN_PROGRAMS and k % _MULTIPLE == 0 and num_bytes <= _MAX_BYTES
    return (channels, warps) if served else None


def serves(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, *, normed: bool) -> bool:
    """Whether x [1, K] by weight [N, K] runs here: bfloat16, without a bias, silu or no activation."""
    plain = x.shape[0] == 1 and x.dtype == torch.bfloat16 and bias is None and activation in (None, "silu")
    if not plain or not x.is_cuda or not _has_room(x.device.index):
        return False
    if _tile(weight.shape[0], weight.shape[1], normed, activation is not None) is None:
        return False
    return x.data_ptr() % 16 == weight.data_ptr() % 16 == 0  # copies to shared memory are 16 bytes wide


@functools.cache
def _has_room(device: int) -> bool:
    return driver.active.utils.get_device_properties(device)["max_shared_mem"] >= 2 * _MAX_BYTES


def product(
    x: Tensor, weight: Tensor, out: Tensor, *, norm: Tensor | None, eps: float, residual: Tensor | None, gated: bool
) -> None:
    """Into out [1, N]: the product of x, normed if there is a norm, through silu if gated, or plus the residual."""
    n, k = weight.shape
    padded, tile = padded_length(k), _tile(n, k, norm is not None, gated)
    assert tile is not None, "the shape is served"
    channels, warps = tile
    _product[(out.shape[1] // channels,)](
        x, out if norm is None else norm, weight, x if residual is None else residual, out, eps, N=n, K=k,
        PADDED=padded, LEVELS=padded.bit_length() - 1, BN=channels, WARPS=warps, BK=128, PART=_PART,
        NORM=norm is not None, GATED=gated, ADD=residual is not None, num_warps=warps, enable_fp_fusion=False,
        **chained(x.device),
    )  # fmt: skip
