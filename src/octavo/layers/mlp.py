"""Gated feed-forward network: down(activation(gate(x)) * up(x)).

Owns the three projections, gate and up fused, and their biases if there are. Does not know where it stands.
Invariant: one product in, one activation, one product out.
"""

from __future__ import annotations

import torch

from octavo.layers.base import Layer
from octavo.layers.linear import Linear
from octavo.ops.activation import activate, gated_activation
from octavo.ops.gemm.fused import activated_linear


class Mlp(Layer):
    """`activation`: silu | gelu_tanh."""

    kind = "mlp"

    def __init__(self, size: int, inner_size: int, activation: str, dtype: torch.dtype, *, bias: bool = False) -> None:
        """`size`: of the hidden state; `inner_size`: between the products; `bias`: on all three."""
        super().__init__()
        self.gate_up = Linear(size, {"gate": inner_size, "up": inner_size}, dtype, bias=bias)
        self.down = Linear(inner_size, size, dtype, bias=bias)
        self.activation = activation
        if bias:
            self.kind = "own"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        if self.gate_up.bias is None:
            return self.down.forward(activated_linear(x, self.gate_up.packed, self.activation))
        return self.down.forward(gated_activation(self.gate_up.forward(x), self.activation))


class UngatedMlp(Layer):
    """down(activation(up(x))). `activation`: relu2."""

    kind = "ungated_mlp"

    def __init__(self, size: int, inner_size: int, activation: str, dtype: torch.dtype, *, bias: bool = False) -> None:
        """As Mlp's; `bias`: on both."""
        super().__init__()
        self.up = Linear(size, inner_size, dtype, bias=bias)
        self.down = Linear(inner_size, size, dtype, bias=bias)
        self.activation = activation
        if bias:
            self.kind = "own"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        if self.up.bias is None:
            return self.down.forward(activated_linear(x, self.up.packed, self.activation))
        return self.down.forward(activate(self.up.forward(x), self.activation))


def make_mlp(
    size: int, inner_size: int, activation: str, dtype: torch.dtype, *, bias: bool = False
) -> Mlp | UngatedMlp:
    """An MLP, gated unless its activation is not. `bias`: on all of its products."""
    return (UngatedMlp if activation == "relu2" else Mlp)(size, inner_size, activation, dtype, bias=bias)
