"""Observers of logits: what a model gave, seen before sampling, for comparisons between runs.

Owns the protocol and LogitsDigest. Knows rows and request ids, not what is done with the folds. Invariant: an observer
changes nothing; without one a step does no work for it.
"""

from __future__ import annotations

from typing import Protocol

import torch

from octavo.ops.digest import digest_rows
from octavo.plan import IntArray, NewRow


class LogitsObserver(Protocol):
    """Sees the logits of every step."""

    def add(self, new: NewRow) -> None:
        """A request entered a row."""

    def __call__(self, logits: torch.Tensor, rows: IntArray, positions: IntArray) -> None:
        """`logits` ([S, V] float32) choose the tokens at `positions` ([S]) of `rows` ([S]); they change afterwards.

        With drafts a position may come again: the last time is the one that counts, as behind a rejected draft.
        """


class LogitsDigest:
    """A 64-bit fold of the logits per request and position."""

    def __init__(self) -> None:
        """Nothing was seen."""
        self._ids: dict[int, str] = {}
        self._seen: list[tuple[list[str], list[int], torch.Tensor]] = []

    def add(self, new: NewRow) -> None:
        """See LogitsObserver."""
        self._ids[new.row] = new.request_id

    def __call__(self, logits: torch.Tensor, rows: IntArray, positions: IntArray) -> None:
        """See LogitsObserver. The folds stay on the device until they are taken."""
        ids = [self._ids[row] for row in rows.tolist()]
        self._seen.append((ids, positions.tolist(), digest_rows(logits)))

    def take(self) -> dict[str, dict[int, int]]:
        """What was seen since the last call: sequence id -> position -> fold."""
        found: dict[str, dict[int, int]] = {}
        for ids, positions, folds in self._seen:
            for sequence_id, position, fold in zip(ids, positions, folds.tolist(), strict=True):
                found.setdefault(sequence_id, {})[position] = fold
        self._seen.clear()
        return found
