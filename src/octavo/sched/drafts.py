"""Drafts in the scheduler: how many a row verifies in a step, and what is taken back of those that were rejected.

Owns no state. A plan counts all its drafts as accepted, so lengths are upper bounds until its result comes; this file
holds both halves of that count. Knows no draft by name: they lie in the worker's rows. Invariant: no request reaches
more tokens than its `max_len`, however many drafts are accepted.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from octavo.plan import IntArray, StepPlan, StepResult
from octavo.request.request import Request, RequestRows, Status
from octavo.sched.kv_manager import KVManager


def count_drafts(rows: RequestRows, at: IntArray, wanted: IntArray, room: int, most: int, kv: KVManager) -> IntArray:
    """[N]: drafts that each of the rows `at`, which compute `wanted` tokens in a step, verifies as well; in order.

    A row that computes the one token that it sampled last takes `most`, or what is left of its `max_len` and of `room`,
    the step's budget. No draft is worth a preemption: where few blocks are free there are none.
    """
    known = rows.num_known[at]
    decodes = (wanted == 1) & (known > rows.num_entered[at])
    counts = np.minimum(most, rows.max_len[at] - known - 1) * decodes
    if kv.num_free_blocks < len(at) * kv.num_groups * (2 + most // kv.block_size):
        return np.zeros_like(counts)
    return np.clip(room - (counts.cumsum() - counts), 0, counts)


def take_back_rejected(plan: StepPlan, result: StepResult, owners: Mapping[int, Request]) -> None:
    """Count for each row of a step with drafts what was accepted, where the plan counted all."""
    drafted = dict(zip(plan.rows.tolist(), plan.num_drafts.tolist(), strict=True))
    for row, num_sampled in zip(result.rows.tolist(), result.num_sampled.tolist(), strict=True):
        request = owners[row]
        if request.status is Status.FINISHED:
            continue
        num_rejected = 1 + drafted[row] - num_sampled
        request.num_in_flight -= num_rejected
        if request.status is Status.RUNNING:
            request.num_computed -= num_rejected


def run_of(result: StepResult, row: int) -> list[int]:
    """The tokens that count of a row that sampled."""
    place = int((result.rows == row).argmax())
    tokens: list[int] = result.tokens[place, : result.num_sampled[place]].tolist()
    return tokens
