"""Gated activations: native and eager give the same bits, the values are right, the extremes behave."""

import pytest
import torch

from octavo.ops import native
from octavo.ops.activation import (
    GATED_KINDS,
    exp_reference,
    gated_activation,
    gated_activation_reference,
    gated_by,
    gated_by_reference,
)


def exact(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """The definitions in float64; the tanh form through the sigmoid it equals, which does not cancel."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    if kind == "silu":
        return torch.nn.functional.silu(gate) * up
    return gate * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)) * up


@pytest.mark.parametrize("kind", GATED_KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 5, 8, 16, 31, 100, 768])
def test_every_library_gives_the_twins_bits(kind: str, dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(width)
    gate_up = torch.randn(5, 2 * width + 3) * torch.exp2(torch.empty(5, 2 * width + 3).uniform_(-8, 6))
    gate_up = gate_up.to(dtype)[:, : 2 * width]
    expected = gated_activation_reference(gate_up, kind)
    for isa in native.built_isas():
        with native.using(isa):
            assert torch.equal(gated_activation(gate_up, kind), expected), isa


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 16, 31, 100])
def test_every_library_gates_with_the_references_bits(dtype: torch.dtype, width: int) -> None:
    """Gates lie within wider rows, as behind the projections of gated attention; x may lie so too."""
    torch.manual_seed(width)
    x, gate = ((torch.randn(5, 3 * width) * 4).to(dtype)[:, -width:] for _ in range(2))
    expected = gated_by_reference(x, gate, "sigmoid")
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(expected.double(), gate.double().sigmoid() * x.double(), rtol=tolerance, atol=1e-12)
    for isa in native.built_isas():
        with native.using(isa):
            assert torch.equal(gated_by(x, gate, "sigmoid"), expected), isa
            for kind in GATED_KINDS:
                assert torch.equal(gated_by(x, gate, kind), gated_activation(torch.cat((gate, x), 1), kind)), isa


@pytest.mark.parametrize("kind", GATED_KINDS)
def test_values_agree_with_float64(kind: str) -> None:
    """Relative tolerance 1e-6 over gates of -4 to 4, where the exponent's own rounding stays below it."""
    torch.manual_seed(0)
    gate_up = torch.cat((torch.empty(4, 3000).uniform_(-4, 4), torch.randn(4, 3000)), dim=1)
    result = gated_activation(gate_up, kind).double()
    torch.testing.assert_close(result, exact(gate_up, kind), rtol=2e-6, atol=1e-12)
    torch.testing.assert_close(
        torch.nn.functional.gelu(gate_up[:, :3000], approximate="tanh") * gate_up[:, 3000:],
        gated_activation(gate_up, "gelu_tanh"),
        rtol=1e-4,
        atol=1e-6,
    )


@pytest.mark.parametrize("kind", GATED_KINDS)
def test_row_bits_do_not_depend_on_the_rows_beside_it(kind: str) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(200, 2 * 101) * 5
    for activation in (gated_activation, gated_activation_reference):
        alone = torch.cat([activation(gate_up[t : t + 1], kind) for t in range(200)])
        for rows in (2, 7, 64, 200):
            assert torch.equal(activation(gate_up[:rows], kind), alone[:rows])


def test_extreme_gates() -> None:
    """Large negative gates give zero, large positive ones pass, a NaN stays one."""
    gate = torch.tensor([[-200.0, -3e38, 200.0, 3e38, 0.0, float("nan")]])
    result = gated_activation(torch.cat((gate, torch.ones_like(gate)), dim=1), "silu")[0]
    assert torch.equal(result[:5], torch.tensor([0.0, 0.0, 200.0, 3e38, 0.0]))
    assert result[5].isnan()


def test_exp_is_within_one_ulp() -> None:
    x = torch.linspace(-87.0, 88.7, 400_001)
    exact_exp = x.double().exp()
    ulp = torch.exp2(torch.floor(torch.log2(exact_exp)) - 23)
    assert ((exp_reference(x).double() - exact_exp) / ulp).abs().max() < 1.0
    ends = exp_reference(torch.tensor([float("-inf"), -104.0, -100.0, 89.0, float("inf"), float("nan")]))
    assert ends[0] == ends[1] == 0.0
    assert 0.0 < ends[2] < 1e-43
    assert bool(ends[3:5].isinf().all())
    assert ends[5].isnan()
