"""Drafts of another, smaller model of the same vocabulary: method draft_model.

Owns the passes behind a step: the drafter computes the step's tokens as the target did, so that its own layers have
what theirs have, and then goes on from the token that was drawn. Its layers keep K and V in the same pool. Knows rows,
not requests. Invariants: an entry of its layers follows from the row's tokens up to it, so prefix hits serve it as they
serve the target; nothing here waits for the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from octavo.attention.base import forward_context
from octavo.cache.specs import AttentionSpec, LayerSpec
from octavo.checkpoint.config_reader.checkpoint import read_arch
from octavo.checkpoint.config_reader.fields import read_json
from octavo.checkpoint.digest import files_digest
from octavo.checkpoint.hub import find_model
from octavo.checkpoint.loader import build_model, fill_model, weight_bytes
from octavo.config.settings import ConfigError
from octavo.config.speculative import FIELD, SpeculativeConfig
from octavo.speculate.draw import DraftSampler
from octavo.speculate.own_layers import OwnLayers

if TYPE_CHECKING:
    from octavo.config.engine_config import Resolved
    from octavo.models.base import Model
    from octavo.speculate.step import DraftBatches, DraftStep


class DraftModelSpeculator:
    """See octavo.speculate.Speculator."""

    num_next_tokens, captures = 0, True
    taps: Sequence[int] = ()

    def __init__(self, config: SpeculativeConfig) -> None:
        """Nothing is read yet."""
        self._config = config
        self.num_drafts = self.num_lookahead = config.num_speculative_tokens
        self.layer_specs: Sequence[LayerSpec] = ()

    def build(self, target: Model, resolved: Resolved) -> int:
        """See Speculator. The drafter reaches as far as the target. Raises ValueError for another vocabulary."""
        config, dtype = self._config, getattr(torch, resolved.dtype)
        assert config.model, "draft_model has a model"
        folder = self._folder = find_model(config.model, config.revision)
        arch = dataclasses.replace(read_arch(folder), max_position=target.arch.max_position)
        if arch.vocab_size != target.arch.vocab_size:
            reason = f"it has {arch.vocab_size} tokens, the target {target.arch.vocab_size}"
            raise _refuse(config.model, reason)
        _check_tokenizers(config.model, folder, find_model(resolved.model))
        self._model = build_model(arch, dtype)
        if not all(isinstance(spec, AttentionSpec) and spec.causal for spec in self._model.layer_specs):
            raise _refuse(config.model, "a drafter has causal attention in all layers")
        self._vocab_size = arch.vocab_size
        self.layer_specs = tuple(self._model.layer_specs)
        self._layers = OwnLayers([len(self.layer_specs)])
        return weight_bytes(self._model, resolved)

    def load(self, target: Model, resolved: Resolved) -> int:
        """Build and fill the drafter."""
        size, device, seed = self.build(target, resolved), torch.device(resolved.device), resolved.seed
        fill_model(self._model, self._folder, resolved.quantization, resolved.load_format, device=device, seed=seed)
        return size

    def identity(self) -> str:
        """See Speculator."""
        return f"{self._config.method} {files_digest(self._folder)}"

    def allocate(self, batches: DraftBatches) -> None:
        """See Speculator."""
        self._batches = batches
        self._sampler = DraftSampler(self._config, batches, self._vocab_size)

    def propose(self, step: DraftStep) -> None:
        """See Speculator."""
        model, batch = self._model, step.batch
        with forward_context(self._layers.of(self._batches.again(step))):
            model.forward(batch.input_ids, batch.positions)
        drafts: torch.Tensor | None = None
        for place in range(step.num_drafts):
            own, context = self._batches.next(step, place, drafts)
            with forward_context(self._layers.of(context)):
                hidden = model.forward(own.input_ids, own.positions)
            drafts = self._sampler.write(step, model.logits(hidden), place)


def _refuse(model: str, reason: str) -> ConfigError:
    hint = "take a smaller model with the target's vocabulary that has causal attention in all layers"
    return ConfigError(FIELD, {"model": model}, reason, hint)


def _check_tokenizers(name: str, folder: Path, target: Path) -> None:
    """Raises ConfigError where both have a tokenizer.json and an id means other text in one than in the other."""
    paths = [place / "tokenizer.json" for place in (folder, target)]
    if not all(path.exists() for path in paths):
        return
    own, other = (_vocabulary(read_json(path)) for path in paths)
    differing = sorted(token for token in own.keys() & other.keys() if own[token] != other[token])
    if differing:
        raise _refuse(
            name, f"token {differing[0]} is {own[differing[0]]!r}, and {other[differing[0]]!r} of the target's"
        )


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Id -> token of a tokenizer.json."""
    model = tokenizer.get("model")
    known = model.get("vocab", {}) if isinstance(model, Mapping) else {}
    if isinstance(known, list):  # Unigram's: pairs of token and score
        known = {str(pair[0]): place for place, pair in enumerate(known) if isinstance(pair, list) and pair}
    found = {place: token for token, place in known.items() if isinstance(place, int)}
    added = tokenizer.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, Mapping) and isinstance(entry.get("id"), int):
            found[entry["id"]] = str(entry.get("content"))
    return found
