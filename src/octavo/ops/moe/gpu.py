"""Products of (token, rank) pairs grouped by expert, on a GPU: `run_experts` of `octavo.ops.moe`.

Owns the grouping and the kernel. Waits for nothing: grids follow the number of pairs and experts, programs beyond what
the router filled return. Invariant: an output is one float32 accumulator that walks K in order, whatever tile, group or
place its pair has.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """The pairs of each expert beside each other."""

    order: Tensor  # [pairs] int64, the pairs
    ends: Tensor  # [experts] int64, how many of them there are up to each expert's last
    tile_ends: Tensor  # [experts] int64, the same in tiles of `rows`
    rows: int  # pairs of a tile


def group_pairs(experts: Tensor, num_experts: int) -> Groups:
    """Group experts [tokens, ranks] int64."""
    flat = experts.flatten()
    rows = 16 if flat.numel() <= 16 * num_experts else 64
    counts = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    counts.scatter_add_(0, flat, torch.ones_like(flat))
    return Groups(flat.argsort(stable=True), counts.cumsum(0), ((counts + rows - 1) // rows).cumsum(0), rows)


@triton.jit
def _grouped_product(
    x, addresses, first_weight, out, order, ends, tile_ends, x_row, pairs_per_row,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (channels, tile of pairs). first_weight: of the type that all weights have."""
    tile = tl.program_id(1)
    expert_at = tl.arange(0, PADDED)
    tiles = tl.load(tile_ends + expert_at, mask=expert_at < EXPERTS, other=9223372036854775807)
    expert = tl.sum((tiles <= tile).to(tl.int32), 0)
    if expert >= EXPERTS:
        return
    first_tile, first = tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    if expert > 0:
        first_tile, first = tl.load(tile_ends + expert - 1), tl.load(ends + expert - 1)
    place = first + (tile - first_tile) * BM + tl.arange(0, BM)
    there = place < tl.load(ends + expert)
    pair = tl.load(order + place, mask=there, other=0)
    channel = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    x_at = x + (pair // pairs_per_row)[:, None] * x_row
    weight = tl.load(addresses + expert).to(tl.pointer_type(first_weight.dtype.element_ty))
    weight_at = weight + channel[None, :] * K
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(x_at + k[None, :], mask=there[:, None] & (k < K)[None, :], other=0.0)
        b = tl.load(weight_at + k[:, None], mask=(channel < N)[None, :] & (k < K)[:, None], other=0.0)
        total = tl.dot(a, b.to(a.dtype), total, input_precision=PRECISION)
    at = out + pair[:, None] * N + channel[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=there[:, None] & (channel < N)[None, :])


def grouped_linear(x: Tensor, addresses: Tensor, first_weight: Tensor, groups: Groups, *, pairs_per_row: int) -> Tensor:
    """x [pairs / pairs_per_row, K] -> [pairs, N], each pair by its expert's weight [N, K].

    addresses: [experts] int64, of the weights, which are contiguous and as the first; of x's dtype, or x is float32.
    """
    num_pairs, num_experts, (n, k) = groups.order.shape[0], addresses.shape[0], first_weight.shape
    assert x.stride(1) == 1, "channels are contiguous"
    out = torch.empty((num_pairs, n), dtype=x.dtype, device=x.device)
    if num_pairs:
        tiles = min(num_pairs, triton.cdiv(num_pairs, groups.rows) + num_experts)
        _grouped_product[(triton.cdiv(n, 64), tiles)](
            x, addresses, first_weight, out, groups.order, groups.ends, groups.tile_ends, x.stride(0), pairs_per_row,
            EXPERTS=num_experts, PADDED=triton.next_power_of_2(num_experts), N=n, K=k, BM=groups.rows,
            BN=64, BK=32 if x.dtype == torch.float32 else 64, PRECISION="ieee", num_warps=4, num_stages=3,
        )  # fmt: skip
    return out
