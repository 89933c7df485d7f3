"""Structured outputs: a row's output stays within the form that its request asks for.

Owns one matcher per row that asks, and forbids the tokens that its grammar does not allow next. Does not know how
forms are compiled (`octavo.grammar`), nor when a request ends: where its grammar is complete a row may sample EOS, and
where nothing else can follow it must. Invariant: what is forbidden is a function of the form and of the row's output
before the position, read from the request table, so preemption, replay, drafts and steps in flight need no care; an
allowed token keeps its bits.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.grammar import Grammars, Matcher
from octavo.plan import NewRow
from octavo.sampling.rows import RowSet, SampleBatch, to_device

_INF = float("inf")


class GrammarMask:
    """Forbids what the grammar of a row does not allow."""

    def __init__(
        self, max_num_rows: int, vocab_size: int, device: torch.device, tokens: torch.Tensor, grammars: Grammars
    ) -> None:
        """`tokens` is the request table's, see Sampler. Matchers work on the host: other devices are waited for."""
        self._rows = RowSet(max_num_rows, device)
        self._vocab_size = vocab_size
        self._device = device
        self._tokens = tokens
        self._tokens_np = tokens.numpy() if device.type == "cpu" else None
        self._grammars = grammars
        eight = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
        self._bounds = np.where(eight, _INF, -_INF).astype(np.float32)  # [256, 8]: of a byte of eight tokens' bits
        self._matchers: dict[int, tuple[Matcher, int]] = {}  # row -> its matcher, where its output begins

    def add(self, new: NewRow) -> bool:
        """Start a row's matcher. Returns whether it asks for a form."""
        structured = new.sampling.structured_outputs
        if structured is None:
            return False
        self._matchers[new.row] = self._grammars.matcher(structured), new.num_prompt
        self._rows.add(new.row)
        return True

    def remove(self, row: int) -> None:
        """Forget `row`."""
        self._rows.discard(row)
        self._matchers.pop(row, None)

    def apply_staged(self) -> None:
        """Nothing is staged: a matcher follows the request table."""

    def __call__(self, logits: torch.Tensor, batch: SampleBatch) -> None:
        """Change `logits` ([S, vocab_size] float32, contiguous) in place. A row without any allowed token gets -inf."""
        selection = self._rows.select(batch.rows_np)
        if selection is None:
            return
        bits = np.zeros((len(selection.at_np), self._grammars.num_words), np.int32)
        positions = batch.positions.index_select(0, selection.at).tolist()
        rows = batch.rows_np[selection.at_np].tolist()
        for line, row, position in zip(bits, rows, positions, strict=True):
            matcher, start = self._matchers[row]
            matcher.fill(self._output(row, start, position), line)
        # the minimum with +inf keeps every bit of a cell
        bounds = self._bounds[bits.view(np.uint8)].reshape(len(bits), -1)[:, : self._vocab_size]
        if self._tokens_np is not None:
            # tensors of this size would wake PyTorch's threads, which then compete with those of the operators
            logits_np = logits.numpy()
            for at, bound in zip(selection.at_np, bounds, strict=True):
                np.minimum(logits_np[at], bound, out=logits_np[at])
            return
        bound = to_device(bounds, self._device)
        logits.index_copy_(0, selection.at, torch.minimum(logits.index_select(0, selection.at), bound))

    def _output(self, row: int, start: int, position: int) -> NDArray[np.int32]:
        """What a row has generated."""
        if self._tokens_np is not None:
            return self._tokens_np[row, start:position]
        return self._tokens[row, start:position].cpu().numpy()
