"""Features that move or forbid single tokens: logit bias, allowed tokens, min_tokens, bad words.

Owns one class each, and the verbs that they share: add, remove, apply_staged and __call__(logits, batch). They touch
only the logits of rows that ask, and of those only the cells that the request names (allowed tokens: the whole row).
Tokens are read from the request table, so drafts before a position count like output. Invariant: a row's result depends
on its own tokens and parameters; a forbidden token has -inf, any other token keeps its bits.
"""

from __future__ import annotations

import abc

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.plan import NewRow
from octavo.sampling.rows import Entries, RowLists, SampleBatch

Columns = tuple[NDArray[np.generic], ...]

_INF = float("inf")


def forbid(logits: torch.Tensor, cells: torch.Tensor, where: torch.Tensor) -> None:
    """Set the flat `cells` of `logits` to -inf `where` true. A cell may be named twice, once true and once false.

    The minimum with +inf keeps every bit of a cell, and does not depend on the order of writes.
    """
    bound = torch.where(where, -_INF, _INF).to(logits.dtype)
    logits.view(-1).scatter_reduce_(0, cells, bound, "amin")


class _TokenLists(abc.ABC):
    """A feature of rows that name tokens, each with a number or tokens of its own."""

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        """No row asks at first."""
        self._lists = RowLists(max_num_rows, vocab_size, device)

    def add(self, new: NewRow) -> bool:
        """Stage what a row names. Returns whether it names anything."""
        columns = self._read(new)
        if columns is not None:
            self._lists.stage(new.row, *columns)
        return columns is not None

    def remove(self, row: int) -> None:
        """Forget `row`."""
        self._lists.remove(row)

    def apply_staged(self) -> None:
        """Bring staged rows to the device."""
        self._lists.apply_staged()

    def __call__(self, logits: torch.Tensor, batch: SampleBatch) -> None:
        """Change `logits` ([S, vocab_size] float32, contiguous) in place."""
        entries = self._lists.select(batch.rows_np)
        if entries is not None:
            self._change(logits, batch, entries)

    @abc.abstractmethod
    def _read(self, new: NewRow) -> Columns | None:
        """The columns of RowLists that a row asks for, None if it does not ask."""

    @abc.abstractmethod
    def _change(self, logits: torch.Tensor, batch: SampleBatch, entries: Entries) -> None:
        """Do it for the batch's entries."""


class LogitBias(_TokenLists):
    """Adds a number to the logits of given tokens."""

    def _read(self, new: NewRow) -> Columns | None:
        bias = new.sampling.logit_bias
        if not bias:
            return None
        return np.array(list(bias), np.int64), np.array(list(bias.values()), np.float32)

    def _change(self, logits: torch.Tensor, batch: SampleBatch, entries: Entries) -> None:
        logits.view(-1).index_add_(0, entries.cells, entries.columns[1])  # a row names a token once: no two writes meet


class AllowedTokens(_TokenLists):
    """Forbids all but the given tokens."""

    def _read(self, new: NewRow) -> Columns | None:
        allowed = new.sampling.allowed_token_ids
        return (np.array(allowed, np.int64),) if allowed else None

    def _change(self, logits: torch.Tensor, batch: SampleBatch, entries: Entries) -> None:
        flat = logits.view(-1)
        kept = flat.index_select(0, entries.cells)
        logits.index_fill_(0, entries.at, -_INF)
        flat.index_copy_(0, entries.cells, kept)


class MinTokens(_TokenLists):
    """Forbids EOS, ignored or not, and the stop tokens until the output has min_tokens tokens."""

    def _read(self, new: NewRow) -> Columns | None:
        """EOS and the tokens that would end a row, with the position up to which they may not."""
        if new.sampling.min_tokens <= 0:
            return None
        ends = sorted({*new.eos_token_ids, *(new.sampling.stop_token_ids or ())})
        if not ends:
            return None
        least = np.full(len(ends), new.num_prompt + new.sampling.min_tokens, np.int64)
        return np.array(ends, np.int64), least

    def _change(self, logits: torch.Tensor, batch: SampleBatch, entries: Entries) -> None:
        forbid(logits, entries.cells, batch.positions.index_select(0, entries.entry_at) < entries.columns[1])


class BadWords(_TokenLists):
    """Forbids the last token of a word when the output ends in the tokens before it."""

    def __init__(
        self, max_num_rows: int, vocab_size: int, device: torch.device, tokens: torch.Tensor, prompt_lens: torch.Tensor
    ) -> None:
        """`tokens` and `prompt_lens` are the request table's, see Sampler."""
        super().__init__(max_num_rows, vocab_size, device)
        self._tokens = tokens
        self._prompt_lens = prompt_lens

    def _read(self, new: NewRow) -> Columns | None:
        """The last token of each word, and those before it, right-aligned after -1."""
        words = [word for word in new.sampling.bad_words_token_ids or () if word]
        if not words:
            return None
        prefixes = np.full((len(words), max(map(len, words)) - 1), -1, np.int32)
        for prefix, word in zip(prefixes, words, strict=True):
            prefix[len(prefix) - len(word) + 1 :] = word[:-1]
        return np.array([word[-1] for word in words], np.int64), prefixes

    def _change(self, logits: torch.Tensor, batch: SampleBatch, entries: Entries) -> None:
        prefix = entries.columns[1]  # [E, W]
        rows = batch.rows.index_select(0, entries.entry_at)
        back = torch.arange(-prefix.shape[1], 0, device=prefix.device)
        place = batch.positions.index_select(0, entries.entry_at)[:, None] + back  # [E, W]
        actual = self._tokens[rows[:, None], place.clamp_min(0)]
        in_output = place >= self._prompt_lens.index_select(0, rows)[:, None]
        matches = ((prefix < 0) | ((prefix == actual) & in_output)).all(1)
        forbid(logits, entries.cells, matches)
