"""PendingStep: a step's results on their way to the host.

Owns the event after which they are there, and the copies of log-probabilities that were started. Knows rows, not
requests. Invariant: nothing here waits for the device before `result` is called; tokens hold until the second step
after this one is issued, what `result` gives holds for good.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import torch

from octavo.device.batch import StepShape
from octavo.layers.expert_recorder import ExpertRecorder
from octavo.ops.copying import to_device
from octavo.plan import NO_INTS, IntArray, RoutedExperts, StepResult
from octavo.sampling.grammar import HELD
from octavo.sampling.logprobs import GroupLogprobs, to_prompt_logprobs, to_token_logprobs
from octavo.sampling.sampler import FAILURES
from octavo.sampling.support import Supports, to_ids

_Told = TypeVar("_Told")

_TOKEN_BITS = 32
_TOKEN_MASK = (1 << _TOKEN_BITS) - 1


class Runs(NamedTuple):
    """Where the S rows that sampled find what they drew, in a step with drafts."""

    entries: IntArray  # [S], of the step
    counts: torch.Tensor  # [>= R] int64 on the host: how many of an entry's tokens count
    num_drafts: IntArray  # [R], of the entries: a row has as many samples, and one more, in the order of rows

    @property
    def num_samples(self) -> IntArray:
        """[S]."""
        return 1 + self.num_drafts[self.entries]


NO_RUNS = Runs(NO_INTS, torch.zeros(0, dtype=torch.int64), NO_INTS)


class ChosenExperts(NamedTuple):
    """Which experts tokens were sent to, row after row."""

    counts: dict[int, int]  # row -> how many tokens of it
    positions: torch.Tensor  # [n] int64
    chosen: torch.Tensor  # [n, layers, ranks] int16


NO_CHOSEN = ChosenExperts({}, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 0, 0, dtype=torch.int16))


class Told(NamedTuple):
    """What is said of tokens that were drawn, for rows that asked."""

    logprobs: Sequence[GroupLogprobs]
    supports: Sequence[Supports]


NOTHING_TOLD = Told((), ())


def chosen_experts(
    recorder: ExpertRecorder, work: StepShape, positions: torch.Tensor, told: Collection[int]
) -> ChosenExperts:
    """Of all tokens that the rows in `told` have computed in the step at hand. positions: [tokens], of the batch."""
    at = np.isin(work.rows, list(told)).nonzero()[0]
    counts = {int(work.rows[entry]): int(work.num_tokens[entry]) for entry in at}
    places = [np.arange(work.query_start[entry], work.query_start[entry + 1], dtype=np.int64) for entry in at]
    tokens = to_device(np.concatenate(places), positions.device)
    return ChosenExperts(counts, positions.index_select(0, tokens), recorder.of(tokens))


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
        runs: Runs = NO_RUNS,
        supports: Sequence[Supports] = (),
        experts: ChosenExperts = NO_CHOSEN,
    ) -> None:
        """Start the copies.

        packed: [S, W] int64 on the host, token | failure << 32, once the device has written them, the first of each
        line; with `runs` [R, W]. rows: [S], those that sampled; event: recorded here, after which they are there, where
        the step was issued to a GPU. failed: rows that were not computed, and why; unsampled: those of them that were
        to sample.
        """
        self._failed, self._unsampled = dict(failed or {}), unsampled
        self._step, self._rows, self._packed, self._runs = step, rows, packed, runs
        self._logprobs = [_to_host(numbers) for numbers in logprobs]
        self._prompt_logprobs = {
            row: [_to_host(numbers) for numbers in parts] for row, parts in (prompt_logprobs or {}).items()
        }
        self._supports = [msgspec.structs.replace(own, bits=_copied(own.bits)) for own in supports]
        self._experts = experts
        if experts is not NO_CHOSEN:
            self._experts = experts._replace(positions=_copied(experts.positions), chosen=_copied(experts.chosen))
        self._event = event
        if event is not None:
            event.record()

    def result(self) -> StepResult:
        """Wait for the step and give its result; raises what the device raises."""
        if self._event is not None:
            self._event.synchronize()
        rows, held = self._rows, NO_INTS
        if self._runs is NO_RUNS:
            packed: IntArray = self._packed.numpy()[:, :1]
            reasons: IntArray = packed[:, 0] >> _TOKEN_BITS
            num_sampled: IntArray = (reasons != HELD).astype(np.int64)
        else:
            packed, num_sampled, reasons, held = self._take_runs()
        said = [(int(rows[place]), int(reasons[place])) for place in reasons.nonzero()[0]]
        failed = {row: FAILURES[reason] for row, reason in said if reason != HELD}
        tokens = packed & _TOKEN_MASK
        logprobs = self._by_row(to_token_logprobs(self._logprobs), num_sampled)
        given = to_ids(self._supports, self._drawn(tokens)) if self._supports else {}
        supports = self._by_row(given, num_sampled)
        if self._failed:
            failed |= self._failed
            count = len(self._unsampled)
            rows = np.concatenate([rows, self._unsampled])
            num_sampled = np.concatenate([num_sampled, np.ones(count, np.int64)])
            tokens = np.concatenate([tokens, np.zeros((count, tokens.shape[1]), tokens.dtype)])
        return StepResult(
            step=self._step,
            rows=rows,
            tokens=tokens,
            num_sampled=num_sampled,
            held=held,
            logprobs=logprobs,
            prompt_logprobs={row: to_prompt_logprobs(parts) for row, parts in self._prompt_logprobs.items()},
            supports=supports,
            experts=_split(self._experts) if self._experts.counts else {},
            failed=failed,
        )

    def _take_runs(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """[S, W] what was drawn, [S] how many of a line count, why the last of those failed, and rows that were held.

        The last two are empty where nothing failed.
        """
        packed, num_sampled = self._packed.numpy(), self._runs.counts.numpy()
        entries = self._runs.entries
        if len(entries) == len(packed):  # all rows
            num_sampled = num_sampled[: len(packed)].copy()
        else:
            packed, num_sampled = packed[entries], num_sampled[entries]
        if packed.max(initial=0) <= _TOKEN_MASK:
            return packed, num_sampled, NO_INTS, NO_INTS
        lines = np.arange(len(packed))
        last = packed[lines, num_sampled.clip(min=1) - 1]  # before it nothing failed
        behind = packed[lines, num_sampled.clip(max=packed.shape[1] - 1)] >> _TOKEN_BITS
        return packed, num_sampled, last >> _TOKEN_BITS, self._rows[behind == HELD]

    def _by_row(self, found: Mapping[int, _Told], num_sampled: IntArray) -> dict[int, list[_Told]]:
        """What is told of samples, by row, of the tokens that count."""
        if not found or self._runs is NO_RUNS:
            return {int(self._rows[place]): [entry] for place, entry in found.items()}
        num_samples = self._runs.num_samples
        firsts = num_samples.cumsum() - num_samples
        return {
            int(row): [found[place] for place in range(first, first + count)]
            for row, first, count in zip(self._rows, firsts.tolist(), num_sampled.tolist(), strict=True)
            if first in found
        }

    def _drawn(self, tokens: IntArray) -> IntArray:
        """The token of each sample; of one behind those that count, anything."""
        if self._runs is NO_RUNS:
            return tokens[:, 0]
        return np.concatenate([line[:count] for line, count in zip(tokens, self._runs.num_samples, strict=True)])


def _split(experts: ChosenExperts) -> dict[int, RoutedExperts]:
    positions, chosen = experts.positions.numpy().astype("<i4"), experts.chosen.numpy().astype("<i2", copy=False)
    found, start = {}, 0
    for row, count in experts.counts.items():
        end = start + count
        found[row] = RoutedExperts(positions[start:end].tobytes(), chosen[start:end].tobytes())
        start = end
    return found


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """On the host, under way."""
    return tensor.to("cpu", non_blocking=True)


def _to_host(numbers: GroupLogprobs) -> GroupLogprobs:
    """A copy on the host, under way."""
    if not numbers.ids.is_cuda:
        return numbers
    tensors = {name: getattr(numbers, name).to("cpu", non_blocking=True) for name in ("ids", "values", "ranks")}
    return msgspec.structs.replace(numbers, **tensors)
