"""Qwen3-Next and Qwen3.5 (dense and MoE): three layers with a gated delta net, then one with gated attention.

Owns the whole models and their weight maps: Qwen3-Next's checkpoints store a delta net's projections head by head,
Qwen3.5's each by itself. Modules for multi-token prediction, and what a checkpoint sees images with, are not read.
Source: arXiv 2412.06464; Qwen3-Next's and Qwen3.5's model cards. Invariant: float32 logits within 1e-5 of
transformers', relative to the largest.
"""

from __future__ import annotations

import torch

from octavo.cache.specs import AttentionSpec
from octavo.checkpoint.arch import Arch
from octavo.layers.attention import RotaryTable, plain_specs, rotary_tables
from octavo.layers.base import Layer
from octavo.layers.mixers.delta_net import GatedDeltaNet
from octavo.layers.mixers.gated_attention import GatedAttention
from octavo.layers.moe import make_network
from octavo.layers.norm import RMSNorm
from octavo.models.base import LLAMA_WEIGHTS, WeightMap
from octavo.models.causal_lm import CausalLM

NORM_OFFSET = 1.0  # norm weights are stored as their distance from one
_EXPERTS = "model.layers.*.mlp.experts.*"
_DELTA = "model.layers.*.linear_attn"
WEIGHT_MAP: WeightMap = {
    **{name: (path.replace(".attention.", ".mixer."), shard) for name, (path, shard) in LLAMA_WEIGHTS.items()},
    "model.layers.*.self_attn.q_norm.weight": ("layers.*.mixer.q_norm", ""),
    "model.layers.*.self_attn.k_norm.weight": ("layers.*.mixer.k_norm", ""),
    f"{_DELTA}.in_proj_qkvz.weight": ("layers.*.mixer.project.weight", "qkvz"),
    f"{_DELTA}.in_proj_ba.weight": ("layers.*.mixer.project.weight", "ba"),
    f"{_DELTA}.in_proj_qkv.weight": ("layers.*.mixer.project.weight", "qkv"),
    f"{_DELTA}.in_proj_z.weight": ("layers.*.mixer.project.weight", "z"),
    f"{_DELTA}.in_proj_b.weight": ("layers.*.mixer.project.weight", "b"),
    f"{_DELTA}.in_proj_a.weight": ("layers.*.mixer.project.weight", "a"),
    f"{_DELTA}.conv1d.weight": ("layers.*.mixer.conv.weight", ""),
    f"{_DELTA}.A_log": ("layers.*.mixer.rule.A_log", ""),
    f"{_DELTA}.dt_bias": ("layers.*.mixer.rule.dt_bias", ""),
    f"{_DELTA}.norm.weight": ("layers.*.mixer.norm", ""),
    f"{_DELTA}.out_proj.weight": ("layers.*.mixer.out.weight", ""),
    "model.layers.*.mlp.gate.weight": ("layers.*.mlp.router.weight", ""),
    f"{_EXPERTS}.gate_proj.weight": ("layers.*.mlp.experts.*.gate_up.weight", "gate"),
    f"{_EXPERTS}.up_proj.weight": ("layers.*.mlp.experts.*.gate_up.weight", "up"),
    f"{_EXPERTS}.down_proj.weight": ("layers.*.mlp.experts.*.down.weight", ""),
    "model.layers.*.mlp.shared_expert.gate_proj.weight": ("layers.*.mlp.shared.gate_up.weight", "gate"),
    "model.layers.*.mlp.shared_expert.up_proj.weight": ("layers.*.mlp.shared.gate_up.weight", "up"),
    "model.layers.*.mlp.shared_expert.down_proj.weight": ("layers.*.mlp.shared.down.weight", ""),
    "model.layers.*.mlp.shared_expert_gate.weight": ("layers.*.mlp.shared_gate.weight", ""),
}


class Qwen3NextLayer(Layer):
    """Norm, gated delta net or gated attention, norm, experts or an MLP."""

    def __init__(self, index: int, arch: Arch, spec: AttentionSpec, rotary: RotaryTable | None, dtype: torch.dtype):
        """Layer number `index` of `arch`; `rotary`: None where it does not attend."""
        super().__init__()
        self.input_norm = RMSNorm(arch.hidden_size, arch.norm_eps, NORM_OFFSET)
        self.mixer: GatedAttention | GatedDeltaNet
        if rotary is not None:
            self.mixer = GatedAttention(index, spec, rotary, arch, dtype, NORM_OFFSET)
        else:
            assert arch.delta is not None, "layers with a delta net need its facts"
            grouped = arch.name == "Qwen3NextForCausalLM"
            self.mixer = GatedDeltaNet(index, arch.hidden_size, arch.delta, arch.norm_eps, dtype, grouped=grouped)
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps, NORM_OFFSET)
        self.mlp = make_network(index, arch, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        mixed = self.mixer(self.input_norm(x))
        x = x + self.mixer.out(mixed)
        h = self.mlp_norm(x)
        return x + self.mlp(h)


class Qwen3NextForCausalLM(CausalLM):
    """Embedding, layers, last norm and output head; see models.base.Model."""

    ignored_weights = (*CausalLM.ignored_weights, "mtp.*", "model.visual.*", "visual.*")
    stacked_weights = {
        "model.layers.*.mlp.experts.gate_up_proj": (f"{_EXPERTS}.gate_proj.weight", f"{_EXPERTS}.up_proj.weight"),
        "model.layers.*.mlp.experts.down_proj": (f"{_EXPERTS}.down_proj.weight",),
    }
    other_prefixes = {"model.language_model.": "model."}
    norm_offset = NORM_OFFSET

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """On the meta device, of the shape that `arch` says."""
        attention, rotary = plain_specs(arch), rotary_tables(arch)
        layers = [
            Qwen3NextLayer(index, arch, attention[index], rotary.get(kind.rope), dtype)
            for index, kind in enumerate(arch.layers)
        ]
        specs = [layer.mixer.spec for layer in layers]
        super().__init__(arch, dtype, specs, rotary.values(), layers, WEIGHT_MAP)
