"""Grouped products of experts under Triton's interpreter, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from moe_rig import CHECKS  # needs triton

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{HERE.parents[1] / 'src'}:{HERE}"}
    command = [sys.executable, "-W", "ignore", str(HERE / "moe_rig.py")]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(check: str, results: dict[str, str]) -> None:
    assert not results[check], results[check]
