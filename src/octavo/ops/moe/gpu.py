"""Products of (token, rank) pairs grouped by expert, on a GPU: `run_experts` of `octavo.ops.moe`.

Owns the grouping and the product. Waits for nothing: grids follow the number of pairs and experts, programs beyond what
the router filled return. Invariant: an output is one float32 accumulator that walks K in order, whatever tile, group or
place its pair has; a gated output is that of `octavo.ops.activation` on two of them, each rounded before.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.activation import GATED_KINDS
from octavo.ops.activation.gpu import gated_value
from octavo.ops.compile.launch import begin_after, chained, launched
from octavo.ops.gemm.gpu import Tile
from octavo.ops.gemm.kernels import add_products, read_tile

_TAIL = 64  # rows of a larger tile that has no more pairs
_BLOCKS = 1024, 4096  # pairs that are looked at at once, of few and of many


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """The pairs of each expert beside each other, and what tiles they make."""

    order: Tensor  # [pairs] int32, the pairs
    tiles: Tensor  # [slots, 3] int32: expert, place of the first pair in `order`, how many; a slot may have none
    slots: int  # as many as there may be tiles
    rows: int  # pairs of a tile at most
    direct: bool = False  # each pair is a tile; `order` is then not read, and `tiles` holds experts alone


def group_pairs(
    experts: Tensor, num_experts: int, rows: int | None = None, *, dtype: torch.dtype = torch.bfloat16
) -> Groups:
    """Group experts [tokens, ranks] int32 or int64. rows: of a tile, not those of the table; dtype: of the rows."""
    num_pairs = experts.numel()
    rows = rows or tile_rows(num_pairs, num_experts, dtype)
    if experts.shape[0] == 1:
        return Groups(experts, experts, num_pairs, rows, direct=True)
    few = num_pairs <= num_pairs // rows + num_experts
    slots = num_pairs if few else num_pairs // rows + num_experts
    order = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    tiles = torch.empty((slots, 3), dtype=torch.int32, device=experts.device)
    if num_pairs:
        block = _BLOCKS[num_pairs > _BLOCKS[0]]
        _group[(num_experts,)](
            experts,
            order,
            tiles,
            num_pairs,
            EXPERTS=num_experts,
            ROWS=rows,
            FEW=few,
            BLOCK=block,
            WHOLE=num_pairs <= block,
            num_warps=4,
            **chained(experts.device),
        )
    return Groups(order, tiles, slots, rows)


@triton.jit
def _ids(experts, num_pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Of a block of pairs; EXPERTS beyond the last. Whole blocks are read 16 bytes at once."""
    at = tl.arange(0, BLOCK)
    if num_pairs >= BLOCK:
        found = tl.load(experts + at)
    else:
        found = tl.load(experts + at, mask=at < num_pairs, other=EXPERTS)
    return found.to(tl.int32)


