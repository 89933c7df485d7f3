"""Fusions: which operators run the lines of a layer.

Owns the table, and the resolution of a layer's lines by it, which is done once for each layer and batch class. Does not
know which kernel an operator runs for how many rows: src/octavo/ops/README.md says so. Invariant: a row of the table
gives the bits of its lines run one by one, so any row may be left out.

From operator to operator goes x, what the last line gave, with the residual stream beside it; None means that x is the
stream. The sum that ends a layer is left to the norm that begins the next one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn

from octavo.attention.base import AttentionBackend, ForwardContext, FusedRopeBackend
from octavo.layers.attention import Attention
from octavo.layers.chain import Chain, Line, learn
from octavo.layers.linear import Linear
from octavo.layers.mlp import UngatedMlp
from octavo.layers.norm import RMSNorm
from octavo.layers.standard import Standard, Tail, standard_form, tail_form
from octavo.ops.decoder import (
    DecoderLayerOperands,
    DeltaLayerOperands,
    PostOperands,
    enter_attention_of_few,
    post_attention,
    pre_attention,
    project,
)
from octavo.ops.gemm.fused import activated_linear, linear_add_at_once, normed_linear
from octavo.states.base import LayerStates

_OF_EACH_TOKEN = frozenset({"norm", "linear", "mlp", "ungated_mlp", "add"})  # lines that look at no other token
_END = "end"  # of a layer whose last sum is left to the next norm, in a pattern

State: TypeAlias = tuple[Tensor, Tensor | None]
Operator: TypeAlias = Callable[[Tensor, Tensor | None, ForwardContext], State]


class BatchClass(NamedTuple):
    """What of a step decides which operators run. Its number of rows does not: operators look at that themselves."""

    in_graph: bool  # a graph is captured
    is_apart: bool  # no row reads what another one stores: each has one query, or verifies
    is_narrowed: bool  # from attention on, only the tokens that give logits are asked for: in a last layer


class LayerLines:
    """What was learned of a layer, once."""

    def __init__(self, index: int, layer: nn.Module) -> None:
        """`index`: the layer's number."""
        self.index, self.layer = index, layer
        self.chain: Chain | None = learn(layer.forward)
        lines = [] if self.chain is None else self.chain.lines
        self.standard: Standard | None = standard_form(lines)
        self.tail: Tail | None = tail_form(lines) if self.standard is None else None
        self.begins_with_norm = bool(lines) and lines[0].kind == "norm"

    @functools.cached_property
    def operands(self) -> DecoderLayerOperands:
        """Of a standard layer, once its weights are final."""
        assert self.standard is not None, "the row of the table is for standard layers"
        return self.standard.operands()

    @functools.cached_property
    def tail_operands(self) -> PostOperands:
        """Of a layer with such an end, once its weights are final."""
        assert self.tail is not None, "the row of the table is for such ends"
        return self.tail.operands()

    @property
    def attention(self) -> Attention | None:
        """Of a layer that compiled operators know from end to end, where it attends."""
        if self.standard is not None:
            return self.standard.attention
        return None if self.tail is None or self.tail.mixer is None else self.tail.mixer.attention

    def whole_operands(self, states: LayerStates) -> DecoderLayerOperands | DeltaLayerOperands:
        """Of such a layer, once its weights are final, of one engine, which keeps `states` of it."""
        if self.standard is not None:
            return self.operands
        assert self.tail is not None and self.tail.mixer is not None, "operators know the layer from end to end"
        return self.tail.mixer.operands(self.tail_operands, states)

    @property
    def mixes_no_tokens(self) -> bool:
        """Whether each token's result is its own: nobody needs those of tokens that are not asked for."""
        return self.chain is not None and _OF_EACH_TOKEN.issuperset(self.chain.kinds)

    @property
    def kinds(self) -> tuple[object, ...]:
        """Of the lines and of what computes them: layers of equal ones run alike, but for their weights."""
        return tuple((line.kind, type(line.owner)) for line in self.lines)

    @property
    def lines(self) -> list[Line]:
        """In the order in which they run: the sum at the end of such a layer stands before its first norm."""
        assert self.chain is not None, "the layer runs as it is written"
        lines = self.chain.lines
        return [lines[-1], *lines[:-1]] if self.begins_with_norm else lines


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Fusion:
    """A row of the table: lines behind each other, the layers and steps that it is for, and what runs the lines."""

    pattern: str  # `end`: the layer's, whose sum is the next norm's
    applies: Callable[[LayerLines, type[AttentionBackend], BatchClass], bool]
    name: str  # of the operator, for people
    make: Callable[[LayerLines, Sequence[Line]], Operator]
    narrows: bool = False  # of narrowed steps, what it gives is of the tokens that give logits alone


