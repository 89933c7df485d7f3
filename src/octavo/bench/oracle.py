"""An oracle: each draft is the true token with a given probability, for honest timing without a trained model.

Owns the method `octavo.bench.oracle:Oracle`, which is told the answers beforehand and so is of no use to anybody but a
benchmark. A drafter may run within it for its cost, and its drafts are dropped. Invariant: whether a draft is right
follows from its answer and its place alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from octavo.cache.specs import LayerSpec
from octavo.config.settings import ConfigError
from octavo.config.speculative import NO_SPECULATION, SpeculativeConfig, read_speculative
from octavo.ops.inputs.tensors import RowTensors
from octavo.speculate import make_speculator
from octavo.speculate.step import DraftBatches, DraftStep

if TYPE_CHECKING:
    from octavo.config.engine_config import Resolved
    from octavo.models.base import Model

_KNOWN_BY = 16  # first tokens by which a row's answer is found
_PARTS = 1 << 16


class Oracle:
    """Options: `answers`, a JSON file of lists, prompts and outputs; `probability`; `cost`, a drafter's config."""

    def __init__(self, config: SpeculativeConfig) -> None:
        """Raises ConfigError for options that are missing or unknown."""
        options = dict(config.options)
        if not {"answers", "probability"} <= options.keys() <= {"answers", "probability", "cost"}:
            raise ConfigError("speculative_config", options, "an oracle is told answers, probability and cost alone")
        self.num_drafts = config.num_speculative_tokens
        self._path, self._bar = Path(options["answers"]), int(float(options["probability"]) * _PARTS)
        cost = read_speculative(options["cost"]) if options.get("cost") else NO_SPECULATION
        self._cost = make_speculator(cost)
        self.taps: Sequence[int] = ()
        self.layer_specs: Sequence[LayerSpec] = ()
        self.num_next_tokens, self.num_lookahead = self._cost.num_next_tokens, self._cost.num_lookahead
        self.captures = True

    def load(self, target: Model, resolved: Resolved) -> int:
        """The answers, and the drafter that is run for its cost."""
        size = self._cost.load(target, resolved)
        self.taps, self.layer_specs = self._cost.taps, self._cost.layer_specs
        self.num_next_tokens, self.num_lookahead = self._cost.num_next_tokens, self._cost.num_lookahead
        self.captures = self._cost.captures or not self._cost.num_drafts
        answers = json.loads(self._path.read_text())
        longest = max(_KNOWN_BY, *map(len, answers)) + self.num_drafts
        padded = [answer + [0] * (longest - len(answer)) for answer in answers]
        self._answers = torch.tensor(padded, dtype=torch.int32, device=resolved.device)
        self._places = torch.arange(self.num_drafts, device=resolved.device)
        self._vocab_size = target.arch.vocab_size
        return size

    def identity(self) -> str:
        """Of whose cost it has."""
        return self._cost.identity()

    def allocate(self, batches: DraftBatches) -> None:
        """Nothing of its own."""
        self._cost.allocate(batches)

    def propose(self, step: DraftStep) -> None:
        """See Speculator."""
        if self._cost.num_drafts:
            self._cost.propose(step)
        if not step.num_drafts:
            return
        if step.batch.rows.is_cuda:
            self._foretell(step)
        else:
            rows, vocab_size = step.batch.rows, self._vocab_size
            step.write_all(drafts_of(step.table, rows, self._answers, self._places, self._bar, vocab_size))

    def _foretell(self, step: DraftStep) -> None:
        """The same by one kernel, as what is timed is not the oracle; of all drafts, whatever the step asks for."""
        from octavo.bench.oracle_gpu import foretell  # needs Triton

        foretell(
            step.table,
            step.batch.rows,
            (step.sample_of, step.batch.seq_lens),
            self._answers,
            num_drafts=self.num_drafts,
            known_by=_KNOWN_BY,
            bar=self._bar,
            parts=_PARTS,
            vocab_size=self._vocab_size,
        )


def drafts_of(
    table: RowTensors, rows: torch.Tensor, answers: torch.Tensor, places: torch.Tensor, bar: int, vocab_size: int
) -> torch.Tensor:
    """Drafts [R, N] of rows [R], by their known tokens, at N places behind. answers: [any, length] int32."""
    begin = table.token_ids[:, :_KNOWN_BY].index_select(0, rows)
    same = (begin[:, None, :] == answers[None, :, :_KNOWN_BY]).all(2)
    answer = same.to(torch.int32).argmax(1)
    totals = table.total_len.index_select(0, rows).to(torch.int64)
    at = (totals[:, None] + places).clamp(max=answers.shape[1] - 1)
    right = answers.view(-1).index_select(0, (answer[:, None] * answers.shape[1] + at).view(-1))
    lot = _mixed(at * 40503 + answer[:, None] * 48271 + 12345) & _PARTS - 1
    wrong = (lot >= bar).to(torch.int32).view(-1)
    return ((right + wrong) % vocab_size).view(at.shape)


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers below 2**32 in which neighbours have nothing in common (the finalizer of MurmurHash3, Appleby 2011).

    A plain product spaces wrong drafts evenly: fewer are accepted in a row than by chance, at the same share.
    """
    numbers = (numbers ^ numbers >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    numbers = (numbers ^ numbers >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return numbers ^ numbers >> 16
