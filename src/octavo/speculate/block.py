"""Drafts of a block at once: method dflash.

Owns the two passes behind a step. First the entries of the step's tokens are stored, which follow from the target's
hidden states alone; then each row's block is computed: its last token and a mask for every draft, at the places where
these would stand. What a block leaves in its slots the next step's entries overwrite: nothing reads it. Knows rows, not
requests. Invariants: an entry follows from the row's tokens up to it; nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from octavo.attention.base import forward_context
from octavo.cache.specs import LayerSpec
from octavo.checkpoint.digest import files_digest
from octavo.checkpoint.drafters import build_block_drafter
from octavo.checkpoint.hub import find_model
from octavo.checkpoint.loader import fill_model, weight_bytes
from octavo.config.speculative import SpeculativeConfig
from octavo.speculate.block_batch import BlockBatches
from octavo.speculate.draw import DraftSampler
from octavo.speculate.own_layers import OwnLayers

if TYPE_CHECKING:
    from octavo.config.engine_config import Resolved
    from octavo.models.base import Model
    from octavo.speculate.step import DraftBatches, DraftStep


class BlockSpeculator:
    """See octavo.speculate.Speculator."""

    captures = True
    num_next_tokens = 0

    def __init__(self, config: SpeculativeConfig) -> None:
        """Nothing is read yet."""
        self._config = config
        self.num_drafts = config.num_speculative_tokens
        self.num_lookahead = self.num_drafts + 1  # a block begins behind the step's last token, and is as long
        self.taps: Sequence[int] = ()
        self.layer_specs: Sequence[LayerSpec] = ()

    def build(self, target: Model, resolved: Resolved) -> int:
        """See Speculator. Raises ValueError for a drafter of another target."""
        config, dtype = self._config, getattr(torch, resolved.dtype)
        assert config.model, "dflash has a model"
        self._folder = find_model(config.model, config.revision)
        drafter = self._drafter = build_block_drafter(self._folder, target, dtype, self.num_drafts)
        self._vocab_size = target.arch.vocab_size
        self.taps, self.layer_specs = drafter.taps, drafter.layer_specs
        self._layers = OwnLayers([len(self.layer_specs)])
        return weight_bytes(drafter, resolved)

    def load(self, target: Model, resolved: Resolved) -> int:
        """Build and fill the drafter."""
        size, device, seed = self.build(target, resolved), torch.device(resolved.device), resolved.seed
        fill_model(self._drafter, self._folder, resolved.quantization, resolved.load_format, device=device, seed=seed)
        return size

    def identity(self) -> str:
        """See Speculator."""
        return f"{self._config.method} {files_digest(self._folder)}"

    def allocate(self, batches: DraftBatches) -> None:
        """See Speculator."""
        self._batches, self._blocks = batches, BlockBatches(batches, self.num_drafts)
        self._sampler = DraftSampler(self._config, batches, self._vocab_size)

    def propose(self, step: DraftStep) -> None:
        """See Speculator. Entries are stored whether drafts are asked for or not: later ones read them."""
        drafter = self._drafter
        with forward_context(self._layers.of(self._batches.store(step))):
            drafter.store(step.taps)
        count = self._blocks.most_drafts(step)
        if not count:
            return
        block = self._blocks.of(step, count)
        with forward_context(self._layers.of(block.context)):
            states = drafter.forward(torch.where(block.masked, drafter.mask_token, block.batch.input_ids))
        logits = drafter.logits(states.index_select(0, block.behind))
        step.write_all(self._sampler.draw_all(step, logits))
