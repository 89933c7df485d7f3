"""What a head's passes launch in which order: a pass behind a draw begins at that draw, see `ops.compile.launch`."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from octavo.config.speculative import SpeculativeConfig
from octavo.speculate import head
from octavo.speculate.head import HeadSpeculator


class Recorder:
    """A drafter, its batches and its sampler, which say what they are asked for."""

    taps = ()
    attends_to_store = False

    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin(self, given: torch.Tensor) -> torch.Tensor:
        return given

    def store(self, *given: Any) -> torch.Tensor:
        self.seen.append("store")
        return torch.zeros(1, 4)

    def forward(self, tokens: Any, states: Any, pick: Any = None, *, behind_draw: bool = False) -> torch.Tensor:
        self.seen.append("pass behind a draw" if behind_draw else "pass")
        return torch.zeros(1, 4)

    def rows(self, step: Any, place: int) -> None:
        """Whose drafts are drawn: nothing is launched."""

    def draw(self, states: Any, of: Any) -> torch.Tensor:
        self.seen.append("draw")
        return torch.zeros(1, dtype=torch.int64)

    def prepare(self, *given: Any) -> None:
        """Attention of a pass: with many rows their division, a kernel."""
        self.seen.append("prepare")

    last = behind = again = prepare

    def last_accepted(self, step: Any) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int64)

    tokens_behind = last_accepted


@pytest.mark.parametrize("num_modules", [1, 2])
@pytest.mark.parametrize("num_drafts", [0, 1, 4])
def test_nothing_is_launched_between_a_draw_and_the_pass_that_begins_at_it(
    num_drafts: int, num_modules: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What attention reads early, its division too, is then there before the draw lets that pass begin."""
    monkeypatch.setattr(head, "forward_context", lambda context: contextlib.nullcontext())
    speculator, own = HeadSpeculator(SpeculativeConfig(method="eagle3", num_speculative_tokens=4)), Recorder()
    batches = SimpleNamespace(
        last_accepted=own.last_accepted,
        tokens_behind=own.tokens_behind,
        store=lambda step: None,
        again=own.again,
        last=own.last,
        behind=own.behind,
    )
    layers = SimpleNamespace(of=lambda context, module: context)
    given = {"_drafters": [own] * num_modules, "_batches": batches, "_sampler": own, "_layers": layers}
    for name, value in given.items():
        setattr(speculator, name, value)
    step = SimpleNamespace(num_drafts=num_drafts, taps=torch.zeros(1, 4), tokens_behind=lambda distance: None)
    speculator.propose(cast(Any, step))
    seen = own.seen
    assert seen.count("draw") == num_drafts
    behind = [place for place, name in enumerate(seen) if name == "pass behind a draw"]
    assert len(behind) == max(num_drafts - num_modules, 0)
    assert all(seen[place - 1] == "draw" for place in behind), seen
