"""Drafts: tokens that are proposed ahead and verified in one step.

Owns the seam between the runner and whoever proposes, and the table of who does. Knows rows, not requests, and imports
no torch itself. Invariant: drafts decide how many steps an output takes, and none of its bits: a draft counts only
where it is the token that is drawn at its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from octavo.cache.specs import LayerSpec
from octavo.config.quoted import quoted
from octavo.config.settings import ConfigError
from octavo.config.speculative import BY_MODEL, FIELD, MAX_DRAFTS, SpeculativeConfig
from octavo.registry import Registry

if TYPE_CHECKING:
    from octavo.config.engine_config import Resolved
    from octavo.models.base import Model
    from octavo.speculate.step import DraftBatches, DraftStep

_HEAD = "octavo.speculate.head:HeadSpeculator"
_PARTS = ("load", "identity", "allocate", "propose")  # what a method's class has
SPECULATORS = Registry(
    "speculative method",
    {
        "ngram": "octavo.speculate.ngram:NgramSpeculator",
        "draft_model": "octavo.speculate.draft_model:DraftModelSpeculator",
        "eagle": _HEAD,
        "eagle3": _HEAD,
        "mtp": _HEAD,
        "dflash": "octavo.speculate.block:BlockSpeculator",
    },
)


class Speculator(Protocol):
    """Proposes what rows will say next. Made of a SpeculativeConfig, or by hand; nothing of a device is in it yet.

    One with layers of its own keeps an entry per known token there, as the target's layers do, in the same blocks. The
    step's tokens are entered again after each step: what a rejected draft has left is overwritten, and never read.
    """

    num_drafts: int
    """K: the most drafts that a row verifies in one step, from 1 to num_speculative_tokens. It does not change."""
    taps: Sequence[int]
    """Which of the target's hidden states it reads, of all tokens of a step: i is what enters layer i, the number of
    layers is what `Model.forward` gives, behind the last norm. Empty: none. Final once `load` was called."""
    layer_specs: Sequence[LayerSpec]
    """What its own layers keep: layers of attention, numbered behind the target's. Final once `load` was called."""
    num_next_tokens: int
    """How many tokens behind a token its entry in the layers follows from: one in EAGLE, in MTP one for each module.
    Blocks are then named by so many tokens behind them as well. Final once `load` was called."""
    num_lookahead: int
    """How many tokens behind a step's last one its layers are written for, at most. Final once `load` was called."""

    captures: bool
    """Whether a CUDA graph may hold `propose` behind a step in which every row verifies: it then always proposes K, or
    what a step of so many rows may have. Of ours with layers, graphs of plain steps hold its stores too. Else it is
    called behind the graph."""

    def load(self, target: Model, resolved: Resolved) -> int:
        """Load what it needs beside the target, which is loaded; the bytes. Raises ValueError for what does not suit.

        Once, before anything is sized. One that also has `build`, of the same form, makes all that is final once `load`
        was called there, reads no weights and wants none of the target's: `octavo doctor` plans by it.
        """

    def identity(self) -> str:
        """What its layers' content follows from beside the target, for names of blocks that leave the process."""

    def allocate(self, batches: DraftBatches) -> None:
        """The tables and the cache are there. Once, before the first step; what it keeps of a step is made here."""

    def propose(self, step: DraftStep) -> None:
        """Write up to K drafts behind the known tokens of the rows that sampled: see DraftStep.write.

        The host counts as many as it planned. A place that is left out is verified as it lies there, be it an earlier
        request's token: no bit depends on that, but the number of steps does, so better write all.

        Called after every step with rows, behind its commit. Nothing in it may wait for the device: on a GPU lengths
        and tokens are known there alone, and a graph may capture it.
        """


