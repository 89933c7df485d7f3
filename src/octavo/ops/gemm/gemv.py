"""Products of one row on a GPU, whose weights are on their way, or there, while the kernel ahead ends.

Owns these kernels: what `octavo.ops.gemm.skinny_gemm` computes, for one row of bfloat16. Where a program's weights fit
shared memory, all of them wait there for the row, and what is left to do is the chain of matrix instructions over K at
its own pace. Larger ones stream through a ring in shared memory, which is full when the row comes. Does not know
layers. Invariant: the bits are those of the separate operators: the same order over K, the same tree of squares, and a
rounding wherever those round.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import dataclasses
import functools

import torch
import triton.language as tl
from torch import Tensor
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.runtime import driver

from octavo.ops.activation import GATED_KINDS, SQUARED_RELU
from octavo.ops.activation.gpu import gated_value, squared_value
from octavo.ops.compile.launch import chained, launched
from octavo.ops.compile.row_sum import padded_length, row_sums

_PART = 256  # k of a piece of the weights in shared memory
_MAX_BYTES = 100 << 10  # of the weights that a processor holds for a kernel: two kernels share it
_MIN_PROGRAMS = 64  # fewer do not draw weights fast enough
_MULTIPLE = 1024  # of k: shapes that were not compared on a device are left to the other kernel
_MAX_NORMED = 4096  # k that the warps of a program that streams hold in registers, to norm them


@gluon.jit
def _normed(x, k, scale, eps, K: gl.constexpr, LEVELS: gl.constexpr, layout: gl.constexpr):
    """The row's k, normed, in float32."""
    value = gl.load(x + k, mask=k < K, other=0.0).to(gl.float32)
    square = gl.reshape(row_sums(value * value, LEVELS), (1, 1))
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square, K * 1.0) + eps))
    return value * gl.convert_layout(inverse, layout) * scale


@constexpr_function
def spread(size, warps):
    """Of a row [1, size] on up to four warps, 8 k a thread: warps meet last in the tree of `row_sums`."""
    lanes, of_warps = [[0, 8 * warps << i] for i in range(5)], [[0, 8 << i] for i in range(warps.bit_length() - 1)]
    more = (size // (256 * warps)).bit_length() - 1
    registers = [[0, 1], [0, 2], [0, 4], *[[0, 256 * warps << i] for i in range(more)]]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [1, size])


@constexpr_function
def _everywhere(count):
    """Of [1, count]: all in each thread of as many warps."""
    levels = count.bit_length() - 1
    return gl.DistributedLinearLayout(
        [[0, 1 << i] for i in range(levels)], [[0, 0]] * 5, [[0, 0]] * levels, [], [1, count]
    )


