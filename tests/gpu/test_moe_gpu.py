"""Grouped products of experts on a CUDA device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from moe_rig import CHECKS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("check", CHECKS)
def test_kernels(check: str, dtype: torch.dtype) -> None:
    CHECKS[check](torch.device("cuda"), dtype)
