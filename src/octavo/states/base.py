"""The seam between the engine and a layer that keeps a state.

Owns StateInputs (one step's batch), LayerStates (what such a layer finds of its own in the ForwardContext, its states
and inputs by block table) and the protocol of a StateBackend, which computes. Knows no formula. Invariants: the tables
are the persistent ones, by table row; they hold blocks for all that a step's rows read, and null blocks where nothing
is kept. What is read of another row, a state or what tokens brought, was written by an earlier step: so rows may be
computed in any order, and side by side.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import torch

from octavo.cache.pool import KVCachePool, PartsView
from octavo.cache.specs import LayerSpec, StateSpec
from octavo.ops import states as ops
from octavo.ops.states import Store

if TYPE_CHECKING:
    from octavo.ops.scan import ConvOperands, DeltaNetOperands, DeltaOperands, Mamba1Operands, Mamba2Operands

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateInputs:
    """One step's batch for layers with states. Row i owns tokens query_start[i] .. query_start[i + 1] - 1.

    They are the last of its `seq_lens[i]` tokens, drafts that may be rejected among them.
    """

    max_query_len: int  # a bound
    max_seq_len: int  # a bound
    rows: torch.Tensor  # [R] int64, the table row of each
    query_start: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32
    positions: torch.Tensor  # [T] int64
    # Host bounds of rows of one token, which come first, and of rows of several, which follow; None: in no order.
    bounds: tuple[int, int] | None = None
    verifies: bool = False  # rows of several tokens have drafts, as far as the host knows

    @property
    def num_queries(self) -> torch.Tensor:
        """[R] int64."""
        return self.query_start.diff().long()

    @property
    def num_computed(self) -> torch.Tensor:
        """[R] int64, exact: the tokens of each row before this step."""
        return self.seq_lens.long() - self.num_queries

    @property
    def token_rows(self) -> torch.Tensor:
        """[T] int64, the table row of each token."""
        return self.rows.repeat_interleave(self.num_queries)


class StateStep:
    """The step that all layers with states share."""

    __slots__ = ("_left", "_num_single", "inputs")

    inputs: StateInputs
    _num_single: torch.Tensor | None
    _left: dict[Hashable, tuple[Callable[[list[Any]], object], list[Any]]]

    def prepare(self, inputs: StateInputs) -> None:
        """Take in a step."""
        self.inputs, self._num_single, self._left = inputs, None, {}

    def leave(self, key: Hashable, run: Callable[[list[T]], object], told: T) -> None:
        """Leave work to the step's end: one `run` for all layers of the same key, with what each of them told."""
        self._left.setdefault(key, (run, []))[1].append(told)

    def finish(self) -> None:
        """Do what layers have left, behind all of them."""
        left, self._left = self._left, {}
        for run, told in left.values():
            run(told)

    @property
    def num_single(self) -> torch.Tensor:
        """[1] int32, exact: rows of one token. Computed once a step, for whoever asks."""
        if self._num_single is None:
            self._num_single = (self.inputs.query_start.diff() == 1).sum(0, keepdim=True, dtype=torch.int32)
        return self._num_single


