"""On a GPU of the recorded kind, 200 fixed requests have the bits that were recorded: see tests/e2e/recorded.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

import recorded

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_bits_are_those_recorded() -> None:
    key = recorded.key("cuda")
    expected = recorded.recorded().get(key)
    if expected is None:
        pytest.skip(f"nothing is recorded for {key}")
    seen = recorded.observe("cuda")  # an empty digest: that request is not recorded there yet
    moved = {name: [i for i, own in enumerate(expected[name]) if own and own != seen[name][i]] for name in expected}
    assert {name: places for name, places in moved.items() if places} == {}
