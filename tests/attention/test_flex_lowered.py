"""The flex backend's compiled kernel, its text made by torch's compiler and run by Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import flex_lowered
from interpreted import run_rig


@pytest.mark.parametrize("check", flex_lowered.INTERPRETED)
def test_interpreted(check: str) -> None:
    error = run_rig(flex_lowered)[check]
    assert not error, error
