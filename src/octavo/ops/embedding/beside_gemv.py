"""A drafter's entry and its first product in one kernel: `project_beside` of `octavo.ops.embedding.beside`, of one row.

Owns that kernel. Weights are on their way, in a ring of shared memory, and the state is normed, before the token is
drawn; each program then reads and norms the token's embedding by itself. Does not know layers. Invariant: the bits are
those of `octavo.ops.embedding.beside_gpu` and, behind it, of `octavo.ops.gemm.gemv`: the same tree of squares, the same
order over K. Behind a draw of drafts states are there before it begins; else it begins whole, see
`octavo.ops.compile.launch`.
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

from octavo.ops.compile.launch import begin_whole, chained, end_before, launched, wait_before
from octavo.ops.gemm import gemv
from octavo.ops.gemm.gemv import normed_by, spread
from octavo.ops.gemm.gpu import is_reproducible

_PART = 256  # k of a stage
_SHARED_BYTES = 90 << 10  # of a processor: attention, which is next, has room beside


@launched(gluon.jit)
def _entry_product(
    ids, table, states, first_norm, second_norm, pick, weight, own, out, eps, states_row, K: gl.constexpr,
    LEVELS: gl.constexpr, WARPS: gl.constexpr, PART: gl.constexpr, STAGES: gl.constexpr, PICK: gl.constexpr,
    KEEP: gl.constexpr, NORMED: gl.constexpr, WHOLE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """16 channels a warp, of a row of K / 2 of a token's embedding and K / 2 of a state, both normed.

    KEEP: the state is written as well, NORMED or as it is.
    """
    if not WHOLE:
        end_before(PDL)
    dtype: gl.constexpr = weight.dtype.element_ty
    SIZE: gl.constexpr = K // 2
    PARTS: gl.constexpr = K // PART
    BN: gl.constexpr = 16 * WARPS
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PART, PART // 8], [WARPS, 1], [1, 0])
    wide: gl.constexpr = spread(SIZE, WARPS)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    first = gl.program_id(0) * BN
    # The ring is filled.
    channel = (first + gl.arange(0, BN, gl.SliceLayout(1, lines))).to(gl.int64)
    at = weight + channel[:, None] * K + gl.arange(0, PART, gl.SliceLayout(0, lines))[None, :]
    ring = gl.allocate_shared_memory(dtype, [STAGES, BN, PART], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    for early in gl.static_range(STAGES):
        async_copy.async_copy_global_to_shared(ring.index(early), at + early * PART)
        async_copy.commit_group()
    row = gl.allocate_shared_memory(dtype, [2, 1, SIZE], plain)
    k = gl.arange(0, SIZE, gl.SliceLayout(0, wide))[None, :]
    scale = gl.load(first_norm + k)
    state_scale, place = gl.load(second_norm + k), 0
    if WHOLE:
        begin_whole(PDL)
    if PICK:
        place = gl.load(pick).to(gl.int64)
        states += place * states_row
    state = normed_by(states, k, state_scale, eps, SIZE, LEVELS, WARPS).to(dtype)
    row.index(1).store(state)
    channel = first + gl.arange(0, BN, gl.SliceLayout(1, sums))
    column = gl.arange(0, 8, gl.SliceLayout(0, sums))  # of the matrix unit: the row is in each
    if not WHOLE:
        wait_before(PDL)
    # The token is there.
    token = table + gl.load(ids + place).to(gl.int64) * SIZE
    row.index(0).store(normed_by(token, k, scale, eps, SIZE, LEVELS, WARPS).to(dtype))
    if KEEP and gl.program_id(0) == 0:
        gl.store(own + k, state if NORMED else gl.load(states + k))
    rows = row._reinterpret(dtype, [PARTS, 1, PART], plain)
    total = gl.zeros([BN, 8], gl.float32, sums)
    for part in gl.static_range(PARTS):
        async_copy.wait_group((STAGES if part + STAGES < PARTS else PARTS - part) - 1)
        tl.debug_barrier()
        b = rows.index(part).permute((1, 0)).load(right)
        b = gl.broadcast(b, gl.zeros([PART, 8], dtype, right))[0]
        total = mma_v2(ring.index(part % STAGES).load(left), b, total)
        if part + STAGES < PARTS:
            tl.debug_barrier()
            async_copy.async_copy_global_to_shared(ring.index(part % STAGES), at + (part + STAGES) * PART)
            async_copy.commit_group()
    gl.store(out + channel[:, None] + column[None, :], total.to(dtype), mask=(column == 0)[None, :])


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """How it is launched. stages: of a program's ring."""

    warps: int
    stages: int


@functools.cache
def tile_for(n: int, size: int, processors: int) -> Tile | None:
    """One program a processor, or two; None: not served."""
    if n % 32 or n // 32 > processors or size & (size - 1) or not 1024 <= size <= 4096:
        return None
    rows = 2 * 2 * size + 1024
    stages = min((_SHARED_BYTES - rows) // (2 * 32 * _PART), 2 * size // _PART)
    return Tile(2, stages) if stages > 1 else None


def serves(num_tokens: int, table: Tensor, scale: float, states: Tensor, weight: Tensor) -> bool:
    """Whether `project` runs these: one row of bfloat16, of which each half is a power of two of channels."""
    plain = states.dtype == table.dtype == weight.dtype == torch.bfloat16 and scale == 1.0
    if not plain or num_tokens != 1 or not is_reproducible() or "launch_pdl" not in chained(states.device):
        return False
    if tile_for(weight.shape[0], states.shape[1], gemv.num_processors(states.device)) is None:
        return False
    aligned = (states.data_ptr() | 2 * states.stride(0) | weight.data_ptr() | table.data_ptr()) % 16 == 0
    return aligned and states.stride(1) == 1 and weight.is_contiguous() and table.is_contiguous()


def project(
    ids: Tensor,
    table: Tensor,
    states: Tensor,
    norms: tuple[Tensor, Tensor],
    eps: float,
    weight: Tensor,
    pick: Tensor | None,
    *,
    normed: bool,
    behind_draw: bool,
) -> tuple[Tensor, Tensor]:
    """See `octavo.ops.embedding.beside.project_beside`."""
    (n, k), size = weight.shape, states.shape[1]
    tile = tile_for(n, size, gemv.num_processors(states.device))
    assert tile is not None and k == 2 * size == 2 * table.shape[1], "ask `serves` first"
    out = torch.empty((1, n), dtype=states.dtype, device=states.device)
    keep = normed or pick is not None
    own = states.new_empty(1, size) if keep else states
    _entry_product[(n // (16 * tile.warps),)](
        ids, table, states, *norms, ids if pick is None else pick, weight, own, out, eps, states.stride(0), K=k,
        LEVELS=size.bit_length() - 1, WARPS=tile.warps, PART=_PART, STAGES=tile.stages, PICK=pick is not None,
        KEEP=keep, NORMED=normed, WHOLE=not behind_draw, num_warps=tile.warps, enable_fp_fusion=False,
        **chained(states.device),
    )  # fmt: skip
    return out, own