@gluon.jit
def normed_by(x, k, scale, eps, K: gl.constexpr, LEVELS: gl.constexpr, WARPS: gl.constexpr):
    """The row's k, normed, in float32, by warps that have it in `spread`."""
    value = gl.load(x + k, mask=k < K, other=0.0).to(gl.float32)
    total = value * value
    for _ in gl.static_range(3):
        total = gl.sum(gl.reshape(total, (1, total.shape[1] // 2, 2)), 2)
    for _ in gl.static_range(LEVELS - 3):
        if total.shape[1] == WARPS:  # a sum of each warp
            total = gl.convert_layout(total, _everywhere(WARPS))
        total = gl.sum(gl.reshape(total, (1, 2, total.shape[1] // 2)), 1)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(gl.reshape(total, (1, 1)), K * 1.0) + eps))
    return value * gl.convert_layout(inverse, value.type.layout) * scale


@launched(gluon.jit)
def _product(
    x, norm, weight, residual, out, eps, N: gl.constexpr, K: gl.constexpr, PADDED: gl.constexpr, LEVELS: gl.constexpr,
    BN: gl.constexpr, WARPS: gl.constexpr, BK: gl.constexpr, PART: gl.constexpr,
    NORM: gl.constexpr, GATED: gl.constexpr, SQUARED: gl.constexpr, ADD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """BN channels; if GATED, BN gates and their ups. Four warps norm the row, WARPS multiply."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: gl.constexpr = out.dtype.element_ty
    ALL: gl.constexpr = 4 if NORM else WARPS
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [ALL, 1], [1, 0])
    wide: gl.constexpr = spread(PADDED, 4) if NORM else lines
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[ALL, 1], instr_shape=[16, 8])
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
    k = gl.arange(0, PADDED, gl.SliceLayout(0, wide))[None, :]
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
        row.store(normed_by(x, k, scale, eps, K, LEVELS, 4).to(dtype))
    else:
        async_copy.async_copy_global_to_shared(row, x + k, mask=k < K)
        async_copy.commit_group()
    async_copy.wait_group(0)
    tl.debug_barrier()
    total = gl.zeros([BN, 8], gl.float32, sums)
    up = total
    thread = gl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=True, pack=1
    )
    if thread < 32 * WARPS:
        for start in gl.static_range(0, K, BK):
            b = row.slice(start, BK, dim=1).permute((1, 0)).load(right)
            b = gl.broadcast(b, gl.zeros([BK, 8], dtype, right))[0]
            total = mma_v2(tile.index(start // PART).slice(start % PART, BK, dim=1).load(left), b, total)
            if GATED:
                up = mma_v2(ups.index(start // PART).slice(start % PART, BK, dim=1).load(left), b, up)
    total = total.to(dtype)
    if GATED:
        total = gated_value(total.to(gl.float32), up.to(dtype).to(gl.float32), False).to(dtype)
    if SQUARED:
        total = squared_value(total.to(gl.float32)).to(dtype)
    if ADD:
        total = (total.to(gl.float32) + before[:, None]).to(dtype)
    gl.store(out + channel[:, None] + column[None, :], total, mask=(column == 0)[None, :])


@gluon.jit
def ask(
    ring,
    at,
    step,
    first,
    stride,
    N: gl.constexpr,
    K: gl.constexpr,
    PART: gl.constexpr,
    STAGES: gl.constexpr,
    GATED: gl.constexpr,
):
    """Ask for the weights of a step: part step % PARTS of the program's group step // PARTS."""
    PARTS: gl.constexpr = K // PART
    offset = (first + step // PARTS * stride).to(gl.int64) * K + step % PARTS * PART
    slot = step % STAGES
    if GATED:
        async_copy.async_copy_global_to_shared(ring.index(2 * slot), at + offset)
        async_copy.async_copy_global_to_shared(ring.index(2 * slot + 1), at + (offset + N // 2 * K))
    else:
        async_copy.async_copy_global_to_shared(ring.index(slot), at + offset)


@launched(gluon.jit)
def _streamed(
    x, norm, weight, residual, out, eps, N: gl.constexpr, K: gl.constexpr, PADDED: gl.constexpr, LEVELS: gl.constexpr,
    BN: gl.constexpr, WARPS: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr,
    NORM: gl.constexpr, GATED: gl.constexpr, SQUARED: gl.constexpr, ADD: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Every so many groups of BN channels; if GATED, of BN gates and their ups. STAGES: of the ring."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: gl.constexpr = weight.dtype.element_ty
    PARTS: gl.constexpr = K // PART
    SIDES: gl.constexpr = 2 if GATED else 1
    CHUNK: gl.constexpr = PADDED if NORM else K & -K  # of the row: a power of two
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PART, PART // 8], [WARPS, 1], [1, 0])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, WARPS], [1, 0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    first, stride = gl.program_id(0) * BN, gl.num_programs(0) * BN
    groups = (N // SIDES - first + stride - 1) // stride
    # The ring is filled.
    at = weight + gl.arange(0, BN, gl.SliceLayout(1, lines))[:, None].to(gl.int64) * K
    at += gl.arange(0, PART, gl.SliceLayout(0, lines))[None, :]
    ring = gl.allocate_shared_memory(dtype, [STAGES * SIDES, BN, PART], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    for early in gl.static_range(STAGES - 1):
        ask(ring, at, early, first, stride, N, K, PART, STAGES, GATED)
        async_copy.commit_group()
    row = gl.allocate_shared_memory(dtype, [(K + CHUNK - 1) // CHUNK, 1, CHUNK], plain)
    k = gl.arange(0, CHUNK, gl.SliceLayout(0, wide))[None, :]
    if NORM:
        scale = gl.load(norm + k, mask=k < K, other=0.0)
    channel = first + gl.arange(0, BN, gl.SliceLayout(1, sums))
    column = gl.arange(0, 8, gl.SliceLayout(0, sums))  # of the matrix unit: the row is in each
    if PDL:
        tl.extra.cuda.gdc_wait()
    # The row is there.
    if NORM:
        row.index(0).store(_normed(x, k, scale, eps, K, LEVELS, wide).to(dtype))
    else:
        for chunk in gl.static_range(K // CHUNK):
            row.index(chunk).store(gl.load(x + chunk * CHUNK + k))
    rows = row._reinterpret(dtype, [(K + CHUNK - 1) // CHUNK * (CHUNK // PART), 1, PART], plain)
    for group in range(groups):
        total = gl.zeros([BN, 8], gl.float32, sums)
        if GATED:
            up = gl.zeros([BN, 8], gl.float32, sums)
        if ADD:
            before = gl.load(residual + channel + group * stride).to(gl.float32)
        for part in range(PARTS):
            step = group * PARTS + part
            async_copy.wait_group(STAGES - 2)
            tl.debug_barrier()
            if step + (STAGES - 1) < groups * PARTS:
                ask(ring, at, step + (STAGES - 1), first, stride, N, K, PART, STAGES, GATED)
            async_copy.commit_group()
            slot = step % STAGES * SIDES
            b = rows.index(part).permute((1, 0)).load(right)
            b = gl.broadcast(b, gl.zeros([PART, 8], dtype, right))[0]
            total = mma_v2(ring.index(slot).load(left), b, total)
            if GATED:
                up = mma_v2(ring.index(slot + 1).load(left), b, up)
        y = total.to(out.dtype.element_ty)
        if GATED:
            y = gated_value(y.to(gl.float32), up.to(dtype).to(gl.float32), False).to(dtype)
        if SQUARED:
            y = squared_value(y.to(gl.float32)).to(dtype)
        if ADD:
            y = (y.to(gl.float32) + before[:, None]).to(dtype)
        gl.store(out + (channel + group * stride)[:, None] + column[None, :], y, mask=(column == 0)[None, :])


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """How a product is launched. stages: of the ring; 0 where a program holds all of its weights."""

    channels: int
    warps: int
    programs: int
    stages: int
    part: int = _PART


@functools.cache
def tile_for(n: int, k: int, normed: bool, gated: bool, processors: int, streams: bool = False) -> Tile | None:
    """The best of a sweep on an H200, in chains of such products; None: not served.

    streams: weights come through a ring, also such as a program could hold.
    """
    sides = 2 if gated else 1
    if k % _MULTIPLE:
        return None
    channels, warps = (32, 2) if normed and not gated else (16, 1)
    programs, left = divmod(n // sides, channels)
    if not (left or streams) and programs >= _MIN_PROGRAMS and 2 * k * channels * sides <= _MAX_BYTES:
        return Tile(channels, warps, programs, 0)
    channels, warps = (64, 4) if normed and not gated else (32, 2)
    programs, left = divmod(n // sides, channels)
    if left or programs < _MIN_PROGRAMS or (normed and k > _MAX_NORMED):
        return None
    part, num_bytes = _PART, _MAX_BYTES
    if programs > 2 * processors:  # two of them fill a processor, or three small ones, and take several groups
        part, programs = _PART // 2, 2 * processors
        if normed and not gated and not streams:
            channels, warps, programs, num_bytes = 32, 2, 3 * processors, 2 * _MAX_BYTES // 3
    elif programs > processors:
        part, num_bytes = _PART // 2, num_bytes // 2
    stages = min(num_bytes // (2 * part * channels * sides), k // part + 1)
    assert stages > 1, "a step is on its way while the one before it is multiplied"
    return Tile(channels, warps, programs, stages, part)


def serves(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, *, normed: bool, out_dtype: torch.dtype
) -> bool:
    """Whether x [1, K] by weight [N, K] runs here: bfloat16, without a bias; silu, squared ReLU or no activation.

    Results of another type are those of products that stream their weights, which have no activation.
    """
    plain = x.shape[0] == 1 and x.dtype == weight.dtype == torch.bfloat16
    if not plain or bias is not None or activation not in (None, "silu", SQUARED_RELU) or not x.is_cuda:
        return False
    if not has_room(x.device, 2 * _MAX_BYTES):
        return False
    processors, streams = num_processors(x.device), out_dtype != x.dtype
    if streams and activation is not None:
        return False
    if tile_for(*weight.shape, normed, activation in GATED_KINDS, processors, streams) is None:
        return False
    return x.data_ptr() % 16 == weight.data_ptr() % 16 == 0  # copies to shared memory are 16 bytes wide


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return int(_device(device.index)["multiprocessor_count"])


def has_room(device: torch.device, num_bytes: int) -> bool:
    """Whether a program may have so many bytes of a processor's shared memory."""
    return _device(device.index)["max_shared_mem"] >= num_bytes


@functools.cache
def _device(index: int) -> dict[str, int]:
    return dict(driver.active.utils.get_device_properties(index))


def product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> None:
    """Into out [1, N]: the product of x, normed if there is a norm, through the activation, or plus the residual."""
    (n, k), gated = weight.shape, activation in GATED_KINDS
    padded = padded_length(k)
    tile = tile_for(n, k, norm is not None, gated, num_processors(x.device), out.dtype != x.dtype)
    assert tile is not None, "the shape is served"
    kernel, more = (_streamed, {"STAGES": tile.stages}) if tile.stages else (_product, {"BK": 128})
    warps = tile.warps if tile.stages or norm is None else 4
    kernel[(tile.programs,)](
        x, out if norm is None else norm, weight, x if residual is None else residual, out, eps, N=n, K=k,
        PADDED=padded, LEVELS=padded.bit_length() - 1, BN=tile.channels, WARPS=tile.warps, PART=tile.part,
        NORM=norm is not None, GATED=gated, SQUARED=activation == SQUARED_RELU, ADD=residual is not None,
        num_warps=warps, enable_fp_fusion=False,
        **more, **chained(x.device),
    )  # fmt: skip
