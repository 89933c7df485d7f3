"""LFM3: LFM2's gated convolutions, of more tokens, beside attention to all tokens or to a window; norms behind them.

A sigmoid of the hidden state weights each head of the attention. Owns the whole model and its weight map. Source:
transformers' modeling_lfm3.py. Invariant: float32 logits within 1e-5 of transformers', relative to the largest.
"""

from __future__ import annotations

import torch
from torch import nn

from octavo.cache.specs import AttentionSpec, LayerSpec
from octavo.checkpoint.arch import Arch
from octavo.layers.attention import RotaryTable, plain_specs, rotary_tables
from octavo.layers.base import Layer
from octavo.layers.mixers.convolution import GatedConvolution
from octavo.layers.mixers.gated_attention import HeadGatedAttention
from octavo.layers.moe import make_network
from octavo.layers.norm import RMSNorm
from octavo.models.base import WeightMap
from octavo.models.causal_lm import CausalLM

_ATTENTION, _CONVOLUTION = "model.layers.*.self_attn", "model.layers.*.conv"
WEIGHT_MAP: WeightMap = {
    "model.layers.*.operator_norm.weight": ("layers.*.input_norm.weight", ""),
    **{
        f"{_ATTENTION}.{own}_proj.{kind}": (f"layers.*.mixer.qkv.{kind}", own)
        for own in ("q", "k", "v")
        for kind in ("weight", "bias")
    },
    f"{_ATTENTION}.q_norm.weight": ("layers.*.mixer.q_norm", ""),
    f"{_ATTENTION}.k_norm.weight": ("layers.*.mixer.k_norm", ""),
    f"{_ATTENTION}.gate_proj.weight": ("layers.*.mixer.gates.weight", ""),
    f"{_ATTENTION}.o_proj.weight": ("layers.*.mixer.output.weight", ""),
    f"{_ATTENTION}.o_proj.bias": ("layers.*.mixer.output.bias", ""),
    f"{_CONVOLUTION}.in_proj.weight": ("layers.*.mixer.project.weight", ""),
    f"{_CONVOLUTION}.in_proj.bias": ("layers.*.mixer.project.bias", ""),
    f"{_CONVOLUTION}.conv.weight": ("layers.*.mixer.conv.weight", ""),
    f"{_CONVOLUTION}.conv.bias": ("layers.*.mixer.conv.bias", ""),
    f"{_CONVOLUTION}.out_proj.weight": ("layers.*.mixer.out.weight", ""),
    f"{_CONVOLUTION}.out_proj.bias": ("layers.*.mixer.out.bias", ""),
    "model.layers.*.post_operator_norm.weight": ("layers.*.mixer_norm.weight", ""),
    "model.layers.*.ffn_norm.weight": ("layers.*.mlp_norm.weight", ""),
    "model.layers.*.feed_forward.w1.weight": ("layers.*.mlp.gate_up.weight", "gate"),
    "model.layers.*.feed_forward.w3.weight": ("layers.*.mlp.gate_up.weight", "up"),
    "model.layers.*.feed_forward.w2.weight": ("layers.*.mlp.down.weight", ""),
    "model.layers.*.post_ffn_norm.weight": ("layers.*.mlp_out_norm.weight", ""),
    "model.embedding_norm.weight": ("norm.weight", ""),
}


class Lfm3Layer(Layer):
    """Norm, gated convolution or gated attention, norm; norm, MLP, norm. A checkpoint may lack the norms behind."""

    def __init__(self, index: int, arch: Arch, spec: AttentionSpec, rotary: RotaryTable | None, dtype: torch.dtype):
        """Layer number `index` of `arch`; `rotary`: None where it does not attend."""
        super().__init__()
        self.input_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mixer: HeadGatedAttention | GatedConvolution
        if rotary is not None:
            self.mixer = HeadGatedAttention(index, spec, rotary, arch, dtype, gated=arch.head_gates)
        else:
            assert arch.conv is not None, "layers with a convolution need its facts"
            self.mixer = GatedConvolution(index, arch.hidden_size, arch.conv, dtype)
        self.mixer_norm = _norm_behind(arch)
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mlp = make_network(index, arch, dtype)
        self.mlp_out_norm = _norm_behind(arch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        mixed = self.mixer(self.input_norm(x))
        x = x + self.mixer_norm(self.mixer.out(mixed))
        h = self.mlp_norm(x)
        return x + self.mlp_out_norm(self.mlp(h))


class Lfm3ForCausalLM(CausalLM):
    """Embedding, layers, last norm and output head; see models.base.Model."""

    trainer_names = {f"{_ATTENTION}.g_proj.weight": f"{_ATTENTION}.gate_proj.weight"}

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """On the meta device, of the shape that `arch` says."""
        attention, rotary = plain_specs(arch), rotary_tables(arch)
        layers = [
            Lfm3Layer(index, arch, attention[index], rotary.get(kind.rope), dtype)
            for index, kind in enumerate(arch.layers)
        ]
        specs: list[LayerSpec] = [layer.mixer.spec for layer in layers]
        super().__init__(arch, dtype, specs, rotary.values(), layers, WEIGHT_MAP)


def _norm_behind(arch: Arch) -> nn.Module:
    return RMSNorm(arch.hidden_size, arch.norm_eps) if arch.norms_behind else nn.Identity()
