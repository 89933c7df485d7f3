"""What a speculator is given: a committed step, and the batches of its own passes behind it.

Owns DraftStep, the bounds of lengths in a drafter's metadata, and DraftBatches, which prepares attention for a
drafter's layers. Knows rows and slots, not requests, and no drafter. Invariants: everything here follows a step on the
device, nothing waits for it; a pass writes to no slot of a row that did not sample, and to none behind max_model_len.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import msgspec
import numpy as np
import torch

from octavo.attention.base import ForwardContext
from octavo.device.batch import Batch
from octavo.device.block_table import BlockTables
from octavo.ops.inputs.draft_passes import lay_out_passes
from octavo.ops.inputs.tensors import GroupTables, PassTensors, RowTensors
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
    num_drafts: (
        int  # the most that the next step may verify, at most K; no pass goes further: rows have no blocks there
    )
    seq_lens: IntArray  # [R] host bounds of the lengths in `batch`, for backends that plan by each; of padding 0
    for_capture: bool = False  # a graph is captured: whatever a pass makes must stay
    vocab_size: int = 0  # that drafts are brought into, of a speculator out of tree; 0: they lie in it

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

        Those of rows that did not sample, and such as would lie behind max_model_len, are not written. Raises as
        `write_all`.
        """
        self.write_all(drafts[:, None], place)

    def write_all(self, drafts: torch.Tensor, first: int = 0) -> None:
        """Write drafts [R, n] as the rows' drafts number `first` to `first + n - 1`: see `write`.

        Raises ValueError for a place in front of the first: known tokens are there.
        """
        if first < 0:
            raise ValueError(f"a row's drafts have numbers from 0 on, got {first}")
        if self.vocab_size:
            drafts = drafts.to(torch.int64).clamp(0, self.vocab_size - 1)
        width, count = self.table.token_ids.shape[1], drafts.shape[1]
        at = self.totals()[:, None] + torch.arange(first, first + count, device=drafts.device)
        inside = self.live[:, None] & (at < width)
        # what is not to be written goes to a cell that it has, of the null row where the row has no place left
        cells = torch.where(inside, self.batch.rows[:, None] * width + at, self.table.token_ids.numel() - 1).view(-1)
        flat = self.table.token_ids.view(-1)
        flat.index_put_((cells,), torch.where(inside.view(-1), drafts.reshape(-1).to(torch.int32), 0))

    def bring_into_vocabulary(self, most: int) -> None:
        """The tokens behind each row's known ones, as many as `most` drafts, are ids that can be embedded afterwards.

        For a speculator that may have written there by itself. Known tokens stay as they are.
        """
        width = self.table.token_ids.shape[1]
        at = (self.totals()[:, None] + torch.arange(most, device=self.batch.rows.device)).clamp(max=width - 1)
        cells, flat = (self.batch.rows[:, None] * width + at).view(-1), self.table.token_ids.view(-1)
        flat.index_put_((cells,), flat.index_select(0, cells).clamp(0, self.vocab_size - 1))


def draft_max_seq_len(max_seq_len: int, step: int, max_model_len: int) -> int:
    """A bound of the lengths in pass number `step`, from 1 on, behind a step whose bound is `max_seq_len`."""
    return min(max_seq_len + step, max_model_len)


class Prepare(Protocol):
    """Of a model state, for a drafter's layers."""

    def __call__(self, batch: Batch, *, for_capture: bool = False, attends: bool = True) -> ForwardContext:
        """See ModelState.prepare_drafts."""


