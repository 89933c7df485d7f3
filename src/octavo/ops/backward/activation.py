"""The way back through gated activations on a GPU: `octavo.ops.activation.gated_activation`'s. Elementwise, float32."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.compile.launch import launched

_BLOCK, _WARPS = 1024, 4


@launched(triton.jit)
def _gated_backward(grad, gate_up, out, grad_row, in_row, SIZE: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < SIZE
    own = tl.load(grad + row * grad_row + channel, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + row * in_row + channel, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * in_row + SIZE + channel, mask=inside, other=0.0).to(tl.float32)
    if TANH:  # gate * s(2 * inner), s the sigmoid: 1 + tanh(inner) = 2 * s(2 * inner)
        share = 1.0 / (tl.exp(gate * (gate * gate * 0.044715 + 1.0) * -1.5957691216057308) + 1.0)
        inner = 1.5957691216057308 * (1.0 + 3 * 0.044715 * gate * gate)
    else:
        share = 1.0 / (tl.exp(-gate) + 1.0)
        inner = 1.0
    slope = share * (1.0 + gate * (1.0 - share) * inner)
    tl.store(out + row * (2 * SIZE) + channel, (own * up * slope).to(out.dtype.element_ty), mask=inside)
    tl.store(out + row * (2 * SIZE) + SIZE + channel, (own * gate * share).to(out.dtype.element_ty), mask=inside)


def gated_backward(grad: Tensor, gate_up: Tensor, *, tanh: bool) -> Tensor:
    """The gradient of gate_up [tokens, 2 * size], in its dtype; grad: [tokens, size]. Rows may be strided."""
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _gated_backward[(rows, triton.cdiv(size, _BLOCK))](
            grad,
            gate_up,
            out,
            grad.stride(0),
            gate_up.stride(0),
            SIZE=size,
            TANH=tanh,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
        )
    return out
