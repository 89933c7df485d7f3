"""DeepSeek-V2 and -V3: latent attention, and in most layers routed experts beside shared ones.

Owns the whole model and its weight map; Arch says which rule chooses the experts. Layers for multi-token prediction
that a checkpoint may hold after the last one are not read. Source: arXiv 2405.04434, 2412.19437.
Invariant: float32 logits within 1e-4 of transformers'.
"""

from __future__ import annotations

import torch

from octavo.cache.specs import AttentionSpec
from octavo.checkpoint.arch import Arch
from octavo.layers.attention import RotaryTable
from octavo.layers.base import Layer
from octavo.layers.latent_attention import LatentAttention
from octavo.layers.moe import make_network
from octavo.layers.norm import RMSNorm
from octavo.models.base import WeightMap
from octavo.models.causal_lm import CausalLM

WEIGHT_MAP: WeightMap = {
    "model.layers.*.input_layernorm.weight": ("layers.*.input_norm.weight", ""),
    "model.layers.*.self_attn.q_a_proj.weight": ("layers.*.attention.down.weight", "q"),
    "model.layers.*.self_attn.q_a_proj.bias": ("layers.*.attention.down.bias", "q"),
    "model.layers.*.self_attn.q_a_layernorm.weight": ("layers.*.attention.query_norm.weight", ""),
    "model.layers.*.self_attn.q_b_proj.weight": ("layers.*.attention.query_up.weight", ""),
    "model.layers.*.self_attn.kv_a_proj_with_mqa.weight": ("layers.*.attention.down.weight", "kv"),
    "model.layers.*.self_attn.kv_a_proj_with_mqa.bias": ("layers.*.attention.down.bias", "kv"),
    "model.layers.*.self_attn.kv_a_layernorm.weight": ("layers.*.attention.state_norm.weight", ""),
    "model.layers.*.self_attn.kv_b_proj.weight": ("layers.*.attention.expand", ""),
    "model.layers.*.self_attn.o_proj.weight": ("layers.*.attention.output.weight", ""),
    "model.layers.*.self_attn.o_proj.bias": ("layers.*.attention.output.bias", ""),
    "model.layers.*.post_attention_layernorm.weight": ("layers.*.post_attention_norm.weight", ""),
    "model.layers.*.mlp.gate_proj.weight": ("layers.*.mlp.gate_up.weight", "gate"),
    "model.layers.*.mlp.up_proj.weight": ("layers.*.mlp.gate_up.weight", "up"),
    "model.layers.*.mlp.down_proj.weight": ("layers.*.mlp.down.weight", ""),
    "model.layers.*.mlp.gate_proj.bias": ("layers.*.mlp.gate_up.bias", "gate"),
    "model.layers.*.mlp.up_proj.bias": ("layers.*.mlp.gate_up.bias", "up"),
    "model.layers.*.mlp.down_proj.bias": ("layers.*.mlp.down.bias", ""),
    "model.layers.*.mlp.gate.weight": ("layers.*.mlp.router.weight", ""),
    "model.layers.*.mlp.gate.e_score_correction_bias": ("layers.*.mlp.correction", ""),
    "model.layers.*.mlp.experts.*.gate_proj.weight": ("layers.*.mlp.experts.*.gate_up.weight", "gate"),
    "model.layers.*.mlp.experts.*.up_proj.weight": ("layers.*.mlp.experts.*.gate_up.weight", "up"),
    "model.layers.*.mlp.experts.*.down_proj.weight": ("layers.*.mlp.experts.*.down.weight", ""),
    "model.layers.*.mlp.shared_experts.gate_proj.weight": ("layers.*.mlp.shared.gate_up.weight", "gate"),
    "model.layers.*.mlp.shared_experts.up_proj.weight": ("layers.*.mlp.shared.gate_up.weight", "up"),
    "model.layers.*.mlp.shared_experts.down_proj.weight": ("layers.*.mlp.shared.down.weight", ""),
    "model.layers.*.mlp.shared_experts.gate_proj.bias": ("layers.*.mlp.shared.gate_up.bias", "gate"),
    "model.layers.*.mlp.shared_experts.up_proj.bias": ("layers.*.mlp.shared.gate_up.bias", "up"),
    "model.layers.*.mlp.shared_experts.down_proj.bias": ("layers.*.mlp.shared.down.bias", ""),
    "model.norm.weight": ("norm.weight", ""),
}


class DeepseekLayer(Layer):
    """Norm, latent attention, norm, experts or an MLP."""

    def __init__(self, index: int, arch: Arch, spec: AttentionSpec, rotary: RotaryTable, dtype: torch.dtype) -> None:
        """Layer number `index` of `arch`."""
        super().__init__()
        self.input_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.attention = LatentAttention(index, arch, spec, rotary, dtype)
        self.post_attention_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mlp = make_network(index, arch, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        attention = self.attention
        h = self.input_norm(x)
        down = attention.down(h)
        q = attention.absorb_and_store(down)
        seen = attention.values_of(attention.attend(q))
        x = x + attention.output(seen)
        h = self.post_attention_norm(x)
        return x + self.mlp(h)


class DeepseekForCausalLM(CausalLM):
    """Embedding, layers, last norm and output head; see models.base.Model."""

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """On the meta device, of the shape that `arch` says."""
        assert arch.latent is not None, "DeepSeek's attention is latent"
        spec = AttentionSpec(
            num_heads=arch.num_heads,
            num_kv_heads=1,
            head_size=arch.head_size,
            scale=arch.attention_scale,
            value_size=arch.latent.latent_size,
        )
        rotary = RotaryTable(arch.layers[0].rope, arch.latent.rope_size, arch.max_position)
        layers = [DeepseekLayer(index, arch, spec, rotary, dtype) for index in range(arch.num_layers)]
        super().__init__(arch, dtype, [spec] * arch.num_layers, [rotary], layers, WEIGHT_MAP)
        self.ignored_weights = (*CausalLM.ignored_weights, f"model.layers.{arch.num_layers}.*")
        if not arch.latent.query_size:  # then the first product makes the query itself
            self.weight_map["model.layers.*.self_attn.q_proj.weight"] = self.weight_map.pop(
                "model.layers.*.self_attn.q_a_proj.weight"
            )
