"""Every kernel in a small case of its own, which `compute-sanitizer` runs too (docs/adding.md says how)."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kernel_cases import CASES
from kernel_names import recorded_launches

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CASES)
def test_each_case_launches_its_kernels_and_equals_the_reference(name: str) -> None:
    run, kernels = CASES[name]
    with recorded_launches() as seen:
        run()
    assert set(kernels) <= seen
