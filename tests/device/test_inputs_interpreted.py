"""The input kernels under Triton's interpreter, in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHECKS = ("gather", "commit", "staged_write", "write_queue")

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{HERE.parents[1] / 'src'}:{HERE}"}
    command = [sys.executable, "-W", "ignore", str(HERE / "inputs_rig.py")]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(check: str, results: dict[str, str]) -> None:
    assert not results[check], results[check]


def test_every_check_is_run(results: dict[str, str]) -> None:
    assert set(results) == set(CHECKS)
