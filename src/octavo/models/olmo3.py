"""OLMo 2 and 3: a decoder that norms what attention and MLP leave, not what they take, and q and k over all heads.

Of OLMo 3 three layers have a sliding window, then one sees all; of OLMo 2 all do. Owns the whole model and its weight
map. Source: arXiv 2501.00656 and OLMo 3's report (Allen Institute for AI, 2025). Invariant: float32 logits within 1e-4
of transformers'.
"""

from __future__ import annotations

import torch

from octavo.cache.specs import AttentionSpec
from octavo.checkpoint.arch import Arch
from octavo.layers.attention import Attention, RotaryTable, plain_specs, rotary_tables
from octavo.layers.base import Layer
from octavo.layers.chain import line
from octavo.layers.mlp import Mlp
from octavo.layers.norm import RMSNorm
from octavo.models.base import LLAMA_WEIGHTS, WeightMap
from octavo.models.causal_lm import CausalLM

WEIGHT_MAP: WeightMap = {
    **LLAMA_WEIGHTS,
    "model.layers.*.self_attn.q_norm.weight": ("layers.*.q_norm.weight", ""),
    "model.layers.*.self_attn.k_norm.weight": ("layers.*.k_norm.weight", ""),
    "model.layers.*.post_attention_layernorm.weight": ("layers.*.attention_norm.weight", ""),
    "model.layers.*.post_feedforward_layernorm.weight": ("layers.*.mlp_norm.weight", ""),
}


class Olmo3Layer(Layer):
    """x = x + norm(attention(x)), then x = x + norm(mlp(x))."""

    def __init__(self, index: int, arch: Arch, spec: AttentionSpec, rotary: RotaryTable, dtype: torch.dtype) -> None:
        """Layer number `index` of `arch`."""
        super().__init__()
        self.attention = Attention(index, spec, rotary, arch, dtype)
        self.q_norm = RMSNorm(spec.num_heads * spec.head_size, arch.norm_eps)
        self.k_norm = RMSNorm(spec.num_kv_heads * spec.head_size, arch.norm_eps)
        self.attention_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mlp = Mlp(arch.hidden_size, arch.intermediate_size, arch.activation, dtype)
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        attention = self.attention
        qkv = self.norm_queries_and_keys(attention.qkv(x))
        q = attention.rope_and_store(qkv)
        seen = attention.attend(q)
        x = x + self.attention_norm(attention.output(seen))
        return x + self.mlp_norm(self.mlp(x))

    @line("own")
    def norm_queries_and_keys(self, qkv: torch.Tensor) -> torch.Tensor:
        """q and k normed over all their heads, v as it is; shapes stay."""
        spec = self.attention.spec
        kv_size = spec.num_kv_heads * spec.head_size
        q, k, v = qkv.split((spec.num_heads * spec.head_size, kv_size, kv_size), dim=1)
        return torch.cat((self.q_norm.forward(q), self.k_norm.forward(k), v), dim=1)


class Olmo3ForCausalLM(CausalLM):
    """Embedding, layers, last norm and output head; see models.base.Model."""

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """On the meta device, of the shape that `arch` says."""
        specs, rotary = plain_specs(arch), rotary_tables(arch)
        layers = [
            Olmo3Layer(index, arch, specs[index], rotary[kind.rope], dtype) for index, kind in enumerate(arch.layers)
        ]
        super().__init__(arch, dtype, specs, rotary.values(), layers, WEIGHT_MAP)
