"""Llama 2, 3 and 3.x, and families of such layers: pre-norm, grouped queries, gated SiLU, rotary positions.

Owns the whole model and its weight map. Arch says what differs: Mistral's sliding window, SmolLM3's layers without
rotation, Seed-OSS's biases, Granite's multipliers (its stream is counted in units of the residual one, so that sums are
plain). Source: arXiv 2307.09288, 2407.21783, 2310.06825. Invariant: float32 logits within 1e-4 of transformers'.
"""

from __future__ import annotations

import torch

from octavo.cache.specs import AttentionSpec
from octavo.checkpoint.arch import Arch
from octavo.layers.attention import Attention, RotaryTable, plain_specs, rotary_tables
from octavo.layers.base import Layer
from octavo.layers.mlp import Mlp
from octavo.layers.norm import RMSNorm
from octavo.models.base import LLAMA_WEIGHTS, WeightMap
from octavo.models.causal_lm import CausalLM

WEIGHT_MAP: WeightMap = LLAMA_WEIGHTS


class LlamaLayer(Layer):
    """Norm, attention, norm, MLP."""

    def __init__(self, index: int, arch: Arch, spec: AttentionSpec, rotary: RotaryTable, dtype: torch.dtype) -> None:
        """Layer number `index` of `arch`."""
        super().__init__()
        self.input_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.attention = Attention(index, spec, rotary, arch, dtype)
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mlp = Mlp(arch.hidden_size, arch.intermediate_size, arch.activation, dtype, bias=arch.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        attention = self.attention
        h = self.input_norm(x)
        qkv = attention.qkv(h)
        q = attention.rope_and_store(qkv)
        seen = attention.attend(q)
        x = x + attention.output(seen)
        h = self.mlp_norm(x)
        return x + self.mlp(h)


class LlamaForCausalLM(CausalLM):
    """Embedding, layers, last norm and output head; see models.base.Model."""

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """On the meta device, of the shape that `arch` says."""
        specs, rotary = plain_specs(arch), rotary_tables(arch)
        layers = [
            LlamaLayer(index, arch, specs[index], rotary[kind.rope], dtype) for index, kind in enumerate(arch.layers)
        ]
        super().__init__(arch, dtype, specs, rotary.values(), layers, WEIGHT_MAP)
