"""ModelState: what varies per architecture in preparing a step.

Owns the protocol. The default is in `default`; hybrid, encoder-only and pooling models bring their own. Knows batches,
not requests. Invariant: every host maximum it passes on is a bound on the device's lengths, and at most max_model_len.
"""

from __future__ import annotations

from typing import Protocol

from octavo.attention.base import ForwardContext
from octavo.device.batch import Batch
from octavo.plan import NewRow


class ModelState(Protocol):
    """Per-architecture preparation of a step."""

    def add(self, new: NewRow) -> None:
        """A request entered a row."""

    def prepare(self, batch: Batch, *, for_capture: bool = False) -> ForwardContext:
        """Prepare attention for the batch and say what the layers need. `for_capture`: a graph captures the step."""

    def finish(self) -> None:
        """Behind a step's layers: issue what they have left."""

    def prepare_drafts(self, batch: Batch, *, for_capture: bool = False, attends: bool = True) -> ForwardContext:
        """The same behind a step, for a pass over a drafter's own layers. attends: False of one that stores alone."""
