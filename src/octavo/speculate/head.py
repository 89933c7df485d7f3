"""Drafts of a head or of modules that read the target's hidden states: methods eagle, eagle3 and mtp.

Owns the passes behind a step. First the entries of all of the step's tokens are stored, each of the token behind it and
of the target's state; then each row's last one is asked, and every draft is the next entry's token. Entry p holds what
the target computed at p and the token at p + 1, so an entry is known once that token is; those of rejected drafts are
overwritten by the next step. Of several modules the one numbered i predicts i + 1 places ahead: each runs over all of
the step's tokens, and behind them the last one goes on by itself. Knows rows, not requests. Invariant: nothing here
waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from octavo.attention.base import forward_context
from octavo.cache.specs import LayerSpec
from octavo.checkpoint.digest import files_digest
from octavo.checkpoint.drafters import build_drafters, read_drafter
from octavo.checkpoint.hub import find_model
from octavo.checkpoint.loader import fill_model, weight_bytes
from octavo.config.speculative import SpeculativeConfig
from octavo.speculate.draw import DraftSampler
from octavo.speculate.own_layers import OwnLayers

if TYPE_CHECKING:
    from octavo.config.engine_config import Resolved
    from octavo.models.base import Model
    from octavo.models.drafters import DraftHead
    from octavo.speculate.step import DraftBatches, DraftStep


class HeadSpeculator:
    """See octavo.speculate.Speculator."""

    captures = True

    def __init__(self, config: SpeculativeConfig) -> None:
        """Nothing is read yet."""
        self._config = config
        self.num_drafts = self.num_lookahead = config.num_speculative_tokens
        self.num_next_tokens = 1
        self.taps: Sequence[int] = ()
        self.layer_specs: Sequence[LayerSpec] = ()
        self._drafters: list[DraftHead] = []

    def build(self, target: Model, resolved: Resolved) -> int:
        """See Speculator. Modules of multi-token prediction may lie in the target's own checkpoint."""
        config, dtype = self._config, getattr(torch, resolved.dtype)
        self._folder = find_model(config.model or resolved.model, config.revision)
        draft = read_drafter(self._folder, config.method, target.arch, resolved.load_format)
        self._drafters = build_drafters(draft, target, dtype)
        self.num_next_tokens = len(self._drafters)
        self._vocab_size = target.arch.vocab_size
        self.taps = tuple(self._drafters[0].taps) or (target.arch.num_layers,)
        self.layer_specs = [spec for drafter in self._drafters for spec in drafter.layer_specs]
        self._layers = OwnLayers([len(drafter.layer_specs) for drafter in self._drafters])
        return sum(weight_bytes(drafter, resolved) for drafter in self._drafters)

    def load(self, target: Model, resolved: Resolved) -> int:
        """Build and fill the drafter."""
        size = self.build(target, resolved)
        for drafter in self._drafters:
            device, seed = torch.device(resolved.device), resolved.seed
            fill_model(drafter, self._folder, resolved.quantization, resolved.load_format, device=device, seed=seed)
        return size

    def identity(self) -> str:
        """See Speculator."""
        return f"{self._config.method} {files_digest(self._folder)}"

    def allocate(self, batches: DraftBatches) -> None:
        """See Speculator."""
        self._batches = batches
        self._sampler = DraftSampler(self._config, batches, self._vocab_size)

    def propose(self, step: DraftStep) -> None:
        """See Speculator. Entries are stored whether drafts are asked for or not: later ones read them."""
        batches, layers, last = self._batches, self._layers, self._batches.last_accepted(step)
        *before, drafter = self._drafters
        number, tokens = len(before), batches.tokens_behind(step)
        states = self._drafters[0].begin(step.taps)
        for place, module in enumerate(before):
            with forward_context(layers.of(batches.again(step), place)):
                states = module.forward(tokens, states)
            if place < step.num_drafts:
                module.draw(states.index_select(0, last), self._sampler.rows(step, place))
            tokens = step.tokens_behind(2 + place)  # of which that draft may be one
        context = (batches.again if drafter.attends_to_store else batches.store)(step)
        with forward_context(layers.of(context, number)):
            drafter.store(tokens, states)
        for place in range(number, step.num_drafts):
            first = place == number
            if first:
                context = batches.last(step)
            with forward_context(layers.of(context, number)):
                states = drafter.forward(tokens, states, last if first else None, behind_draw=not first)
            if place + 1 < step.num_drafts:  # ahead of the draw: nothing is launched between that and the next pass
                context = batches.behind(step, place - number)
            tokens = drafter.draw(states, self._sampler.rows(step, place))
