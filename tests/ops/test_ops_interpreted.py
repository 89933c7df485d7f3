"""The Triton operators under Triton's interpreter: shapes are tiny."""

from __future__ import annotations

from types import ModuleType

import pytest

pytest.importorskip("triton")

import backward_rig
import draft_rig
import flex_rig
import gpu_rig
import matmul_rig
import moe_rig
import quantized_rig
from interpreted import run_rig

CASES = [
    (rig, check)
    for rig in (gpu_rig, matmul_rig, moe_rig, flex_rig, backward_rig, draft_rig, quantized_rig)
    for check in rig.INTERPRETED
]


@pytest.mark.parametrize(("rig", "check"), CASES, ids=lambda of: getattr(of, "__name__", of))
def test_interpreted(rig: ModuleType, check: str) -> None:
    error = run_rig(rig)[check]
    assert not error, error
