"""No tensor is read on the host while a step is issued: on a GPU each such read would wait for the device (M5.7).

On a CPU the operators are Python and read what kernels read on a GPU; all other code is the same on both. So a tensor
may be read within octavo.ops alone. That an engine on a GPU does not wait either, kernels included, is in tests/gpu.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import octavo
from drafter_rig import METHODS, make
from octavo.device.batch import Batch
from octavo.model_state.default import DefaultModelState
from octavo.speculate import step as passes
from octavo.worker.runner import Runner
from test_drafts import EVERYTHING, LONG, Counts, Job, params, run

SOURCE = str(Path(octavo.__file__).parent)
READS = frozenset(
    {
        torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu, torch.Tensor.__bool__,
        torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.__contains__,
        torch.Tensor.nonzero, torch.nonzero, torch.Tensor.masked_select, torch.masked_select, torch.Tensor.unique,
        torch.unique, torch.Tensor.equal, torch.equal, torch.Tensor.allclose, torch.allclose,
    }
)  # fmt: skip


class Reads(TorchFunctionMode):
    """Where tensors are read on the host, by the innermost line of the engine's."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.in_operators = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            frame = sys._getframe(1)
            while frame.f_back is not None and not frame.f_code.co_filename.startswith(SOURCE):
                frame = frame.f_back
            place = frame.f_code.co_filename.removeprefix(SOURCE + "/")
            if place.startswith("ops/"):
                self.in_operators += 1
            else:
                self.places.add(f"{func.__name__} in {place}:{frame.f_lineno}")
        return func(*args, **(kwargs or {}))


def watch(monkeypatch: pytest.MonkeyPatch) -> tuple[Reads, list[int]]:
    """What the issue of steps reads, and the bounds of lengths that steps and passes of drafters were given."""
    reads, bounds = Reads(), list[int]()

    def within(issue: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*own: Any) -> Any:
            with reads:
                return issue(*own)

        return watched

    def noted(prepare: Callable[..., Any]) -> Callable[..., Any]:
        def seen(self: DefaultModelState, batch: Batch, **given: bool) -> Any:
            assert type(batch.max_seq_len) is int
            bounds.append(batch.max_seq_len)
            return prepare(self, batch, **given)

        return seen

    monkeypatch.setattr(Runner, "issue", within(Runner.issue))
    for name in ("prepare", "prepare_drafts"):
        monkeypatch.setattr(DefaultModelState, name, noted(getattr(DefaultModelState, name)))
    return reads, bounds


# but forms, whose masks are made of copies of tokens that are the host's
FEATURES = [each for each in EVERYTHING if each.structured_outputs is None]
JOBS: list[Job] = [(LONG[: 30 + 7 * index], each) for index, each in enumerate(FEATURES)]


@pytest.mark.parametrize("name", METHODS)
def test_M5_7_bounds_are_the_hosts_and_drafts_are_never_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With features, chunks, a step in flight, and passes of the drafter."""
    reads, bounds = watch(monkeypatch)
    engine = make(METHODS[name](tmp_path), async_scheduling=True, max_num_batched_tokens=64, max_model_len=512)
    counts = Counts(engine)
    run(engine, JOBS)
    engine.close()
    assert counts.num_drafted > 50 and len(bounds) > 20 and reads.in_operators > 400
    assert not reads.places


def test_a_bound_that_is_the_devices_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, _ = watch(monkeypatch)

    def of_the_device(longest: int, step: int, limit: int) -> int:
        return int(torch.tensor([longest + step, limit]).min())

    monkeypatch.setattr(passes, "draft_max_seq_len", of_the_device)
    engine = make({"method": "eagle3", "model": "octavo-tiny-eagle3"})
    run(engine, [(LONG, params())])
    engine.close()
    assert len(reads.places) == 1 and "__int__" in reads.places.pop()
