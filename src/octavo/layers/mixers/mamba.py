"""Mamba-2: heads of a state that decays whole, read and written through a few channels.

Owns one layer's place in the model (its number), its projections in one product, its short convolution, and the gate
and norm of its result. Does not know blocks, rows or how a state is computed. Invariant: a token's result follows from
its own row's tokens alone. Source: arXiv 2405.21060.
"""

from __future__ import annotations

import torch

from octavo.checkpoint.arch import Mamba
from octavo.layers.base import Layer
from octavo.layers.chain import line
from octavo.layers.linear import Linear
from octavo.layers.recurrent import Mamba2Scan, ShortConvolution, state_spec
from octavo.ops.activation import gated_by
from octavo.ops.norm.groups import group_norm


class GroupNorm(Layer):
    """An RMS norm of each of `groups` groups of channels, each channel with its own weight."""

    weight: torch.Tensor  # [size] float32

    def __init__(self, size: int, groups: int, eps: float) -> None:
        """`groups` divides `size`."""
        super().__init__()
        self.declare("weight", (size,), torch.float32, dummy=1.0)
        self.groups, self.eps = groups, eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """x [tokens, size] -> the same shape and dtype; of silu(gate) * x if there is a gate."""
        return group_norm(x, self.weight, self.groups, self.eps, gate)


class Mamba2(Layer):
    """The state space of layer number `index`: a Layer of one line."""

    scales: torch.Tensor | None  # [channels of the projections] float32

    def __init__(self, index: int, size: int, facts: Mamba, dtype: torch.dtype) -> None:
        """`size`: of the hidden state."""
        super().__init__()
        inner, shared = facts.inner_size, facts.num_groups * facts.state_size
        self.parts = inner, inner + 2 * shared, facts.num_heads
        self.project = Linear(size, sum(self.parts), dtype, bias=facts.in_bias)
        self.conv = ShortConvolution(index, self.parts[1], facts.conv_size, dtype, bias=facts.conv_bias)
        self.scan = Mamba2Scan(
            index,
            facts.num_heads,
            inner // facts.num_heads,
            facts.num_groups,
            facts.state_size,
            dtype,
            dt_limits=facts.step_limit,
        )
        self.spec = state_spec(self.conv, self.scan)
        self.norm = None if facts.norm == "none" else GroupNorm(inner, facts.num_groups, facts.eps)
        self.out = Linear(inner, size, dtype, bias=facts.out_bias)
        self.facts = facts
        self.widths = inner, inner, shared, shared, facts.num_heads
        self.scales = None

    def finalize(self, quantization: str | None) -> None:
        """Lay out what the projections are multiplied by."""
        super().finalize(quantization)
        if self.facts.scales:
            self.scales = torch.tensor(self.facts.scales).repeat_interleave(torch.tensor(self.widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> [tokens, inner size], which `out` takes."""
        projected = self.project.forward(x if self.facts.in_scale == 1.0 else x * self.facts.in_scale)
        if self.scales is not None:
            projected = (projected * self.scales).to(x.dtype)
        return self.mix(projected)

    @line("own")
    def mix(self, projected: torch.Tensor) -> torch.Tensor:
        """What the product `project` gives, scaled if it is to be -> [tokens, inner size]: lines of their own."""
        z, xbc, dt = projected.split(self.parts, 1)
        found = self.scan.mix(self.conv.mix(xbc), dt)
        if self.norm is None:
            return gated_by(found, z, "silu")
        if self.facts.norm == "before_gate":
            return gated_by(self.norm.forward(found), z, "silu")
        return self.norm.forward(found, z)
