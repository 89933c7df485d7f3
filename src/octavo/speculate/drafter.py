"""Drafter: a speculator as a runner meets it.

Owns the hidden states that it reads of the target, what it is told of a step, and what becomes of one out of tree that
fails. Knows rows, and no method. Invariants: without a speculator a step does nothing for it; one that is not the
engine's ends no step, unless the device fails, whatever it raises and whatever it writes as drafts.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from octavo.attention.base import NO_TAPS, Taps
from octavo.config.quoted import describe
from octavo.config.settings import ConfigError
from octavo.config.speculative import FIELD
from octavo.device.batch import Batch
from octavo.ops.inputs.tensors import RowTensors
from octavo.plan import IntArray
from octavo.speculate import NO_SPECULATOR, Speculator
from octavo.startup.interrupts import may_be_a_signal

if TYPE_CHECKING:
    from octavo.checkpoint.arch import Arch
    from octavo.config.engine_config import Resolved
    from octavo.device.graphs import GraphKey
    from octavo.models.base import Model
    from octavo.speculate.step import DraftBatches

_LOG = logging.getLogger(__name__)
_OF_DEVICE = (MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)


class Drafter:
    """Lets a speculator propose behind each step."""

    def __init__(
        self,
        table: RowTensors,
        speculator: Speculator = NO_SPECULATOR,
        taps: Taps = NO_TAPS,
        *,
        vocab_size: int = 0,
    ) -> None:
        """`taps`: what the speculator reads of the target. vocab_size: the target's."""
        self._table, self._speculator, self.taps = table, speculator, taps
        self._is_ours = _is_ours(speculator)
        self._vocab_size = 0 if self._is_ours else vocab_size
        self._is_told = False
        self._stores_within = self._is_ours and len(speculator.layer_specs) > 0
        self._without: set[GraphKey] = set()  # of plain steps, whose graphs hold no stores
        self._broke = False  # stores that were captured raised, and not for want of memory

    @property
    def is_on(self) -> bool:
        """Whether there is a speculator."""
        return self._speculator.num_drafts > 0

    def reads_last(self, num_layers: int) -> bool:
        """Whether it reads what the last norm gives, of a model of so many layers."""
        return num_layers in self.taps.layers

    def is_within(self, key: GraphKey) -> bool:
        """Whether the graph of this key holds its proposing; one of steps without drafts, its stores."""
        if key.num_drafts:
            return self._speculator.captures
        is_without = bool(self._without) and key in self._without  # asked each step: mostly there are none
        return self._stores_within and not is_without and self._speculator.captures

    def leave_graphs(self, error: RuntimeError, key: GraphKey) -> bool:
        """A plain step's graph could not be captured: it is to hold no stores. False where it would hold none anyway.

        Nor is any other one from now on, if it is the stores that cannot be captured: if they raised, and not for
        want of memory. Another time there may be room, and what else breaks a capture is no fault of theirs. Graphs
        that were captured before store as they did, and what is stored behind them again is the same.
        """
        if not self.is_within(key):
            return False
        which = "graphs of plain steps are" if self._broke else f"the graph of plain steps of {key.num_rows} rows is"
        _LOG.warning("%s captured without the drafter's stores: %s", which, describe(error))
        if self._broke:
            self._stores_within = False
        else:
            self._without.add(key)
        return True

    def propose(
        self, batch: Batch, sample_of: torch.Tensor, depth: int, seq_lens: IntArray, *, for_capture: bool = False
    ) -> None:
        """Behind a step's commit: drafts for the next one, at most `depth` of a row.

        sample_of: [R] int32, padding included; seq_lens: host bounds of the rows before it. for_capture: a graph is.
        """
        from octavo.speculate.step import DraftStep  # most engines never do this

        self._broke = False
        lengths = np.zeros(batch.num_rows, np.int64)
        lengths[: len(seq_lens)] = seq_lens
        step = DraftStep(
            batch=batch,
            table=self._table,
            sample_of=sample_of,
            taps=self.taps.of(batch.total_tokens),
            num_drafts=depth,
            seq_lens=lengths,
            for_capture=for_capture,
            vocab_size=self._vocab_size,
        )
        try:
            self._speculator.propose(step)
        except BaseException as error:
            self._broke = for_capture and not depth and not _is_of_memory(error)
            if self._is_ours or isinstance(error, _OF_DEVICE) or may_be_a_signal(error):
                raise
            self._tell(error, for_capture)
        if self._vocab_size:  # of one that may have written the table by itself
            step.bring_into_vocabulary(self._speculator.num_drafts)

    def _tell(self, error: BaseException, for_capture: bool) -> None:
        """A step goes on with whatever stands behind its rows: tokens that are verified as any draft is."""
        text = f"the speculator {_name(self._speculator)} fails: {describe(error)}"
        if for_capture:  # the graph would never propose again
            raise RuntimeError(text) from error
        if not self._is_told:
            _LOG.warning("%s; steps go on without what it did not write, and this is told once", text)
        self._is_told = True


def build_drafts(speculator: Speculator, target: Model, resolved: Resolved) -> int | None:
    """The bytes that `load` will fill, of a target without weights; None: this speculator tells them as it loads.

    Raises ValueError for what does not suit.
    """
    own: Callable[[Model, Resolved], int] | None = getattr(speculator, "build", None)
    if own is None:
        return None
    with _refused(speculator, "be built"):
        return operator.index(own(target, resolved))


def load_speculator(speculator: Speculator, target: Model, resolved: Resolved) -> int:
    """Let `speculator` load what it needs beside the target; the bytes. Raises ValueError for what does not suit."""
    with _refused(speculator, "be loaded"):
        return operator.index(speculator.load(target, resolved))


def make_drafter(speculator: Speculator, batches: DraftBatches, arch: Arch, dtype: torch.dtype) -> Drafter:
    """Let `speculator` allocate what it keeps, and keep what it reads: hidden states of a target of this `arch`."""
    with _refused(speculator, "allocate what it keeps"):
        speculator.allocate(batches)
    taps, size = NO_TAPS, len(speculator.taps) * arch.hidden_size
    if size:
        device = batches.table.token_ids.device
        kept = torch.zeros((batches.limits.max_num_tokens, size), dtype=dtype, device=device)
        taps = Taps(speculator.taps, kept)
    return Drafter(batches.table, speculator, taps, vocab_size=arch.vocab_size)


@contextlib.contextmanager
def _refused(speculator: Speculator, what: str) -> Iterator[None]:
    """Within: what one out of tree raises is a ConfigError with its name, unless the device fails."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) or _is_ours(speculator) or isinstance(error, _OF_DEVICE):
            raise
        limit = f"cannot {what}: {describe(error)}"
        raise ConfigError(FIELD, _name(speculator), limit, "repair it, or take another method") from error


def _is_of_memory(error: BaseException) -> bool:
    """Whether memory is what lacked: torch's allocator says so by a type, the driver and its libraries by words."""
    lacks = ("out of memory", "ALLOC_FAILED")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(word in str(error) for word in lacks)


def _is_ours(speculator: Speculator) -> bool:
    return type(speculator).__module__.startswith("octavo.")


def _name(speculator: Speculator) -> str:
    return f"{type(speculator).__module__}:{type(speculator).__qualname__}"
