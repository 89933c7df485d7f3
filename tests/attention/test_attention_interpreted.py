"""The Triton attention under Triton's interpreter: shapes are tiny."""

from __future__ import annotations

from types import ModuleType

import pytest

pytest.importorskip("triton")

import fused_rope_rig
import latent_rig
import paged_rig
from interpreted import run_rig

CASES = [(rig, check) for rig in (paged_rig, latent_rig, fused_rope_rig) for check in rig.INTERPRETED]


@pytest.mark.parametrize(("rig", "check"), CASES, ids=lambda of: getattr(of, "__name__", of))
def test_interpreted(rig: ModuleType, check: str) -> None:
    error = run_rig(rig)[check]
    assert not error, error
