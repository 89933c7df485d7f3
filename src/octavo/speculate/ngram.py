"""N-grams: what a row says again, as it quotes its prompt or itself. Costs next to nothing and knows nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.cache.specs import LayerSpec
from octavo.config.speculative import SpeculativeConfig
from octavo.ops.lookup import look_up
from octavo.speculate.step import DraftBatches, DraftStep

if TYPE_CHECKING:
    from octavo.config.engine_config import Resolved
    from octavo.models.base import Model


class NgramSpeculator:
    """Looks up the longest end of a row, of prompt_lookup_min to prompt_lookup_max tokens, that stood before."""

    taps: Sequence[int] = ()
    layer_specs: Sequence[LayerSpec] = ()
    num_next_tokens = num_lookahead = 0
    captures = True

    def __init__(self, config: SpeculativeConfig) -> None:
        """Nothing is loaded."""
        self.num_drafts = config.num_speculative_tokens
        self._shortest, self._longest = config.prompt_lookup_min, config.prompt_lookup_max

    def build(self, target: Model, resolved: Resolved) -> int:
        """Nothing."""
        return 0

    def load(self, target: Model, resolved: Resolved) -> int:
        """Nothing."""
        return 0

    def identity(self) -> str:
        """No layers."""
        return ""

    def allocate(self, batches: DraftBatches) -> None:
        """Nothing is kept."""

    def propose(self, step: DraftStep) -> None:
        """See Speculator."""
        if step.num_drafts:
            look_up(
                step.table,
                step.batch.rows,
                step.live,
                shortest=self._shortest,
                longest=self._longest,
                num_drafts=step.num_drafts,
            )
