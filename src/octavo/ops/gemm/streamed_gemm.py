"""Products of 2 to 8 rows on a GPU by weights of many channels, as of a head, that stream through shared memory.

Owns that kernel: `octavo.ops.gemm.gemv`'s for a row alone, with more rows, each a column of the matrix unit. A program
takes every so many groups of channels, so that its ring of weights never runs dry between them; it is full before the
rows are there. Does not know layers. Invariant: the bits are those of `octavo.ops.gemm.gpu`'s canonical order.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import dataclasses
import functools

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from octavo.ops.compile.launch import chained, launched
from octavo.ops.gemm import gemv

MAX_ROWS = 8  # columns of the matrix unit
LEAST_CHANNELS = 16384  # fewer are as well served by programs of one group each
_CHANNELS, _PART, _WARPS = 64, 128, 4  # of a group, k of a stage, and warps
_GATHER = 8  # parts of the rows that are on their way at a time
_SHARED_BYTES = 226 << 10  # of a processor, for its programs
_STAGES = 4, 12  # of a ring, at least, where a processor has two programs, and at most


@gluon.jit
def _ask(ring, at, step, first, stride, K: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr):
    """Ask for the weights of a step: part step % PARTS of the program's group step // PARTS."""
    PARTS: gl.constexpr = K // PART
    offset = (first + step // PARTS * stride).to(gl.int64) * K + step % PARTS * PART
    async_copy.async_copy_global_to_shared(ring.index(step % STAGES), at + offset)


@launched(gluon.jit(do_not_specialize=["num_rows"]))
def _streamed_rows(
    x,
    weight,
    out,
    num_rows,
    x_stride,
    out_stride,
    N: gl.constexpr,
    K: gl.constexpr,
    BN: gl.constexpr,
    WARPS: gl.constexpr,
    PART: gl.constexpr,
    STAGES: gl.constexpr,
    GATHER: gl.constexpr,
    PDL: gl.constexpr,
):
    """Every so many groups of BN channels of all rows. STAGES: of the ring."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    dtype: gl.constexpr = weight.dtype.element_ty
    PARTS: gl.constexpr = K // PART
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PART, PART // 8], [WARPS, 1], [1, 0])
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    first, stride = gl.program_id(0) * BN, gl.num_programs(0) * BN
    groups = (N - first + stride - 1) // stride
    # The ring is filled.
    k = gl.arange(0, PART, gl.SliceLayout(0, lines))[None, :]
    at = weight + gl.arange(0, BN, gl.SliceLayout(1, lines))[:, None].to(gl.int64) * K + k
    ring = gl.allocate_shared_memory(dtype, [STAGES, BN, PART], swizzled)
    for early in gl.static_range(STAGES - 1):
        if early < groups * PARTS:
            _ask(ring, at, gl.to_tensor(early), first, stride, K, PART, STAGES)
        async_copy.commit_group()
    rows = gl.allocate_shared_memory(dtype, [PARTS, 8, PART], swizzled)
    row = gl.arange(0, 8, gl.SliceLayout(1, lines))[:, None]
    x_at, live = x + row.to(gl.int64) * x_stride + k, row < num_rows
    channel = first + gl.arange(0, BN, gl.SliceLayout(1, sums))
    column = gl.arange(0, 8, gl.SliceLayout(0, sums))[None, :]  # of the matrix unit: a row
    if PDL:
        tl.extra.cuda.gdc_wait()
    # The rows are there.
    for base in gl.static_range(0, PARTS, GATHER):
        loaded = ()
        for one in gl.static_range(GATHER):
            loaded = loaded + (gl.load(x_at + (base + one) * PART, mask=live, other=0.0),)  # noqa: RUF005
        for one in gl.static_range(GATHER):
            rows.index(base + one).store(loaded[one])
    for group in range(groups):
        total = gl.zeros([BN, 8], gl.float32, sums)
        for part in range(PARTS):
            step = group * PARTS + part
            async_copy.wait_group(STAGES - 2)
            tl.debug_barrier()
            if step + (STAGES - 1) < groups * PARTS:
                _ask(ring, at, step + (STAGES - 1), first, stride, K, PART, STAGES)
            async_copy.commit_group()
            b = rows.index(part).permute((1, 0)).load(right)
            total = mma_v2(ring.index(step % STAGES).load(left), b, total)
        to = out + column.to(gl.int64) * out_stride + (channel + group * stride)[:, None]
        gl.store(to, total.to(out.dtype.element_ty), mask=column < num_rows)


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """How a product is launched."""

    programs: int
    stages: int  # of the ring


@functools.cache
def tile_for(n: int, k: int, processors: int) -> Tile | None:
    """Two programs a processor if their rings are long enough, else one; None: not served."""
    if n <= LEAST_CHANNELS or n % _CHANNELS or k % (_PART * _GATHER):
        return None
    stage, rows = 2 * _CHANNELS * _PART, 2 * MAX_ROWS * k
    for programs in (2, 1):
        stages = min((_SHARED_BYTES // programs - rows) // stage, _STAGES[1])
        if stages >= _STAGES[0]:
            return Tile(min(programs * processors, n // _CHANNELS), stages)
    return None


def serves(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> bool:
    """Whether x [M, K] by weight [N, K] runs here: 2 to 8 rows of bfloat16, without a bias, of many channels."""
    if not 1 < x.shape[0] <= MAX_ROWS or not x.is_cuda or bias is not None:
        return False
    if not x.dtype == weight.dtype == torch.bfloat16 or tile_for(*weight.shape, 1) is None:
        return False
    aligned = (x.data_ptr() | weight.data_ptr() | 2 * x.stride(0)) % 16 == 0 and x.stride(1) == 1
    return aligned and weight.is_contiguous() and gemv.has_room(x.device, _SHARED_BYTES)


def product(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Into out [M, N] the product of x [M, K], rounded once to out's type."""
    num_rows, (n, k) = x.shape[0], weight.shape
    tile = tile_for(n, k, gemv.num_processors(x.device))
    assert tile is not None and x.stride(1) == out.stride(1) == 1 and weight.is_contiguous(), "ask `serves` first"
    _streamed_rows[(tile.programs,)](
        x, weight, out, num_rows, x.stride(0), out.stride(0), N=n, K=k, BN=_CHANNELS, WARPS=_WARPS, PART=_PART,
        STAGES=tile.stages, GATHER=_GATHER, num_warps=_WARPS, enable_fp_fusion=False, **chained(x.device),
    )  # fmt: skip
