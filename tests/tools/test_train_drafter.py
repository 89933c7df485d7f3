"""The bundled drafters can be made again: the whole path in seconds, on a few files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
