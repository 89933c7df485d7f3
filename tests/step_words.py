"""Plans and results as tests say and read them, row by row; the package has arrays."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from octavo.plan import NO_INTS, NO_PROMPT_LOGPROBS, IntArray, NewBlocks, PromptLogprobs, StepResult, TokenLogprobs


def result_of(
    step: int,
    rows: Sequence[int],
    tokens: Sequence[Sequence[int]],
    held: Container[int] = (),
    *,
    num_drafts: IntArray = NO_INTS,
    **fields: Any,
) -> StepResult:
    """From a list of tokens per row. A row with none has not sampled; held: rows that have drawn nothing.

    num_drafts: that the step verified, of its rows.
    """
    sampled = [(row, own) for row, own in zip(rows, tokens, strict=True) if own or row in held]
    counts = np.array([len(own) for _, own in sampled], np.int64)
    lines = np.zeros((len(sampled), max([1, *counts, *(1 + num_drafts)])), np.int64)
    for line, (_, own) in zip(lines, sampled, strict=True):
        line[: len(own)] = own
    return StepResult(
        step=step, rows=np.array([row for row, _ in sampled], np.int64), tokens=lines, num_sampled=counts, **fields
    )


def blocks_by_row(new: NewBlocks) -> dict[int, list[int]]:
    """The new blocks of each row."""
    found: dict[int, list[int]] = {}
    for row, block in zip(new.rows.tolist(), new.block_ids.tolist(), strict=True):
        found.setdefault(row, []).append(block)
    return found


def scores_of(entries: Sequence[TokenLogprobs]) -> PromptLogprobs:
    """From entries of one width."""
    if not entries:
        return NO_PROMPT_LOGPROBS
    token_ids = np.array([entry.token_ids for entry in entries], "<i4")
    return PromptLogprobs.of_arrays(
        token_ids, np.array([e.logprobs for e in entries], "<f4"), np.array([e.ranks for e in entries], "<i4")
    )


def entries_of(scores: PromptLogprobs) -> list[TokenLogprobs]:
    """An entry per position."""
    return [TokenLogprobs(*lines) for lines in zip(*(array.tolist() for array in scores.arrays()), strict=True)]
