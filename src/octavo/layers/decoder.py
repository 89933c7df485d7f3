"""Decoder: the run over all layers of a decoder-only transformer, and the norm behind them.

Owns when lines are learned and resolved (`octavo.layers.fusions`), and the choice of the one native call that runs all
layers of a model on a CPU. Does not know blocks, rows, how a backend works, or what a layer computes: its lines say so.
Invariants: K and V are stored by slot before attention runs; whatever runs a layer, its bits are those of its forward.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TypeGuard

import torch
from torch import nn

from octavo.attention.base import AttentionBackend, ForwardContext, LayerContext, current_context
from octavo.layers.base import Layer
from octavo.layers.fusions import BatchClass, LayerLines, Operator, describe, resolve, runs_whole
from octavo.layers.norm import RMSNorm
from octavo.ops.decoder import BoundDecoder, DecoderLayerOperands, last_norm, no_step
from octavo.ops.gemm import LinearWeight
from octavo.states.base import NO_STATES, LayerStates, NativeNets


class Decoder:
    """All layers and the norm behind them. Holds references: the model owns the layers."""

    def __init__(self, layers: Iterable[nn.Module], norm: Layer, first: int = 0) -> None:
        """`layers`: in order, each with its number as its attention's index, from `first` on. `norm`: of any class."""
        self._layers = [LayerLines(index, layer) for index, layer in enumerate(layers, first)]
        self._norm, self._first = norm, first
        self._bound: Sequence[LayerContext] = ()  # the engine's layers that all below is resolved for
        self._contexts: Sequence[LayerContext] = ()  # of these, the own ones
        self._whole: BoundDecoder | None = None
        self._resolved: dict[BatchClass, list[tuple[Operator, ...]]] = {}
        self._unlike = 0  # see _num_unlike; 0: not counted yet

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [tokens, size]: the embedding; positions [tokens] int64 -> hidden states after the norm.

        Of the tokens that the context says are asked for: the last layer needs of the others K and V alone. Raises
        ValueError for other tokens than the context's: a step's tables and slots are read for each of them.
        """
        context = current_context()
        if x.shape[0] != context.positions.shape[0]:
            raise ValueError(f"{x.shape[0]} tokens in a pass that was prepared for {context.positions.shape[0]}")
        if self._bound is not context.layers:
            self._bind(context.layers)
        if self._whole is not None and not self._is_tapped(context):
            return self._whole(x, positions, [table.inputs for table in context.tables], context.logit_tokens)
        residual: torch.Tensor | None = None
        for layer, operators in enumerate(self._operators(context), self._first):
            context.gates.before(layer)
            context.taps.keep(layer, x, residual)
            for run in operators:
                x, residual = run(x, residual, context)
        if context.warmup_only:
            context.taps.rehearse(x, residual)
        norm = self._norm
        if _is_plain(norm):
            return last_norm(x, residual, norm.weight, norm.eps)
        return norm.forward(x if residual is None else x + residual)

    def _is_tapped(self, context: ForwardContext) -> bool:
        """Whether somebody reads what enters one of these layers."""
        return any(self._first <= layer < self._first + len(self._layers) for layer in context.taps.layers)

    def describe(self, backends: Sequence[type[AttentionBackend]], layers_of_each: int = 1) -> list[tuple[str, str]]:
        """(steps, what runs the lines of which published layers: see Arch), of layers that `backends` attend for."""
        return describe(self._layers, backends, layers_of_each, is_norm_plain=_is_plain(self._norm))

    def _bind(self, contexts: Sequence[LayerContext]) -> None:
        """To an engine's layers, seen for the first time."""
        self._bound, self._whole = contexts, None
        self._contexts = contexts = contexts[self._first : self._first + len(self._layers)]
        self._resolved, self._unlike = {}, 0
        norm = self._norm
        if _is_plain(norm) and runs_whole(self._layers, [type(own.backend) for own in contexts]):
            operands = [layer.whole_operands(own.states) for layer, own in zip(self._layers, contexts, strict=True)]
            caches, tables = [own.cache for own in contexts], [own.table_index for own in contexts]
            self._whole = BoundDecoder(operands, norm.weight, norm.eps, caches, tables, _step_of(contexts))

    def _operators(self, context: ForwardContext) -> list[tuple[Operator, ...]]:
        """What runs the layers of a step."""
        tables = context.tables  # none, where no layer attends
        is_apart = bool(tables) and (tables[0].inputs.max_query_len == 1 or tables[0].inputs.apart)
        batch = BatchClass(context.for_capture, is_apart, context.logit_tokens is not None)
        resolved = self._resolved.get(batch)
        if resolved is None:
            resolved = self._resolved[batch] = self._resolve(batch)
        if context.warmup_only:
            self._unlike = self._unlike or self._num_unlike()
            return [*resolved[:-1][: self._unlike], resolved[-1]]
        return resolved

    def _resolve(self, batch: BatchClass) -> list[tuple[Operator, ...]]:
        """Of steps of a class. In the last layer alone some tokens go no further."""
        found, behind_sum, last = [], False, self._layers[-1]
        for layer, own in zip(self._layers, self._contexts, strict=True):
            asked = batch if layer is last else batch._replace(is_narrowed=False)
            found.append(resolve(layer, type(own.backend), asked, behind_sum=behind_sum))
            behind_sum = layer.begins_with_norm
        return found

    def _num_unlike(self) -> int:
        """Layers from the first on that launch, with the last one, what all do. All, where lines are of other forms."""
        if any(layer.standard is None for layer in self._layers):
            return len(self._layers)
        facts = zip(self._layers, self._contexts, strict=True)
        return num_unlike(
            [(own.table, own.spec, layer.kinds, _kind(own.cache), _kind(layer.operands)) for layer, own in facts]
        )


def _step_of(contexts: Sequence[LayerContext]) -> Callable[[], int]:
    """What gives the C form of a step's rows to layers with states."""
    for own in contexts:
        if own.states is not NO_STATES and isinstance(own.states.backend, NativeNets):
            return functools.partial(_address_of_step, own.states.backend, own.states)
    return no_step


def _address_of_step(backend: NativeNets, states: LayerStates) -> int:
    return backend.step_address(states.inputs)


def _is_plain(norm: Layer) -> TypeGuard[RMSNorm]:
    """Whether operators compute what its forward does: they are given its weight alone."""
    return isinstance(norm, RMSNorm) and norm.called_as == "norm" and type(norm).add is RMSNorm.add


def num_unlike(kinds: Sequence[object]) -> int:
    """How many layers from the first on hold, with the last one, one of each kind that there is behind the first."""
    return max((kinds.index(kind, 1) for kind in kinds[1:]), default=0) + 1


def _kind(value: object) -> object:
    """What of a layer's operands decides which kernels run: how tensors lie, and every number."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.data_ptr() % 16
    if isinstance(value, LinearWeight):
        return value.n, value.k, value.kind, _kind(value.storage)
    if isinstance(value, DecoderLayerOperands):
        return tuple(_kind(getattr(value, field.name)) for field in dataclasses.fields(value))
    return value
