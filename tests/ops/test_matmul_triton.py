"""The Triton products under Triton's interpreter, in a process of its own: shapes are tiny, sums are numpy's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
CHECKS = (
    "check_twin",
    "check_float32_rows_read_a_narrower_weight",
    "check_the_result_is_rounded_once",
    "check_fused",
    "check_no_rows",
)


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{HERE.parents[1] / 'src'}:{HERE}"}
    command = [sys.executable, "-W", "ignore", str(HERE / "matmul_rig.py")]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("check", CHECKS)
def test_interpreted(check: str, results: dict[str, str]) -> None:
    assert not results[check], results[check]


def test_every_check_is_run(results: dict[str, str]) -> None:
    assert set(results) == set(CHECKS)