class DraftBatches:
    """Makes the batches of a drafter's passes, and prepares attention for them. Its tensors stay where they are.

    All passes behind a step are laid out at once, by the first that is asked for.
    """

    def __init__(
        self,
        tables: BlockTables,
        table: RowTensors,
        block_tables: list[torch.Tensor],
        limits: StepLimits,
        prepare: Prepare,
        sampling: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """block_tables: a step's, which its passes gather anew. prepare: of the model state, for the drafter's layers.

        table: the persistent rows, read and never written; sampling: temperatures (float32) and seeds (int64) of all
        rows.
        """
        self.sampling = sampling
        rows, device = limits.max_num_rows, table.token_ids.device
        self.limits, self.table, self.prepare = limits, table, prepare
        self.tables, self.block_tables = tables, block_tables
        self._query_start = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._turn = torch.zeros(1, dtype=torch.int32, device=device)  # nobody's: no gather fills these batches
        gathered = tables.tables[: tables.num_gathered]
        # the last token's pass, and one for each place that may be asked for; passes begin at even addresses
        shape = limits.max_num_drafts + 2, -(-rows // 16) * 16
        slots = torch.full((len(gathered), *shape), -1, dtype=torch.int64, device=device)
        self._passes = PassTensors(
            last=torch.zeros(rows, dtype=torch.int64, device=device),
            tokens=torch.zeros(rows, dtype=torch.int64, device=device),
            behind=torch.zeros(limits.max_num_tokens, dtype=torch.int64, device=device),
            positions=torch.zeros(shape, dtype=torch.int64, device=device),
            next_positions=torch.zeros(shape, dtype=torch.int64, device=device),
            seq_lens=torch.zeros(shape, dtype=torch.int32, device=device),
            slots=slots,
        )
        sizes = tables.block_sizes[: tables.num_gathered]
        self._groups = GroupTables([own.data for own in gathered], block_tables, slots.flatten(1), sizes)
        self._step: DraftStep | None = None  # that the passes are laid out behind

    def again(self, step: DraftStep) -> ForwardContext:
        """For a pass over the step's own tokens: the same positions and slots, all of them asked for.

        What it stores of rejected drafts the next step's pass overwrites. `step.batch` has ids and positions.
        """
        return self.prepare(msgspec.structs.replace(step.batch, logit_tokens=None), for_capture=step.for_capture)

    def store(self, step: DraftStep) -> ForwardContext:
        """As `again`, for a pass that stores entries and does not attend."""
        batch = msgspec.structs.replace(step.batch, logit_tokens=None)
        return self.prepare(batch, for_capture=step.for_capture, attends=False)

    def last(self, step: DraftStep) -> ForwardContext:
        """For a pass over the last token of each row that counts, whose entry is stored: no slot is written."""
        return self._one(step, -1, self._laid_out(step).tokens[: step.batch.num_rows])[1]

    def next(self, step: DraftStep, offset: int, tokens: torch.Tensor | None = None) -> tuple[Batch, ForwardContext]:
        """For a pass over one token of each row: that at its last known place plus `offset`, from 0 on, and its slot.

        What was written as draft number `offset - 1` is the batch's input id: give it as `tokens` [R] int64 if it is at
        hand. Rows that did not sample, and those that would leave max_model_len, run as rows of one token at position 0
        and store nothing. To be asked in the order of offsets, and after `again`: block tables are the last ones that
        were asked for.
        """
        assert 0 <= offset < step.num_drafts, "rows may have no blocks behind the drafts that a step asks for"
        rows = step.batch.rows
        if tokens is None and not offset:
            tokens = self._laid_out(step).tokens[: len(rows)]
        elif tokens is None:
            cells = rows * self.table.token_ids.shape[1] + self._laid_out(step).positions[1 + offset, : len(rows)]
            tokens = self.table.token_ids.view(-1).index_select(0, cells).to(torch.int64)
        return self._one(step, offset, tokens)

    def behind(self, step: DraftStep, offset: int) -> ForwardContext:
        """What `next` prepares for the pass at that offset, whose tokens need not be there yet."""
        assert 0 <= offset < step.num_drafts, "rows may have no blocks behind the drafts that a step asks for"
        return self._one(step, offset, self._laid_out(step).tokens[: step.batch.num_rows])[1]

    def last_accepted(self, step: DraftStep) -> torch.Tensor:
        """[R] int64: which of the T tokens is the last one of each row that counts, behind which its drafts go on."""
        return self._laid_out(step).last[: step.batch.num_rows]

    def tokens_behind(self, step: DraftStep) -> torch.Tensor:
        """`DraftStep.tokens_behind` of distance 1, laid out with the passes: no drafts are among them that count."""
        return self._laid_out(step).behind[: step.batch.total_tokens]

    def _laid_out(self, step: DraftStep) -> PassTensors:
        if self._step is not step:
            limit = self.limits.max_model_len
            lay_out_passes(step.batch, self.table, step.sample_of, self._groups, self._passes, max_model_len=limit)
            self._step = step
        return self._passes

    def _one(self, step: DraftStep, offset: int, tokens: torch.Tensor) -> tuple[Batch, ForwardContext]:
        source, rows, number = step.batch, step.batch.num_rows, 1 + offset
        passes = self._laid_out(step)
        batch = Batch(
            max_query_len=1,
            max_seq_len=draft_max_seq_len(source.max_seq_len, number, self.limits.max_model_len),
            max_long=0,
            rows=source.rows,
            input_ids=tokens,
            positions=passes.positions[number, :rows],
            query_start=self._query_start[: rows + 1],
            seq_lens=passes.seq_lens[number, :rows],
            next_positions=passes.next_positions[number, :rows],
            turn=self._turn,
            results=source.results,
            counts=source.counts,
            slot_mapping=[slots[number, :rows] for slots in passes.slots],
            block_tables=[table[:rows] for table in self.block_tables],
            logit_tokens=None,
        )
        return batch, self.prepare(batch, for_capture=step.for_capture)
