"""PendingStep: a step's results on their way to the host.

Owns the event after which they are there, and the copies of log-probabilities that were started. Knows rows, not
requests. Invariant: nothing here waits for the device before `result` is called; tokens hold until the second step
after this one is issued, what `result` gives holds for good.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from octavo.plan import NO_INTS, IntArray, StepResult
from octavo.sampling.grammar import HELD
from octavo.sampling.logprobs import GroupLogprobs, to_prompt_logprobs, to_token_logprobs
from octavo.sampling.sampler import FAILURES

_TOKEN_BITS = 32
_TOKEN_MASK = (1 << _TOKEN_BITS) - 1


class PendingStep:
    """The results of one step; see `worker.executor.PendingResult`."""

    def __init__(
        self,
        step: int,
        packed: torch.Tensor,
        rows: IntArray = NO_INTS,
        logprobs: Sequence[GroupLogprobs] = (),
        prompt_logprobs: Mapping[int, Sequence[GroupLogprobs]] | None = None,
        *,
        event: torch.cuda.Event | None = None,
        failed: Mapping[int, str] | None = None,
        unsampled: IntArray = NO_INTS,
    ) -> None:
        """Start the copies.

        packed: [S] int64 on the host, token | failure << 32, once the device has written them; rows: [S], those that
        sampled; event: recorded here, after which they are there, where the step was issued to a GPU. failed: rows that
        were not computed, and why; unsampled: those of them that were to sample.
        """
        self._failed, self._unsampled = dict(failed or {}), unsampled
        self._step, self._rows, self._packed = step, rows, packed
        self._logprobs = [_to_host(numbers) for numbers in logprobs]
        self._prompt_logprobs = {
            row: [_to_host(numbers) for numbers in parts] for row, parts in (prompt_logprobs or {}).items()
        }
        self._event = event
        if event is not None:
            event.record()

    def result(self) -> StepResult:
        """Wait for the step and give its result; raises what the device raises."""
        if self._event is not None:
            self._event.synchronize()
        packed, rows = self._packed.numpy(), self._rows
        reasons = packed >> _TOKEN_BITS
        said = [(int(rows[place]), int(reasons[place])) for place in reasons.nonzero()[0]]
        failed = {row: FAILURES[reason] for row, reason in said if reason != HELD}
        tokens = packed & _TOKEN_MASK
        if self._failed:
            failed |= self._failed
            rows = np.concatenate([rows, self._unsampled])
            reasons = np.concatenate([reasons, np.zeros(len(self._unsampled), reasons.dtype)])
            tokens = np.concatenate([tokens, np.zeros(len(self._unsampled), tokens.dtype)])
        logprobs = {int(rows[place]): [entry] for place, entry in to_token_logprobs(self._logprobs).items()}
        return StepResult(
            step=self._step,
            rows=rows,
            tokens=tokens[:, None],
            num_sampled=(reasons != HELD).astype(np.int64),
            logprobs=logprobs,
            prompt_logprobs={row: to_prompt_logprobs(parts) for row, parts in self._prompt_logprobs.items()},
            failed=failed,
        )


def _to_host(numbers: GroupLogprobs) -> GroupLogprobs:
    """A copy on the host, under way."""
    if not numbers.ids.is_cuda:
        return numbers
    tensors = {name: getattr(numbers, name).to("cpu", non_blocking=True) for name in ("ids", "values", "ranks")}
    return dataclasses.replace(numbers, **tensors)
