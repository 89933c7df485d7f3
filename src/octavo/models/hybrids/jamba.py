"""Jamba: Mamba-1 with norms on what it makes of its input, every eighth layer attention, every second one experts.

Owns the whole model and its weight map. Heads do not turn. Source: arXiv 2403.19887, 2312.00752. Invariant: float32
logits within 1e-5 of transformers', relative to the largest.
"""

from __future__ import annotations

import torch

from octavo.cache.specs import AttentionSpec, LayerSpec
from octavo.checkpoint.arch import Arch, Mamba
from octavo.layers.attention import Attention, RotaryTable, plain_specs, rotary_tables
from octavo.layers.base import Layer
from octavo.layers.linear import Linear
from octavo.layers.moe import make_network
from octavo.layers.norm import RMSNorm
from octavo.layers.recurrent import Mamba1Scan, ShortConvolution, state_spec
from octavo.models.base import LLAMA_WEIGHTS, MAMBA2_WEIGHTS, WeightMap
from octavo.models.causal_lm import CausalLM
from octavo.ops.activation import gated_by

_MAMBA = "model.layers.*.mamba"
_MLP = "model.layers.*.feed_forward"
WEIGHT_MAP: WeightMap = {
    **LLAMA_WEIGHTS,
    **MAMBA2_WEIGHTS,
    f"{_MAMBA}.dt_proj.bias": ("layers.*.mamba.scan.dt_bias", ""),
    f"{_MAMBA}.dt_proj.weight": ("layers.*.mamba.steps.weight", ""),
    f"{_MAMBA}.x_proj.weight": ("layers.*.mamba.select.weight", ""),
    f"{_MAMBA}.dt_layernorm.weight": ("layers.*.mamba.step_norm.weight", ""),
    f"{_MAMBA}.b_layernorm.weight": ("layers.*.mamba.write_norm.weight", ""),
    f"{_MAMBA}.c_layernorm.weight": ("layers.*.mamba.read_norm.weight", ""),
    "model.layers.*.pre_ff_layernorm.weight": ("layers.*.mlp_norm.weight", ""),
    f"{_MLP}.gate_proj.weight": ("layers.*.mlp.gate_up.weight", "gate"),
    f"{_MLP}.up_proj.weight": ("layers.*.mlp.gate_up.weight", "up"),
    f"{_MLP}.down_proj.weight": ("layers.*.mlp.down.weight", ""),
    f"{_MLP}.router.weight": ("layers.*.mlp.router.weight", ""),
    f"{_MLP}.experts.*.gate_proj.weight": ("layers.*.mlp.experts.*.gate_up.weight", "gate"),
    f"{_MLP}.experts.*.up_proj.weight": ("layers.*.mlp.experts.*.gate_up.weight", "up"),
    f"{_MLP}.experts.*.down_proj.weight": ("layers.*.mlp.experts.*.down.weight", ""),
    "model.final_layernorm.weight": ("norm.weight", ""),
}


class Mamba1(Layer):
    """The state space of layer number `index`: a Layer of one line."""

    def __init__(self, index: int, size: int, facts: Mamba, dtype: torch.dtype) -> None:
        """`size`: of the hidden state."""
        super().__init__()
        inner, self._parts = facts.inner_size, (facts.step_rank, facts.state_size, facts.state_size)
        self.project = Linear(size, 2 * inner, dtype, bias=facts.in_bias)
        self.conv = ShortConvolution(index, inner, facts.conv_size, dtype, bias=facts.conv_bias)
        self.select = Linear(inner, sum(self._parts), dtype)
        self.step_norm, self.write_norm, self.read_norm = (RMSNorm(part, facts.eps) for part in self._parts)
        self.steps = Linear(facts.step_rank, inner, dtype)
        self.scan = Mamba1Scan(index, inner, facts.state_size, dtype)
        self.out = Linear(inner, size, dtype, bias=facts.out_bias)
        self.spec = state_spec(self.conv, self.scan)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> [tokens, inner size], which `out` takes."""
        values, gate = self.project.forward(x).chunk(2, 1)
        mixed = self.conv.mix(values)
        dt, b, c = self.select.forward(mixed).split(self._parts, 1)
        steps = self.steps.forward(self.step_norm.forward(dt))
        found = self.scan.mix(mixed, steps, self.write_norm.forward(b), self.read_norm.forward(c))
        return gated_by(found, gate, "silu")


class JambaMambaLayer(Layer):
    """Norm, Mamba-1, norm, experts or an MLP."""

    def __init__(self, index: int, arch: Arch, dtype: torch.dtype) -> None:
        """Layer number `index` of `arch`."""
        super().__init__()
        assert arch.mamba is not None, "layers with a state space need its facts"
        self.input_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mamba = Mamba1(index, arch.hidden_size, arch.mamba, dtype)
        self.spec = self.mamba.spec
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mlp = make_network(index, arch, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        mixed = self.mamba(self.input_norm(x))
        x = x + self.mamba.out(mixed)
        h = self.mlp_norm(x)
        return x + self.mlp(h)


class JambaAttentionLayer(Layer):
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


class JambaForCausalLM(CausalLM):
    """Embedding, layers, last norm and output head; see models.base.Model."""

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """On the meta device, of the shape that `arch` says."""
        attention, rotary = plain_specs(arch), rotary_tables(arch)
        layers = [
            JambaAttentionLayer(index, arch, attention[index], rotary[kind.rope], dtype)
            if kind.mixer == "attention"
            else JambaMambaLayer(index, arch, dtype)
            for index, kind in enumerate(arch.layers)
        ]
        specs: list[LayerSpec] = [layer.spec for layer in layers]
        super().__init__(arch, dtype, specs, rotary.values(), layers, WEIGHT_MAP)
