"""A gated convolution: a short convolution between two gates, all three of one product; LFM2's and LFM3's.

Owns its projections. Does not know the layer around it. Invariant: one product in, one convolution, one product out.
"""

from __future__ import annotations

import torch

from octavo.checkpoint.arch import ShortConv
from octavo.layers.base import Layer
from octavo.layers.linear import Linear
from octavo.layers.recurrent import ShortConvolution, state_spec


class GatedConvolution(Layer):
    """A convolution between two gates, of layer number `index`: a Layer of one line."""

    def __init__(self, index: int, size: int, facts: ShortConv, dtype: torch.dtype) -> None:
        """`size`: of the hidden state."""
        super().__init__()
        self.project = Linear(size, 3 * size, dtype, bias=facts.bias)
        self.conv = ShortConvolution(index, size, facts.size, dtype, bias=facts.bias, silu=False)
        self.out = Linear(size, size, dtype, bias=facts.bias)
        self.spec = state_spec(self.conv)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape, which `out` takes."""
        before, behind, values = self.project.forward(x).chunk(3, 1)
        return behind * self.conv.mix(before * values)
