"""NIXL by itself: what it may not do to a cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow  # it waits for what is not to come
def test_N_5_what_arrives_after_a_read_was_given_up_is_written_nowhere(tmp_path: Path):
    """Over TCP a peer that was stopped sends what was asked for when it goes on: no agent is there any more."""
    pytest.importorskip("nixl_cu12")
    program = Path(__file__).with_name("late_bytes.py")
    env = {**os.environ, "UCX_TLS": "tcp"}
    ran = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "told")], env=env, capture_output=True, text=True, timeout=120
    )
    assert "arrived 8388608" in ran.stdout, ran.stderr
    assert "a READ of blocks did not end within 1 s" in ran.stdout and "late 0" in ran.stdout, ran.stdout + ran.stderr
