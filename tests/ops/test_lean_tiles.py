"""GPUs whose programs have 99 KiB of shared memory (RTX 30 to 50, A10, L4, L40) get tiles that fit.

The kernels are compiled for such a GPU, with none there. What they compute is for the interpreter and a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from octavo.attention import paged as paged_backend  # noqa: E402
from octavo.cache.specs import AttentionSpec  # noqa: E402
from octavo.ops.attention import paged as operator  # noqa: E402
from octavo.ops.attention import paged_plan, rope_decode_kernel  # noqa: E402
from octavo.ops.attention.mask_spec import MaskSpec  # noqa: E402
from octavo.ops.compile import launch  # noqa: E402

CPU, BF16, FP32, FP8 = torch.device("cpu"), torch.bfloat16, torch.float32, torch.float8_e4m3fn
DESKTOP, A100, HOPPER = 101_376, 166_912, 232_448  # bytes of shared memory that a program may have


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A GPU with `shared` bytes for a program; `found`: what has been compiled instead of launched."""
    state = SimpleNamespace(shared=DESKTOP, arch=0, found=[])
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        state.found.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return state.found[-1]

    no_device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", state.arch or (89 if state.shared == DESKTOP else 80), 32),
        get_current_device=lambda: f"a GPU {state.arch} of {state.shared} that is not there",
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(driver, "_active", no_device)
    monkeypatch.setattr(JITFunction, "run", compile_only)
    for module in (paged_plan, paged_backend, rope_decode_kernel):
        monkeypatch.setattr(module, "shared_bytes", lambda device: state.shared)
    yield state


def attend(
    heads: paged_plan.Heads, dtype: torch.dtype, cache_dtype: torch.dtype, num_rows: int, queries: int, length: int
) -> None:
    """Compile what attends for rows of so many queries and tokens."""
    scratch, mask_spec = paged_plan.Scratch(CPU), MaskSpec(scale=0.1)
    planner = paged_plan.Planner(heads, mask_spec, dtype, CPU, scratch, 132, cache_dtype=cache_dtype)
    starts = torch.arange(num_rows + 1, dtype=torch.int32) * queries
    lengths = torch.full((num_rows,), length, dtype=torch.int32)
    plan = planner.plan(starts, lengths, num_tokens=num_rows * queries, max_query_len=queries, max_seq_len=length)
    q = torch.zeros(num_rows * queries, heads.num_heads, heads.size, dtype=dtype)
    kv = torch.zeros(2, 64, heads.num_kv_heads, 2 * heads.size, dtype=cache_dtype).transpose(1, 2)
    scales = {} if cache_dtype == dtype else dict.fromkeys(("key_scale", "value_scale"), torch.ones(8))
    table = torch.zeros(num_rows, -(-length // 64), dtype=torch.int32)
    operator.paged_attention(
        q, kv, starts, lengths, table, torch.zeros_like(q), mask_spec=mask_spec, plan=plan, scratch=scratch, **scales
    )


ONE, FEW, SPLIT, LONG = (1, 1, 1000), (4, 8, 1000), (2, 100, 1000), (8, 1024, 2048)  # rows, queries, tokens


@pytest.mark.parametrize(
    ("heads", "dtype", "cache_dtype", "batches"),
    [
        ((16, 2, 128), BF16, BF16, (ONE, SPLIT, LONG)),
        ((8, 1, 256), BF16, BF16, (FEW, LONG)),
        ((16, 2, 128), BF16, FP8, (ONE,)),
        ((16, 2, 128), FP32, FP32, (SPLIT,)),
    ],
)
def test_tiles_fit_a_desktop_gpu(
    gpu: SimpleNamespace, heads: tuple[int, int, int], dtype: torch.dtype, cache_dtype: torch.dtype, batches: Any
) -> None:
    for batch in batches:
        attend(paged_plan.Heads(*heads), dtype, cache_dtype, *batch)
    assert max(kernel.metadata.shared for kernel in gpu.found) <= DESKTOP


def test_wide_float32_heads_fit_an_a100_and_are_refused_where_they_do_not_fit(gpu: SimpleNamespace) -> None:
    gpu.shared = A100
    for batch in (FEW, SPLIT):
        attend(paged_plan.Heads(8, 1, 256), FP32, FP32, *batch)
    assert max(kernel.metadata.shared for kernel in gpu.found) <= A100
    gpu.shared = DESKTOP
    spec = AttentionSpec(num_heads=8, num_kv_heads=1, head_size=256, scale=1.0)
    with pytest.raises(ValueError, match=r"float32 heads of 256 in 160 KiB .* this GPU has 99: set dtype='bfloat16'"):
        AnyDevice([spec], FP32, CPU)


class AnyDevice(paged_backend.PagedBackend):
    """Takes a device that is not there."""

    def runs_on(self, device: torch.device) -> bool:
        return True


def test_what_was_measured_keeps_its_tiles(gpu: SimpleNamespace) -> None:
    wide = paged_plan.Heads(8, 1, 256)
    for gpu.shared, lean in ((HOPPER, [False, False]), (A100, [False, True]), (DESKTOP, [True, True])):
        assert [paged_plan._is_lean(wide, dtype, CPU) for dtype in (BF16, FP32)] == lean


@pytest.mark.parametrize(("shared", "takes"), [(DESKTOP, False), (HOPPER, True)])
def test_rotation_in_one_kernel_needs_its_room(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, shared: int, takes: bool
) -> None:
    """A desktop Blackwell launches early, too."""
    gpu.shared = shared
    monkeypatch.setattr(launch, "_has_pdl", lambda device: True)
    kv = torch.zeros(2, 2, 64, 256, dtype=BF16)
    assert rope_decode_kernel.serves(paged_plan.Heads(4, 2, 128), MaskSpec(scale=1.0), kv) is takes


@pytest.mark.parametrize(("heads", "stored"), [((4, 2, 64), FP8), ((8, 8, 128), torch.int8), ((8, 1, 256), FP8)])
def test_tiles_over_numbers_of_8_bits_take_channels_in_one_order(
    gpu: SimpleNamespace, heads: tuple[int, int, int], stored: torch.dtype
) -> None:
    """On Hopper a warp's instruction takes them in fours, as they are loaded, and that of four warps in twos.

    A row of one query, of a few and of many must have the same bits, so each kernel's products are of the latter.
    """
    gpu.shared, gpu.arch = HOPPER, 90
    for batch in (ONE, (32, 1, 1000), (4, 2, 1000), (4, 5, 1000), (4, 16, 1000), LONG):
        attend(paged_plan.Heads(*heads), BF16, stored, *batch)
    orders = {order for kernel in gpu.found for order in re.findall(r"kWidth = (\d)", kernel.asm["ttgir"])}
    assert orders <= {"2"} and any("wgmma" in kernel.asm["ptx"] for kernel in gpu.found)
