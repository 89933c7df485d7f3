"""Command R and Command A: attention and MLP side by side behind one layer norm, rotated pairs of neighbours.

Of the second generation three layers have a sliding window, then one sees all and its heads do not turn. Owns the whole
model and its weight map. Source: Cohere's model cards (2024), arXiv 2504.00698. Invariant: float32 logits within 1e-4
of transformers'.
"""

from __future__ import annotations

import torch

from octavo.cache.specs import AttentionSpec
from octavo.checkpoint.arch import Arch
from octavo.layers.attention import Attention, RotaryTable, plain_specs, rotary_tables
from octavo.layers.base import Layer
from octavo.layers.mlp import Mlp
from octavo.models.base import LLAMA_WEIGHTS, WeightMap
from octavo.models.causal_lm import CausalLM
from octavo.ops.norm import rms_norm

WEIGHT_MAP: WeightMap = LLAMA_WEIGHTS


class CenteredNorm(Layer):
    """A layer norm without a bias: the mean is taken off, and what is left is normed by its root mean square."""

    weight: torch.Tensor  # [size] float32

    def __init__(self, size: int, eps: float) -> None:
        """Over the last axis of `size` elements."""
        super().__init__()
        self.declare("weight", (size,), torch.float32, dummy=1.0)
        self.size, self.eps = size, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape and dtype, computed in float32."""
        wide = x.float()
        total = torch.nn.functional.pad(wide, (0, (1 << (self.size - 1).bit_length()) - self.size))
        while total.shape[1] > 1:
            half = total.shape[1] // 2
            total = total[:, :half] + total[:, half:]
        return rms_norm(wide - total / self.size, self.weight, self.eps).to(x.dtype)


class CohereLayer(Layer):
    """x = x + attention(norm(x)) + mlp(norm(x)), of one norm."""

    def __init__(self, index: int, arch: Arch, spec: AttentionSpec, rotary: RotaryTable, dtype: torch.dtype) -> None:
        """Layer number `index` of `arch`."""
        super().__init__()
        self.input_norm = CenteredNorm(arch.hidden_size, arch.norm_eps)
        self.attention = Attention(index, spec, rotary, arch, dtype)
        self.mlp = Mlp(arch.hidden_size, arch.intermediate_size, arch.activation, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        attention = self.attention
        h = self.input_norm(x)
        qkv = attention.qkv(h)
        q = attention.rope_and_store(qkv)
        seen = attention.attend(q)
        return x + attention.output(seen) + self.mlp(h)


class CohereForCausalLM(CausalLM):
    """Embedding, layers, last norm and output head; see models.base.Model."""

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """On the meta device, of the shape that `arch` says."""
        specs, rotary = plain_specs(arch), rotary_tables(arch)
        layers = [
            CohereLayer(index, arch, specs[index], rotary[kind.rope], dtype) for index, kind in enumerate(arch.layers)
        ]
        super().__init__(arch, dtype, specs, rotary.values(), layers, WEIGHT_MAP)
        self.norm = CenteredNorm(arch.hidden_size, arch.norm_eps)
