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


def test_N_4_runs_are_joined_where_both_sides_go_on() -> None:
    pytest.importorskip("nixl_cu12")
    import numpy as np

    from octavo.kv_connector.worker.ways.nixl import joined
    from octavo.kv_connector.worker.ways.nixl_agent import Runs

    own = [(300, 10), (100, 10), (110, 10), (120, 5), (310, 10), (320, 10)]
    others = [(50, 10), (0, 10), (10, 10), (20, 5), (60, 10), (80, 10)]
    sides = [Runs(np.array(places, np.uint64), device, "DRAM") for device, places in ((1, own), (2, others))]
    here, there = joined(*sides)
    assert here.places.tolist() == [[100, 25], [300, 20], [320, 10]] and here.device == 1
    assert there.places.tolist() == [[0, 25], [50, 20], [80, 10]] and there.device == 2
    assert here.places.dtype == np.uint64
    one, other = joined(*(Runs(side.places[:1], 0, "DRAM") for side in sides))
    assert one.places.tolist() == [[300, 10]] and other.places.tolist() == [[50, 10]]
