"""A token's experts summed on a GPU, in one launch: `sum_experts` of `octavo.ops.moe.routing`.

Owns the kernel. Invariant: elementwise, float32, nothing contracted; ranks in order, then what every token meets.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.compile.launch import begin_after, chained, launched
from octavo.ops.moe.routing_gpu import sigmoid

_BLOCK = 1024  # channels of a program: they move no bit
_WARPS = 4


@launched(triton.jit)
def _sum(
    results,
    weights,
    shared,
    gate,
    out,
    token_row,
    shared_row,
    SIZE: tl.constexpr,
    RANKS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEVICE: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_after(PDL)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < SIZE
    total = tl.load(results + token * token_row + channel, mask=inside, other=0.0).to(tl.float32)
    if WEIGHTED:
        total = total * tl.load(weights + token * RANKS)
    for rank in tl.static_range(1, RANKS):
        own = tl.load(results + token * token_row + rank * SIZE + channel, mask=inside, other=0.0).to(tl.float32)
        total = total + own * tl.load(weights + token * RANKS + rank)
    if SHARED:
        own = tl.load(shared + token * shared_row + channel, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            own = sigmoid(tl.load(gate + token), DEVICE) * own
        total = total + own
    tl.store(out + token * SIZE + channel, total.to(out.dtype.element_ty), mask=inside)


def sum_experts(
    results: Tensor, weights: Tensor | None, shared: Tensor | None, gate: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """See `octavo.ops.moe.routing.sum_experts`."""
    tokens, ranks, size = results.shape
    assert results.stride()[1:] == (size, 1), "a token's ranks lie one after another"
    assert weights.is_contiguous() if weights is not None else ranks == 1, "a token's weights lie one after another"
    assert shared is None or shared.stride(1) == 1, "channels are contiguous"
    assert gate is None or gate.is_contiguous(), "one gate of a token lies after another"
    out = torch.empty((tokens, size), dtype=dtype, device=results.device)
    if tokens:
        _sum[(tokens, triton.cdiv(size, _BLOCK))](
            results, weights, shared, gate, out, results.stride(0), 0 if shared is None else shared.stride(0),
            SIZE=size, RANKS=ranks, WEIGHTED=weights is not None, SHARED=shared is not None, GATED=gate is not None,
            BLOCK=_BLOCK, DEVICE=results.is_cuda, num_warps=_WARPS, enable_fp_fusion=False, **chained(results.device),
        )  # fmt: skip
    return out
