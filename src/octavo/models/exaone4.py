"""EXAONE 4: a decoder that norms what attention and MLP leave, not what they take, and each head of q and k.

Its large model has three layers with a sliding window, then one that sees all and whose heads do not turn. Owns the
whole model and its weight map. Source: arXiv 2507.11407. Invariant: float32 logits within 1e-4 of transformers'.
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

WEIGHT_MAP: WeightMap = {
    **LLAMA_WEIGHTS,
    "model.layers.*.self_attn.q_norm.weight": ("layers.*.attention.q_norm", ""),
    "model.layers.*.self_attn.k_norm.weight": ("layers.*.attention.k_norm", ""),
    "model.layers.*.post_attention_layernorm.weight": ("layers.*.attention_norm.weight", ""),
    "model.layers.*.post_feedforward_layernorm.weight": ("layers.*.mlp_norm.weight", ""),
}


class Exaone4Layer(Layer):
    """x = x + norm(attention(x)), then x = x + norm(mlp(x))."""

    def __init__(self, index: int, arch: Arch, spec: AttentionSpec, rotary: RotaryTable, dtype: torch.dtype) -> None:
        """Layer number `index` of `arch`."""
        super().__init__()
        self.attention = Attention(index, spec, rotary, arch, dtype, qk_norm=True)
        self.attention_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mlp = Mlp(arch.hidden_size, arch.intermediate_size, arch.activation, dtype)
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        attention = self.attention
        qkv = attention.qkv(x)
        q = attention.rope_and_store(qkv)
        seen = attention.attend(q)
        x = x + self.attention_norm(attention.output(seen))
        return x + self.mlp_norm(self.mlp(x))


class Exaone4ForCausalLM(CausalLM):
    """Embedding, layers, last norm and output head; see models.base.Model."""

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """On the meta device, of the shape that `arch` says."""
        specs, rotary = plain_specs(arch), rotary_tables(arch)
        layers = [
            Exaone4Layer(index, arch, specs[index], rotary[kind.rope], dtype) for index, kind in enumerate(arch.layers)
        ]
        super().__init__(arch, dtype, specs, rotary.values(), layers, WEIGHT_MAP)
