"""The seam between the engine and a layer that keeps a state.

Owns StateInputs (one step's batch) and LayerStates: what such a layer finds of its own in the ForwardContext, its
states and inputs by block table. Knows no formula. Invariants: the tables are the persistent ones, by table row; they
hold blocks for all that a step's rows read, and null blocks where nothing is kept. What is read of a state was written
by an earlier step; of the inputs perhaps by this one, for another row: all of a step's are stored before any is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from octavo.cache.pool import KVCachePool, PartsView
from octavo.cache.specs import LayerSpec, StateSpec
from octavo.ops import states as ops
from octavo.ops.states import Store


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

    __slots__ = ("inputs",)

    inputs: StateInputs

    def prepare(self, inputs: StateInputs) -> None:
        """Take in a step."""
        self.inputs = inputs


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LayerStates:
    """What one layer keeps beside K and V, and where. Made once; `inputs` are those of the step."""

    chunk: int  # tokens
    block_size: int  # tokens of an entry of inputs
    states: tuple[Store, ...]  # by the spec's tensors
    kept_inputs: tuple[Store, ...]
    state_table: torch.Tensor  # [rows, columns] int32, block ids; entry i is the state behind (i + 1) * chunk tokens
    input_table: torch.Tensor  # [rows, columns] int32, block ids; entry i has block_size tokens
    step: StateStep

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

        Behind `store_inputs`: a row may have found what another one stores in this step.
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


NO_STATES = LayerStates(0, 0, (), (), torch.empty(0, 0), torch.empty(0, 0), StateStep())


def layer_states(
    specs: Sequence[LayerSpec], pool: KVCachePool, tables: Sequence[torch.Tensor], step: StateStep
) -> Mapping[int, LayerStates]:
    """Of each layer that keeps states. tables: the persistent ones, of the pool's tables in order."""
    found = {}
    for layer, view in pool.states.items():
        spec, inputs = specs[layer], pool.inputs[layer]
        assert isinstance(spec, StateSpec), "a layer in a group of states has their spec"
        size = inputs.parts.tensors[0].shape[0]
        found[layer] = LayerStates(
            spec.chunk, size, _stores(view, 0), _stores(inputs, 1), tables[view.table], tables[inputs.table], step
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
