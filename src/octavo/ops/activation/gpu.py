"""Gated activations on a GPU: `gated_activation`, `gated_by` and a squared ReLU of `octavo.ops.activation`.

Owns the kernel. Invariant: elementwise, float32 inside, nothing contracted, rounded once; exp is the GPU's, so float32
results are within a few units in the last place of the reference's, 16-bit ones within one.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.compile.launch import begin_after, chained, launched

# Channels of a program and its warps: they move no bit.
_BLOCK = 1024
_SQUARED_BLOCK = 2048  # of an operator that reads one tensor: two vectors of 16 bytes a thread
_WARPS = 4


@triton.jit
def gated_value(gate, up, TANH: tl.constexpr):
    """The activation of float32 gates times their ups, not rounded."""
    if TANH:
        exponent = gate * (gate * gate * 0.044715 + 1.0) * -1.5957691216057308
    else:
        exponent = -gate
    return gate / (tl.exp(exponent) + 1.0) * up


@launched(triton.jit)
def _gated(gate_up, out, in_row, SIZE: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin_after(PDL)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < SIZE
    gate = tl.load(gate_up + row * in_row + channel, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * in_row + SIZE + channel, mask=inside, other=0.0).to(tl.float32)
    result = gated_value(gate, up, TANH)
    tl.store(out + row * SIZE + channel, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_value(gate, up, KIND: tl.constexpr):
    """What float32 values are by gates, not rounded. KIND: silu | gelu_tanh | sigmoid."""
    if KIND == "sigmoid":
        return 1.0 / (tl.exp(-gate) + 1.0) * up
    return gated_value(gate, up, KIND == "gelu_tanh")


@launched(triton.jit)
def _gated_by(
    x, gate, out, x_row, gate_row, SIZE: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin_after(PDL)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < SIZE
    weight = tl.load(gate + row * gate_row + channel, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_row + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + channel, gate_value(weight, value, KIND).to(out.dtype.element_ty), mask=inside)


@triton.jit
def squared_value(value):
    """The square of max(value, 0) of float32 values, not rounded."""
    positive = tl.maximum(value, 0.0)
    return positive * positive


@launched(triton.jit)
def _squared_relu(x, out, x_row, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin_after(PDL)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < SIZE
    value = squared_value(tl.load(x + row * x_row + channel, mask=inside, other=0.0).to(tl.float32))
    tl.store(out + row * SIZE + channel, value.to(out.dtype.element_ty), mask=inside)


def gated_by(x: Tensor, gate: Tensor, kind: str) -> Tensor:
    """See `octavo.ops.activation.gated_by`; float16 too."""
    assert x.stride(1) == gate.stride(1) == 1, "channels are contiguous"
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows:
        _gated_by[(rows, triton.cdiv(size, _BLOCK))](
            x,
            gate,
            out,
            x.stride(0),
            gate.stride(0),
            SIZE=size,
            KIND=kind,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            enable_fp_fusion=False,
            **chained(x.device),
        )
    return out


def squared_relu(x: Tensor) -> Tensor:
    """The square of max(x, 0), [T, I] of x's dtype; float16 too."""
    assert x.stride(1) == 1, "channels are contiguous"
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows:
        _squared_relu[(rows, triton.cdiv(size, _SQUARED_BLOCK))](
            x,
            out,
            x.stride(0),
            SIZE=size,
            BLOCK=_SQUARED_BLOCK,
            num_warps=_WARPS,
            enable_fp_fusion=False,
            **chained(x.device),
        )
    return out


def gated_activation(gate_up: Tensor, *, tanh: bool) -> Tensor:
    """See `octavo.ops.activation.gated_activation`; float16 too. tanh: "gelu_tanh", else "silu"."""
    assert gate_up.stride(1) == 1, "channels are contiguous"
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _gated[(rows, -(-size // _BLOCK))](
            gate_up,
            out,
            gate_up.stride(0),
            SIZE=size,
            TANH=tanh,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            enable_fp_fusion=False,
            **chained(gate_up.device),
        )
    return out
