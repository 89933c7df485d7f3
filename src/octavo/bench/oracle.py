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
        longest = max(map(len, answers)) + self.num_drafts
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
        if step.num_drafts:
            begin = step.table.token_ids[:, :_KNOWN_BY].index_select(0, step.batch.rows)
            same = (begin[:, None, :] == self._answers[None, :, :_KNOWN_BY]).all(2)
            answer = same.to(torch.int32).argmax(1)
            at = (step.totals()[:, None] + self._places).clamp(max=self._answers.shape[1] - 1)
            right = self._answers.view(-1).index_select(0, (answer[:, None] * self._answers.shape[1] + at).view(-1))
            lot = _mixed(at * 40503 + answer[:, None] * 48271 + 12345) & _PARTS - 1
            wrong = (lot >= self._bar).to(torch.int32).view(-1)
            step.write_all(((right + wrong) % self._vocab_size).view(at.shape))


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers below 2**32 in which neighbours have nothing in common (the finalizer of MurmurHash3, Appleby 2011).

    A plain product spaces wrong drafts evenly: fewer are accepted in a row than by chance, at the same share.
    """
    numbers = (numbers ^ numbers >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    numbers = (numbers ^ numbers >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return numbers ^ numbers >> 16
