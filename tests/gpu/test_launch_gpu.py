"""Kernels launched past Triton's search give the bits that Triton's own launches give."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from triton.runtime.jit import JITFunction  # noqa: E402

from octavo.ops.attention import prefill  # noqa: E402
from octavo.ops.compile import launch, tensor_maps  # noqa: E402
from octavo.ops.gemm import gpu as matmul  # noqa: E402
from octavo.ops.norm import gpu as norm  # noqa: E402

BF16 = torch.bfloat16


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return norm.rms_norm(x, weight[0].float(), 1e-6)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return matmul.linear(x, weight, None, x.new_empty(len(x), len(weight)), matmul.tile_for(8, *weight.shape, BF16))


def attended(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A prompt of 64 tokens over a block of a cache, which come as descriptors."""
    if not tensor_maps.takes_gluon(x.device):
        pytest.skip("for Hopper")
    q, cache = x.view(64, 8, 128), weight.view(-1, 2, 64, 256)
    out, tiles = torch.empty_like(q), prefill.queries_of_tile(4)
    start, length, table, tile_start, counter = numbers(64, 64 // tiles)
    assert prefill.launch(
        q,
        cache,
        out,
        start,
        length,
        table,
        tile_start,
        counter,
        programs=4,
        sees=0,
        reach=0,
        score_scale=0.1,
        cap_scale=0.0,
        sinks=None,
    )
    return out


@functools.cache
def numbers(tokens: int, tiles: int) -> list[torch.Tensor]:
    """One row's query_start, seq_lens, block_table and tile_start, and a counter."""
    values = [0, tokens], [tokens], [[1]], [0, tiles], [0]
    return [torch.tensor(value, dtype=torch.int32, device="cuda") for value in values]


@pytest.mark.parametrize("call", [normed, product, attended])
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
    if call is not attended:  # whose descriptors are aligned
        assert torch.equal(call(shifted, weight), expected[0])
