"""What a speculator is given: a committed step, and the batches of its own passes behind it.

Owns DraftStep, the bounds of lengths in a drafter's metadata, and DraftBatches, which prepares attention for a
drafter's layers. Knows rows and slots, not requests, and no drafter. Invariants: everything here follows a step on the
device, nothing waits for it; a pass writes to no slot of a row that did not sample, and to none behind max_model_len.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
import torch

from octavo.attention.base import ForwardContext
from octavo.device.batch import Batch
from octavo.device.block_table import BlockTables
from octavo.ops.inputs import gather_inputs
from octavo.ops.inputs.tensors import GroupTables, RowTensors
from octavo.plan import IntArray, StepLimits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DraftStep:
    """A step behind its commit: R rows, padding included, with T tokens.

    The known tokens of a row are now table.token_ids[row, :table.total_len[row]]. Of row i's n queries in `batch` the
    first `table.num_computed[row] - (batch.seq_lens[i] - n)` were accepted; the others hold rejected drafts.
    """

    batch: Batch  # of the target: rows, tokens, positions, query_start and seq_lens as the step ran
    table: RowTensors
    sample_of: torch.Tensor  # [R] int32; -1: the entry did not sample, as padding and chunks of prompts
    taps: torch.Tensor  # [T, len(taps) * hidden_size], one behind the other; of no taps [0, 0]
    num_drafts: int  # the most that the next step may verify, at most K: no more need be written
    seq_lens: IntArray  # [R] host bounds of the lengths in `batch`, for backends that plan by each; of padding 0
    for_capture: bool = False  # a graph is captured: whatever a pass makes must stay

    @property
    def live(self) -> torch.Tensor:
        """[R] bool: the entries that sampled."""
        return (self.sample_of >= 0) & (self.batch.seq_lens > 0)

    def bounds(self, step: int, max_model_len: int) -> IntArray:
        """[R] bounds of the rows' lengths in pass number `step` behind this one, from 1 on; of padding 0."""
        return np.where(self.seq_lens > 0, np.minimum(self.seq_lens + step, max_model_len), 0)

    def totals(self) -> torch.Tensor:
        """[R] int64: the known tokens of each row."""
        return self.table.total_len.index_select(0, self.batch.rows).to(torch.int64)

    def last_accepted(self) -> torch.Tensor:
        """[R] int64: which of the T tokens is the last one of each row that counts, behind which its drafts go on."""
        batch = self.batch
        rejected = batch.seq_lens - self.table.num_computed.index_select(0, batch.rows)
        last = torch.maximum(batch.query_start[1:] - 1 - rejected, batch.query_start[:-1])
        return last.clamp(max=batch.total_tokens - 1).to(torch.int64)

    def tokens_behind(self, distance: int) -> torch.Tensor:
        """[T] int64: the tokens so many places behind the step's own, known ones or drafts; behind those anything."""
        batch, width = self.batch, self.table.token_ids.shape[1]
        number = torch.arange(batch.total_tokens, dtype=torch.int32, device=batch.rows.device)
        entry = torch.searchsorted(batch.query_start[1:], number, right=True).clamp(max=batch.num_rows - 1)
        at = (batch.positions + distance).clamp(max=width - 1)
        cells = batch.rows.index_select(0, entry) * width + at
        return self.table.token_ids.view(-1).index_select(0, cells).to(torch.int64)

    def write(self, place: int, drafts: torch.Tensor) -> None:
        """Write drafts [R], ids of the vocabulary, as the rows' drafts number `place`, from 0 on.

        Those of rows that did not sample, and such as would lie behind max_model_len, are not written.
        """
        self.write_all(drafts[:, None], place)

    def write_all(self, drafts: torch.Tensor, first: int = 0) -> None:
        """Write drafts [R, n] as the rows' drafts number `first` to `first + n - 1`: see `write`."""
        width, count = self.table.token_ids.shape[1], drafts.shape[1]
        at = self.totals()[:, None] + torch.arange(first, first + count, device=drafts.device)
        inside = self.live[:, None] & (at < width)
        # what is not to be written goes to a cell that it has, of the null row where the row has no place left
        cells = torch.where(inside, self.batch.rows[:, None] * width + at, self.table.token_ids.numel() - 1).view(-1)
        flat = self.table.token_ids.view(-1)
        flat.index_put_((cells,), torch.where(inside.view(-1), drafts.reshape(-1).to(torch.int32), 0))


