"""RMSNorm, alone and fused with the residual addition.

Owns the scale, float32 whatever the checkpoint's dtype. Does not know where in a decoder it stands.
Invariant: Gemma's "1 + weight" is applied once, at `finalize`, so that one operator serves every family.
"""

from __future__ import annotations

import torch

from octavo.layers.base import Layer
from octavo.ops.norm import add_rms_norm, rms_norm


class RMSNorm(Layer):
    """x / rms(x) * (offset + weight) over the last axis of `size` elements (Zhang and Sennrich 2019)."""

    kind = "norm"
    weight: torch.Tensor  # [size] float32

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        """`offset`: 1 where the checkpoint stores the weight's distance from one (Gemma)."""
        super().__init__()
        self.declare("weight", (size,), torch.float32, dummy=1.0 - offset)
        self.eps = eps
        self._offset = offset

    def live(self, name: str) -> torch.Tensor | None:
        """The weight, unless an offset is in it."""
        return self.weight if not self._offset else None

    def finalize(self, quantization: str | None) -> None:
        """Apply the offset."""
        super().finalize(quantization)
        if self._offset:
            self.weight.add_(self._offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual), both [tokens, size]."""
        return add_rms_norm(x, residual, self.weight, self.eps)
