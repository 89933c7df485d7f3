"""is_finite finds one NaN or Inf anywhere, and takes the largest numbers for what they are."""

import pytest
import torch

from octavo.ops import native
from octavo.ops.finite import is_finite

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
PART = 1 << 18  # elements that a thread looks at together


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 63, PART, PART + 1, 3 * PART - 5])
def test_one_bad_element_is_found(dtype: torch.dtype, size: int) -> None:
    largest = torch.finfo(dtype).max
    values = torch.full((size,), largest, dtype=dtype)
    values[::2] = -largest
    values[::3] = torch.finfo(dtype).tiny / 2  # denormal
    assert is_finite(values)
    for place in {0, size // 2, size - 1, min(PART, size - 1)}:
        for bad in (float("nan"), float("inf"), -float("inf")):
            spoilt = values.clone()
            spoilt[place] = bad
            assert not is_finite(spoilt), (place, bad)


def test_the_eager_form_says_the_same() -> None:
    values = torch.zeros(3, 5)
    with native.disabled():
        assert is_finite(values)
        values[2, 4] = float("nan")
        assert not is_finite(values)


def test_nothing_is_finite() -> None:
    assert is_finite(torch.empty(0, 7))
