"""Log-probabilities of prompts: what rows are still owed of theirs, and how it is computed, some positions at a time.

Owns which row owes what. Knows rows, not requests. Invariant: how many positions are scored at a time bounds memory and
changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from octavo.device.batch import StepShape
from octavo.plan import IntArray, NewRow
from octavo.sampling.logprobs import GroupLogprobs, prompt_chunks
from octavo.sampling.sampler import Sampler

# Logits rows computed at a time.
ROWS_AT_A_TIME = 256
_ENTRIES = 1 << 20  # likeliest tokens of those rows together


class _Owed(msgspec.Struct):
    """What a row still owes."""

    next_position: int
    num_prompt: int  # and the token behind it, if that is scored
    num_logprobs: int
    temperature: float
    behind: int | None  # the token that is scored in the place of the one that is drawn


class PromptScores:
    """Scores the prompts of rows that asked."""

    def __init__(self, sampler: Sampler, logits: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> None:
        """logits: of hidden states [n, size]; tokens: the request table's."""
        self._sampler, self._logits, self._tokens = sampler, logits, tokens
        self._owed: dict[int, _Owed] = {}

    def add(self, new: NewRow) -> None:
        """A request entered a row."""
        if new.prompt_logprobs_start >= 0:
            wanted = new.sampling.prompt_logprobs
            assert wanted is not None, "a row that owes prompt log-probabilities was asked for them"
            behind = new.sampling.scored_token_id
            num_prompt = new.num_prompt + (behind is not None)
            temperature = new.sampling.prompt_logprobs_temperature
            self._owed[new.row] = _Owed(new.prompt_logprobs_start, num_prompt, wanted, temperature, behind)

    def remove(self, row: int) -> None:
        """Forget `row`."""
        self._owed.pop(row, None)

    def wanted(self, rows: IntArray) -> bool:
        """Whether one of these rows owes any."""
        return not self._owed.keys().isdisjoint(rows.tolist())

    def collect(self, work: StepShape, hidden: torch.Tensor) -> dict[int, list[GroupLogprobs]]:
        """Those of a step, by row. hidden: of all its tokens; that at position p scores the prompt's token p + 1."""
        collected: dict[int, list[GroupLogprobs]] = {}
        for entry, row in enumerate(work.rows.tolist()):
            owed = self._owed.get(row)
            if owed is None:
                continue
            end = int(work.seq_lens[entry])
            first = end - int(work.num_tokens[entry])
            start, stop = max(owed.next_position - 1, first), min(end, owed.num_prompt - 1)
            if start < stop:
                offset = int(work.query_start[entry]) - first
                targets = self._tokens[row, start + 1 : stop + 1].to(torch.int64)
                if owed.behind is not None and stop == owed.num_prompt - 1:
                    targets[-1] = owed.behind
                scored = hidden[start + offset : stop + offset]
                collected[row] = self.score(scored, targets, owed.num_logprobs, owed.temperature)
                owed.next_position = stop + 1
            if owed.next_position >= owed.num_prompt:
                del self._owed[row]
        return collected

    def score(
        self, hidden: torch.Tensor, targets: torch.Tensor, num_logprobs: int, temperature: float = 1.0
    ) -> list[GroupLogprobs]:
        """Of `targets` [n] int64 behind hidden [n, size]."""
        return [
            self._sampler.prompt_logprobs(self._logits(hidden[chunk]), targets[chunk], num_logprobs, temperature)
            for chunk in prompt_chunks(len(targets), max_rows=_rows_of_logits(num_logprobs))
        ]


def _rows_of_logits(num_top: int) -> int:
    """Prompt positions that are scored at a time. num_top: likeliest tokens at each, -1: the vocabulary's."""
    return min(ROWS_AT_A_TIME, max(_ENTRIES // (num_top if num_top > 0 else 1 << 18 if num_top else 1), 1))
