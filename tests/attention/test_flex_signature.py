"""One compiled signature per spec, counted in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from patience import patient

HERE = Path(__file__).parent


def test_F1_4_steps_of_all_sizes_and_lengths_are_one_compilation() -> None:
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1] / "src")}
    command = [sys.executable, "-W", "ignore", str(HERE / "flex_signature.py")]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=patient(120))
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["1"] * 7
