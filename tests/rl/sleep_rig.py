"""An engine on a CPU whose memory is as a GPU's that may sleep: weights as they were loaded, in a double's memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "device"))

from octavo.device import sleep
from octavo.layers import linear
from octavo.ops.gemm import LinearWeight, pack_linear
from octavo.worker import worker
from pages_double import PagesDouble


def _plain(weight: torch.Tensor, quantization: str | None = None, into: LinearWeight | None = None) -> LinearWeight:
    """As a GPU's `pack_linear`: the weight as it is, where it is."""
    return pack_linear(weight, into=into) if into else LinearWeight(*weight.shape, "float32", weight)


def move_memory(patch: pytest.MonkeyPatch, pages: PagesDouble) -> None:
    """Engines that are opened from now on, with native="off", have their memory of `pages`."""
    patch.setattr(linear, "pack_linear", _plain)
    patch.setattr(linear.Linear, "copied_by_finalize", frozenset())
    patch.setattr(worker, "make_memory", lambda *_: sleep.MovingMemory(pages, pages.give_spare))
