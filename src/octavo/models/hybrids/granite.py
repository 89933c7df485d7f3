"""Granite 4 and Bamba: layers of Mamba-2, some of which attend instead, each with an MLP or experts behind it.

Owns the whole models and their weight maps. Granite's stream is counted in units of its residual multiplier, so that
sums are plain. Source: IBM's model cards of Granite 4.0 and Bamba-9B; arXiv 2405.21060. Invariant: float32 logits
within 1e-5 of transformers', relative to the largest.
"""

from __future__ import annotations

import torch

from octavo.cache.specs import AttentionSpec, LayerSpec
from octavo.checkpoint.arch import Arch
from octavo.layers.attention import Attention, RotaryTable, plain_specs, rotary_tables
from octavo.layers.base import Layer
from octavo.layers.mixers.mamba import Mamba2
from octavo.layers.moe import make_network
from octavo.layers.norm import RMSNorm
from octavo.models.base import FEED_FORWARD_WEIGHTS, LLAMA_WEIGHTS, MAMBA2_WEIGHTS, WeightMap
from octavo.models.causal_lm import CausalLM

_EXPERTS = "model.layers.*.block_sparse_moe.experts.*"
_SHARED = "model.layers.*.shared_mlp"
WEIGHT_MAP: WeightMap = {
    **LLAMA_WEIGHTS,
    **MAMBA2_WEIGHTS,
    # Granite's
    f"{_SHARED}.input_linear.weight": ("layers.*.mlp.gate_up.weight", ""),
    f"{_SHARED}.output_linear.weight": ("layers.*.mlp.down.weight", ""),
}
MOE_WEIGHT_MAP: WeightMap = {
    **WEIGHT_MAP,
    "model.layers.*.block_sparse_moe.router.layer.weight": ("layers.*.mlp.router.weight", ""),
    f"{_EXPERTS}.gate_proj.weight": ("layers.*.mlp.experts.*.gate_up.weight", "gate"),
    f"{_EXPERTS}.up_proj.weight": ("layers.*.mlp.experts.*.gate_up.weight", "up"),
    f"{_EXPERTS}.down_proj.weight": ("layers.*.mlp.experts.*.down.weight", ""),
    f"{_SHARED}.input_linear.weight": ("layers.*.mlp.shared.gate_up.weight", ""),
    f"{_SHARED}.output_linear.weight": ("layers.*.mlp.shared.down.weight", ""),
}
BAMBA_WEIGHT_MAP: WeightMap = {
    **LLAMA_WEIGHTS,
    **MAMBA2_WEIGHTS,
    **FEED_FORWARD_WEIGHTS,
}


class GraniteMambaLayer(Layer):
    """Norm, Mamba-2, norm, experts or an MLP."""

    def __init__(self, index: int, arch: Arch, dtype: torch.dtype) -> None:
        """Layer number `index` of `arch`."""
        super().__init__()
        assert arch.mamba is not None, "layers with a state space need its facts"
        self.input_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mamba = Mamba2(index, arch.hidden_size, arch.mamba, dtype)
        self.spec = self.mamba.spec
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mlp = make_network(index, arch, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        mixed = self.mamba(self.input_norm(x))
        x = x + self.mamba.out(mixed)
        h = self.mlp_norm(x)
        return x + self.mlp(h)


class GraniteAttentionLayer(Layer):
    """Norm, attention, norm, experts or an MLP."""

    def __init__(self, index: int, arch: Arch, spec: AttentionSpec, rotary: RotaryTable, dtype: torch.dtype) -> None:
        """Layer number `index` of `arch`."""
        super().__init__()
        self.input_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.spec = spec
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


class GraniteHybridForCausalLM(CausalLM):
    """Embedding, layers, last norm and output head; see models.base.Model."""

    stacked_weights = {
        "model.layers.*.block_sparse_moe.input_linear.weight": (
            f"{_EXPERTS}.gate_proj.weight",
            f"{_EXPERTS}.up_proj.weight",
        ),
        "model.layers.*.block_sparse_moe.output_linear.weight": (f"{_EXPERTS}.down_proj.weight",),
    }

    trainer_names = {
        "model.layers.*.block_sparse_moe.router.weight": "model.layers.*.block_sparse_moe.router.layer.weight",
    }

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """On the meta device, of the shape that `arch` says."""
        attention, rotary = plain_specs(arch), rotary_tables(arch)
        layers = [
            GraniteAttentionLayer(index, arch, attention[index], rotary[kind.rope], dtype)
            if kind.mixer == "attention"
            else GraniteMambaLayer(index, arch, dtype)
            for index, kind in enumerate(arch.layers)
        ]
        specs: list[LayerSpec] = [layer.spec for layer in layers]
        weights = WEIGHT_MAP if arch.moe is None else MOE_WEIGHT_MAP
        if arch.name == "BambaForCausalLM":
            weights = BAMBA_WEIGHT_MAP
        super().__init__(arch, dtype, specs, rotary.values(), layers, weights)
        if arch.moe is not None and not arch.moe.num_shared:
            self.ignored_weights = (*CausalLM.ignored_weights, f"{_SHARED}.*")  # files hold them, of no element
