"""DefaultModelState: decoder-only models of layers that attend, keep states, or keep nothing.

Owns one attention backend per block table of attention and hands each its inputs; layers with states share a step.
Invariant: `prepare` runs once per step, before the first layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from octavo.attention.base import (
    NO_TABLE,
    AttentionBackend,
    AttentionInputs,
    ForwardContext,
    LayerContext,
    TableContext,
)
from octavo.cache.pool import KVCachePool
from octavo.cache.specs import AttentionSpec, LayerSpec
from octavo.device.batch import Batch
from octavo.device.field_tables import FieldTables
from octavo.plan import NewRow
from octavo.states.base import NO_STATES, LayerStates, StateInputs, StateStep, layer_states
from octavo.states.choice import backend_of


def layer_contexts(
    specs: Sequence[LayerSpec], tables: Sequence[TableContext], pool: KVCachePool, states: Mapping[int, LayerStates]
) -> tuple[LayerContext, ...]:
    """What each layer finds, of a pool whose table t is `tables[t]`'s: those of attention come first."""
    attention = [table for table in pool.tables if isinstance(specs[table.layers[0]], AttentionSpec)]
    assert len(attention) == len(tables), "every block table of attention has a backend"
    found = []
    for layer, spec in enumerate(specs):
        if isinstance(spec, AttentionSpec):
            index = pool.group_of_layer[layer]
            found.append(LayerContext(spec, tables[index], index, pool.views[layer]))
        else:
            found.append(LayerContext(spec, NO_TABLE, -1, pool.buffer[:0], states.get(layer, NO_STATES)))
    return tuple(found)


class DefaultModelState:
    """Full and sliding-window attention over the paged cache, and the request fields that mods read."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        backends: Sequence[AttentionBackend],
        pool: KVCachePool,
        fields: FieldTables,
        block_tables: Sequence[torch.Tensor],
    ) -> None:
        """`specs`: per layer. `backends[t]` serves the layers of the pool's table t.

        block_tables: the persistent ones, of all of the pool's tables.
        """
        self._tables, self._fields = [TableContext(backend) for backend in backends], fields
        self._step = StateStep()
        states = layer_states(specs, pool, block_tables, self._step, backend_of(pool))
        self._keeps_states = bool(states)
        self._layers = layer_contexts(specs, self._tables, pool, states)
        self._block_sizes = [block_map.kernel_block_size for block_map in pool.block_maps[: len(backends)]]

    def add(self, new: NewRow) -> None:
        """Take in what the request gives to mods."""
        self._fields.add(new.row, new.sampling.extra_args)

    def prepare(self, batch: Batch, *, for_capture: bool = False) -> ForwardContext:
        """Prepare attention for the batch and say what the layers need."""
        self._prepare_tables(batch, for_capture=for_capture)
        if self._keeps_states:
            self._step.prepare(_state_inputs(batch, for_capture=for_capture))
        return self._context(batch, for_capture=for_capture)

    def finish(self) -> None:
        """See ModelState."""
        if self._keeps_states:
            self._step.finish()

    def prepare_drafts(self, batch: Batch, *, for_capture: bool = False, attends: bool = True) -> ForwardContext:
        """See ModelState."""
        self._prepare_tables(batch, for_capture=for_capture, attends=attends)
        return self._context(batch, for_capture=for_capture)

    def _prepare_tables(self, batch: Batch, *, for_capture: bool, attends: bool = True) -> None:
        for index, (block_size, table) in enumerate(zip(self._block_sizes, self._tables, strict=True)):
            inputs = self._inputs(batch, index, block_size, batch.block_tables[index])
            if attends:
                table.prepare(inputs, for_capture=for_capture)
            else:
                table.prepare_stores(inputs)

    def _context(self, batch: Batch, *, for_capture: bool) -> ForwardContext:
        return ForwardContext(
            layers=self._layers,
            tables=self._tables,
            positions=batch.positions,
            logit_tokens=batch.logit_tokens,
            for_capture=for_capture,
            prepared=[table.inputs for table in self._tables],
        )

    @staticmethod
    def _inputs(batch: Batch, index: int, block_size: int, block_table: torch.Tensor) -> AttentionInputs:
        return AttentionInputs(
            num_rows=batch.num_rows,
            num_tokens=batch.total_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            block_size=block_size,
            query_start=batch.query_start,
            seq_lens=batch.seq_lens,
            block_table=block_table,
            slot_mapping=batch.slot_mapping[index],
            rows=batch.rows,
            max_long=batch.max_long,
            apart=batch.apart,
            is_padded=batch.is_padded,
        )


def _state_inputs(batch: Batch, *, for_capture: bool) -> StateInputs:
    most_single = batch.num_rows - (0 if for_capture else batch.max_long)  # a graph's rows may be of either kind
    return StateInputs(
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        rows=batch.rows,
        query_start=batch.query_start,
        seq_lens=batch.seq_lens,
        positions=batch.positions,
        bounds=(most_single, batch.max_long),
        verifies=batch.verifies,
    )
