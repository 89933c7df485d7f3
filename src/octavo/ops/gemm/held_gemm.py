"""Products of 2 to 8 rows on a GPU whose weights all wait in shared memory while the kernel ahead ends.

Owns that kernel: `octavo.ops.gemm.gemv`'s for a row alone, with more rows, each a column of the matrix unit: 8 of them
cost it what one does. The norm before, and the activation or addition behind, are in the kernel. Does not know
layers. Invariant: the bits are those of the separate operators: the same order over K, the same tree of squares, and a
rounding wherever those round.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment, var-annotated, unreachable"
from __future__ import annotations

import functools

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from octavo.ops.activation import GATED_KINDS, SQUARED_RELU
from octavo.ops.activation.gpu import gated_value, squared_value
from octavo.ops.compile.launch import chained, launched
from octavo.ops.compile.row_sum import padded_length, row_sums
from octavo.ops.gemm import gemv
from octavo.ops.gemm import gpu as matmul

MAX_ROWS = 8  # columns of the matrix unit
_PART, _STEP = 256, 128  # k of a piece of shared memory, and of what is multiplied at a time
_ALIGNED = 16  # bytes of addresses, elements between rows: copies to shared memory are 16 bytes wide
_SHARED_BYTES = 227 << 10  # of a processor, for one program
_NORMING_WARPS = (
    8  # where nothing is normed more warps than multiply make those wait: registers are then allotted sparsely
)


@gluon.jit
def _normed(x_at, live, scale, eps, K: gl.constexpr, LEVELS: gl.constexpr, layout: gl.constexpr):
    """Rows [ROWS, K], normed, in float32; those that are not live are zeros. K is a power of two."""
    value = gl.load(x_at, mask=live, other=0.0).to(gl.float32)
    squares = row_sums(value * value, LEVELS)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(squares * (1.0 / K) + eps))  # the product has the quotient's bits
    return value * gl.convert_layout(inverse, gl.SliceLayout(1, layout))[:, None] * scale


@launched(gluon.jit(do_not_specialize=["num_rows"]))
def _product(
    x, norm, weight, residual, out, eps, num_rows, x_stride, residual_stride, out_stride, N: gl.constexpr,
    K: gl.constexpr, LEVELS: gl.constexpr, ROWS: gl.constexpr, BN: gl.constexpr, WARPS: gl.constexpr,
    ALL: gl.constexpr, BK: gl.constexpr, PART: gl.constexpr, NORM: gl.constexpr, GATED: gl.constexpr,
    TANH: gl.constexpr, SQUARED: gl.constexpr, ADD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """BN channels of all rows; if GATED, BN gates and their ups. ALL warps copy, and norm; WARPS of them multiply."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: gl.constexpr = out.dtype.element_ty
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [ALL, 1], [1, 0])
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[ALL, 1], instr_shape=[16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    first = gl.program_id(0) * BN
    # The weights set out.
    channel = (first + gl.arange(0, BN, gl.SliceLayout(1, lines))).to(gl.int64)
    part_k = gl.arange(0, PART, gl.SliceLayout(0, lines))
    at = weight + channel[:, None] * K + part_k[None, :]
    tile, ups, rows = (), (), ()  # in pieces of their own, between whose copies no warp waits for another
    for part in gl.static_range(K // PART):
        tile = tile + (gl.allocate_shared_memory(dtype, [BN, PART], swizzled),)  # noqa: RUF005
        async_copy.async_copy_global_to_shared(tile[part], at + part * PART)
        if GATED:
            ups = ups + (gl.allocate_shared_memory(dtype, [BN, PART], swizzled),)  # noqa: RUF005
            async_copy.async_copy_global_to_shared(ups[part], at + (N // 2 * K + part * PART))
    async_copy.commit_group()
    row = gl.arange(0, ROWS, gl.SliceLayout(1, lines))
    live = (row < num_rows)[:, None]
    x_row = x + row.to(gl.int64)[:, None] * x_stride
    if NORM:
        whole = gl.allocate_shared_memory(dtype, [ROWS, K], swizzled)
        k = gl.arange(0, K, gl.SliceLayout(0, lines))[None, :]
        scale = gl.load(norm + k)
    for part in gl.static_range(K // PART):
        if NORM:
            rows = rows + (whole.slice(part * PART, PART, dim=1),)  # noqa: RUF005
        else:
            rows = rows + (gl.allocate_shared_memory(dtype, [ROWS, PART], swizzled),)  # noqa: RUF005
    channel = first + gl.arange(0, BN, gl.SliceLayout(1, sums))
    column = gl.arange(0, ROWS, gl.SliceLayout(0, sums))  # of the matrix unit: a row
    is_there = (column < num_rows)[None, :]
    column = column.to(gl.int64)[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    # The rows are there.
    if ADD:
        at = residual + column * residual_stride + channel[:, None]
        before = gl.load(at, mask=is_there, other=0.0).to(gl.float32)
    if NORM:
        whole.store(_normed(x_row + k, live, scale, eps, K, LEVELS, lines).to(dtype))
    else:
        for part in gl.static_range(K // PART):
            async_copy.async_copy_global_to_shared(rows[part], x_row + part_k[None, :] + part * PART, mask=live)
        async_copy.commit_group()
    async_copy.wait_group(0)
    tl.debug_barrier()
    total = gl.zeros([BN, ROWS], gl.float32, sums)
    up = total
    thread = gl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=True, pack=1
    )
    if thread < 32 * WARPS:
        for start in gl.static_range(0, K, BK):
            b = rows[start // PART].slice(start % PART, BK, dim=1).permute((1, 0)).load(right)
            total = mma_v2(tile[start // PART].slice(start % PART, BK, dim=1).load(left), b, total)
            if GATED:
                up = mma_v2(ups[start // PART].slice(start % PART, BK, dim=1).load(left), b, up)
    total = total.to(dtype)
    if GATED:
        total = gated_value(total.to(gl.float32), up.to(dtype).to(gl.float32), TANH).to(dtype)
    if SQUARED:
        total = squared_value(total.to(gl.float32)).to(dtype)
    if ADD:
        total = (total.to(gl.float32) + before).to(dtype)
    gl.store(out + column * out_stride + channel[:, None], total, mask=is_there)


@functools.cache
def _tile(n: int, k: int, normed: bool, gated: bool) -> tuple[int, int] | None:
    """(channels, warps that multiply) of a program: `gemv`'s; None: not served."""
    tile = gemv.tile_for(n, k, normed, gated, 1)
    if tile is None or tile.stages or (normed and padded_length(k) != k):
        return None
    return tile.channels, tile.warps


def serves(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, *, normed: bool) -> bool:
    """Whether x [M, K] by weight [N, K] runs here: 2 to 8 rows of bfloat16, without a bias, of shapes that fit."""
    if not 1 < x.shape[0] <= MAX_ROWS or x.dtype != torch.bfloat16 or weight.dtype != x.dtype or bias is not None:
        return False
    if not (x.is_cuda and matmul.is_reproducible()) or _tile(*weight.shape, normed, activation in GATED_KINDS) is None:
        return False
    aligned = (x.data_ptr() | weight.data_ptr() | x.stride(0)) % _ALIGNED == 0 and x.stride(1) == 1
    return aligned and weight.is_contiguous() and gemv.has_room(x.device, _SHARED_BYTES)


def product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    activation: str | None,
) -> None:
    """Into out [M, N]: the product of x [M, K], normed if there is a norm, gated, or plus the residual.

    Of gates and their ups, out is [M, N / 2].
    """
    (num_rows, k), n, gated = x.shape, weight.shape[0], activation in GATED_KINDS
    tile = _tile(n, k, norm is not None, gated)
    assert tile is not None, "the shape is served"
    assert x.stride(1) == out.stride(1) == 1 and weight.is_contiguous(), "channels are contiguous"
    channels, warps = tile
    before = x if residual is None else residual
    all_warps = warps if norm is None else _NORMING_WARPS
    _product[(n // (2 * channels if gated else channels),)](
        x, out if norm is None else norm, weight, before, out, eps, num_rows, x.stride(0), before.stride(0),
        out.stride(0), N=n, K=k, LEVELS=padded_length(k).bit_length() - 1, ROWS=MAX_ROWS,
        BN=channels, WARPS=warps, ALL=all_warps, BK=_STEP, PART=_PART, NORM=norm is not None, GATED=gated,
        TANH=GATED_KINDS.get(activation or "") == 1, SQUARED=activation == SQUARED_RELU, ADD=residual is not None,
        num_warps=all_warps,
        enable_fp_fusion=False, **chained(x.device),
    )  # fmt: skip
