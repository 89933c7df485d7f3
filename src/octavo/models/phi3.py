"""Phi-3, Phi-3.5 and Phi-4: Llama's decoder, whose checkpoints store q, k and v as one matrix, and gate and up as one.

Owns the whole model and its weight map. Heads turn whole or in part, by LongRoPE or not, and see a window or all: Arch
says so. Source: arXiv 2404.14219, 2412.08905, 2503.01743. Invariant: float32 logits within 1e-4 of transformers'.
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
    "model.layers.*.self_attn.qkv_proj.weight": ("layers.*.attention.qkv.weight", ""),
    "model.layers.*.self_attn.o_proj.weight": ("layers.*.attention.output.weight", ""),
    "model.layers.*.post_attention_layernorm.weight": ("layers.*.mlp_norm.weight", ""),
    "model.layers.*.mlp.gate_up_proj.weight": ("layers.*.mlp.gate_up.weight", ""),
    "model.layers.*.mlp.down_proj.weight": ("layers.*.mlp.down.weight", ""),
    "model.norm.weight": ("norm.weight", ""),
}


class Phi3ForCausalLM(CausalLM):
    """Embedding, layers, last norm and output head; see models.base.Model."""

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """On the meta device, of the shape that `arch` says."""
        specs, rotary = plain_specs(arch), rotary_tables(arch)
        layers = []
        for index, kind in enumerate(arch.layers):
            attention = Attention(index, specs[index], rotary[kind.rope], arch, dtype)
            mlp = Mlp(arch.hidden_size, arch.intermediate_size, arch.activation, dtype)
            layers.append(DecoderLayer(attention, mlp, arch.hidden_size, arch.norm_eps))
        super().__init__(arch, dtype, specs, rotary.values(), layers, WEIGHT_MAP)