class StateBackend(Protocol):
    """What computes of layers with states: prefill, decode and verification (1 + k tokens of a row) are one call.

    Each operator reads and keeps what bears its own names (`octavo.layers.recurrent` has them) in the layer's states
    and inputs. The step's tokens are T; a row's results depend on its own tokens alone, however they were cut. Of
    inputs it need keep no more than InputsPolicy says.
    """

    name: str

    def short_conv(self, own: LayerStates, conv: ConvOperands, x: torch.Tensor) -> torch.Tensor:
        """x [T, channels], rows may be strided -> the same shape and dtype."""

    def gated_delta(
        self, own: LayerStates, rule: DeltaOperands, qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> torch.Tensor:
        """qkv [T, channels of q, k and v], behind their convolution; a, b [T, heads] -> [T, heads * value_size]."""

    def delta_net(self, own: LayerStates, net: DeltaNetOperands, x: torch.Tensor) -> torch.Tensor:
        """x [T, size] -> [T, heads * value_size]: projections, convolution, delta rule, gated norm of each head."""

    def mamba2(self, own: LayerStates, scan: Mamba2Operands, xbc: torch.Tensor, dt: torch.Tensor) -> torch.Tensor:
        """xbc [T, channels of x, B and C], behind their convolution; dt [T, heads] -> [T, heads * head_size]."""

    def mamba1(
        self,
        own: LayerStates,
        scan: Mamba1Operands,
        x: torch.Tensor,
        dt: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
    ) -> torch.Tensor:
        """x, dt [T, channels], x behind its convolution; b, c [T, state_size] -> [T, channels]."""


@runtime_checkable
class NativeNets(StateBackend, Protocol):
    """One whose delta nets a decoder can call among its own compiled operators."""

    def net_address(self, own: LayerStates, net: DeltaNetOperands) -> int:
        """The C form of a layer's delta net, which stays; 0 where `delta_net` must be called."""

    def step_address(self, inputs: StateInputs) -> int:
        """The C form of a step's rows, for as long as no other step is asked for."""


@dataclasses.dataclass(frozen=True, eq=False)
class LayerStates:
    """What one layer keeps beside K and V, and where. Made once; `inputs` are those of the step."""

    chunk: int  # tokens
    block_size: int  # tokens of an entry of inputs
    states: tuple[Store, ...]  # by the spec's tensors
    kept_inputs: tuple[Store, ...]
    state_table: torch.Tensor  # [rows, columns] int32, block ids; entry i is the state behind (i + 1) * chunk tokens
    input_table: torch.Tensor  # [rows, columns] int32, block ids; entry i has block_size tokens
    step: StateStep
    state_names: tuple[str, ...]
    input_names: tuple[str, ...]
    backend: StateBackend | None = None  # None: the layer computes by itself

    def only(self, states: tuple[str, ...], inputs: tuple[str, ...]) -> LayerStates:
        """Those tensors of it that are named, in that order; the same object for the same names."""
        return self._only(states, inputs)

    @functools.cached_property
    def _only(self) -> Callable[[tuple[str, ...], tuple[str, ...]], LayerStates]:
        @functools.cache
        def only(states: tuple[str, ...], inputs: tuple[str, ...]) -> LayerStates:
            return dataclasses.replace(
                self,
                states=tuple(self.states[self.state_names.index(name)] for name in states),
                kept_inputs=tuple(self.kept_inputs[self.input_names.index(name)] for name in inputs),
                state_names=states,
                input_names=inputs,
            )

        return only

    @property
    def inputs(self) -> StateInputs:
        """Of the step."""
        return self.step.inputs

    def gather_states(self) -> tuple[torch.Tensor, ...]:
        """Per tensor [R, *shape]: of each row the state at the last border that it has computed; zeros at 0."""
        step = self.inputs
        borders = step.num_computed // self.chunk * self.chunk
        return ops.gather_states(self.states, self.state_table, step.rows, borders, self.chunk)

    def store_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        """Keep what the step's tokens bring, per tensor [T, *shape], as far as a later step may read it."""
        step = self.inputs
        ops.store_inputs(self.kept_inputs, self.input_table, step.token_rows, step.positions, self.block_size, inputs)

    def gather_open_inputs(self) -> tuple[torch.Tensor, ...]:
        """Per tensor [R, chunk, *shape]: what the tokens of each row's open chunk brought before this step, then zeros.

        Ahead of `store_inputs` or behind it: no row has found what another one stores in this step.
        """
        step = self.inputs
        return ops.gather_open_inputs(
            self.kept_inputs, self.input_table, step.rows, step.num_computed, self.chunk, self.block_size
        )

    def store_states(self, entries: torch.Tensor, borders: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """Keep states, per tensor [N, *shape], that rows `entries` of the step have at `borders`, [N] int64 each.

        A border lies behind what a row has computed before, and not behind its tokens of this step; where no block
        was reserved for it the state is not kept.
        """
        rows = self.inputs.rows[entries]
        ops.store_states(self.states, self.state_table, rows, borders, self.chunk, states)


NO_STATES = LayerStates(0, 0, (), (), torch.empty(0, 0), torch.empty(0, 0), StateStep(), (), ())


def layer_states(
    specs: Sequence[LayerSpec],
    pool: KVCachePool,
    tables: Sequence[torch.Tensor],
    step: StateStep,
    backend: StateBackend | None = None,
) -> Mapping[int, LayerStates]:
    """Of each layer that keeps states. tables: the persistent ones, of the pool's tables in order."""
    found = {}
    for layer, view in pool.states.items():
        spec, inputs = specs[layer], pool.inputs[layer]
        assert isinstance(spec, StateSpec), "a layer in a group of states has their spec"
        size = inputs.parts.tensors[0].shape[0]
        found[layer] = LayerStates(
            spec.chunk,
            size,
            _stores(view, 0),
            _stores(inputs, 1),
            tables[view.table],
            tables[inputs.table],
            step,
            tuple(tensor.name for tensor in spec.states),
            tuple(tensor.name for tensor in spec.inputs),
            backend,
        )
    return found


def _stores(view: PartsView, lead: int) -> tuple[Store, ...]:
    """Of each tensor. lead: axes of an entry's tensor before those of an item, 1 where an entry has several tokens."""
    parts = view.parts
    return tuple(
        ops.store_of(
            data, tensor.shape[lead:], depth=parts.depth - lead, first_part=view.slot * parts.count, blocks=parts.blocks
        )
        for data, tensor in zip(view.tensors, parts.tensors, strict=True)
    )
