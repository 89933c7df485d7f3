"""gated: the sampler's gated activation, with gradients. Elementwise; backward in blocks of rows, in float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.ops.activation import GATED_KINDS, gated_activation
from octavo.rl.autograd.outside import apply, first_order

_AT_ONCE = 1 << 22  # elements of a block in backward
_GELU = 0.7978845608028654  # sqrt(2 / pi)


def gated(gate_up: Tensor, kind: str = "silu") -> Tensor:
    """`act(gate) * up` for gate_up [tokens, 2 * size] = (gate, up) -> [tokens, size]. kind: "silu" or "gelu_tanh"."""
    if kind not in GATED_KINDS:
        raise ValueError(f"unknown activation {kind!r}: known are {', '.join(GATED_KINDS)}")
    result: Tensor = apply(_Gated, gate_up, kind)
    return result


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, kind: str) -> Tensor:
        gate_up = gate_up if gate_up.stride(-1) == 1 else gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        ctx.kind = kind
        return gated_activation(gate_up, kind)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        return gated_backward(grad, gate_up, ctx.kind), None


def gated_backward(grad: Tensor, gate_up: Tensor, kind: str) -> Tensor:
    """The gradient of gate_up [tokens, 2 * size], in its dtype."""
    if gate_up.is_cuda:
        from octavo.ops.backward import activation as gpu  # needs triton

        return gpu.gated_backward(grad, gate_up, tanh=kind == "gelu_tanh")
    result = torch.empty_like(gate_up)
    rows = max(1, _AT_ONCE // gate_up.shape[1])
    for into, own, values in zip(result.split(rows), grad.split(rows), gate_up.split(rows), strict=True):
        gate, up = values.float().chunk(2, dim=1)
        if kind == "silu":
            share = gate.sigmoid()
            active, slope = gate * share, share * (1 + gate * (1 - share))
        else:
            tanh = (_GELU * (gate + 0.044715 * gate**3)).tanh()
            active = 0.5 * gate * (1 + tanh)
            slope = 0.5 * (1 + tanh) + 0.5 * gate * (1 - tanh.square()) * _GELU * (1 + 3 * 0.044715 * gate.square())
        first, second = into.chunk(2, dim=1)
        first.copy_(own * up * slope)
        second.copy_(own * active)
    return result
