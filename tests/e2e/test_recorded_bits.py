"""Tokens and log-probabilities of 200 fixed requests are those that were recorded: a refactor moves no bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

import recorded
from octavo.ops import native


@pytest.mark.parametrize(("group", "count"), [("", 180), (recorded.OF_TORCH, 20)], ids=["ours", "of torch"])
def test_bits_are_those_recorded(group: str, count: int) -> None:
    key = recorded.key("cpu", group)
    expected = recorded.recorded().get(key)
    if expected is None or not native.available():
        pytest.skip(f"nothing is recorded for {key}; see tests/e2e/recorded.py")
    assert sum(map(len, expected.values())) == count
    _compare(expected, recorded.observe("cpu", of_torch=bool(group)))


def test_bits_of_compiled_operators_do_not_follow_the_processor() -> None:
    """torch and its library are told to act as a processor that has less: softmaxes and exponentials of theirs move."""
    expected = recorded.recorded().get(recorded.key("cpu"))
    if expected is None or not native.available():
        pytest.skip("nothing is recorded here")
    run = "import json, recorded; print(json.dumps(recorded.observe('cpu', of_torch=False)))"
    other = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "COMPATIBLE", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", run], env=os.environ | other, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    _compare(expected, json.loads(done.stdout.splitlines()[-1]))


def _compare(expected: dict[str, Any], seen: dict[str, Any]) -> None:
    moved = {name: [i for i, own in enumerate(expected[name]) if own != seen[name][i]] for name in expected}
    assert {name: places for name, places in moved.items() if places} == {}
