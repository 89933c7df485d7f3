"""How a drafter's logits become drafts: the likeliest token, or one drawn with the noise of the target's own draw.

The target draws at a position argmax(logits + noise), with noise that follows from the row's seed, the position and the
token's id. A drafter that draws with the same noise agrees with it more often than one that draws by itself: at least
with probability (1 - TV) / (1 + TV), TV being the distance of the two distributions (Daliri, Musco and Suresh,
arXiv 2408.07978). A drafter that is often wrong agrees more often still if it draws with a part of the noise, that is
at a lower temperature: nearer to its likeliest token. A row of temperature 0 takes that in any way. Knows no drafter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo.config.speculative import SpeculativeConfig
from octavo.ops.inputs.tensors import DraftRows
from octavo.ops.sampling import draw
from octavo.ops.sampling.drafts import draw_drafts

if TYPE_CHECKING:
    from octavo.speculate.step import DraftBatches, DraftStep


class DraftSampler:
    """Draws for all rows of a step."""

    def __init__(self, config: SpeculativeConfig, batches: DraftBatches, vocab_size: int) -> None:
        """By `draft_sample_method`. vocab_size: the target's."""
        self._noise = config.draft_noise if config.draft_sample_method == "probabilistic" else 0.0
        self._temperatures, self._seeds = batches.sampling
        self._vocab_size = vocab_size

    def rows(self, step: DraftStep, place: int) -> DraftRows:
        """Whose drafts number `place` are drawn, and how; they are written as `DraftStep.write` does."""
        return DraftRows(
            rows=step.batch.rows,
            live=(step.sample_of, step.batch.seq_lens),
            table=step.table,
            place=place,
            temperatures=self._temperatures,
            seeds=self._seeds,
            noise=self._noise,
            vocab_size=self._vocab_size,
        )

    def write(
        self, step: DraftStep, logits: torch.Tensor, place: int, target_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Drafts number `place` of the rows [R] int64, ids of the target, written.

        logits: [R, any] float32; target_ids: [any] int64, the target's id of each place; None: the places themselves.
        """
        return draw_drafts(logits, target_ids, self.rows(step, place))

    def draw_all(self, step: DraftStep, logits: torch.Tensor) -> torch.Tensor:
        """All drafts of the rows [R, N] int64 at once, not written. logits: [R * N, V] float32, row by row."""
        rows, count = step.batch.rows, len(logits) // step.batch.num_rows
        positions = step.totals()[:, None] + torch.arange(count, device=rows.device)
        tables = self._temperatures * self._noise, self._seeds
        tokens, _ = draw(logits.contiguous(), rows.repeat_interleave(count), *tables, positions.view(-1))
        return tokens.view(-1, count)
