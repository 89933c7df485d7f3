"""The input kernels under Triton's interpreter: shapes are tiny."""

from __future__ import annotations

from types import ModuleType

import pytest

pytest.importorskip("triton")

import inputs_rig
from interpreted import run_rig

CASES = [(rig, check) for rig in (inputs_rig,) for check in rig.INTERPRETED]


@pytest.mark.parametrize(("rig", "check"), CASES, ids=lambda of: getattr(of, "__name__", of))
def test_interpreted(rig: ModuleType, check: str) -> None:
    error = run_rig(rig)[check]
    assert not error, error
