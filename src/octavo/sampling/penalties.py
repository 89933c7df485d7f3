"""Repetition, frequency and presence penalties.

Owns their parameters per row and one scratch table of counts. Keeps no history: the counts of a row are made from its
tokens in the request table at every step and wiped again, which costs time in the length of the row, not in the
vocabulary, and memory for a few rows, not for all. Invariant: the result is a pure function of the row's tokens before
the position, so preemption, replay and drafts need no care; between calls the scratch table is zero.
"""

from __future__ import annotations

import msgspec
import torch

from octavo.device.staging import Queue, StagedTensor
from octavo.plan import NewRow
from octavo.sampling.rows import RowSet, SampleBatch, Selection

_NUM_SCRATCH_ROWS = 16  # logits rows at a time: bounds the scratch table at 16 * vocab_size * 4 bytes


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """Logits rows that are penalised together, n <= _NUM_SCRATCH_ROWS, and what stays the same between steps."""

    at: torch.Tensor  # [n] int64, places among the S
    rows: torch.Tensor  # [n] int64
    base: torch.Tensor  # [n, 1] int64, where each begins in the flat logits
    num_prompt: torch.Tensor  # [n, 1] int32
    repetition: torch.Tensor  # [n, 1] float32, as the next two
    frequency: torch.Tensor
    presence: torch.Tensor
    counts: bool  # whether any row has a frequency or presence penalty


class Penalties:
    """vLLM's three penalties, in its order."""

    def __init__(
        self,
        max_num_rows: int,
        vocab_size: int,
        device: torch.device,
        tokens: torch.Tensor,
        prompt_lens: torch.Tensor,
        queue: Queue,
    ) -> None:
        """`tokens` and `prompt_lens` are the request table's, see Sampler."""
        self._rows = RowSet(max_num_rows, device)
        self._vocab_size = vocab_size
        self._tokens = tokens
        self._prompt_lens = prompt_lens
        self._params = StagedTensor(max_num_rows, 3, torch.float32, device, queue)  # repetition, frequency, presence
        self._counting: set[int] = set()  # rows with a frequency or presence penalty
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)  # made by the first user
        self._selection: Selection | None = None
        self._parts: list[_Part] = []

    def add(self, new: NewRow) -> bool:
        """Stage the penalties of a row. Returns whether there are any."""
        repetition, frequency = new.sampling.repetition_penalty, new.sampling.frequency_penalty
        presence = new.sampling.presence_penalty
        counts = frequency != 0.0 or presence != 0.0
        if repetition == 1.0 and not counts:
            return False
        self._rows.add(new.row)
        self._params.stage(new.row, 0, (repetition, frequency, presence))
        if counts:
            self._counting.add(new.row)
        return True

    def remove(self, row: int) -> None:
        """Forget `row`; the last counting row's leaving frees the scratch table."""
        self._rows.discard(row)
        self._counting.discard(row)
        if not self._counting and len(self._counts):
            self._counts = self._counts.new_zeros((0, self._vocab_size))

    def apply_staged(self) -> None:
        """Nothing more: the queue brings a row's parameters."""

    def __call__(self, logits: torch.Tensor, batch: SampleBatch) -> None:
        """Change `logits` ([S, vocab_size] float32, contiguous) in place.

        A token that the prompt or the output holds: x / r if x > 0 else x * r. Then, with c its count in the output,
        x - frequency * c - presence * (c > 0).
        """
        selection = self._rows.select(batch.rows_np)
        if selection is not self._selection:
            self._selection = selection
            self._parts = [] if selection is None else self._split(selection, batch)
        for part in self._parts:
            self._apply(logits, batch, part)

    def _split(self, selection: Selection, batch: SampleBatch) -> list[_Part]:
        parts = []
        for start in range(0, len(selection.at_np), _NUM_SCRATCH_ROWS):
            at = selection.at[start : start + _NUM_SCRATCH_ROWS]
            rows = batch.rows.index_select(0, at)
            params = self._params.data.index_select(0, rows)
            rows_np = batch.rows_np[selection.at_np[start : start + _NUM_SCRATCH_ROWS]]
            parts.append(
                _Part(
                    at=at,
                    rows=rows,
                    base=at[:, None] * self._vocab_size,
                    num_prompt=self._prompt_lens.index_select(0, rows)[:, None],
                    repetition=params[:, :1],
                    frequency=params[:, 1:2],
                    presence=params[:, 2:],
                    counts=not self._counting.isdisjoint(rows_np.tolist()),
                )
            )
        return parts

    def _apply(self, logits: torch.Tensor, batch: SampleBatch, part: _Part) -> None:
        """Penalise the logits rows of `part`. L = max_position."""
        ids = self._tokens[:, : batch.max_position].index_select(0, part.rows).to(torch.int64)  # [n, L]
        place = torch.arange(batch.max_position, device=ids.device)
        known = place < batch.positions.index_select(0, part.at)[:, None]
        # what lies beyond the position is garbage: it becomes the row's first token, which is written twice alike
        ids = torch.where(known, ids, ids[:, :1])
        cells = (part.base + ids).view(-1)
        flat = logits.view(-1)
        x = flat.index_select(0, cells).view_as(ids)
        x = torch.where(x > 0, x / part.repetition, x * part.repetition)
        if part.counts:  # without it both terms are x - 0, which is x
            count = self._count(ids, known & (place >= part.num_prompt))
            x = x - part.frequency * count - part.presence * (count > 0)
        flat.index_copy_(0, cells, x.view(-1))

    def _count(self, ids: torch.Tensor, is_output: torch.Tensor) -> torch.Tensor:
        """How often each of `ids` ([n, L] int64) occurs in its row where `is_output`: [n, L] int32."""
        if not len(self._counts):
            self._counts = self._counts.new_zeros((_NUM_SCRATCH_ROWS, self._vocab_size))
        counts = self._counts[: len(ids)]
        counts.scatter_add_(1, ids, is_output.to(torch.int32))
        count = counts.gather(1, ids)
        counts.scatter_(1, ids, 0)
        return count