class NoSpeculator:
    """Nobody proposes."""

    num_drafts = 0
    taps: Sequence[int] = ()
    layer_specs: Sequence[LayerSpec] = ()
    num_next_tokens = num_lookahead = 0
    captures = False

    def build(self, target: Model, resolved: Resolved) -> int:
        """Nothing."""
        return 0

    def load(self, target: Model, resolved: Resolved) -> int:
        """Nothing."""
        return 0

    def identity(self) -> str:
        """Nothing is kept."""
        return ""

    def allocate(self, batches: DraftBatches) -> None:
        """Nothing is kept."""

    def propose(self, step: DraftStep) -> None:
        """Propose nothing."""


NO_SPECULATOR: Speculator = NoSpeculator()


def with_method(config: SpeculativeConfig) -> SpeculativeConfig:
    """These settings, with the method that the drafter's checkpoint says where nobody named it."""
    if config.method != BY_MODEL:
        return config
    from octavo.checkpoint.drafters import method_in
    from octavo.checkpoint.hub import find_model

    assert config.model, "a model says the method"
    return dataclasses.replace(config, method=method_in(find_model(config.model, config.revision)))


def make_speculator(config: SpeculativeConfig) -> Speculator:
    """Who proposes by these settings. Raises ConfigError for a method that is not known, does not load or has no K."""
    if not config.method:
        return NO_SPECULATOR
    config = with_method(config)
    try:
        found = SPECULATORS.resolve(config.method)
    except ValueError as error:
        raise _refuse(config.method, str(error)) from None
    lacking = [part for part in _PARTS if not hasattr(found, part)]
    if lacking or not isinstance(found, type):
        said = f"it has no {', '.join(lacking)}" if lacking else "it is no class"
        raise _refuse(config.method, f"is no speculator: {said} (see docs/speculation.md)")
    try:
        made: Speculator = found(config)
        check_num_drafts(made, config)
    except ValueError:  # its own words
        raise
    except Exception as error:
        raise _refuse(config.method, f"cannot be made: {type(error).__name__}: {error}") from error
    return made


def check_num_drafts(speculator: Speculator, config: SpeculativeConfig) -> None:
    """Raises ConfigError for a K that is no whole number from 1 to what the settings ask for; nobody has none."""
    asked, count = config.num_speculative_tokens, getattr(speculator, "num_drafts", None)
    if not config.method or (type(count) is int and 1 <= count <= asked):
        return
    limit = f"its num_drafts is {quoted(count)}, and must be a whole number from 1 to num_speculative_tokens={asked}"
    fits = type(count) is int and asked < count <= MAX_DRAFTS
    raise ConfigError(FIELD, config.method, limit, f"{'raise num_speculative_tokens, or ' * fits}set it in the class")


def check_ahead(speculator: Speculator, config: SpeculativeConfig, max_model_len: int, chunk: int) -> None:
    """Once it is loaded: raises ConfigError for numbers of tokens ahead that are none, by which rows lack blocks.

    And for more than rows can have blocks for, where that is more than the most drafts and a token need. chunk: tokens
    of the shortest in which states advance, whose inputs are kept for one chunk ahead; 0: the model has no states.
    """
    longest = (max_model_len, f"max_model_len={max_model_len}, the longest row")
    if max_model_len <= MAX_DRAFTS:
        longest = (MAX_DRAFTS + 1, f"{MAX_DRAFTS + 1}, for the most drafts and a token")
    why = f"{chunk}: the model has states that advance every {chunk} tokens, and so many have blocks ahead of a step"
    limits = {"num_lookahead": (chunk, why) if 0 < chunk < max_model_len else longest, "num_next_tokens": longest}
    for name, (most, why) in limits.items():
        count = getattr(speculator, name, None)
        if type(count) is not int or count < 0:
            limit = f"its {name} is {quoted(count)}, and must be a whole number of tokens, at least 0"
        elif count > most:
            limit = f"its {name} is {quoted(count)}, and must be at most {why}"
        else:
            continue
        raise ConfigError(FIELD, config.method, limit, "set it in the class")


def _refuse(name: str, limit: str) -> ConfigError:
    return ConfigError(FIELD, name, limit, "set its method")
