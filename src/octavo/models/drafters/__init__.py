"""Drafters that read a target's hidden states: a head or module of one layer, and what all of them are asked for.

Owns the protocol. An entry of such a drafter's cache is of a token and of the hidden state in front of it: entry p
holds K and V of the token at p + 1 and of what the target computed at p. So entry p is known as soon as the token at
p + 1 is. Knows no rows and no drafts. Invariant: K and V of an entry follow from its token and its hidden state alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from octavo.models.base import Loadable
from octavo.ops.inputs.tensors import DraftRows
from octavo.registry import Registry

DRAFTERS = Registry(
    "method of drafting by hidden states",
    {
        "eagle": "octavo.models.drafters.eagle:EagleHead",
        "eagle3": "octavo.models.drafters.eagle3:Eagle3Head",
        "mtp": "octavo.models.drafters.mtp:MtpModule",
    },
)


class DraftHead(Loadable, Protocol):
    """Its layers are numbered from 0, in a context of their own."""

    attends_to_store: bool  # whether `store` is a pass that attends
    taps: Sequence[int]  # it reads the stream behind so many of the target's layers; empty: the last norm's result

    def begin(self, given: torch.Tensor) -> torch.Tensor:
        """The taps side by side [tokens, taps * size], or the target's hidden states -> what entries know of them."""

    def store(self, tokens: torch.Tensor, states: torch.Tensor) -> None:
        """Store K and V of entries: tokens [T] int64, states [T, size], of the context's positions and slots."""

    def forward(
        self, tokens: torch.Tensor, states: torch.Tensor, pick: torch.Tensor | None = None, *, behind_draw: bool = False
    ) -> torch.Tensor:
        """Entries as `store`'s, which attend as well -> [T, size], what a next entry knows, and logits follow from.

        pick: [T] int64, places at which tokens and states are taken from longer ones; None: all. behind_draw: whether
        the tokens are what was just drawn.
        """

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[T, size] of `forward` -> [T, vocabulary of the drafts] float32."""

    def draw(self, states: torch.Tensor, of: DraftRows) -> torch.Tensor:
        """Drafts of rows [R] int64, ids of the target, by the `logits` of [R, size] of `forward`; they are written."""
