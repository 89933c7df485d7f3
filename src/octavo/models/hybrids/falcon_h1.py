"""Falcon-H1: attention and Mamba-2 side by side in each layer, an MLP behind them, and factors everywhere.

Owns the whole model and its weight map. A layer has two places in the cache, one for each mixer, so it runs as two: the
mixers, the MLP. Source: arXiv 2507.22448. Invariant: float32 logits within 1e-5 of transformers', of the largest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import cast

import torch
from torch import nn

from octavo.cache.specs import AttentionSpec
from octavo.checkpoint.arch import Arch
from octavo.layers.attention import Attention, RotaryTable, plain_specs, rotary_tables
from octavo.layers.base import Layer
from octavo.layers.linear import Linear
from octavo.layers.mixers.mamba import Mamba2
from octavo.layers.norm import RMSNorm
from octavo.models.base import FEED_FORWARD_WEIGHTS, LLAMA_WEIGHTS, MAMBA2_WEIGHTS, WeightMap
from octavo.models.causal_lm import CausalLM
from octavo.ops.activation import gated_by

_MAPPED: WeightMap = {
    **LLAMA_WEIGHTS,
    **MAMBA2_WEIGHTS,
    **FEED_FORWARD_WEIGHTS,
}
_HALVES = {"input_norm": "mixers", "attention": "mixers", "mamba": "mixers", "mlp_norm": "network", "mlp": "network"}


# Each parameter of a layer is in the half that holds it.
WEIGHT_MAP: WeightMap = {
    name: (re.sub(r"^layers\.\*\.(\w+)", lambda own: f"layers.*.{_HALVES[own[1]]}.{own[1]}", path), shard)
    for name, (path, shard) in _MAPPED.items()
}


class ScaledMlp(Layer):
    """down(silu(gate(x) * a) * up(x)) * b."""

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """Of `arch`."""
        super().__init__()
        inner = arch.intermediate_size
        self.gate_up = Linear(arch.hidden_size, {"gate": inner, "up": inner}, dtype, bias=arch.mlp_bias)
        self.down = Linear(inner, arch.hidden_size, dtype, bias=arch.mlp_bias)
        self._scales, self._activation = arch.scales, arch.activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        gate, up = self.gate_up.forward(x).chunk(2, 1)
        inner = gated_by(up, gate * self._scales.gate, self._activation)
        return self.down.forward(inner) * self._scales.down


class MixersLayer(Layer):
    """Norm, and attention beside Mamba-2: the first half of a layer, numbers `index` and `index + 1` in the cache."""

    def __init__(self, index: int, arch: Arch, spec: AttentionSpec, rotary: RotaryTable, dtype: torch.dtype) -> None:
        """Of `arch`."""
        super().__init__()
        assert arch.mamba is not None, "layers with a state space need its facts"
        self.input_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.attention = Attention(index, spec, rotary, arch, dtype)
        self.mamba = Mamba2(index + 1, arch.hidden_size, arch.mamba, dtype)
        self._scales = arch.scales

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        attention, scales = self.attention, self._scales
        h = self.input_norm(x)
        q = attention.rope_and_store(attention.qkv(h * scales.attention_in))
        seen = attention.output(attention.attend(q)) * scales.attention_out
        return x + (self.mamba.out(self.mamba(h)) * scales.mixer_out + seen)


class NetworkLayer(Layer):
    """Norm and MLP: the second half of a layer."""

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """Of `arch`."""
        super().__init__()
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mlp = ScaledMlp(arch, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        return x + self.mlp(self.mlp_norm(x))


class FalconH1Layer(Layer):
    """Both halves."""

    def __init__(self, mixers: MixersLayer, network: NetworkLayer) -> None:
        """In the order in which they run."""
        super().__init__()
        self.mixers, self.network = mixers, network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        return self.network(self.mixers(x))


class FalconH1ForCausalLM(CausalLM):
    """Embedding, layers, last norm and output head; see models.base.Model."""

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """On the meta device, of the shape that `arch` says."""
        attention, rotary = plain_specs(arch), rotary_tables(arch)
        layers = []
        for index in range(0, arch.num_layers, 2):
            own = attention[index], rotary[arch.layers[index].rope]
            layers.append(FalconH1Layer(MixersLayer(index, arch, *own, dtype), NetworkLayer(arch, dtype)))
        specs = [
            spec for layer in layers for spec in (attention[layer.mixers.attention.index], layer.mixers.mamba.spec)
        ]
        super().__init__(arch, dtype, specs, rotary.values(), layers, WEIGHT_MAP)

    def run_layers(self) -> Iterable[nn.Module]:
        """The halves of all layers."""
        layers = cast(list[FalconH1Layer], list(self.layers))
        return [half for layer in layers for half in (layer.mixers, layer.network)]
