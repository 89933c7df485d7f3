"""The softmax of a router's logits: one order of sums on every instruction set, torch's with AVX-512."""

from __future__ import annotations

import contextlib

import pytest
import torch

from octavo.ops import native
from octavo.ops.moe.routing import softmax

WIDTHS = [*range(1, 70), 96, 100, 127, 128, 160, 256, 257, 384]
WIDEST = torch.backends.cpu.get_cpu_capability() == "AVX512"
needs_native = pytest.mark.skipif(not native.available(), reason="the native library is not built")


def _logits(width: int, rows: int = 65) -> torch.Tensor:
    logits = torch.randn(rows, width, generator=torch.Generator().manual_seed(width)) * 4
    logits[3] *= 30  # down to where a float32 ends
    logits[4, : width // 2] = -torch.inf
    return logits


@needs_native
@pytest.mark.parametrize("num_threads", [1, 3])
def test_every_instruction_set_has_the_same_bits(num_threads: int) -> None:
    before = native.num_threads()
    for width in WIDTHS:
        seen = []
        for isa in native.built_isas():
            with native.using(isa):
                native.set_num_threads(num_threads)
                seen.append(softmax(_logits(width, 700)))
                native.set_num_threads(before)
        assert all(torch.equal(each, seen[0]) for each in seen), width


@needs_native
def test_it_is_summed_as_it_is_told() -> None:
    for width in WIDTHS:
        found = softmax(logits := _logits(width))
        wide = logits.double().softmax(-1)
        torch.testing.assert_close(found.double(), wide, rtol=2e-6, atol=1e-37)
        assert torch.equal(softmax(logits.t().contiguous().t()), found)
        assert torch.equal(softmax(logits[5:])[0], found[5])


@needs_native
@pytest.mark.skipif(not WIDEST, reason="torch has other sums here")
def test_bits_are_torchs_with_avx512() -> None:
    for width in WIDTHS:
        assert torch.equal(softmax(_logits(width)), _logits(width).softmax(-1)), width


@pytest.mark.parametrize("is_native", [pytest.param(True, marks=needs_native), False])
def test_what_is_no_number_stays_so(is_native: bool) -> None:
    nan, inf = torch.nan, torch.inf
    rows = torch.tensor([[nan, 0, 1], [0, nan, 1], [0, 1, nan], [inf, 0, 0], [-inf, -inf, -inf]]).repeat(1, 7)
    with contextlib.nullcontext() if is_native else native.disabled():
        assert softmax(rows).isnan().all()
        assert softmax(torch.empty(0, 8)).shape == (0, 8)


def test_a_trainers_default_type_is_not_that_of_the_result() -> None:
    """What was written was float32, into a buffer of the default type: behind its end where that is a narrower one."""
    logits, before = _logits(40), torch.get_default_dtype()
    expected = softmax(logits)
    torch.set_default_dtype(torch.float64)  # a wider one is red without harm
    try:
        found = softmax(logits)
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_a_gradient_is_that_of_the_result() -> None:
    logits, weights = _logits(40)[:3].requires_grad_(), torch.randn(3, 40)
    scores = softmax(logits)
    assert torch.equal(scores, softmax(logits.detach()))
    (scores * weights).sum().backward()
    wide = logits.detach().double().requires_grad_()
    (wide.softmax(-1) * weights).sum().backward()
    torch.testing.assert_close(logits.grad, wide.grad.float(), rtol=1e-5, atol=1e-6)
