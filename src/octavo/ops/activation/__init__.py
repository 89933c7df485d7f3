"""Gated activations of an MLP: act(gate) * up.

Owns the formulas and the one float32 exponential they share. It knows nothing of layers.
Invariant: elementwise, float32 inside, rounded once; the native operator and its reference implementation give the same
bits, because both spell out exp in IEEE additions and multiplications (library exps differ between vector and tail
code). A GPU uses its own exp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops import native

_P, _I = native.PTR, native.I64
native.declare("octavo_gated_activation", [_P, _I, _P, _I, _I, native.I32, native.I32])
native.declare("octavo_gated_product", [_P, _I, _P, _I, _P, _I, _I, native.I32, native.I32])

SQUARED_RELU = "relu2"  # of an MLP that has no gates
# Names of gated activations -> their number in the C ABI.
GATED_KINDS = {"silu": 0, "gelu_tanh": 1}
_GATES = {**GATED_KINDS, "sigmoid": 2}

_MAGIC = 12582912.0
_MAGIC_BITS = 0x4B400000
# Cephes expf, highest power first; every constant is exact in float32 after rounding.
_EXP_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def gated_activation(gate_up: Tensor, kind: str) -> Tensor:
    """`act(gate) * up` for gate_up [T, 2I] = (gate, up), float32 or bfloat16, rows may be strided -> [T, I] contiguous.

    kind: "silu" (x * sigmoid(x)) or "gelu_tanh" (the tanh form of GELU). Raises KeyError for another kind.
    """
    if gate_up.is_cuda:
        from octavo.ops.activation import gpu

        return gpu.gated_activation(gate_up, tanh=GATED_KINDS[kind] == 1)
    lib = native.lib()
    if not lib:
        return gated_activation_reference(gate_up, kind)
    rows, width = gate_up.shape
    out = torch.empty((rows, width // 2), dtype=gate_up.dtype)
    lib.octavo_gated_activation(
        gate_up.data_ptr(),
        gate_up.stride(0),
        out.data_ptr(),
        rows,
        width // 2,
        GATED_KINDS[kind],
        native.DTYPE_CODES[gate_up.dtype],
    )
    return out


def gated_by(x: Tensor, gate: Tensor, kind: str) -> Tensor:
    """`act(gate) * x`, both [T, n], float32 or bfloat16, rows may be strided -> [T, n] contiguous.

    kind: as `gated_activation`'s, or "sigmoid", 1 / (1 + e^-gate). Raises KeyError for another kind.
    """
    if x.is_cuda:
        from octavo.ops.activation import gpu

        return gpu.gated_by(x, gate, kind)
    lib = native.lib()
    if not lib:
        return gated_by_reference(x, gate, kind)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    sizes = *x.shape, _GATES[kind], native.DTYPE_CODES[x.dtype]
    lib.octavo_gated_product(gate.data_ptr(), gate.stride(0), x.data_ptr(), x.stride(0), out.data_ptr(), *sizes)
    return out


def gated_by_reference(x: Tensor, gate: Tensor, kind: str) -> Tensor:
    """The reference implementation of `gated_by`, the same bits."""
    if kind != "sigmoid":
        return gated_activation_reference(torch.cat((gate, x), 1), kind)
    return (1.0 / (exp_reference(-gate.float()) + 1.0) * x.float()).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x) of float32, of any shape: the same bits in any place."""
    # as a softmax of (x, 0): torch's sigmoid has other bits for the last elements of a tensor
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]


def activate(x: Tensor, kind: str) -> Tensor:
    """What stands between an MLP's products: `gated_activation`, or for "relu2" the square of max(x, 0), [T, I]."""
    if kind != SQUARED_RELU:
        return gated_activation(x, kind)
    if x.is_cuda:
        from octavo.ops.activation import gpu

        return gpu.squared_relu(x)
    positive = x.float().clamp(min=0.0)
    return (positive * positive).to(x.dtype)


def gated_activation_reference(gate_up: Tensor, kind: str) -> Tensor:
    """The reference implementation of `gated_activation`, the same bits."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if GATED_KINDS[kind] == 0:
        exponent = -gate
    else:
        exponent = gate * (gate * gate * 0.044715 + 1.0) * -1.5957691216057308
    return (gate / (exp_reference(exponent) + 1.0) * up).to(gate_up.dtype)


def exp_reference(x: Tensor) -> Tensor:
    """e^x of float32 within 1 ulp; the steps of vexp in native/vec.h, where they are explained, bit for bit."""
    x = x.clamp(-104.0, 89.0)
    shifted = x * 1.44269504088896341 + _MAGIC
    n = shifted.view(torch.int32) - _MAGIC_BITS
    nf = shifted - _MAGIC
    r = x - nf * 0.693359375
    r = r - nf * -2.12194440e-4
    p = r * _EXP_POLYNOMIAL[0] + _EXP_POLYNOMIAL[1]
    for coefficient in _EXP_POLYNOMIAL[2:]:
        p = p * r + coefficient
    p = p * (r * r) + r
    p = p + 1.0
    half = n >> 1
    return p * _power_of_two(half) * _power_of_two(n - half)


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).view(torch.float32)
