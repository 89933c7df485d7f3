"""The batch of a pass over blocks: of each row its last known token, and behind it a place for every draft.

Owns the tensors of such a pass. Knows rows and slots, not requests, and no drafter. Invariants: everything here follows
a step on the device, nothing waits for it; a pass writes to no slot of a row that did not sample, to none behind
max_model_len, and to none before a row's last known token. Near max_model_len a row's block begins earlier, and
the places before its last known token are for nobody.
"""

from __future__ import annotations

import dataclasses

import msgspec
import torch

from octavo.attention.base import ForwardContext
from octavo.device.batch import Batch
from octavo.ops.inputs import gather_inputs
from octavo.ops.inputs.tensors import GroupTables
from octavo.speculate.step import DraftBatches, DraftStep, draft_max_seq_len


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One pass over R blocks of N + 1 places."""

    batch: Batch
    context: ForwardContext
    masked: torch.Tensor  # [R * (N + 1)] bool: places of drafts
    behind: torch.Tensor  # [R * N] int64: the places of each row's drafts, in order; of those beyond its end any


class BlockBatches:
    """Makes them. Its tensors stay where they are."""

    def __init__(self, batches: DraftBatches, most_drafts: int) -> None:
        """most_drafts: of a row in one pass."""
        self._batches = batches
        limits, table, tables = batches.limits, batches.table, batches.tables
        rows, device = limits.max_num_rows, table.token_ids.device
        tokens = min(rows * (1 + most_drafts), limits.max_num_tokens)
        self._input_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self._next_positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._turn = torch.zeros(1, dtype=torch.int32, device=device)  # nobody's: a gather counts steps by it
        self._computed = torch.zeros_like(table.num_computed)
        gathered = tables.tables[: tables.num_gathered]
        self._slots = torch.full((len(gathered), tokens), -1, dtype=torch.int64, device=device)
        sizes = tables.block_sizes[: tables.num_gathered]
        self._groups = GroupTables([own.data for own in gathered], batches.block_tables, self._slots, sizes)

    def most_drafts(self, step: DraftStep) -> int:
        """As many as a pass has room for behind `step`, which asks for `step.num_drafts`."""
        limits = self._batches.limits
        room = min(limits.max_num_tokens // max(step.batch.num_rows, 1), limits.max_model_len)
        return max(min(step.num_drafts, room - 1), 0)

    def of(self, step: DraftStep, count: int) -> Block:
        """The rows of `step` with `count` places for drafts each, at least one. After `DraftBatches.store`.

        Rows that did not sample run at position 0 and store nothing.
        """
        assert count <= step.num_drafts, "rows may have no blocks behind the drafts that a step asks for"
        source, rows, places, limits = step.batch, step.batch.num_rows, 1 + count, self._batches.limits
        device, tokens = source.rows.device, rows * places
        last = step.totals() - 1  # the place of the last known token
        live = step.live & (last >= 0)
        start = torch.where(live, last.clamp(max=limits.max_model_len - places), 0)
        self._computed.index_copy_(0, source.rows, start.to(torch.int32))
        batch = Batch(
            max_query_len=places,
            max_seq_len=draft_max_seq_len(source.max_seq_len, places, limits.max_model_len),
            max_long=rows,
            rows=source.rows,
            input_ids=self._input_ids[:tokens],
            positions=self._positions[:tokens],
            query_start=torch.arange(0, tokens + 1, places, dtype=torch.int32, device=device),
            seq_lens=self._seq_lens[:rows],
            next_positions=self._next_positions[:rows],
            turn=self._turn,
            results=source.results,
            counts=source.counts,
            slot_mapping=[slots[:tokens] for slots in self._slots],
            block_tables=[table[:rows] for table in self._batches.block_tables],
            logit_tokens=None,
        )
        gather_inputs(batch, msgspec.structs.replace(step.table, num_computed=self._computed), self._groups)
        position, own = batch.positions.view(rows, places), torch.where(live, last, limits.max_model_len)
        unwritten = (position < own[:, None]).view(-1)
        for slots in batch.slot_mapping:
            slots.masked_fill_(unwritten, -1)
        number = torch.arange(places, device=device)
        begin = torch.arange(rows, device=device) * places
        behind = (begin + last - start)[:, None] + number[1:]
        return Block(
            batch=batch,
            context=self._batches.prepare(batch, for_capture=step.for_capture),
            masked=(position > own[:, None]).view(-1),
            behind=torch.minimum(behind, (begin + count)[:, None]).view(-1),
        )
