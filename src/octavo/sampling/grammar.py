"""Structured outputs: a row's output stays within the form that its request asks for, once its reasoning has ended.

Owns one matcher per row that asks, and forbids the tokens that its grammar does not allow next. Does not know how
forms are compiled (`octavo.grammar`), where reasoning ends (`octavo.sampling.thinking`), nor when a request ends: where
its grammar is complete a row may sample EOS, and where nothing else can follow it must. Invariant: what is forbidden is
a function of the request and of the row's output before the position, so preemption, replay and steps in flight need no
care; an allowed token keeps its bits.

Matchers work on the host. On CPU they read the request table. On a GPU each drawn token is copied to the host as soon
as it is there, and the next call waits for that copy alone: the forward pass issued since then runs meanwhile.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.device.staging import PinnedRing
from octavo.grammar import Grammars
from octavo.ops.sample import allow_bits_
from octavo.plan import NewRow
from octavo.sampling.rows import RowSet, SampleBatch, Selection, to_device
from octavo.sampling.thinking import AfterThinking, Anything, Form

_INF = float("inf")


@dataclasses.dataclass(eq=False, slots=True)
class _Row:
    """A row that asks. `tokens` holds what it has said, on a GPU as far as the host knows."""

    matcher: Form
    start: int  # where its output begins in the request table
    tokens: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class _Drawn:
    """Tokens on their way to the host, and the rows that they continue."""

    rows: list[tuple[int, _Row]]
    tokens: NDArray[np.int64]
    event: torch.cuda.Event


class GrammarMask:
    """Forbids what the grammar of a row does not allow."""

    def __init__(
        self, max_num_rows: int, vocab_size: int, device: torch.device, tokens: torch.Tensor, grammars: Grammars
    ) -> None:
        """`tokens` is the request table's, see Sampler."""
        self._rows = RowSet(max_num_rows, device)
        self._vocab_size = vocab_size
        self._device = device
        self._tokens_np = tokens.numpy() if device.type == "cpu" else None
        self._ring = None if device.type == "cpu" else PinnedRing()
        self._grammars = grammars
        eight = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self._bounds = np.where(eight, _INF, -_INF).astype(np.float32)  # [256, 8]: of a byte of eight tokens' bits
        self._of_row: dict[int, _Row] = {}
        self._drawn: list[_Drawn] = []  # at most one, on a GPU

    def add(self, new: NewRow) -> bool:
        """Start a row's matcher. Returns whether it asks for a form, or for an end of its reasoning."""
        structured, thinking = new.sampling.structured_outputs, new.sampling.thinking
        if structured is None and thinking is None:
            return False
        form: Form = Anything() if structured is None else self._grammars.matcher(structured)
        if thinking is not None:
            budget = new.sampling.thinking_token_budget
            form = AfterThinking(self._grammars.closing_mark(thinking.closing), thinking, budget, form)
        said = [] if self._ring is None else list(map(int, new.token_ids[new.num_prompt :]))
        self._of_row[new.row] = _Row(form, new.num_prompt, said)
        self._rows.add(new.row)
        return True

    def remove(self, row: int) -> None:
        """Forget `row`."""
        self._rows.discard(row)
        self._of_row.pop(row, None)

    def apply_staged(self) -> None:
        """Nothing is staged: a matcher follows the row's tokens."""

    def __call__(self, logits: torch.Tensor, batch: SampleBatch) -> None:
        """Change `logits` ([S, vocab_size] float32, contiguous) in place. A row without any allowed token gets -inf."""
        selection = self._rows.select(batch.rows_np)
        if selection is None:
            return
        bits = np.zeros((len(selection.at_np), self._grammars.num_words), np.int32)
        rows = [self._of_row[row] for row in batch.rows_np[selection.at_np].tolist()]
        if self._tokens_np is None:
            self._settle()
            for line, row in zip(bits, rows, strict=True):
                row.matcher.fill(np.array(row.tokens, np.int32), line)
            allow_bits_(logits, selection.at, to_device(bits, self._device))
            return
        positions = batch.positions.index_select(0, selection.at).tolist()
        places = zip(bits, rows, batch.rows_np[selection.at_np].tolist(), positions, strict=True)
        for line, row, at, position in places:
            row.matcher.fill(self._tokens_np[at, row.start : position], line)
        self._hide_on_cpu(logits, selection, bits)

    def _hide_on_cpu(self, logits: torch.Tensor, selection: Selection, bits: NDArray[np.int32]) -> None:
        # numpy: tensors of this size would wake PyTorch's threads, which then compete with those of the operators;
        # the minimum with +inf keeps every bit of a cell
        bounds = self._bounds[bits.view(np.uint8)].reshape(len(bits), -1)[:, : self._vocab_size]
        logits_np = logits.numpy()
        for at, bound in zip(selection.at_np, bounds, strict=True):
            np.minimum(logits_np[at], bound, out=logits_np[at])

    def drawn(self, tokens: torch.Tensor, batch: SampleBatch) -> None:
        """Take note of what was drawn: `tokens` [S] int64 are the rows' next ones."""
        selection = self._rows.select(batch.rows_np)
        if self._ring is None or selection is None:
            return
        slot, event = self._ring.take(2 * len(selection.at_np))
        host = slot[: 2 * len(selection.at_np)].view(torch.int64)
        host.copy_(tokens.index_select(0, selection.at), non_blocking=True)
        event.record()
        rows = batch.rows_np[selection.at_np].tolist()
        self._drawn.append(_Drawn([(row, self._of_row[row]) for row in rows], host.numpy(), event))

    def _settle(self) -> None:
        """Wait for the tokens on their way, and append them to the rows that still are who they were."""
        for drawn in self._drawn:
            drawn.event.synchronize()
            for (row, was), token in zip(drawn.rows, drawn.tokens.tolist(), strict=True):
                if self._of_row.get(row) is was:
                    was.tokens.append(token)
        self._drawn.clear()
