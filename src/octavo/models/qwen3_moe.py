"""Qwen3-MoE: Qwen3's attention, and in most layers a router over many small experts in the place of the MLP.

Owns the whole model and its weight map. Source: arXiv 2505.09388.
Invariant: float32 logits within 1e-4 of transformers'.
"""

from __future__ import annotations

import torch

from octavo.cache.specs import AttentionSpec
from octavo.checkpoint.arch import Arch
from octavo.layers.attention import Attention, RotaryTable, plain_specs, rotary_tables
from octavo.layers.base import Layer
from octavo.layers.moe import make_network
from octavo.layers.norm import RMSNorm
from octavo.models.base import LLAMA_WEIGHTS, WeightMap
from octavo.models.causal_lm import CausalLM

WEIGHT_MAP: WeightMap = {
    **LLAMA_WEIGHTS,
    "model.layers.*.self_attn.q_norm.weight": ("layers.*.attention.q_norm", ""),
    "model.layers.*.self_attn.k_norm.weight": ("layers.*.attention.k_norm", ""),
    "model.layers.*.mlp.gate.weight": ("layers.*.mlp.router.weight", ""),
    "model.layers.*.mlp.experts.*.gate_proj.weight": ("layers.*.mlp.experts.*.gate_up.weight", "gate"),
    "model.layers.*.mlp.experts.*.up_proj.weight": ("layers.*.mlp.experts.*.gate_up.weight", "up"),
    "model.layers.*.mlp.experts.*.down_proj.weight": ("layers.*.mlp.experts.*.down.weight", ""),
}


class Qwen3MoeLayer(Layer):
    """Norm, attention with norms on the heads of q and k, norm, experts or an MLP."""

    def __init__(self, index: int, arch: Arch, spec: AttentionSpec, rotary: RotaryTable, dtype: torch.dtype) -> None:
        """Layer number `index` of `arch`."""
        super().__init__()
        self.input_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.attention = Attention(index, spec, rotary, arch, dtype, qk_norm=True)
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mlp = make_network(index, arch, dtype)

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


class Qwen3MoeForCausalLM(CausalLM):
    """Embedding, layers, last norm and output head; see models.base.Model."""

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """On the meta device, of the shape that `arch` says."""
        specs, rotary = plain_specs(arch), rotary_tables(arch)
        layers = [
            Qwen3MoeLayer(index, arch, specs[index], rotary[kind.rope], dtype) for index, kind in enumerate(arch.layers)
        ]
        super().__init__(arch, dtype, specs, rotary.values(), layers, WEIGHT_MAP)
