"""OLMo 3: a decoder that norms what attention and MLP leave, not what they take, and q and k over all their heads.

Three layers with a sliding window, then one that sees all. Owns the whole model and its weight map. Source: the model's
report (Allen Institute for AI, 2025). Invariant: float32 logits within 1e-4 of transformers'.
"""

from __future__ import annotations

import torch

from octavo.attention.base import current_context
from octavo.cache.specs import AttentionSpec
from octavo.checkpoint.arch import Arch
from octavo.layers.attention import Attention, RotaryTable, plain_specs, rotary_tables
from octavo.layers.base import Layer
from octavo.layers.mlp import Mlp
from octavo.layers.norm import RMSNorm
from octavo.models.base import WeightMap
from octavo.models.causal_lm import CausalLM
from octavo.ops.rope import qk_norm_rope_store

WEIGHT_MAP: WeightMap = {
    "model.layers.*.self_attn.q_proj.weight": ("layers.*.attention.qkv.weight", "q"),
    "model.layers.*.self_attn.k_proj.weight": ("layers.*.attention.qkv.weight", "k"),
    "model.layers.*.self_attn.v_proj.weight": ("layers.*.attention.qkv.weight", "v"),
    "model.layers.*.self_attn.q_proj.bias": ("layers.*.attention.qkv.bias", "q"),
    "model.layers.*.self_attn.k_proj.bias": ("layers.*.attention.qkv.bias", "k"),
    "model.layers.*.self_attn.v_proj.bias": ("layers.*.attention.qkv.bias", "v"),
    "model.layers.*.self_attn.o_proj.weight": ("layers.*.attention.output.weight", ""),
    "model.layers.*.self_attn.o_proj.bias": ("layers.*.attention.output.bias", ""),
    "model.layers.*.self_attn.q_norm.weight": ("layers.*.q_norm.weight", ""),
    "model.layers.*.self_attn.k_norm.weight": ("layers.*.k_norm.weight", ""),
    "model.layers.*.post_attention_layernorm.weight": ("layers.*.attention_norm.weight", ""),
    "model.layers.*.mlp.gate_proj.weight": ("layers.*.mlp.gate_up.weight", "gate"),
    "model.layers.*.mlp.up_proj.weight": ("layers.*.mlp.gate_up.weight", "up"),
    "model.layers.*.mlp.down_proj.weight": ("layers.*.mlp.down.weight", ""),
    "model.layers.*.post_feedforward_layernorm.weight": ("layers.*.mlp_norm.weight", ""),
    "model.norm.weight": ("norm.weight", ""),
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

    def forward(self, x: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """x [tokens, size], positions [tokens] int64 -> [tokens, size].

        wanted: [S] int64, the tokens that attend and go on, for which the backend is prepared; None: all do.
        """
        x, attended = self._attend(x, positions, wanted)
        x = x + self.attention_norm.forward(self.attention.output.forward(attended.flatten(1)))
        return x + self.mlp_norm.forward(self.mlp.forward(x))

    def _attend(
        self, x: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x of the tokens that go on, what their heads saw [S, heads, head_size]); K and V of all are stored."""
        attention = self.attention
        own, spec, tensors = current_context().layers[attention.index], attention.spec, attention.tensors
        kv_size = spec.num_kv_heads * spec.head_size
        q, k, v = attention.qkv.forward(x).split((spec.num_heads * spec.head_size, kv_size, kv_size), dim=1)
        qkv = torch.cat((self.q_norm.forward(q), self.k_norm.forward(k), v), dim=1)
        heads = qk_norm_rope_store(
            qkv, positions, attention.rotary.cos_sin, None, None, attention.norm_eps, spec.num_heads,
            spec.num_kv_heads, spec.head_size, own.cache, own.inputs.slot_mapping,
            key_scale=tensors.key_scale, value_scale=tensors.value_scale,
        )  # fmt: skip
        if wanted is not None:
            x, heads = x.index_select(0, wanted), heads.index_select(0, wanted)
        attended = torch.empty_like(heads)
        own.backend.run(heads, own.cache, spec, attended, tensors)
        return x, attended


class Olmo3ForCausalLM(CausalLM):
    """Embedding, layers, last norm and output head; see models.base.Model."""

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """On the meta device, of the shape that `arch` says."""
        specs, rotary = plain_specs(arch), rotary_tables(arch)
        layers = [
            Olmo3Layer(index, arch, specs[index], rotary[kind.rope], dtype) for index, kind in enumerate(arch.layers)
        ]
        super().__init__(arch, dtype, specs, rotary.values(), layers, WEIGHT_MAP)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Hidden states after the last norm."""
        x = self.embedding.forward(input_ids)
        *layers, last = self.layers
        for layer in layers:
            x = layer.forward(x, positions)
        return self.norm.forward(last.forward(x, positions, current_context().narrow_to_logit_tokens(len(layers))))
