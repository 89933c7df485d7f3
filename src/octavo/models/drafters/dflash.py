"""DFlash: a few layers that draft a block of places at once, over K and V that follow from the target's hidden states.

Owns the whole drafter and its weight map, which is that of published ones and of transformers' assistants. An entry of
its layers' caches is of one hidden state of the target, projected once for all layers: K and V of layer i are layer
i's product of it, so entries take no pass through the layers. A block is the token that is known last and masks behind
it; its places see all entries before them and each other, and each mask's hidden state gives the draft in its place.
Embedding and head are the target's. Source: arXiv 2602.06036. Invariant: float32 logits within 1e-4 of transformers'.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from octavo.cache.specs import LayerSpec
from octavo.checkpoint.arch import DraftArch
from octavo.layers.attention import plain_specs, rotary_tables
from octavo.layers.base import Layer
from octavo.layers.embedding import Embedding, OutputHead
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.models.base import WeightMap
from octavo.models.causal_lm import CausalLM
from octavo.models.qwen3 import WEIGHT_MAP as QWEN3_WEIGHTS
from octavo.models.qwen3 import Qwen3Layer

_OF_LAYERS = "model.layers."
WEIGHT_MAP: WeightMap = {
    "fc.weight": ("fc.weight", ""),
    "hidden_norm.weight": ("state_norm.weight", ""),
    "norm.weight": ("norm.weight", ""),
    **{name.removeprefix("model."): to for name, to in QWEN3_WEIGHTS.items() if name.startswith(_OF_LAYERS)},
}


class BlockDrafter(Layer):
    """Its layers are numbered from 0, in a context of their own."""

    ignored_weights: Sequence[str] = ("*.rotary_emb.inv_freq",)
    stacked_weights: Mapping[str, Sequence[str]] = {}
    other_prefixes: Mapping[str, str] = {
        "model.": "",
        "encoder.fc.": "fc.",
        "encoder.output_norm_enc.": "hidden_norm.",
    }

    def __init__(self, draft: DraftArch, target: CausalLM, dtype: torch.dtype) -> None:
        """On the meta device. target: whose embedding and head serve."""
        super().__init__()
        arch = self.arch = draft.arch
        self.taps, self.mask_token = draft.taps, draft.mask_token
        specs = [
            dataclasses.replace(spec, causal=is_causal, sees_block=not is_causal)
            for spec, is_causal in zip(plain_specs(arch), draft.is_causal, strict=True)
        ]
        self.layer_specs: Sequence[LayerSpec] = specs
        rotary = rotary_tables(arch)
        self.rotary = nn.ModuleList(rotary.values())
        self.layers = nn.ModuleList(
            Qwen3Layer(index, arch, specs[index], rotary[kind.rope], dtype) for index, kind in enumerate(arch.layers)
        )
        self.fc = Linear(draft.target_size * len(draft.taps), arch.hidden_size, dtype)
        self.state_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.__dict__["embedding"], self.__dict__["head"] = target.embedding, target.head  # references, not children
        self.weight_map = WEIGHT_MAP

    embedding: Embedding
    head: OutputHead

    def store(self, given: torch.Tensor) -> None:
        """Store K and V of entries: the taps side by side [T, taps * size], of the context's positions and slots."""
        states = self.state_norm.forward(self.fc.forward(given))
        for layer in self.layers:
            assert isinstance(layer, Qwen3Layer), "as they were made"
            layer.attention.store(states)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Blocks [T] int64, of the context's rows -> [T, size], normed, from which logits follow."""
        x = self.embedding.forward(tokens)
        for layer in self.layers:
            x = layer.forward(x)
        return self.norm.forward(x)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """By the target's head."""
        return self.head.forward(states)
