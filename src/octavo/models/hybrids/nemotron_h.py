"""Nemotron-H: each layer is one thing behind a norm: Mamba-2, attention without rotation, an MLP or experts.

Its MLPs are not gated (squared ReLU). Owns the whole model and its weight map. Steps of time are cut at
`time_step_min`, as transformers cuts a prompt's. Source: arXiv 2504.03624, 2512.20856. Invariant: float32 logits within
1e-5 of transformers', relative to the largest.
"""

from __future__ import annotations

import torch

from octavo.cache.specs import AttentionSpec, LayerSpec, NoCache
from octavo.checkpoint.arch import Arch
from octavo.layers.attention import Attention, RotaryTable, plain_specs, rotary_tables
from octavo.layers.base import Layer
from octavo.layers.mixers.mamba import Mamba2
from octavo.layers.moe import make_network
from octavo.layers.norm import RMSNorm
from octavo.models.base import MAMBA2_WEIGHTS, WeightMap
from octavo.models.causal_lm import CausalLM

_MIXER = "model.layers.*.mixer"
WEIGHT_MAP: WeightMap = {
    **{name.replace(".mamba.", ".mixer."): target for name, target in MAMBA2_WEIGHTS.items()},
    "model.layers.*.norm.weight": ("layers.*.norm.weight", ""),
    f"{_MIXER}.q_proj.weight": ("layers.*.attention.qkv.weight", "q"),
    f"{_MIXER}.k_proj.weight": ("layers.*.attention.qkv.weight", "k"),
    f"{_MIXER}.v_proj.weight": ("layers.*.attention.qkv.weight", "v"),
    f"{_MIXER}.o_proj.weight": ("layers.*.attention.output.weight", ""),
    f"{_MIXER}.up_proj.weight": ("layers.*.mlp.up.weight", ""),
    f"{_MIXER}.down_proj.weight": ("layers.*.mlp.down.weight", ""),
    f"{_MIXER}.up_proj.bias": ("layers.*.mlp.up.bias", ""),
    f"{_MIXER}.down_proj.bias": ("layers.*.mlp.down.bias", ""),
    f"{_MIXER}.gate.weight": ("layers.*.mlp.router.weight", ""),
    f"{_MIXER}.gate.e_score_correction_bias": ("layers.*.mlp.correction", ""),
    f"{_MIXER}.experts.*.up_proj.weight": ("layers.*.mlp.experts.*.up.weight", ""),
    f"{_MIXER}.experts.*.down_proj.weight": ("layers.*.mlp.experts.*.down.weight", ""),
    f"{_MIXER}.shared_experts.up_proj.weight": ("layers.*.mlp.shared.up.weight", ""),
    f"{_MIXER}.shared_experts.down_proj.weight": ("layers.*.mlp.shared.down.weight", ""),
    f"{_MIXER}.shared_experts.up_proj.bias": ("layers.*.mlp.shared.up.bias", ""),
    f"{_MIXER}.shared_experts.down_proj.bias": ("layers.*.mlp.shared.down.bias", ""),
    f"{_MIXER}.fc1_latent_proj.bias": ("layers.*.mlp.into.bias", ""),
    f"{_MIXER}.fc2_latent_proj.bias": ("layers.*.mlp.back.bias", ""),
    f"{_MIXER}.fc1_latent_proj.weight": ("layers.*.mlp.into.weight", ""),
    f"{_MIXER}.fc2_latent_proj.weight": ("layers.*.mlp.back.weight", ""),
    "model.norm_f.weight": ("norm.weight", ""),
}


class NemotronMambaLayer(Layer):
    """Norm and Mamba-2."""

    def __init__(self, index: int, arch: Arch, dtype: torch.dtype) -> None:
        """Layer number `index` of `arch`."""
        super().__init__()
        assert arch.mamba is not None, "layers with a state space need its facts"
        self.norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mamba = Mamba2(index, arch.hidden_size, arch.mamba, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        projected = self.mamba.project(self.norm(x))
        mixed = self.mamba.mix(projected)
        return x + self.mamba.out(mixed)


class NemotronAttentionLayer(Layer):
    """Norm and attention."""

    def __init__(self, index: int, arch: Arch, spec: AttentionSpec, rotary: RotaryTable, dtype: torch.dtype) -> None:
        """Layer number `index` of `arch`."""
        super().__init__()
        self.norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.attention = Attention(index, spec, rotary, arch, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        attention = self.attention
        qkv = attention.qkv(self.norm(x))
        q = attention.rope_and_store(qkv)
        seen = attention.attend(q)
        return x + attention.output(seen)


class NemotronMlpLayer(Layer):
    """Norm, and an MLP or experts: nothing is kept."""

    def __init__(self, index: int, arch: Arch, dtype: torch.dtype) -> None:
        """Layer number `index` of `arch`."""
        super().__init__()
        self.norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.mlp = make_network(index, arch, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, size] -> the same shape."""
        return x + self.mlp(self.norm(x))


class NemotronHForCausalLM(CausalLM):
    """Embedding, layers, last norm and output head; see models.base.Model."""

    ignored_weights = (*CausalLM.ignored_weights, "mtp.*")
    other_prefixes = {"backbone.": "model."}

    def __init__(self, arch: Arch, dtype: torch.dtype) -> None:
        """On the meta device, of the shape that `arch` says."""
        attention, rotary = plain_specs(arch), rotary_tables(arch)
        specs: list[LayerSpec] = []
        layers: list[Layer] = []
        for index, kind in enumerate(arch.layers):
            if kind.mixer == "attention":
                specs.append(attention[index])
                layers.append(NemotronAttentionLayer(index, arch, attention[index], rotary[kind.rope], dtype))
            elif kind.mixer == "mamba":
                own = NemotronMambaLayer(index, arch, dtype)
                specs.append(own.mamba.spec)
                layers.append(own)
            else:
                specs.append(NoCache())
                layers.append(NemotronMlpLayer(index, arch, dtype))
        super().__init__(arch, dtype, specs, rotary.values(), layers, WEIGHT_MAP)
        ends = {name.replace("embed_tokens", "embeddings"): own for name, own in self.weight_map.items()}
        self.weight_map = ends
