"""LFM2: layers with a gated convolution over a few tokens, some of which attend instead, each with an MLP behind it.

LFM2-MoE has experts there, but for its first layers. Owns both models and their weight map. Source: Liquid AI's LFM2
technical report (arXiv 2511.23404). Invariant: float32 logits within 1e-5 of transformers', relative to the largest.
"""

from __future__ import annotations

import torch

from octavo.cache.specs import AttentionSpec, LayerSpec
from octavo.checkpoint.arch import Arch
from octavo.layers.attention import Attention, RotaryTable, plain_specs, rotary_tables
from octavo.layers.base import Layer
from octavo.layers.mixers.convolution import GatedConvolution
from octavo.layers.moe import make_network
from octavo.layers.norm import RMSNorm
from octavo.models.base import WeightMap
from octavo.models.causal_lm import CausalLM

_ATTENTION, _NETWORK = "model.layers.*.self_attn", "model.layers.*.feed_forward"
WEIGHT_MAP: WeightMap = {
    "model.layers.*.operator_norm.weight": ("layers.*.input_norm.weight", ""),
    f"{_ATTENTION}.q_proj.weight": ("layers.*.attention.qkv.weight", "q"),
    f"{_ATTENTION}.k_proj.weight": ("layers.*.attention.qkv.weight", "k"),
    f"{_ATTENTION}.v_proj.weight": ("layers.*.attention.qkv.weight", "v"),
    f"{_ATTENTION}.q_layernorm.weight": ("layers.*.attention.q_norm", ""),
    f"{_ATTENTION}.k_layernorm.weight": ("layers.*.attention.k_norm", ""),
    f"{_ATTENTION}.out_proj.weight": ("layers.*.attention.output.weight", ""),
    "model.layers.*.conv.in_proj.weight": ("layers.*.conv.project.weight", ""),
    "model.layers.*.conv.in_proj.bias": ("layers.*.conv.project.bias", ""),
    "model.layers.*.conv.conv.weight": ("layers.*.conv.conv.weight", ""),
    "model.layers.*.conv.conv.bias": ("layers.*.conv.conv.bias", ""),
    "model.layers.*.conv.out_proj.weight": ("layers.*.conv.out.weight", ""),
    "model.layers.*.conv.out_proj.bias": ("layers.*.conv.out.bias", ""),
    "model.layers.*.ffn_norm.weight": ("layers.*.mlp_norm.weight", ""),
    f"{_NETWORK}.w1.weight": ("layers.*.mlp.gate_up.weight", "gate"),
    f"{_NETWORK}.w3.weight": ("layers.*.mlp.gate_up.weight", "up"),
    f"{_NETWORK}.w2.weight": ("layers.*.mlp.down.weight", ""),
    f"{_NETWORK}.gate.weight": ("layers.*.mlp.router.weight", ""),
    f"{_NETWORK}.expert_bias": ("layers.*.mlp.correction", ""),
    f"{_NETWORK}.experts.*.w1.weight": ("layers.*.mlp.experts.*.gate_up.weight", "gate"),
    f"{_NETWORK}.experts.*.w3.weight": ("layers.*.mlp.experts.*.gate_up.weight", "up"),
    f"{_NETWORK}.experts.*.w2.weight": ("layers.*.mlp.experts.*.down.weight", ""),
    "model.embedding_norm.weight": ("norm.weight", ""),
}


class Lfm2Layer(Layer):
    """Norm, gated convolution, norm, experts or an MLP."""

    def __init__(self, index: int, arch: Arch, dtype: torch.dtype) -> None:
        """Layer number `index` of `arch`."""
        super().__init__()
        assert arch.conv is not None, "layers with a convolution need its facts"
        self.input_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.conv = GatedConvolution(index, arch.hidden_size, arch.conv, dtype)
        self.spec = self.conv.spec
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mlp = make_network(index, arch, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        mixed = self.conv(self.input_norm(x))
        x = x + self.conv.out(mixed)
        h = self.mlp_norm(x)
        return x + self.mlp(h)


class Lfm2AttentionLayer(Layer):
    """Norm, attention with norms on the heads of q and k, norm, experts or an MLP."""

    def __init__(self, index: int, arch: Arch, spec: AttentionSpec, rotary: RotaryTable, dtype: torch.dtype) -> None:
        """Layer number `index` of `arch`."""
        super().__init__()
        self.input_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.spec = spec
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


class Lfm2ForCausalLM(CausalLM):
    """Embedding, layers, last norm and output head; see models.base.Model."""

    stacked_weights = {
        f"{_NETWORK}.experts.gate_up_proj": (f"{_NETWORK}.experts.*.w1.weight", f"{_NETWORK}.experts.*.w3.weight"),
        f"{_NETWORK}.experts.down_proj": (f"{_NETWORK}.experts.*.w2.weight",),
    }

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """On the meta device, of the shape that `arch` says."""
        attention, rotary = plain_specs(arch), rotary_tables(arch)
        layers = [
            Lfm2AttentionLayer(index, arch, attention[index], rotary[kind.rope], dtype)
            if kind.mixer == "attention"
            else Lfm2Layer(index, arch, dtype)
            for index, kind in enumerate(arch.layers)
        ]
        specs: list[LayerSpec] = [layer.spec for layer in layers]
        super().__init__(arch, dtype, specs, rotary.values(), layers, WEIGHT_MAP)
