"""RL.N5: FSDP2 on two ranks keeps the bits of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from patience import patient

RANKS = Path(__file__).with_name("fsdp_ranks.py")
SRC = Path(__file__).resolve().parents[2] / "src"


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
def test_RL_N5_two_ranks(tmp_path: Path, order: str) -> None:
    """Converted before or after the model is sharded; float32 masters, bfloat16 in the forward, three updates."""
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(RANKS)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), order],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=patient(120))
            assert out.strip() == "same", err
    finally:
        for rank in ranks:
            rank.kill()
