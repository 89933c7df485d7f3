"""No kernel is without a small case that the sanitizer can run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

from kernel_cases import CASES
from kernel_names import launched_kernels


def test_every_launched_kernel_has_a_case() -> None:
    named = {kernel for _, kernels in CASES.values() for kernel in kernels}
    assert named == launched_kernels(), "name each kernel in tests/gpu/kernel_cases.py"
