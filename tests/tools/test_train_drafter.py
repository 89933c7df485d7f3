"""The bundled drafters can be made again: the whole path in seconds, on a few files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from measure_drafts import Tally
from train_drafter import AIMS, gumbel_like

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.mark.slow
def test_smoke_run_gives_drafters_that_can_be_measured(tmp_path: Path) -> None:
    train = [sys.executable, str(TOOLS / "train_drafter.py"), "--smoke", "--out", str(tmp_path)]
    subprocess.run(train, check=True, capture_output=True)
    folders = sorted(tmp_path.iterdir())
    assert [folder.name for folder in folders] == ["octavo-tiny-eagle3", "octavo-tiny-mtp"]
    for folder in folders:
        assert "tokens a step" in (folder / "README.md").read_text()
        assert json.loads((folder / "config.json").read_text())["hidden_size"] == 256
    measure = [sys.executable, str(TOOLS / "measure_drafts.py"), "--prompts", "2", "--tokens", "4", "--texts", "1"]
    measure += [word for folder in folders for word in ("--drafter", str(folder))]
    table = subprocess.run(measure, check=True, capture_output=True, text=True).stdout
    assert table.count("of the noise") == 8 and table.count("rejection sampling") == 8


def test_tokens_are_counted_as_an_engine_counts_them() -> None:
    first = torch.tensor([[1, 1, 0, 1, 1, 0]]).bool()  # behind each place: whether draft 0 is right, and draft 1
    second = torch.tensor([[0, 1, 1, 0, 1, 0]]).bool()
    tally = Tally()
    tally.add("a", [first, second], 2)  # a step at place 1 gives 3 tokens, at place 4 three more, and that is the end
    tally.add("b", [first, second], 1)  # at place 0 two, at 2 one, at 3 two, at 5 one
    assert tally.tokens_per_step() == {"a": 3.0, "b": 1.5}


@pytest.mark.parametrize("aim", sorted(AIMS))
def test_an_aim_draws_a_drafter_to_its_target(aim: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 50, generator=generator) * 3
    drafted = torch.zeros_like(logits).requires_grad_(True)
    before = torch.minimum(logits.softmax(-1), drafted.softmax(-1)).sum(-1).mean()
    for _ in range(300):
        noise = gumbel_like(logits, generator)
        (gradient,) = torch.autograd.grad(AIMS[aim](drafted, logits, noise, 2.0).sum(), drafted)
        drafted.data -= gradient
    right = (drafted + noise).argmax(-1) == (logits + noise).argmax(-1)
    assert torch.minimum(logits.softmax(-1), drafted.softmax(-1)).sum(-1).mean() > before + 0.2
    if aim == "likeliest":
        assert torch.equal(drafted.argmax(-1), logits.argmax(-1))
    else:
        assert right.float().mean() > 0.6
