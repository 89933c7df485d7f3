"""Kernels launched past Triton's search give the bits that Triton's own launches give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from triton.runtime.jit import JITFunction  # noqa: E402

from octavo.ops.gpu import gated_product, launch, matmul, norm, tensor_maps  # noqa: E402

BF16 = torch.bfloat16


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return norm.rms_norm(x, weight[0].float(), 1e-6)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return matmul.linear(x, weight, None, x.new_empty(len(x), len(weight)), matmul.tile_for(8, *weight.shape, BF16))


def gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Its tensors come as descriptors."""
    if not tensor_maps.takes_gluon(x.device):
        pytest.skip("for Hopper")
    return gated_product.gated_linear(x, weight[:960], "silu")


@pytest.mark.parametrize("call", [normed, product, gated])
def test_other_tensors_of_a_kind_are_launched_without_triton(
    call: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and in a graph; rows that Triton would compile for anew, as other alignments are, come through it."""
    generator = torch.Generator("cuda").manual_seed(1)

    def make() -> tuple[torch.Tensor, torch.Tensor]:
        sizes = (64, 1024), (1024, 1024)
        return tuple(torch.randn(size, generator=generator, device="cuda").to(BF16) for size in sizes)  # type: ignore[return-value]

    calls = [make() for _ in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(launch.Direct, "__getitem__", lambda self, grid: self.kernel[grid])
        expected = [call(*tensors) for tensors in calls]
    call(*calls[0])
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", None)
        results = [call(*tensors) for tensors in calls]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(*calls[2])
        graph.replay()
    torch.cuda.synchronize()
    for one, other in zip([*results, captured], [*expected, expected[2]], strict=True):
        assert torch.equal(one, other)
    x, weight = calls[0]
    shifted = torch.empty(x.numel() + 1, dtype=BF16, device="cuda")[1:].view_as(x).copy_(x)
    if call is not gated:  # whose descriptors are aligned
        assert torch.equal(call(shifted, weight), expected[0])
