"""Gated feed-forward network: down(activation(gate(x)) * up(x)).

Owns the three projections, gate and up fused. Does not know where it stands.
Invariant: one product in, one activation, one product out.
"""

from __future__ import annotations

import torch

from octavo.layers.base import Layer
from octavo.layers.linear import Linear
from octavo.ops.fused import gated_linear


class Mlp(Layer):
    """`activation`: silu | gelu_tanh."""

    def __init__(self, size: int, inner_size: int, activation: str, dtype: torch.dtype) -> None:
        """`size`: of the hidden state; `inner_size`: between the products."""
        super().__init__()
        self.gate_up = Linear(size, {"gate": inner_size, "up": inner_size}, dtype)
        self.down = Linear(inner_size, size, dtype)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        return self.down.forward(gated_linear(x, self.gate_up.packed, self.activation))
