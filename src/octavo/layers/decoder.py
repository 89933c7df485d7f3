"""Decoder: what a decoder-only transformer does between embedding and output head.

Owns the layer that most families share (norms, attention, MLP, the residual stream beside them) and the run over all
layers, in one operator where the step's attention allows it. Does not know blocks, rows or how a backend works.
Invariant: K and V are stored by slot before attention runs; both ways to run a decoder give the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import cast

import torch
from torch import nn

from octavo.attention.base import ForwardContext, FusedRopeBackend, LayerContext, current_context
from octavo.layers.attention import Attention
from octavo.layers.base import Layer
from octavo.layers.mlp import Mlp
from octavo.layers.moe import MoeMlp
from octavo.layers.norm import RMSNorm
from octavo.ops.decoder import (
    BoundDecoder,
    DecoderLayerOperands,
    enter_attention_of_few,
    last_norm,
    post_attention,
    pre_attention,
    project,
)
from octavo.ops.gemm import LinearWeight


class DecoderLayer(Layer):
    """x = attention(norm(x)) + x, then x = mlp(norm(x)) + x; Gemma also norms what attention and MLP leave.

    The residual stream travels beside x: each norm before a half adds x to it first.
    """

    attention_norm: RMSNorm | None
    mlp_out_norm: RMSNorm | None

    def __init__(
        self,
        attention: Attention,
        mlp: Mlp | MoeMlp,
        size: int,
        eps: float,
        *,
        norm_offset: float = 0.0,
        out_norms: bool = False,
    ) -> None:
        """`size`: of the hidden state; `norm_offset`: as RMSNorm's; `out_norms`: `attention_norm`, `mlp_out_norm`."""
        super().__init__()
        self.input_norm = RMSNorm(size, eps, norm_offset)
        self.attention = attention
        self.attention_norm = RMSNorm(size, eps, norm_offset) if out_norms else None
        self.mlp_norm = RMSNorm(size, eps, norm_offset)
        self.mlp = mlp
        self.mlp_out_norm = RMSNorm(size, eps, norm_offset) if out_norms else None
        self.has_plain_mlp = isinstance(mlp, Mlp) and mlp.gate_up.bias is None  # else it runs by itself
        assert self.has_plain_mlp or not out_norms, "such an MLP is not followed by a norm in any family"

    @functools.cached_property
    def operands(self) -> DecoderLayerOperands:
        """The finalized weights, as the operators take them."""
        attention, spec = self.attention, self.attention.spec
        mlp = self.mlp if self.has_plain_mlp and isinstance(self.mlp, Mlp) else None
        return DecoderLayerOperands(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            eps=self.input_norm.eps,
            input_norm=self.input_norm.weight,
            qkv=attention.qkv.packed,
            keys_values=attention.qkv.rest,
            qkv_bias=attention.qkv.bias,
            q_norm=attention.q_norm,
            k_norm=attention.k_norm,
            head_eps=attention.norm_eps,
            cos_sin=attention.rotary.cos_sin,
            output=attention.output.packed,
            output_bias=attention.output.bias,
            attention_norm=None if self.attention_norm is None else self.attention_norm.weight,
            mlp_norm=self.mlp_norm.weight,
            gate_up=None if mlp is None else mlp.gate_up.packed,
            down=None if mlp is None else mlp.down.packed,
            activation="silu" if mlp is None else mlp.activation,
            mlp_out_norm=None if self.mlp_out_norm is None else self.mlp_out_norm.weight,
            scale=spec.scale,
            window=spec.window,
            soft_cap=spec.soft_cap,
            key_scale=attention.tensors.key_scale,
            value_scale=attention.tensors.value_scale,
        )

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(x, residual) before the layer -> after it. `residual` None: x is also the residual.

        wanted: [S] int64, the tokens that attend and go on, for which the backend is prepared; None: all do. Of the
        others K and V are stored.
        """
        own, operands = current_context().layers[self.attention.index], self.operands
        kv, slots, backend, spec = own.cache, own.inputs.slot_mapping, own.backend, self.attention.spec
        rotation = operands.rotation(positions, slots)
        if wanted is None and isinstance(backend, FusedRopeBackend) and backend.rotates(rotation, kv, spec):
            projected, residual = project(operands, x, residual)
            attended = projected.new_empty(projected.shape[0], spec.num_heads, spec.head_size)
            backend.run_fused_rope(projected, rotation, kv, spec, attended)
        else:
            if wanted is None:
                q, residual = pre_attention(operands, x, residual, positions, kv, slots)
            else:
                q, residual = enter_attention_of_few(operands, x, residual, positions, kv, slots, wanted)
            attended = torch.empty_like(q)
            backend.run(q, kv, spec, attended, self.attention.tensors)
        x, residual = post_attention(operands, attended, residual)
        return (x if self.has_plain_mlp else self.mlp.forward(x)), residual


class Decoder:
    """All layers and the norm behind them. Holds references: the model owns the layers."""

    def __init__(self, layers: nn.ModuleList, norm: RMSNorm) -> None:
        """`layers`: DecoderLayers in order, each with its number as the attention's index."""
        self._layers, self._norm = tuple(cast(DecoderLayer, layer) for layer in layers), norm
        self._dense = all(layer.has_plain_mlp for layer in self._layers)
        self._unlike: int | None = None
        self._bound: BoundDecoder | None = None
        self._bound_to: object = None  # the context's layers

    @functools.cached_property
    def _plain(self) -> bool:
        """Whether the layers' attention is what the operator over all layers knows. Variants are final by now."""
        specs = [layer.attention.spec for layer in self._layers]
        return all(set(spec.facts) <= {"window", "soft_cap"} for spec in specs)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [tokens, size]: the embedding; positions [tokens] int64 -> hidden states after the norm.

        Of the tokens that the context says are asked for: the last layer needs of the others K and V alone.
        """
        context = current_context()
        if self._dense and self._plain and all(table.backend.capability.paged_operator for table in context.tables):
            rows = [table.inputs for table in context.tables]
            return self._bind(context)(x, positions, rows, context.logit_tokens)
        residual: torch.Tensor | None = None
        *layers, last = self._layers
        for layer in layers[: self._num_unlike(context)] if context.warmup_only else layers:
            x, residual = layer.forward(x, residual, positions)
        x, residual = last.forward(x, residual, positions, context.narrow_to_logit_tokens(last.attention.index))
        return last_norm(x, residual, self._norm.weight, self._norm.eps)

    def _num_unlike(self, context: ForwardContext) -> int:
        """Layers from the first on that launch, with the last one, what all do: one of each kind behind the first."""
        if self._unlike is None:
            kinds = [
                (own.table, layer.attention.spec, type(layer.mlp), _kind(own.cache), _kind(layer.operands))
                for layer, own in zip(self._layers, self._contexts(context), strict=True)
            ]
            self._unlike = max((kinds.index(kind, 1) for kind in kinds[1:]), default=0) + 1
        return self._unlike

    def _bind(self, context: ForwardContext) -> BoundDecoder:
        """The decoder on the context's cache, made when that cache is first seen."""
        if self._bound is None or self._bound_to is not context.layers:
            operands = [layer.operands for layer in self._layers]
            caches, tables = zip(*((own.cache, own.table_index) for own in self._contexts(context)), strict=True)
            self._bound = BoundDecoder(operands, self._norm.weight, self._norm.eps, caches, tables)
            self._bound_to = context.layers
        return self._bound

    def _contexts(self, context: ForwardContext) -> list[LayerContext]:
        return [context.layers[layer.attention.index] for layer in self._layers]


def _kind(value: object) -> object:
    """What of a layer's operands decides which kernels run: how tensors lie, and every number."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.data_ptr() % 16
    if isinstance(value, LinearWeight):
        return value.n, value.k, value.kind, _kind(value.storage)
    if isinstance(value, DecoderLayerOperands):
        return tuple(_kind(getattr(value, field.name)) for field in dataclasses.fields(value))
    return value
