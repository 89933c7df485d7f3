"""Gemma 3 (text): norms before and after each half of a layer, q and k norms, scaled embeddings, two kinds of layers.

Layers that see a sliding window take turns with layers that see all, each kind with a rotary base of its own. Owns the
whole model and its weight map; a vision checkpoint's other weights are left alone. Source: arXiv 2503.19786.
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
    "model.layers.*.post_attention_layernorm.weight": ("layers.*.attention_norm.weight", ""),
    "model.layers.*.pre_feedforward_layernorm.weight": ("layers.*.mlp_norm.weight", ""),
    "model.layers.*.mlp.gate_proj.weight": ("layers.*.mlp.gate_up.weight", "gate"),
    "model.layers.*.mlp.up_proj.weight": ("layers.*.mlp.gate_up.weight", "up"),
    "model.layers.*.mlp.down_proj.weight": ("layers.*.mlp.down.weight", ""),
    "model.layers.*.post_feedforward_layernorm.weight": ("layers.*.mlp_out_norm.weight", ""),
    "model.norm.weight": ("norm.weight", ""),
}
# Three generations of names around the text model's own, as transformers has written them.
_PREFIXES = ("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")
_BESIDE_THE_TEXT = ("vision_tower.*", "multi_modal_projector.*")
NORM_OFFSET = 1.0  # norm weights are stored as their distance from one


class Gemma3ForCausalLM(CausalLM):
    """Embedding, layers, last norm and output head; see models.base.Model."""

    ignored_weights = (
        "*.rotary_emb.inv_freq", "*lm_head.weight", *_BESIDE_THE_TEXT, *(f"model.{name}" for name in _BESIDE_THE_TEXT)
    )  # fmt: skip
    norm_offset = NORM_OFFSET

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """On the meta device, of the shape that `arch` says."""
        specs, rotary = plain_specs(arch), rotary_tables(arch)
        layers = []
        for index, kind in enumerate(arch.layers):
            attention = Attention(
                index, specs[index], rotary[kind.rope], arch, dtype, qk_norm=True, norm_offset=NORM_OFFSET
            )
            mlp = Mlp(arch.hidden_size, arch.intermediate_size, arch.activation, dtype)
            layers.append(
                DecoderLayer(attention, mlp, arch.hidden_size, arch.norm_eps, norm_offset=NORM_OFFSET, out_norms=True)
            )
        super().__init__(arch, dtype, specs, rotary.values(), layers, WEIGHT_MAP)
        own = "language_model." if arch.name == "Gemma3ForConditionalGeneration" else ""
        self.weight_map = {own + name: target for name, target in self.weight_map.items()}
        known = f"{own}model.", f"{own}lm_head."
        self.other_prefixes = {
            other: name for others in _PREFIXES for other, name in zip(others, known, strict=True) if other != name
        }
