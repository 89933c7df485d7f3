"""GLM-4: Llama's decoder with biases on q, k and v, and heads of which half the channels turn, in neighbouring pairs.

GLM-4-0414 (Glm4ForCausalLM) also norms what attention and MLP leave. Owns the whole model and its weight map. Source:
arXiv 2406.12793. Invariant: float32 logits within 1e-4 of transformers'.
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
    "model.layers.*.mlp.gate_up_proj.weight": ("layers.*.mlp.gate_up.weight", ""),
    "model.layers.*.post_self_attn_layernorm.weight": ("layers.*.attention_norm.weight", ""),
    "model.layers.*.post_mlp_layernorm.weight": ("layers.*.mlp_out_norm.weight", ""),
}


class GlmLayer(Layer):
    """Norm, attention, norm, MLP."""

    def __init__(self, index: int, arch: Arch, spec: AttentionSpec, rotary: RotaryTable, dtype: torch.dtype) -> None:
        """Layer number `index` of `arch`."""
        super().__init__()
        self.input_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.attention = Attention(index, spec, rotary, arch, dtype)
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mlp = Mlp(arch.hidden_size, arch.intermediate_size, arch.activation, dtype)

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


class Glm4Layer(Layer):
    """GLM-4-0414: norm, attention, norm; norm, MLP, norm."""

    def __init__(self, index: int, arch: Arch, spec: AttentionSpec, rotary: RotaryTable, dtype: torch.dtype) -> None:
        """Layer number `index` of `arch`."""
        super().__init__()
        self.input_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.attention = Attention(index, spec, rotary, arch, dtype)
        self.attention_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mlp = Mlp(arch.hidden_size, arch.intermediate_size, arch.activation, dtype)
        self.mlp_out_norm = RMSNorm(arch.hidden_size, arch.norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        attention = self.attention
        h = self.input_norm(x)
        qkv = attention.qkv(h)
        q = attention.rope_and_store(qkv)
        seen = attention.attend(q)
        x = x + self.attention_norm(attention.output(seen))
        h = self.mlp_norm(x)
        return x + self.mlp_out_norm(self.mlp(h))


class GlmForCausalLM(CausalLM):
    """Embedding, layers, last norm and output head; see models.base.Model."""

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """On the meta device, of the shape that `arch` says."""
        specs, rotary = plain_specs(arch), rotary_tables(arch)
        own = Glm4Layer if arch.name == "Glm4ForCausalLM" else GlmLayer
        layers = [own(index, arch, specs[index], rotary[kind.rope], dtype) for index, kind in enumerate(arch.layers)]
        super().__init__(arch, dtype, specs, rotary.values(), layers, WEIGHT_MAP)
