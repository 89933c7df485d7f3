"""RMS norm: native and eager give the same bits, a row's bits depend on the row alone, the values are right."""

import pytest
import torch
from torch import Tensor

from octavo.ops import native
from octavo.ops.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference

WIDTHS = [1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 100, 256, 768, 1000, 1024, 3000]
DTYPES = [torch.float32, torch.bfloat16]


def strided_rows(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Heavy-tailed rows with a gap between them."""
    values = torch.randn(rows, width + 5) * torch.exp2(torch.empty(rows, width + 5).uniform_(-8, 8))
    return values.to(dtype)[:, :width]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_library_gives_the_twins_bits(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    x, residual, weight = strided_rows(5, width, dtype), strided_rows(5, width, dtype), torch.randn(width)
    expected, (expected_sum_norm, expected_sum) = (
        rms_norm_reference(x, weight, 1e-6),
        add_rms_norm_reference(x, residual, weight, 1e-6),
    )
    for isa in native.built_isas():
        with native.using(isa):
            assert torch.equal(rms_norm(x, weight, 1e-6), expected), isa
            normed, total = add_rms_norm(x, residual, weight, 1e-6)
            assert torch.equal(total, expected_sum), isa
            assert torch.equal(normed, expected_sum_norm), isa


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_bits_do_not_depend_on_the_rows_beside_it(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = strided_rows(300, 256, dtype), torch.randn(256)
    for norm in (rms_norm, rms_norm_reference):
        alone = torch.cat([norm(x[t : t + 1], weight, 1e-6) for t in range(300)])
        for rows in (2, 3, 17, 64, 300):
            assert torch.equal(norm(x[:rows], weight, 1e-6), alone[:rows])


def test_values_agree_with_float64() -> None:
    """Relative tolerance 1e-6: four roundings and a pairwise sum."""
    torch.manual_seed(0)
    x, weight = strided_rows(7, 1000, torch.float32), torch.randn(1000)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-6).double(), exact, rtol=1e-6, atol=1e-12)


def test_the_new_residual_is_rounded_before_the_norm() -> None:
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(4, 96).bfloat16(), torch.randn(4, 96).bfloat16(), torch.randn(96))
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(x + residual, weight, 1e-6))


def test_inputs_are_left_alone() -> None:
    x, residual = torch.randn(3, 40), torch.randn(3, 40)
    copies = x.clone(), residual.clone()
    add_rms_norm(x, residual, torch.ones(40), 1e-6)
    assert torch.equal(x, copies[0])
    assert torch.equal(residual, copies[1])
