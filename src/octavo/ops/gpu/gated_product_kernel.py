"""The Gluon kernel of `octavo.ops.gpu.gated_product`: gates and ups of many rows, and their activation, on Hopper.

Owns that kernel: how its warps share the work. Does not know which products it serves. Invariant: a gate or an up is
one chain of matrix-unit steps over k in ascending order into one float32 accumulator, rounded once; the rest is
`octavo.ops.gpu.activation`'s arithmetic.

A program has tiles of some rows, and of 64 channels for each of three groups of warps that multiply. A warp lets the
copy engine fill a ring of stages with both; the weights are the first side of the matrix unit, the rows its second,
so that the wide side, which every group reads, is read once for 64 channels. The copy engine lays 8 gates beside their
8 ups, which puts both into the same thread's sums. The first stages' weights, which are constants, are asked for before
the kernel ahead is done. Results leave through shared memory, turned round, by the copy engine too.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

DEPTH = 64  # k of a stage: 128 bytes, as wide as the copy engine's swizzle
CHANNELS = 64  # gates and ups of a group of warps
SIDE = 8  # gates, or ups, that lie side by side
_CONSUMERS = gl.constexpr(3)  # groups of warps
_DEPTH, _CHANNELS, _SIDE = gl.constexpr(DEPTH), gl.constexpr(CHANNELS), gl.constexpr(SIDE)
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton renamed it


@gluon.jit
def _signal(PDL: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def _wait_ahead(PDL: gl.constexpr):
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)


@gluon.jit
def _place(turn, num_rows, BM: gl.constexpr):
    """(first row, number of the tile of channels) of a program's tile: rows first, so that neighbours share weights."""
    tile = gl.program_id(0) + turn * gl.num_programs(0)
    row_tiles = (num_rows + BM - 1) // BM
    return tile % row_tiles * BM, tile // row_tiles


@gluon.jit
def _copy(
    step, x_desc, w_desc, ring, num_rows, STEPS: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    WEIGHTS: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Ask for a step's weights, its rows, or both."""
    x_smem, w_smem, full, _ = ring
    stage = step % STAGES
    row, tile = _place(step // STEPS, num_rows, BM)
    k = step % STEPS * _DEPTH
    if WEIGHTS:
        mbarrier.expect(full.index(stage), (BM + _CONSUMERS * _CHANNELS) * _DEPTH * 2)
        for part in gl.static_range(_CONSUMERS):
            group = (tile * _CONSUMERS + part) * (_CHANNELS // (2 * _SIDE))
            tma.async_copy_global_to_shared(
                w_desc, [group, 0, 0, k], full.index(stage), w_smem.index(stage * _CONSUMERS + part)
            )
    if ROWS:
        tma.async_copy_global_to_shared(x_desc, [row, k], full.index(stage), x_smem.index(stage))


@gluon.jit
def _produce(
    x_desc, w_desc, ring, num_rows, turns, STEPS: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Fill the ring for all steps of the program's tiles."""
    AHEAD: gl.constexpr = min(STAGES, STEPS)
    for step in gl.static_range(AHEAD):
        _copy(step, x_desc, w_desc, ring, num_rows, STEPS, BM, STAGES, True, False)
    _wait_ahead(PDL)
    for step in gl.static_range(AHEAD):
        _copy(step, x_desc, w_desc, ring, num_rows, STEPS, BM, STAGES, False, True)
    for step in range(AHEAD, turns * STEPS):
        mbarrier.wait(ring[3].index(step % STAGES), (step // STAGES & 1) ^ 1)
        _copy(step, x_desc, w_desc, ring, num_rows, STEPS, BM, STAGES, True, True)


@gluon.jit
def _activate(sums, dtype: gl.constexpr, TANH: gl.constexpr):
    """[CHANNELS / 2, rows]: the activation of the gates, rounded, times their ups, rounded, and rounded again."""
    BM: gl.constexpr = sums.shape[1]
    pairs = sums.to(dtype).to(gl.float32).reshape([_CHANNELS // (2 * _SIDE), 2, _SIDE, BM])
    gate, up = pairs.permute((0, 2, 3, 1)).split()
    if TANH:
        exponent = gate * (gate * gate * 0.044715 + 1.0) * -1.5957691216057308
    else:
        exponent = -gate
    return (gate / (gl.exp(exponent) + 1.0) * up).to(dtype).reshape([_CHANNELS // 2, BM])


@gluon.jit
def _consume(
    part, out_desc, ring, out_smem, num_rows, turns, STEPS: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    TANH: gl.constexpr,
):  # fmt: skip
    """The channels of one part of every tile of the program."""
    x_smem, w_smem, full, empty = ring
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    buffer = out_smem.index(part)
    for turn in range(turns):
        begin = turn * STEPS
        sums = gl.zeros((_CHANNELS, BM), gl.float32, SUMS)
        for step in range(begin, begin + STEPS):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            weights, x = w_smem.index(stage * _CONSUMERS + part).reshape([_CHANNELS, _DEPTH]), x_smem.index(stage)
            sums = warpgroup_mma(weights, x.permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[sums])
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=step > begin)
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index((begin + STEPS - 1) % STAGES), count=1)
        tma.store_wait(0)
        _barrier()
        buffer.permute((1, 0)).store(_activate(sums, x_smem.dtype, TANH))
        fence_async_shared()
        _barrier()
        row, tile = _place(turn, num_rows, BM)
        tma.async_copy_shared_to_global(out_desc, [row, (tile * _CONSUMERS + part) * (_CHANNELS // 2)], buffer)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows"])
def gated_product(
    x_desc, w_desc, out_desc, num_rows, N: gl.constexpr, K: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    TANH: gl.constexpr, REGISTERS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """out [num_rows, N / 2]: the activation of x [num_rows, K] times weight [N, K], transposed. Grid: tiles, or fewer.

    The first N / 2 rows of the weight are gates, the others their ups. Boxes of the descriptors: of x [BM, DEPTH], of
    the weight as [N / 16, 2, 8, K] a part's [4, 2, 8, DEPTH], of out [BM, CHANNELS / 2]. K and N are whole steps and
    tiles.
    """
    _signal(PDL)
    STEPS: gl.constexpr = K // _DEPTH
    dtype: gl.constexpr = x_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [STAGES, BM, _DEPTH], x_desc.layout)
    w_smem = gl.allocate_shared_memory(
        dtype, [STAGES * _CONSUMERS, _CHANNELS // (2 * _SIDE), 2, _SIDE, _DEPTH], w_desc.layout
    )
    out_smem = gl.allocate_shared_memory(dtype, [_CONSUMERS, BM, _CHANNELS // 2], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(empty.index(stage), _CONSUMERS)
    fence_async_shared()
    ring = (x_smem, w_smem, full, empty)
    tiles = (num_rows + BM - 1) // BM * (N // (_CONSUMERS * _CHANNELS))
    turns = (tiles - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    gl.warp_specialize(
        [
            (_consume, (0, out_desc, ring, out_smem, num_rows, turns, STEPS, BM, STAGES, TANH)),
            (_consume, (1, out_desc, ring, out_smem, num_rows, turns, STEPS, BM, STAGES, TANH)),
            (_consume, (2, out_desc, ring, out_smem, num_rows, turns, STEPS, BM, STAGES, TANH)),
            (_produce, (x_desc, w_desc, ring, num_rows, turns, STEPS, BM, STAGES, PDL)),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, 24],
    )  # fmt: skip