def _pre_attention(layer: LayerLines, _: Sequence[Line]) -> Operator:
    operands, index = layer.operands, layer.index

    def run(x: Tensor, residual: Tensor | None, context: ForwardContext) -> State:
        own = context.layers[index]
        return pre_attention(operands, x, residual, context.positions, own.cache, own.inputs.slot_mapping)

    return run


def _pre_attention_of_few(layer: LayerLines, _: Sequence[Line]) -> Operator:
    operands, index = layer.operands, layer.index

    def run(x: Tensor, residual: Tensor | None, context: ForwardContext) -> State:
        own, logits = context.layers[index], context.logit_tokens
        assert logits is not None, "a narrowed step"
        return enter_attention_of_few(
            operands, x, residual, context.positions, own.cache, own.inputs.slot_mapping, logits.tokens
        )

    return run


def _rope_decode(layer: LayerLines, lines: Sequence[Line]) -> Operator:
    """In a graph whose plan of attention has no such kernel, the lines run as elsewhere."""
    operands, index = layer.operands, layer.index
    assert layer.standard is not None, "it has operands"
    spec = layer.standard.attention.spec
    apart, attend = _pre_attention(layer, lines), lines[-1].run

    def run(x: Tensor, residual: Tensor | None, context: ForwardContext) -> State:
        own = context.layers[index]
        backend, rotation = own.backend, operands.rotation(context.positions, own.inputs.slot_mapping)
        assert isinstance(backend, FusedRopeBackend), "the row is for such backends"
        if not backend.rotates(rotation, own.cache, spec):
            q, residual = apart(x, residual, context)
            return attend(q), residual
        projected, residual = project(operands, x, residual)
        attended = projected.new_empty(projected.shape[0], spec.num_heads, spec.head_size)
        backend.run_fused_rope(projected, rotation, own.cache, spec, attended)
        return attended.flatten(1), residual

    return run


def _post_attention(layer: LayerLines, _: Sequence[Line]) -> Operator:
    operands = layer.operands if layer.standard is not None else layer.tail_operands

    def run(x: Tensor, residual: Tensor | None, context: ForwardContext) -> State:
        assert residual is not None, "the stream is beside what attention gave"
        return post_attention(operands, x, residual)

    return run


def _add_norm(_: LayerLines, lines: Sequence[Line]) -> Operator:
    norm: RMSNorm = lines[-1].owner

    def run(x: Tensor, residual: Tensor | None, context: ForwardContext) -> State:
        return (norm.forward(x), x) if residual is None else norm.add(x, residual)

    return run


def _norm_linear(_: LayerLines, lines: Sequence[Line]) -> Operator:
    norm: RMSNorm = lines[1].owner
    product: Linear = lines[2].owner

    def run(x: Tensor, residual: Tensor | None, context: ForwardContext) -> State:
        if residual is None:
            return normed_linear(x, norm.weight, norm.eps, product.packed, product.bias), x
        normed, total = norm.add(x, residual)
        return product.forward(normed), total

    return run


def _norm_mlp(_: LayerLines, lines: Sequence[Line]) -> Operator:
    norm: RMSNorm = lines[1].owner
    mlp: UngatedMlp = lines[2].owner

    def run(x: Tensor, residual: Tensor | None, context: ForwardContext) -> State:
        up, down = mlp.up.packed, mlp.down.packed
        if residual is None:
            total, inner = x, normed_linear(x, norm.weight, norm.eps, up, activation=mlp.activation)
        else:
            normed, total = norm.add(x, residual)
            inner = activated_linear(normed, up, mlp.activation)
        whole = linear_add_at_once(inner, down, None, total)
        return (mlp.down.forward(inner), total) if whole is None else (whole, None)

    return run


def _linear_add(_: LayerLines, lines: Sequence[Line]) -> Operator:
    product: Linear = lines[0].owner

    def run(x: Tensor, residual: Tensor | None, context: ForwardContext) -> State:
        assert residual is not None, "the stream is beside what the product takes"
        whole = linear_add_at_once(x, product.packed, product.bias, residual)
        return (product.forward(x), residual) if whole is None else (whole, None)

    return run


def _narrow(x: Tensor, residual: Tensor | None, context: ForwardContext) -> State:
    """The tokens that give logits."""
    assert context.logit_tokens is not None, "a narrowed step"
    few = context.logit_tokens.tokens
    residual = None if residual is None else residual.index_select(0, few)
    return x.index_select(0, few), residual


def _add(x: Tensor, residual: Tensor | None, context: ForwardContext) -> State:
    """The sum of what the last line gave and the stream, if that is not done."""
    return (x if residual is None else residual + x), None


