"""bench/weights.py: what of it a CPU can run, so that a GPU's time is not lost to a wrong name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from patience import patient

BENCH = Path(__file__).resolve().parents[2] / "bench" / "weights.py"


@pytest.mark.slow
def test_each_way_that_needs_no_gpu_is_measured_and_others_are_left_out_by_name() -> None:
    command = [sys.executable, str(BENCH), "--model", "tiny", "--rounds", "1", "ipc", "disk", "shm", "nccl", "gloo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(120), check=True)
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("tiny")]
    assert [row[1] for row in rows] == ["disk", "shm", "gloo"] and all(0 < float(row[3]) < 60 for row in rows)
    assert "ipc is left out: it needs 1 GPUs" in done.stderr and "nccl is left out: it needs 2 GPUs" in done.stderr
