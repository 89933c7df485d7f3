"""Qwen3: Llama's decoder with RMS norms on each head of q and k; the head size is free of the hidden size.

Owns the whole model and its weight map. Source: arXiv 2505.09388.
Invariant: float32 logits within 1e-4 of transformers'.
"""

from __future__ import annotations

import torch

from octavo.checkpoint.arch import Arch
from octavo.layers.attention import Attention, plain_specs, rotary_tables
from octavo.layers.decoder import DecoderLayer
from octavo.layers.mlp import Mlp
from octavo.models.base import WeightMap
from octavo.models.causal_lm import CausalLM

WEIGHT_MAP: WeightMap = {
    "model.layers.*.input_layernorm.weight": ("layers.*.input_norm.weight", ""),
    "model.layers.*.self_attn.q_proj.weight": ("layers.*.attention.qkv.weight", "q"),
    "model.layers.*.self_attn.k_proj.weight": ("layers.*.attention.qkv.weight", "k"),
    "model.layers.*.self_attn.v_proj.weight": ("layers.*.attention.qkv.weight", "v"),
    "model.layers.*.self_attn.q_proj.bias": ("layers.*.attention.qkv.bias", "q"),
    "model.layers.*.self_attn.k_proj.bias": ("layers.*.attention.qkv.bias", "k"),
    "model.layers.*.self_attn.v_proj.bias": ("layers.*.attention.qkv.bias", "v"),
    "model.layers.*.self_attn.o_proj.weight": ("layers.*.attention.output.weight", ""),
    "model.layers.*.self_attn.o_proj.bias": ("layers.*.attention.output.bias", ""),
    "model.layers.*.self_attn.q_norm.weight": ("layers.*.attention.q_norm", ""),
    "model.layers.*.self_attn.k_norm.weight": ("layers.*.attention.k_norm", ""),
    "model.layers.*.post_attention_layernorm.weight": ("layers.*.mlp_norm.weight", ""),
    "model.layers.*.mlp.gate_proj.weight": ("layers.*.mlp.gate_up.weight", "gate"),
    "model.layers.*.mlp.up_proj.weight": ("layers.*.mlp.gate_up.weight", "up"),
    "model.layers.*.mlp.down_proj.weight": ("layers.*.mlp.down.weight", ""),
    "model.norm.weight": ("norm.weight", ""),
}


class Qwen3ForCausalLM(CausalLM):
    """Embedding, layers, last norm and output head; see models.base.Model."""

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """On the meta device, of the shape that `arch` says."""
        specs, rotary = plain_specs(arch), rotary_tables(arch)
        layers = []
        for index, kind in enumerate(arch.layers):
            attention = Attention(index, specs[index], rotary[kind.rope], arch, dtype, qk_norm=True)
            mlp = Mlp(arch.hidden_size, arch.intermediate_size, arch.activation, dtype)
            layers.append(DecoderLayer(attention, mlp, arch.hidden_size, arch.norm_eps))
        super().__init__(arch, dtype, specs, rotary.values(), layers, WEIGHT_MAP)
