"""The kernels around torch's FlexAttention equal their twins, under Triton's interpreter in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_interpreted() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE.parents[1] / "src")}
    command = [sys.executable, "-W", "ignore", str(HERE / "flex_rig.py")]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert run.returncode == 0, run.stderr