@launched(triton.jit(do_not_specialize=["num_pairs"]))
def _group(
    experts,
    order,
    tiles,
    num_pairs,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program finds the pairs of one expert, in order, and describes its tiles.

    Slots need no sum over the other experts' tiles: with FEW there is one for each pair, else an expert's begin at
    (pairs before it) // ROWS + expert, which leaves room for what others do not fill.
    """
    begin_after(PDL)
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    if WHOLE:
        found = _ids(experts, num_pairs, EXPERTS, BLOCK)
        is_own = (found == expert).to(tl.int32)
        first, count = tl.sum((found < expert).to(tl.int32), 0), tl.sum(is_own, 0)
        tl.store(order + first + tl.cumsum(is_own, 0) - 1, at, mask=is_own != 0)
    else:
        lower, equal = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
        for start in range(0, num_pairs, BLOCK):
            found = _ids(experts + start, num_pairs - start, EXPERTS, BLOCK)
            lower += (found < expert).to(tl.int32)
            equal += (found == expert).to(tl.int32)
        first, count = tl.sum(lower, 0), tl.sum(equal, 0)
        place = first
        for start in range(0, num_pairs, BLOCK):
            found = _ids(experts + start, num_pairs - start, EXPERTS, BLOCK)
            is_own = (found == expert).to(tl.int32)
            own = tl.sum(is_own, 0)
            if own > 0:
                tl.store(order + place + tl.cumsum(is_own, 0) - 1, start + at, mask=is_own != 0)
                place += own
    if FEW:
        slot, end = first, first + count
    else:
        slot, end = first // ROWS + expert, (first + count) // ROWS + expert + 1
    lane = tl.arange(0, 128)
    for start in range(slot, end, 128):
        inside = start + lane < end
        if FEW:
            done = start + lane - slot
            filled = tl.where(done % ROWS == 0, tl.minimum(count - done, ROWS), 0)
        else:
            done = (start + lane - slot) * ROWS
            filled = tl.maximum(tl.minimum(count - done, ROWS), 0)
        goal = tiles + (start + lane) * 3
        tl.store(goal, tl.zeros((128,), tl.int32) + expert, mask=inside)
        tl.store(goal + 1, first + done, mask=inside)
        tl.store(goal + 2, filled, mask=inside)


@triton.jit
def _tile_product(
    x, weight, out, order, first, count, x_row, pairs_per_row, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr, GATED: tl.constexpr,
    TANH: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BM rows, `count` of them pairs: those at `order` from `first` on; DIRECT: the pair `first`."""
    row = tl.arange(0, BM)
    there = row < count
    if DIRECT:
        pair = (first + row).to(tl.int64)
    else:
        pair = tl.load(order + first + row, mask=there, other=0).to(tl.int64)
    i, k = tl.arange(0, BN), tl.arange(0, BK)
    if GATED:
        channel = tl.program_id(0) * (BN // 2) + i // 2 + i % 2 * (N // 2)
        kept = (tl.program_id(0) * (BN // 2) + i // 2 < N // 2)[:, None]
    else:
        channel = tl.program_id(0) * BN + i
        kept = (channel < N)[:, None]
    live = there[:, None]
    x_at = x + (pair // pairs_per_row)[:, None] * x_row + k[None, :]
    weight_at = weight + channel.to(tl.int64)[:, None] * K + k[None, :]
    if SWAP:
        sums = tl.zeros((BN, BM), tl.float32)
    else:
        sums = tl.zeros((BM, BN), tl.float32)
    for start in tl.range(0, K, BK, num_stages=STAGES):
        a = read_tile(x_at, start, live, k, K, BK, False)
        b = read_tile(weight_at, start, kept, k, K, BK, N % BN == 0)
        sums = add_products(sums, a, b, SWAP, PRECISION)
    if SWAP:
        sums = tl.trans(sums)
    y = sums.to(out.dtype.element_ty)
    if GATED:
        gate, up = tl.split(tl.reshape(y, (BM, BN // 2, 2)))
        inner = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
        value = gated_value(gate.to(tl.float32), up.to(tl.float32), TANH).to(out.dtype.element_ty)
        tl.store(out + pair[:, None] * (N // 2) + inner[None, :], value, mask=live & (inner < N // 2)[None, :])
    else:
        tl.store(out + pair[:, None] * N + channel[None, :], y, mask=live & (channel < N)[None, :])


@launched(triton.jit)
def _grouped_product(
    x, addresses, first_weight, out, order, tiles, x_row, pairs_per_row, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, TAIL: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, SWAP: tl.constexpr,
    GATED: tl.constexpr, TANH: tl.constexpr, DIRECT: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (channels, tile of pairs). first_weight: of the type that all weights have. N: of a weight.

    GATED: gates and their ups are read in turn, and their activation is written: [pairs, N / 2]. TAIL: tiles of at most
    so many pairs have so many rows; 0: all have BM.
    """
    begin_after(PDL)
    slot = tl.program_id(1)
    if DIRECT:
        expert, first, count = tl.load(tiles + slot), slot, 1
    else:
        count = tl.load(tiles + slot * 3 + 2)
        if count == 0:
            return
        expert, first = tl.load(tiles + slot * 3), tl.load(tiles + slot * 3 + 1)
    weight = tl.load(addresses + expert).to(tl.pointer_type(first_weight.dtype.element_ty))
    if ALIGNED:  # or elements are read one by one
        weight = tl.multiple_of(weight, 16)
    if TAIL > 0:
        if count > TAIL:
            _tile_product(
                x, weight, out, order, first, count, x_row, pairs_per_row, N, K, BM, BN, BK, STAGES, SWAP, GATED, TANH,
                DIRECT, PRECISION,
            )  # fmt: skip
        else:
            _tile_product(
                x, weight, out, order, first, count, x_row, pairs_per_row, N, K, TAIL, BN, BK, STAGES, SWAP, GATED,
                TANH, DIRECT, PRECISION,
            )  # fmt: skip
    else:
        _tile_product(
            x, weight, out, order, first, count, x_row, pairs_per_row, N, K, BM, BN, BK, STAGES, SWAP, GATED, TANH,
            DIRECT, PRECISION,
        )  # fmt: skip


def grouped_linear(
    x: Tensor,
    addresses: Tensor,
    first_weight: Tensor,
    groups: Groups,
    *,
    pairs_per_row: int,
    activation: str = "",
    aligned: bool = False,
    tile: Tile | None = None,
) -> Tensor:
    """x [pairs / pairs_per_row, K] -> [pairs, N], each pair by its expert's weight [N, K].

    addresses: [experts] int64, of the weights, which are contiguous and as the first; of x's dtype, or x is float32.
    activation: a gated one's name (16-bit rows only): gates and ups are one weight, the result is [pairs, N / 2].
    aligned: 16 divides all addresses. tile: this one instead of the table's, of the groups' rows.
    """
    num_pairs, (n, k) = groups.order.numel(), first_weight.shape
    assert x.stride(1) == 1, "channels are contiguous"
    assert not activation or serves_gate(x, activation), "float32 gates have a kernel of their own"
    tile = tile or tile_for(groups.rows, n, k, x.dtype, alone=groups.direct)
    assert tile.rows == groups.rows, "a tile has the rows that pairs were grouped for"
    width = n // 2 if activation else n
    out = torch.empty((num_pairs, width), dtype=x.dtype, device=x.device)
    if num_pairs:
        _grouped_product[(triton.cdiv(n, tile.channels), groups.slots)](
            x, addresses, first_weight, out, groups.order, groups.tiles, x.stride(0), pairs_per_row, N=n, K=k,
            BM=tile.rows, TAIL=_TAIL if tile.rows > _TAIL else 0, BN=tile.channels, BK=tile.depth, STAGES=tile.stages,
            SWAP=tile.swap, GATED=bool(activation), TANH=activation == "gelu_tanh", DIRECT=groups.direct,
            ALIGNED=aligned, PRECISION="ieee", num_warps=tile.warps, enable_fp_fusion=not activation,
            **chained(x.device),
        )  # fmt: skip
    return out


def serves_gate(x: Tensor, activation: str) -> bool:
    """Whether a product of rows as `x` writes the activation itself."""
    return activation in GATED_KINDS and x.dtype != torch.float32


def tile_rows(num_pairs: int, num_experts: int, dtype: torch.dtype) -> int:
    """Pairs of a tile: few experts have more than one, and little of a tile is empty."""
    for rows in (8, 16, 32):
        if num_pairs <= rows * num_experts // 2:
            return rows
    return 64 if num_pairs <= 96 * num_experts or dtype == torch.float32 else 128


def tile_for(rows: int, n: int, k: int, dtype: torch.dtype, *, alone: bool = False) -> Tile:
    """The tile of so many rows, of a sweep on an H200; alone: of one token. It moves no bit."""
    if dtype == torch.float32:
        return Tile(rows, 64, 32, 4, 3) if rows >= 16 else Tile(rows, 64, 32, 4, 3, swap=True)
    if rows == 8 and alone:
        return Tile(rows, 32, 256, 2, 3, swap=True)
    if rows <= 32:
        return Tile(rows, 64, 128, 4, 4 if k > 512 else 3, swap=True)
    if rows == 64:
        return Tile(rows, 128, 64, 4, 3)
    return Tile(rows, 256 if k > 512 and n % 256 == 0 else 128, 64, 8, 3)