def _one_by_one(lines: Sequence[Line]) -> Operator:
    """Lines without a fusion; a sum may be the last of them."""
    *before, last = (line.run for line in lines)
    if lines[-1].kind != "add":
        before.append(last)
    elif not before:
        return _add
    runs = tuple(before)

    def keep_stream(x: Tensor, residual: Tensor | None, context: ForwardContext) -> State:
        stream = x if residual is None else residual
        for run in runs:
            x = run(x)
        return x, stream

    def add(x: Tensor, residual: Tensor | None, context: ForwardContext) -> State:
        stream = x if residual is None else residual
        for run in runs:
            x = run(x)
        return stream + x, None

    return add if lines[-1].kind == "add" else keep_stream


def _as_written(layer: LayerLines, batch: BatchClass) -> Operator:
    """A layer without a chain: its forward, of all tokens."""
    forward = layer.layer.forward

    def run(x: Tensor, residual: Tensor | None, context: ForwardContext) -> State:
        y: Tensor = forward(x)
        return y, None

    def run_narrowed(x: Tensor, residual: Tensor | None, context: ForwardContext) -> State:
        assert context.logit_tokens is not None, "a narrowed step"
        y: Tensor = forward(x)
        return y.index_select(0, context.logit_tokens.tokens), None

    return run_narrowed if batch.is_narrowed else run


def _prepare_for_few(layer: LayerLines) -> Operator:
    """The backend attends next for the tokens that give logits alone."""
    index = layer.index

    def run(x: Tensor, residual: Tensor | None, context: ForwardContext) -> State:
        context.narrow_to_logit_tokens(index)
        return x, residual

    return run


def _always(layer: LayerLines, backend: type[AttentionBackend], batch: BatchClass) -> bool:
    return True


def _standard(layer: LayerLines, backend: type[AttentionBackend], batch: BatchClass) -> bool:
    return layer.standard is not None


def _dense(layer: LayerLines, backend: type[AttentionBackend], batch: BatchClass) -> bool:
    end = layer.standard or layer.tail
    return end is not None and end.mlp is not None


def _without_mlp(layer: LayerLines, backend: type[AttentionBackend], batch: BatchClass) -> bool:
    """The operator gives what the layer's own MLP takes."""
    end = layer.standard or layer.tail
    return end is not None and end.mlp is None


def _is_plain(owner: object) -> bool:
    """Whether a line is what operators of its owner's weights compute."""
    if isinstance(owner, UngatedMlp):
        return _is_plain(owner.up) and _is_plain(owner.down)
    if isinstance(owner, Linear):
        return owner.called_as == "linear" and owner.out_dtype is None
    return isinstance(owner, RMSNorm) and type(owner).add is RMSNorm.add


def _plain(layer: LayerLines, backend: type[AttentionBackend], batch: BatchClass) -> bool:
    known = ("norm", "linear", "ungated_mlp")
    return all(_is_plain(line.owner) for line in layer.lines if line.kind in known)


def _standard_narrowed(layer: LayerLines, backend: type[AttentionBackend], batch: BatchClass) -> bool:
    return layer.standard is not None and batch.is_narrowed


def _decodes_in_graph(layer: LayerLines, backend: type[AttentionBackend], batch: BatchClass) -> bool:
    """In a graph of rows that decode or verify, where the backend is a FusedRopeBackend."""
    decodes = batch.in_graph and batch.is_apart and not batch.is_narrowed
    return layer.standard is not None and decodes and hasattr(backend, "run_fused_rope")


# Tried in order at each line.
FUSIONS = (
    Fusion("add norm linear rope_store attend", _decodes_in_graph, "fused_rope_decode", _rope_decode),
    Fusion("add norm linear rope_store", _standard_narrowed, "pre_attention_of_few", _pre_attention_of_few, True),
    Fusion("add norm linear rope_store", _standard, "pre_attention", _pre_attention),
    Fusion("linear add norm mlp", _dense, "post_attention", _post_attention),
    Fusion("linear norm add norm mlp norm", _dense, "post_attention", _post_attention),
    Fusion("linear add norm", _without_mlp, "post_attention", _post_attention),
    Fusion("add norm linear", _plain, "normed_linear", _norm_linear),
    Fusion("add norm ungated_mlp", _plain, "normed_mlp", _norm_mlp),
    Fusion(f"linear {_END}", _plain, "linear_add", _linear_add),
    Fusion("add norm", _always, "add_rms_norm", _add_norm),
)


def match(
    layer: LayerLines, backend: type[AttentionBackend], batch: BatchClass
) -> list[tuple[Fusion | None, Sequence[Line]]]:
    """A layer's lines in the parts that one operator each runs. A line without a fusion runs by itself."""
    lines, found = layer.lines, list[tuple[Fusion | None, Sequence[Line]]]()
    while lines:
        kinds = " ".join(line.kind for line in lines) + (f" {_END} " if layer.begins_with_norm else " ")
        fits = (row for row in FUSIONS if kinds.startswith(row.pattern + " ") and row.applies(layer, backend, batch))
        fusion = next(fits, None)
        count = 1 if fusion is None else len(fusion.pattern.removesuffix(f" {_END}").split())
        found.append((fusion, lines[:count]))
        lines = lines[count:]
    return found


