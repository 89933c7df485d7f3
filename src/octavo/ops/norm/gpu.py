"""RMS norm of rows on a GPU: `rms_norm` and `add_rms_norm` of `octavo.ops.norm`, whose docstrings say what they give.

Owns the kernel. Invariant: a row is one program's; squares are summed by `tree.row_sums`, division and square root are
correctly rounded and nothing is contracted, so a row's bits depend on that row, the weight and eps only.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.activation.gpu import gated_value
from octavo.ops.compile.launch import begin_after, chained, launched
from octavo.ops.compile.row_sum import padded_length, row_sums

_CHANNELS_PER_WARP = 1024  # moves no bit


@triton.jit
def inverse_norm(value, eps, SIZE: tl.constexpr, PADDED: tl.constexpr, LEVELS: tl.constexpr):
    """1 / sqrt(mean of the squares + eps) of a row [PADDED] float32, 0 beyond SIZE: [1]."""
    square = row_sums(tl.reshape(value * value, (1, PADDED)), LEVELS)
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(square, SIZE * 1.0) + eps))


@launched(triton.jit)
def _norm_rows(
    x,
    residual,
    weight,
    out,
    total,
    x_row,
    residual_row,
    eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    LEVELS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, PADDED)
    inside = channel < SIZE
    scale = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    begin_after(PDL)
    value = tl.load(x + row * x_row + channel, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_row + channel, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * SIZE + channel, rounded, mask=inside)
        value = rounded.to(tl.float32)
    result = value * inverse_norm(value, eps, SIZE, PADDED, LEVELS) * scale
    tl.store(out + row * SIZE + channel, result.to(out.dtype.element_ty), mask=inside)


@launched(triton.jit)
def _norm_groups(
    x,
    gate,
    weight,
    out,
    x_row,
    gate_row,
    eps,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED: tl.constexpr,
    LEVELS: tl.constexpr,
    GATE: tl.constexpr,
    SHARED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One group of a row. GATE: first | last | none; SHARED: all groups have the same weights."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, PADDED)
    inside = channel < SIZE
    scale = tl.load(weight + (0 if SHARED else group * SIZE) + channel, mask=inside, other=0.0)
    begin_after(PDL)
    at = group * SIZE + channel
    value = tl.load(x + row * x_row + at, mask=inside, other=0.0).to(tl.float32)
    if GATE != "none":
        by = tl.load(gate + row * gate_row + at, mask=inside, other=0.0).to(tl.float32)
    if GATE == "first":
        value = gated_value(by, value, False).to(x.dtype.element_ty).to(tl.float32)
    result = value * inverse_norm(value, eps, SIZE, PADDED, LEVELS) * scale
    if GATE == "last":
        result = gated_value(by, result.to(x.dtype.element_ty).to(tl.float32), False)
    tl.store(out + row * (GROUPS * SIZE) + at, result.to(out.dtype.element_ty), mask=inside)


def group_norm(
    x: Tensor, weight: Tensor, eps: float, gate: Tensor | None, *, num_groups: int, gates_first: bool
) -> Tensor:
    """See `octavo.ops.norm.groups`; float16 too. weight: of all channels, or of one group's, which then all have."""
    rows, channels = x.shape
    size = channels // num_groups
    gates = x if gate is None else gate
    assert x.stride(1) == gates.stride(1) == weight.stride(0) == 1, "channels are contiguous"
    out = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    padded = padded_length(size)
    kind = "none" if gate is None else "first" if gates_first else "last"
    if rows:
        _norm_groups[(rows, num_groups)](
            x, gates, weight, out, x.stride(0), gates.stride(0), eps,
            SIZE=size, GROUPS=num_groups, PADDED=padded, LEVELS=padded.bit_length() - 1, GATE=kind,
            SHARED=len(weight) < channels, num_warps=min(max(padded // _CHANNELS_PER_WARP, 1), 16),
            enable_fp_fusion=False, **chained(x.device),
        )  # fmt: skip
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `octavo.ops.norm.rms_norm`; float16 too, and weights of any of these types."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, x, weight, out, out, eps, add=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `octavo.ops.norm.add_rms_norm`; float16 too."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    _launch(x, residual, weight, out, total, eps, add=True)
    return out, total


def _launch(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, *, add: bool) -> None:
    assert x.stride(1) == residual.stride(1) == weight.stride(0) == 1, "channels are contiguous"
    rows, size = x.shape
    padded = padded_length(size)
    if rows:
        _norm_rows[(rows,)](
            x, residual, weight, out, total, x.stride(0), residual.stride(0), eps,
            SIZE=size, PADDED=padded, LEVELS=padded.bit_length() - 1, ADD=add,
            num_warps=min(max(padded // _CHANNELS_PER_WARP, 1), 16), enable_fp_fusion=False, **chained(x.device),
        )  # fmt: skip
