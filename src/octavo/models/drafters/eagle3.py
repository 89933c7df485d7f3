"""EAGLE-3: a head of one Llama layer over three places of the target's stream, with a vocabulary of its own.

Owns the whole head and its weight map, which is that of published heads (SafeAILab's, and vLLM's reading of them). The
layer takes the token and the state side by side; its residual stream is the state. Without an embedding of its own it
takes the rows of the target's table, without the target's scale, as EAGLE-1 does. Source: arXiv 2503.01840.
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
from octavo.layers.embedding import Embedding, OutputHead, embed_with_states, project_with_states, unscaled
from octavo.layers.linear import Linear
from octavo.layers.mlp import Mlp
from octavo.layers.norm import RMSNorm
from octavo.models.base import WeightMap
from octavo.models.causal_lm import CausalLM
from octavo.models.drafters.ends import end_of, leave
from octavo.ops.decoder import PostOperands
from octavo.ops.gemm.fused import linear_of_few
from octavo.ops.inputs.tensors import DraftRows

WEIGHT_MAP: WeightMap = {
    "fc.weight": ("fc.weight", ""),
    "midlayer.input_layernorm.weight": ("token_norm.weight", ""),
    "midlayer.hidden_norm.weight": ("state_norm.weight", ""),
    "midlayer.self_attn.q_proj.weight": ("attention.qkv.weight", "q"),
    "midlayer.self_attn.k_proj.weight": ("attention.qkv.weight", "k"),
    "midlayer.self_attn.v_proj.weight": ("attention.qkv.weight", "v"),
    "midlayer.self_attn.q_proj.bias": ("attention.qkv.bias", "q"),
    "midlayer.self_attn.k_proj.bias": ("attention.qkv.bias", "k"),
    "midlayer.self_attn.v_proj.bias": ("attention.qkv.bias", "v"),
    "midlayer.self_attn.o_proj.weight": ("attention.output.weight", ""),
    "midlayer.self_attn.o_proj.bias": ("attention.output.bias", ""),
    "midlayer.post_attention_layernorm.weight": ("mlp_norm.weight", ""),
    "midlayer.mlp.gate_proj.weight": ("mlp.gate_up.weight", "gate"),
    "midlayer.mlp.up_proj.weight": ("mlp.gate_up.weight", "up"),
    "midlayer.mlp.down_proj.weight": ("mlp.down.weight", ""),
    "norm.weight": ("norm.weight", ""),
    "lm_head.weight": ("head.weight", ""),
    "embed_tokens.weight": ("embedding.weight", ""),
    "d2t": ("vocabulary.offsets", ""),
}


class DraftVocabulary(Layer):
    """The target's ids of a reduced vocabulary, stored as their distances from the places."""

    offsets: torch.Tensor  # [draft vocabulary] int64

    def __init__(self, size: int, target_size: int) -> None:
        """Sizes of the reduced vocabulary and of the target's."""
        super().__init__()
        self._target_size = target_size
        self.declare("offsets", (size,), torch.int64)

    def fault_of(self, name: str, values: torch.Tensor) -> str:
        """Each place stands for a token of the target's, and no two for one: logits are stored by these ids."""
        ids = values + torch.arange(len(values))
        outside = ((ids < 0) | (ids >= self._target_size)).nonzero()[:, 0].tolist()
        if outside:
            place, last = outside[0], self._target_size - 1
            reason = f"place {place} would draft token {ids[place]}, the target has tokens 0 to {last}"
            return f"[{place}]={values[place]} ({reason}: take the head of this model)"
        known: dict[int, int] = {}
        for place, token in enumerate(ids.tolist()):
            if token in known:
                reason = f"places {known[token]} and {place} would both draft token {token}: each token has one place"
                return f"[{place}]={values[place]} ({reason})"
            known[token] = place
        return ""

    def finalize(self, quantization: str | None) -> None:
        """Distances become ids."""
        super().finalize(quantization)
        self.ids = self.offsets + torch.arange(len(self.offsets), device=self.offsets.device)


class Eagle3Head(Layer):
    """See models.drafters.DraftHead."""

    ignored_weights: Sequence[str] = ("t2d", "*.rotary_emb.inv_freq")  # t2d says the same as d2t
    stacked_weights: Mapping[str, Sequence[str]] = {}
    other_prefixes: Mapping[str, str] = {"layers.0.": "midlayer.", "model.": ""}
    attends_to_store = False

    def __init__(self, draft: DraftArch, target: CausalLM, dtype: torch.dtype) -> None:
        """On the meta device. target: whose embedding serves, unless the checkpoint brings one."""
        super().__init__()
        arch = self.arch = draft.arch
        self.taps, self._normed_residual = draft.taps, draft.norm_before_residual
        self._unit = draft.tap_unit
        (spec,), (rotary,) = plain_specs(arch), rotary_tables(arch).values()
        self.layer_specs: Sequence[LayerSpec] = (spec,)
        self.rotary = nn.ModuleList([rotary])
        size, eps = arch.hidden_size, arch.norm_eps
        self.fc = Linear(draft.target_size * len(draft.taps), size, dtype)
        self.token_norm, self.state_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.attention = Attention(0, spec, rotary, arch, dtype, in_size=2 * size)
        self.mlp_norm, self.norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.mlp = Mlp(size, arch.intermediate_size, arch.activation, dtype)
        self.head = OutputHead(draft.vocab_size, size, dtype)
        self.vocabulary = (
            DraftVocabulary(draft.vocab_size, arch.vocab_size) if draft.vocab_size < arch.vocab_size else None
        )
        if draft.has_embedding:
            self.embedding = Embedding(arch.vocab_size, size, dtype)
        else:
            self.__dict__["embedding"] = unscaled(target.embedding, dtype)  # a reference, not a child
        self.weight_map = WEIGHT_MAP

    def begin(self, given: torch.Tensor) -> torch.Tensor:
        """Three taps in one product."""
        return linear_of_few(given if self._unit == 1.0 else given * self._unit, self.fc.packed)

    def store(self, tokens: torch.Tensor, states: torch.Tensor) -> None:
        """K and V of entries."""
        both, _ = embed_with_states(self.embedding, tokens, states, (self.token_norm, self.state_norm))
        self.attention.store(both)

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, pick: torch.Tensor | None = None, *, behind_draw: bool = False
    ) -> torch.Tensor:
        """What a next entry knows: the stream, before the last norm."""
        norms, normed = (self.token_norm, self.state_norm), self._normed_residual
        given = self.embedding, tokens, states, norms, self.attention.qkv, pick
        projected, x = project_with_states(*given, normed=normed, behind_draw=behind_draw)
        return leave(self._end, self.attention.attend_projection(projected), x)

    @functools.cached_property
    def _end(self) -> PostOperands:
        return end_of(self.attention, self.mlp_norm, self.mlp)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """In the reduced vocabulary."""
        return self.head.of_norm(states, self.norm)

    def draw(self, states: torch.Tensor, of: DraftRows) -> torch.Tensor:
        """By their logits, which a row alone does not write."""
        return self.head.draft_of_norm(states, self.norm, self.target_ids, of)

    @property
    def target_ids(self) -> torch.Tensor | None:
        """By the head's map."""
        return None if self.vocabulary is None else self.vocabulary.ids