def _runs_as_written(layer: LayerLines, batch: BatchClass) -> bool:
    """Whether there are no lines, or none at which a narrowed step would leave tokens behind."""
    narrows = layer.mixes_no_tokens or (layer.chain is not None and "attend" in layer.chain.kinds)
    return layer.chain is None or (batch.is_narrowed and not narrows)


def resolve(
    layer: LayerLines, backend: type[AttentionBackend], batch: BatchClass, *, behind_sum: bool
) -> tuple[Operator, ...]:
    """What runs a layer in steps of a class, its weights being final. behind_sum: the layer before leaves its sum."""
    operators: list[Operator] = []
    if behind_sum and (_runs_as_written(layer, batch) or not layer.begins_with_norm):
        operators.append(_add)
    if _runs_as_written(layer, batch):
        return (*operators, _as_written(layer, batch))
    if batch.is_narrowed:
        operators.append(_narrow if layer.mixes_no_tokens else _prepare_for_few(layer))
    is_narrowed = not batch.is_narrowed or layer.mixes_no_tokens  # by now, or for good
    alone: list[Line] = []
    for row, lines in match(layer, backend, batch):
        narrows_here = not is_narrowed and lines[0].kind == "attend"
        if alone and (row is not None or narrows_here or alone[-1].kind == "add"):
            operators.append(_one_by_one(alone))
            alone = []
        if narrows_here:
            operators.append(_narrow)
        if row is None:
            alone += lines
        else:
            operators.append(row.make(layer, lines))
        is_narrowed |= narrows_here or (row is not None and row.narrows)
    return (*operators, *([_one_by_one(alone)] if alone else []))


def runs_whole(layers: Sequence[LayerLines], backends: Sequence[type[AttentionBackend]]) -> bool:
    """Whether one native call runs all layers and the last norm, where a CPU has compiled operators for the cache."""
    attends = [backend for layer, backend in zip(layers, backends, strict=True) if layer.attention is not None]
    return (
        bool(attends)
        and all(backend.capability.paged_operator for backend in attends)
        and all(_is_known_whole(layer) for layer in layers)
    )


def _is_known_whole(layer: LayerLines) -> bool:
    """Whether compiled operators know a layer from end to end."""
    end = layer.standard or layer.tail
    if end is None or end.mlp is None or (isinstance(end, Tail) and end.mixer is None):
        return False
    return layer.attention is None or set(layer.attention.spec.facts) <= {"window", "soft_cap"}


_CLASSES = {
    "decode graph": BatchClass(in_graph=True, is_apart=True, is_narrowed=False),
    "other steps": BatchClass(in_graph=False, is_apart=False, is_narrowed=False),
    "other steps, last layer": BatchClass(in_graph=False, is_apart=False, is_narrowed=True),
}


def describe(
    layers: Sequence[LayerLines],
    backends: Sequence[type[AttentionBackend]],
    layers_of_each: int = 1,
    *,
    is_norm_plain: bool,
) -> list[tuple[str, str]]:
    """(steps and layers, what runs their lines), for people. layers_of_each: `layers` in a published one.

    is_norm_plain: operators know the last norm.
    """
    if is_norm_plain and runs_whole(layers, backends):
        return [
            (
                "all steps",
                f"layers 0-{len(layers) // layers_of_each - 1} and the last norm: ops.decoder, one native call",
            )
        ]
    rows = []
    for name, batch in _CLASSES.items():
        if batch.in_graph and not any(backend.capability.graphs for backend in backends):
            continue
        asked = list(zip(layers, backends, strict=True))[-1 if batch.is_narrowed else 0 :]
        texts: dict[str, dict[int, None]] = {}  # text -> published layers, in order
        for layer, backend in asked:
            texts.setdefault(_parts(layer, backend, batch), {})[layer.index // layers_of_each] = None
        rows += [(name, f"{_numbers(own)}: {text}") for text, own in texts.items()]
    return rows


def _parts(layer: LayerLines, backend: type[AttentionBackend], batch: BatchClass) -> str:
    if _runs_as_written(layer, batch):
        return "as its forward is written"
    parts = match(layer, backend, batch)
    texts = [(" ".join(line.kind for line in own), row.name if row else "itself") for row, own in parts]
    return "; ".join(f"{lines} -> {name}" for lines, name in texts)


def _numbers(layers: Collection[int]) -> str:
    """`layer 3`, or `layers 0-2, 5`."""
    runs: list[list[int]] = []
    for number in layers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return "layer" + "s" * (len(layers) > 1) + " " + ", ".join("-".join(map(str, run)) for run in runs)