def draft_max_seq_len(max_seq_len: int, step: int, max_model_len: int) -> int:
    """A bound of the lengths in pass number `step`, from 1 on, behind a step whose bound is `max_seq_len`."""
    return min(max_seq_len + step, max_model_len)


class Prepare(Protocol):
    """Of a model state, for a drafter's layers."""

    def __call__(self, batch: Batch, *, for_capture: bool = False) -> ForwardContext:
        """See ModelState.prepare_drafts."""


class DraftBatches:
    """Makes the batches of a drafter's passes, and prepares attention for them. Its tensors stay where they are."""

    def __init__(
        self,
        tables: BlockTables,
        table: RowTensors,
        block_tables: list[torch.Tensor],
        limits: StepLimits,
        prepare: Prepare,
        sampling: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """block_tables: a step's, which each pass gathers anew. prepare: of the model state, for the drafter's layers.

        table: the persistent rows, read and never written; sampling: temperatures (float32) and seeds (int64) of all
        rows.
        """
        self.sampling = sampling
        rows, device = limits.max_num_rows, table.token_ids.device
        self.limits, self.table, self.prepare = limits, table, prepare
        self.tables, self.block_tables = tables, block_tables
        self._input_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._next_positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._query_start = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._turn = torch.zeros(1, dtype=torch.int32, device=device)  # nobody's: a gather counts steps by it
        self._computed = torch.zeros_like(table.num_computed)
        gathered = tables.tables[: tables.num_gathered]
        self._slots = torch.full((len(gathered), rows), -1, dtype=torch.int64, device=device)
        sizes = tables.block_sizes[: tables.num_gathered]
        self._groups = GroupTables([own.data for own in gathered], block_tables, self._slots, sizes)

    def again(self, step: DraftStep) -> ForwardContext:
        """For a pass over the step's own tokens: the same positions and slots, all of them asked for.

        What it stores of rejected drafts the next step's pass overwrites. `step.batch` has ids and positions.
        """
        return self.prepare(dataclasses.replace(step.batch, logit_tokens=None), for_capture=step.for_capture)

    def last(self, step: DraftStep) -> ForwardContext:
        """For a pass over the last token of each row that counts, whose entry `again` stored: no slot is written."""
        return self._one(step, -1)[1]

    def next(self, step: DraftStep, offset: int) -> tuple[Batch, ForwardContext]:
        """For a pass over one token of each row: that at its last known place plus `offset`, from 0 on, and its slot.

        What was written as draft number `offset - 1` is the batch's input id. Rows that did not sample, and those that
        would leave max_model_len, run as rows of one token at position 0 and store nothing. To be asked in the order of
        offsets, and after `again`: block tables are the last ones that were asked for.
        """
        assert 0 <= offset <= self.limits.max_num_drafts, "a pass behind the last draft"
        return self._one(step, offset)

    def _one(self, step: DraftStep, offset: int) -> tuple[Batch, ForwardContext]:
        source, rows = step.batch, step.batch.num_rows
        position = step.totals() - 1 + offset
        live = step.live & (position >= 0) & (position < self.limits.max_model_len)
        self._computed.index_copy_(0, source.rows, torch.where(live, position, 0).to(torch.int32))
        batch = Batch(
            max_query_len=1,
            max_seq_len=draft_max_seq_len(source.max_seq_len, offset + 1, self.limits.max_model_len),
            max_long=0,
            rows=source.rows,
            input_ids=self._input_ids[:rows],
            positions=self._positions[:rows],
            query_start=self._query_start[: rows + 1],
            seq_lens=self._seq_lens[:rows],
            next_positions=self._next_positions[:rows],
            turn=self._turn,
            results=source.results,
            counts=source.counts,
            slot_mapping=[slots[:rows] for slots in self._slots],
            block_tables=[table[:rows] for table in self.block_tables],
            logit_tokens=None,
        )
        gather_inputs(batch, dataclasses.replace(self.table, num_computed=self._computed), self._groups)
        for slots in batch.slot_mapping:
            slots.masked_fill_(torch.ones_like(live) if offset < 0 else ~live, -1)
        return batch, self.prepare(batch, for_capture=step.for_capture)
