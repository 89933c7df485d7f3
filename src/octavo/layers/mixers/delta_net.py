"""A gated delta net: a state per head that forgets by a gate and learns by the delta rule.

Owns one layer's place in the model (its number), its projections in one product, its short convolution and the norm of
its result. Checkpoints store the projections each by itself, or head by head: rows are put into one order when they are
loaded. Does not know blocks, rows or how a state is computed. Invariant: a token's result follows from its own row's
tokens alone. Source: arXiv 2412.06464.
"""

from __future__ import annotations

import functools

import torch

from octavo.attention.base import current_context
from octavo.checkpoint.arch import DeltaNet
from octavo.layers.base import Layer
from octavo.layers.linear import Linear
from octavo.layers.recurrent import GatedDeltaRule, ShortConvolution, state_spec
from octavo.ops.scan import DeltaNetOperands


def _sizes(facts: DeltaNet) -> tuple[int, int, int]:
    """Channels of the keys, of the values, and heads of the values."""
    return facts.num_key_heads * facts.key_size, facts.num_value_heads * facts.value_size, facts.num_value_heads


class _GroupedLinear(Linear):
    """The same product of a checkpoint that stores q, k, v and z of each key head beside each other, and b and a."""

    def __init__(self, size: int, facts: DeltaNet, dtype: torch.dtype) -> None:
        """`size`: of the hidden state."""
        keys, values, heads = _sizes(facts)
        super().__init__(size, {"qkvz": 2 * (keys + values), "ba": 2 * heads}, dtype)
        group, count = heads // facts.num_key_heads, facts.num_key_heads
        own = facts.key_size, facts.key_size, group * facts.value_size, group * facts.value_size
        rows = torch.arange(2 * (keys + values)).view(count, -1).split(own, 1)
        gates = 2 * (keys + values) + torch.arange(2 * heads).view(count, -1)
        self.order = [row for part in (*rows, *gates.split((group, group), 1)) for row in part.flatten().tolist()]

    def finalize(self, quantization: str | None) -> None:
        """Put the rows into the order q, k, v, z, b, a, then pack."""
        weight = self.get_parameter("weight")
        weight.copy_(weight[self.order])
        super().finalize(quantization)


class GatedDeltaNet(Layer):
    """The gated delta net of layer number `index`: a Layer of one line."""

    norm: torch.Tensor  # [value_size] float32

    def __init__(
        self, index: int, size: int, facts: DeltaNet, eps: float, dtype: torch.dtype, *, grouped: bool
    ) -> None:
        """`size`: of the hidden state; `grouped`: checkpoints store the projections head by head."""
        super().__init__()
        keys, values, heads = _sizes(facts)
        self.parts = 2 * keys + values, values, heads, heads  # channels of q, k and v together, of z, b and a
        shards = {"qkv": self.parts[0], "z": values, "b": heads, "a": heads}
        self.project: Linear = _GroupedLinear(size, facts, dtype) if grouped else Linear(size, shards, dtype)
        self.conv = ShortConvolution(index, self.parts[0], facts.conv_size, dtype)
        self.rule = GatedDeltaRule(index, facts.num_key_heads, heads, facts.key_size, facts.value_size, dtype)
        self.spec = state_spec(self.conv, self.rule)
        self.declare("norm", (facts.value_size,), torch.float32, dummy=1.0)
        self.out = Linear(values, size, dtype)
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> [tokens, values], which `out` takes."""
        own = current_context().layers[self.conv.index].states
        assert own.backend is not None, "the engine gives every layer with a state its operators"
        return own.backend.delta_net(own, self.operands, x)

    @property
    def row_order(self) -> list[int] | None:
        """Rows of a checkpoint's projections in the order of `parts`; None where they lie so."""
        return self.project.order if isinstance(self.project, _GroupedLinear) else None

    @functools.cached_property
    def operands(self) -> DeltaNetOperands:
        """The finalized weights, as operators take them."""
        return DeltaNetOperands(self.project.packed, self.conv.operands, self.rule.operands, self.norm, self._eps)
