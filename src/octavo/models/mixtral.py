"""Mixtral: Llama's decoder with a router over a few large experts in the place of each MLP.

Owns the whole model and its weight map. Source: arXiv 2401.04088.
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

_MLP = "model.layers.*.block_sparse_moe"  # what checkpoints say; transformers' model in memory says mlp
_EXPERT = f"{_MLP}.experts.*"
WEIGHT_MAP: WeightMap = {
    **LLAMA_WEIGHTS,
    f"{_MLP}.gate.weight": ("layers.*.mlp.router.weight", ""),
    f"{_EXPERT}.w1.weight": ("layers.*.mlp.experts.*.gate_up.weight", "gate"),
    f"{_EXPERT}.w3.weight": ("layers.*.mlp.experts.*.gate_up.weight", "up"),
    f"{_EXPERT}.w2.weight": ("layers.*.mlp.experts.*.down.weight", ""),
}


class MixtralLayer(Layer):
    """Norm, attention, norm, experts."""

    def __init__(self, index: int, arch: Arch, spec: AttentionSpec, rotary: RotaryTable, dtype: torch.dtype) -> None:
        """Layer number `index` of `arch`."""
        super().__init__()
        self.input_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.attention = Attention(index, spec, rotary, arch, dtype)
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


class MixtralForCausalLM(CausalLM):
    """Embedding, layers, last norm and output head; see models.base.Model."""

    stacked_weights = {
        "model.layers.*.mlp.experts.gate_up_proj": (f"{_EXPERT}.w1.weight", f"{_EXPERT}.w3.weight"),
        "model.layers.*.mlp.experts.down_proj": (f"{_EXPERT}.w2.weight",),
    }
    trainer_names = {name.replace("block_sparse_moe", "mlp"): name for name in WEIGHT_MAP if name.startswith(_MLP)}

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """On the meta device, of the shape that `arch` says."""
        specs, rotary = plain_specs(arch), rotary_tables(arch)
        layers = [
            MixtralLayer(index, arch, specs[index], rotary[kind.rope], dtype) for index, kind in enumerate(arch.layers)
        ]
        super().__init__(arch, dtype, specs, rotary.values(), layers, WEIGHT_MAP)
