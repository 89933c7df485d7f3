"""Drafts: tokens that are proposed ahead and verified in one step.

Owns the seam between the runner and whoever proposes. Knows rows, not requests, and imports no torch itself.
Invariant: drafts decide how many steps an output takes, and none of its bits: a draft counts only where it is the token
that is drawn at its place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from octavo.ops.inputs.tensors import RowTensors


class Speculator(Protocol):
    """Proposes what rows will say next."""

    @property
    def num_drafts(self) -> int:
        """K: the most drafts that a row verifies in one step. It does not change."""

    def propose(self, table: RowTensors, rows: torch.Tensor) -> None:
        """Write K drafts, ids of the vocabulary, behind the known tokens of `rows` ([S] int64), which just sampled.

        The known tokens of a row are token_ids[row, :total_len[row]]; drafts end where the table does. Called after
        every step, behind its commit: on a GPU lengths are known to the device alone.
        """


class NoSpeculator:
    """Nobody proposes."""

    num_drafts = 0

    def propose(self, table: RowTensors, rows: torch.Tensor) -> None:
        """Propose nothing."""


NO_SPECULATOR: Speculator = NoSpeculator()
