"""EAGLE-1 and -2: a Llama layer without its first norm over the target's last hidden state, with the target's head.

Owns the whole head and its weight map, which is that of published heads. Token and state go through one product;
neither is normed, nor is what comes out: it stands where the target's normed state does. Source: arXiv 2401.15077,
2406.16858. Where a target multiplies its embedding (Gemma, Granite), a head that brings none takes the table's rows as
they are: the EAGLE repository and vLLM give a head the target's table, and the product with the scale is the target's.
Invariant: float32 logits within 1e-4 of the formula's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from octavo.cache.specs import LayerSpec
from octavo.checkpoint.arch import DraftArch
from octavo.layers.attention import Attention, plain_specs, rotary_tables
from octavo.layers.base import Layer
from octavo.layers.embedding import Embedding, OutputHead, embed_with_states, unscaled
from octavo.layers.linear import Linear
from octavo.layers.mlp import Mlp
from octavo.layers.norm import RMSNorm
from octavo.models.base import WeightMap
from octavo.models.causal_lm import CausalLM
from octavo.models.drafters.ends import end_of, leave
from octavo.ops.decoder import PostOperands
from octavo.ops.gemm.fused import linear_of_few
from octavo.ops.inputs.tensors import DraftRows
from octavo.ops.sampling.drafts import draw_drafts

WEIGHT_MAP: WeightMap = {
    "fc.weight": ("fc.weight", ""),
    "fc.bias": ("fc.bias", ""),
    "layers.0.self_attn.q_proj.weight": ("attention.qkv.weight", "q"),
    "layers.0.self_attn.k_proj.weight": ("attention.qkv.weight", "k"),
    "layers.0.self_attn.v_proj.weight": ("attention.qkv.weight", "v"),
    "layers.0.self_attn.q_proj.bias": ("attention.qkv.bias", "q"),
    "layers.0.self_attn.k_proj.bias": ("attention.qkv.bias", "k"),
    "layers.0.self_attn.v_proj.bias": ("attention.qkv.bias", "v"),
    "layers.0.self_attn.o_proj.weight": ("attention.output.weight", ""),
    "layers.0.self_attn.o_proj.bias": ("attention.output.bias", ""),
    "layers.0.post_attention_layernorm.weight": ("mlp_norm.weight", ""),
    "layers.0.mlp.gate_proj.weight": ("mlp.gate_up.weight", "gate"),
    "layers.0.mlp.up_proj.weight": ("mlp.gate_up.weight", "up"),
    "layers.0.mlp.down_proj.weight": ("mlp.down.weight", ""),
    "embed_tokens.weight": ("embedding.weight", ""),
}


class EagleHead(Layer):
    """See models.drafters.DraftHead."""

    ignored_weights: Sequence[str] = ("*.rotary_emb.inv_freq", "lm_head.weight")
    stacked_weights: Mapping[str, Sequence[str]] = {}
    other_prefixes: Mapping[str, str] = {"model.": ""}
    attends_to_store = False
    taps: Sequence[int] = ()

    def __init__(self, draft: DraftArch, target: CausalLM, dtype: torch.dtype) -> None:
        """On the meta device. target: whose head serves, and whose table of embeddings unless there is one."""
        super().__init__()
        arch = self.arch = draft.arch
        (spec,), (rotary,) = plain_specs(arch), rotary_tables(arch).values()
        self.layer_specs: Sequence[LayerSpec] = (spec,)
        self.rotary = nn.ModuleList([rotary])
        size = arch.hidden_size
        self.fc = Linear(2 * size, size, dtype, bias=draft.fc_bias)
        self.attention = Attention(0, spec, rotary, arch, dtype)
        self.mlp_norm = RMSNorm(size, arch.norm_eps)
        self.mlp = Mlp(size, arch.intermediate_size, arch.activation, dtype)
        self.__dict__["head"] = target.head  # a reference, not a child
        if draft.has_embedding:
            self.embedding = Embedding(arch.vocab_size, size, dtype)
        else:
            self.__dict__["embedding"] = unscaled(target.embedding, dtype)
        self.weight_map = WEIGHT_MAP

    head: OutputHead

    def begin(self, given: torch.Tensor) -> torch.Tensor:
        """The target's hidden states as they are: behind its last norm, so in no unit of its stream."""
        return given

    def _enter(
        self, tokens: torch.Tensor, states: torch.Tensor, pick: torch.Tensor | None = None, *, behind_draw: bool = False
    ) -> torch.Tensor:
        """The stream."""
        both, _ = embed_with_states(self.embedding, tokens, states, None, pick, behind_draw=behind_draw)
        return linear_of_few(both, self.fc.packed, self.fc.bias)

    def store(self, tokens: torch.Tensor, states: torch.Tensor) -> None:
        """K and V of entries."""
        self.attention.store(self._enter(tokens, states))

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, pick: torch.Tensor | None = None, *, behind_draw: bool = False
    ) -> torch.Tensor:
        """What a next entry knows, and the head's logits follow from."""
        x = self._enter(tokens, states, pick, behind_draw=behind_draw)
        return leave(self._end, self.attention.project_and_attend(x), x)

    @functools.cached_property
    def _end(self) -> PostOperands:
        return end_of(self.attention, self.mlp_norm, self.mlp)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """By the target's head."""
        return self.head.forward(states)

    def draw(self, states: torch.Tensor, of: DraftRows) -> torch.Tensor:
        """By their logits."""
        return draw_drafts(self.logits(states), None, of)
