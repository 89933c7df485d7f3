"""How a drafter's logits become drafts: the likeliest token, or one drawn with the noise of the target's own draw.

The target draws at a position argmax(logits + noise), with noise that follows from the row's seed, the position and the
token's id. A drafter that draws with the same noise agrees with it more often than one that draws by itself: at least
with probability (1 - TV) / (1 + TV), TV being the distance of the two distributions (Daliri, Musco and Suresh,
arXiv 2408.07978). A drafter that is often wrong agrees more often still if it draws with a part of the noise, that is
at a lower temperature: nearer to its likeliest token. A row of temperature 0 takes that in any way. Knows no drafter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from octavo.config.speculative import SpeculativeConfig
from octavo.ops.sampling import draw

if TYPE_CHECKING:
    from octavo.speculate.step import DraftBatches, DraftStep


class Vocabulary(Protocol):
    """Which tokens a drafter's logits are of."""

    def token_ids(self, places: torch.Tensor) -> torch.Tensor:
        """The target's ids of places among the logits, both [S] int64."""


class DraftSampler:
    """Draws for all rows of a step."""

    def __init__(self, config: SpeculativeConfig, batches: DraftBatches, vocab_size: int) -> None:
        """By `draft_sample_method`. vocab_size: the target's."""
        self._noise = config.draft_noise if config.draft_sample_method == "probabilistic" else 0.0
        self._temperatures, self._seeds = batches.sampling
        self._vocab_size = vocab_size

    def draw(self, step: DraftStep, logits: torch.Tensor, vocabulary: Vocabulary, place: int) -> torch.Tensor:
        """Drafts number `place` of the rows [R] int64, ids of the target. logits: [R, any] float32."""
        return self._draw(logits, vocabulary, step.batch.rows, step.totals() + place)

    def draw_all(self, step: DraftStep, logits: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
        """All drafts of the rows [R, N] int64 at once. logits: [R * N, any] float32, row by row."""
        rows, count = step.batch.rows, len(logits) // step.batch.num_rows
        positions = step.totals()[:, None] + torch.arange(count, device=rows.device)
        return self._draw(logits, vocabulary, rows.repeat_interleave(count), positions.view(-1)).view(-1, count)

    def _draw(
        self, logits: torch.Tensor, vocabulary: Vocabulary, rows: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """A draft for each of `logits`, which is of a row and a position."""
        if not self._noise:
            return vocabulary.token_ids(logits.argmax(-1))
        if logits.shape[1] < self._vocab_size:  # noise is of the target's ids
            places = torch.arange(logits.shape[1], device=logits.device)
            every = logits.new_full((len(logits), self._vocab_size), -torch.inf)
            logits = every.index_copy_(1, vocabulary.token_ids(places), logits)
        tokens, _ = draw(logits.contiguous(), rows, self._temperatures * self._noise, self._seeds, positions)
        return tokens
