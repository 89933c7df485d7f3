"""Gemma 3 (text): norms before and after each half of a layer, q and k norms, scaled embeddings, two kinds of layers.

Layers that see a sliding window take turns with layers that see all, each kind with a rotary base of its own. Owns the
whole model and its weight map; a vision checkpoint's other weights are left alone. Source: arXiv 2503.19786.
Invariant: float32 logits within 1e-4 of transformers'.
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
    "model.layers.*.pre_feedforward_layernorm.weight": ("layers.*.mlp_norm.weight", ""),
    "model.layers.*.post_feedforward_layernorm.weight": ("layers.*.mlp_out_norm.weight", ""),
}
# Three generations of names around the text model's own, as transformers has written them.
_PREFIXES = ("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")
_BESIDE_THE_TEXT = ("vision_tower.*", "multi_modal_projector.*")
NORM_OFFSET = 1.0  # norm weights are stored as their distance from one


class Gemma3Layer(Layer):
    """Norm, attention with norms on the heads of q and k, norm; norm, MLP, norm."""

    def __init__(self, index: int, arch: Arch, spec: AttentionSpec, rotary: RotaryTable, dtype: torch.dtype) -> None:
        """Layer number `index` of `arch`."""
        super().__init__()
        self.input_norm = RMSNorm(arch.hidden_size, arch.norm_eps, NORM_OFFSET)
        self.attention = Attention(index, spec, rotary, arch, dtype, qk_norm=True, norm_offset=NORM_OFFSET)
        self.attention_norm = RMSNorm(arch.hidden_size, arch.norm_eps, NORM_OFFSET)
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps, NORM_OFFSET)
        self.mlp = Mlp(arch.hidden_size, arch.intermediate_size, arch.activation, dtype)
        self.mlp_out_norm = RMSNorm(arch.hidden_size, arch.norm_eps, NORM_OFFSET)

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


class Gemma3ForCausalLM(CausalLM):
    """Embedding, layers, last norm and output head; see models.base.Model."""

    ignored_weights = (
        "*.rotary_emb.inv_freq",
        "*lm_head.weight",
        *_BESIDE_THE_TEXT,
        *(f"model.{name}" for name in _BESIDE_THE_TEXT),
    )
    norm_offset = NORM_OFFSET

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """On the meta device, of the shape that `arch` says."""
        specs, rotary = plain_specs(arch), rotary_tables(arch)
        layers = [
            Gemma3Layer(index, arch, specs[index], rotary[kind.rope], dtype) for index, kind in enumerate(arch.layers)
        ]
        super().__init__(arch, dtype, specs, rotary.values(), layers, WEIGHT_MAP)
        own = "language_model." if arch.name == "Gemma3ForConditionalGeneration" else ""
        self.weight_map = {own + name: target for name, target in self.weight_map.items()}
        known = f"{own}model.", f"{own}lm_head."
        self.other_prefixes = {
            other: name for others in _PREFIXES for other, name in zip(others, known, strict=True) if other != name
        }
