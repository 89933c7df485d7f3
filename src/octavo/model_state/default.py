"""DefaultModelState: decoder-only models whose only state is the KV cache.

Owns one attention backend per block table and hands each its inputs. Invariant: `prepare` runs once per step, before
the first layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.attention.base import AttentionBackend, AttentionInputs, ForwardContext, LayerContext, TableContext
from octavo.cache.pool import KVCachePool
from octavo.cache.specs import LayerSpec
from octavo.device.batch import Batch
from octavo.device.field_tables import FieldTables
from octavo.plan import NewRow


def layer_contexts(
    specs: Sequence[LayerSpec], tables: Sequence[TableContext], pool: KVCachePool
) -> tuple[LayerContext, ...]:
    """What each layer finds, of a pool whose table t is `tables[t]`'s."""
    assert len(pool.tables) == len(tables), "every block table has a backend"
    facts = zip(specs, pool.group_of_layer, pool.views, strict=True)
    return tuple(LayerContext(spec, tables[index], index, view) for spec, index, view in facts)


class DefaultModelState:
    """Full and sliding-window attention over the paged cache, and the request fields that mods read."""

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        backends: Sequence[AttentionBackend],
        pool: KVCachePool,
        fields: FieldTables,
    ) -> None:
        """`specs`: per layer. `backends[t]` serves the layers of the pool's table t."""
        self._tables, self._fields = [TableContext(backend) for backend in backends], fields
        self._layers = layer_contexts(specs, self._tables, pool)
        self._block_sizes = [block_map.kernel_block_size for block_map in pool.block_maps]

    def add(self, new: NewRow) -> None:
        """Take in what the request gives to mods."""
        self._fields.add(new.row, new.sampling.extra_args)

    def prepare(self, batch: Batch, *, for_capture: bool = False) -> ForwardContext:
        """Prepare attention for the batch and say what the layers need."""
        self._fields.apply()
        for index, (block_size, table) in enumerate(zip(self._block_sizes, self._tables, strict=True)):
            inputs = self._inputs(batch, index, block_size, batch.block_tables[index])
            table.prepare(inputs, for_capture=for_capture)
        return ForwardContext(
            layers=self._layers,
            tables=self._tables,
            positions=batch.positions,
            logit_tokens=batch.logit_tokens,
            for_capture=for_capture,
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
        )
