"""Drafter: a speculator as a runner meets it.

Owns the hidden states that it reads of the target, and what it is told of a step. Knows rows, and no method. Invariant:
without a speculator a step does nothing for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo.attention.base import NO_TAPS, Taps
from octavo.device.batch import Batch
from octavo.ops.inputs.tensors import RowTensors
from octavo.plan import IntArray
from octavo.speculate import NO_SPECULATOR, Speculator

if TYPE_CHECKING:
    from octavo.speculate.step import DraftBatches


class Drafter:
    """Lets a speculator propose behind each step."""

    def __init__(self, table: RowTensors, speculator: Speculator = NO_SPECULATOR, taps: Taps = NO_TAPS) -> None:
        """`taps`: what the speculator reads of the target."""
        self._table, self._speculator, self.taps = table, speculator, taps

    @property
    def is_on(self) -> bool:
        """Whether there is a speculator."""
        return self._speculator.num_drafts > 0

    def reads_last(self, num_layers: int) -> bool:
        """Whether it reads what the last norm gives, of a model of so many layers."""
        return num_layers in self.taps.layers

    @property
    def captures(self) -> bool:
        """Whether a graph of a verification may hold its proposing."""
        return self._speculator.captures

    def propose(
        self, batch: Batch, sample_of: torch.Tensor, depth: int, seq_lens: IntArray, *, for_capture: bool = False
    ) -> None:
        """Behind a step's commit: drafts for the next one, at most `depth` of a row.

        sample_of: [R] int32, padding included; seq_lens: host bounds of the rows before it. for_capture: a graph is.
        """
        from octavo.speculate.step import DraftStep  # most engines never do this

        lengths = np.zeros(batch.num_rows, np.int64)
        lengths[: len(seq_lens)] = seq_lens
        self._speculator.propose(
            DraftStep(
                batch=batch,
                table=self._table,
                sample_of=sample_of,
                taps=self.taps.of(batch.total_tokens),
                num_drafts=depth,
                seq_lens=lengths,
                for_capture=for_capture,
            )
        )


def make_drafter(speculator: Speculator, batches: DraftBatches, hidden_size: int, dtype: torch.dtype) -> Drafter:
    """Let `speculator` allocate what it keeps, and keep what it reads: hidden states of `hidden_size` channels."""
    speculator.allocate(batches)
    size = len(speculator.taps) * hidden_size
    if not size:
        return Drafter(batches.table, speculator)
    device = batches.table.token_ids.device
    kept = torch.zeros((batches.limits.max_num_tokens, size), dtype=dtype, device=device)
    return Drafter(batches.table, speculator, Taps(speculator.taps, kept))
