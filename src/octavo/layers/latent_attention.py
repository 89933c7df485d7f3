"""Latent attention (MLA): K and V of all heads live in one compressed state per token.

Owns one layer's place in the model and its weights, among them the halves of the projection that would expand the
state: they are absorbed into the query and the output, in prefill as in decode, so that there is one order of sums.
Does not know blocks, rows or how a backend works. Invariant: the state is stored by slot before the backend runs; the
cache holds [latent, rotated key], which serves as K whole and as V in its first `latent_size` channels.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1 and its note on absorption.
"""

from __future__ import annotations

import functools

import torch

from octavo.attention.base import NO_TENSORS, current_context
from octavo.cache.specs import AttentionSpec
from octavo.checkpoint.arch import Arch
from octavo.layers.attention import RotaryTable
from octavo.layers.base import Layer, WeightForm
from octavo.layers.chain import line
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.ops.gemm.head_linear import HeadWeights, head_linear, pack_heads
from octavo.ops.latent import latent_rope_store
from octavo.ops.latent.state import LatentState

_INNER_EPS = 1e-6  # of the norms on compressed states: no config.json sets it


class LatentAttention(Layer):
    """Attention of layer number `index`."""

    remade_by_finalize = frozenset({"expand"})
    rotary: RotaryTable
    expand: torch.Tensor  # [heads * (nope + value), latent], until `finalize`
    absorb_key: HeadWeights  # per head [latent, nope]
    expand_value: HeadWeights  # per head [value, latent]

    def __init__(self, index: int, arch: Arch, spec: AttentionSpec, rotary: RotaryTable, dtype: torch.dtype) -> None:
        """Layer number `index` of `arch`, which has latent facts."""
        super().__init__()
        latent = arch.latent
        assert latent is not None, "latent attention needs its facts"
        self.index, self.spec, self._latent = index, spec, latent
        self.tensors = NO_TENSORS
        self.stored_scales: tuple[torch.Tensor, torch.Tensor] | None = None  # as Attention's
        self._interleaved = arch.layers[index].rope.interleaved
        self.__dict__["rotary"] = rotary  # a reference, not a child: the model owns it
        num_heads, state = arch.num_heads, latent.latent_size + latent.rope_size
        head_query = latent.nope_size + latent.rope_size
        self._num_heads, self._head_query = num_heads, head_query
        self._first_size = latent.query_size or num_heads * head_query
        # the compressed query, or the query itself, and the state in one product
        bias = "kv" if arch.attention_bias and not latent.query_size else arch.attention_bias  # a whole query has none
        self.down = Linear(arch.hidden_size, {"q": self._first_size, "kv": state}, dtype, bias=bias)
        self.query_norm, self.query_up = None, None
        if latent.query_size:
            self.query_norm = RMSNorm(latent.query_size, _INNER_EPS)
            self.query_up = Linear(latent.query_size, num_heads * head_query, dtype)
        self.state_norm = RMSNorm(latent.latent_size, _INNER_EPS)
        expanded = num_heads * (latent.nope_size + latent.value_size)
        self.declare("expand", (expanded, latent.latent_size), dtype)
        self.output = Linear(num_heads * latent.value_size, arch.hidden_size, dtype, bias=arch.output_bias)

    def weight_bytes(self, form: WeightForm) -> int:
        """The expansion's halves, a matrix of each head."""
        latent, dtype = self._latent, self.get_parameter("expand").dtype
        shapes = (latent.latent_size, latent.nope_size), (latent.value_size, latent.latent_size)
        return self._num_heads * sum(form.packed_bytes(n, k, dtype, quantize=False) for n, k in shapes)

    def finalize(self, quantization: str | None) -> None:
        """Split the expansion into what queries absorb and what makes the values."""
        super().finalize(quantization)
        heads = self.__dict__.pop("expand").unflatten(0, (self._num_heads, -1))
        key, value = heads.split((self._latent.nope_size, self._latent.value_size), dim=1)
        before = self.__dict__.get("absorb_key"), self.__dict__.get("expand_value")
        self.absorb_key, self.expand_value = pack_heads(key.transpose(1, 2), before[0]), pack_heads(value, before[1])

    @functools.cached_property
    def _state(self) -> LatentState:
        """The finalized weights around a state, as their operator takes them."""
        norm, key_scale = self.state_norm, self.tensors.key_scale
        return LatentState(self.rotary.cos_sin, norm.weight, norm.eps, self._interleaved, key_scale)

    @line("own")
    def absorb_and_store(self, down: torch.Tensor) -> torch.Tensor:
        """q [tokens, heads, head_size] in the state's channels, of what `down` gave; the state is stored by slot."""
        context, latent = current_context(), self._latent
        own = context.layers[self.index]
        first, state = down.split((self._first_size, latent.latent_size + latent.rope_size), dim=1)
        if self.query_norm is not None and self.query_up is not None:
            first = self.query_up.forward(self.query_norm.forward(first))
        query = first.unflatten(1, (self._num_heads, self._head_query))
        q = down.new_empty(len(down), self._num_heads, self.spec.head_size)
        head_linear(query[..., : latent.nope_size], self.absorb_key, q[..., : latent.latent_size])
        latent_rope_store(
            self._state,
            query[..., latent.nope_size :],
            state,
            context.positions,
            q[..., latent.latent_size :],
            own.cache,
            own.inputs.slot_mapping,
        )
        return q

    @line("attend")
    def attend(self, q: torch.Tensor) -> torch.Tensor:
        """What each query's head sees of the states, [tokens, heads, latent_size]."""
        own, seen = current_context().layers[self.index], q.new_empty(len(q), self._num_heads, self._latent.latent_size)
        own.backend.run(q, own.cache, self.spec, seen, self.tensors)
        return seen

    @line("own")
    def values_of(self, seen: torch.Tensor) -> torch.Tensor:
        """[tokens, heads * value_size]: the values of what was seen."""
        values = seen.new_empty(len(seen), self._num_heads, self._latent.value_size)
        return head_linear(seen, self.expand_value, values).flatten(1)
