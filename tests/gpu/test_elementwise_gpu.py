"""The elementwise operators on a CUDA device: against their references, and the same bits for every number of rows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import gpu_rig
import quantized_rig
from gpu_rig import BF16, F16, F32, HEADS, RopeCase, heavy
from octavo.ops.activation import gated_activation
from octavo.ops.cache_write.zero_blocks import zero_blocks
from octavo.ops.embedding import gather_rows
from octavo.ops.norm import add_rms_norm, rms_norm
from octavo.ops.rope import qk_norm_rope_store
from row_counts import DISTINCT, assert_rows_keep_their_bits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("width", [1, 40, 256, 1024, 2560, 4096, 5120, 8192, 16384])
def test_norm_equals_the_reference(width: int, dtype: torch.dtype) -> None:
    gpu_rig.check_norm("cuda", width, dtype, 200)


def test_2_16_blocks_are_zeroed_without_a_wait() -> None:
    gpu_rig.check_zero_blocks("cuda", 3, 70, 40_000, [5, 69, 1])
    data = torch.full((1, 70, 50 << 20), 7, dtype=torch.uint8, device="cuda")  # the last block is past 2^31
    zero_blocks(data, [3])  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        zero_blocks(data, [69, 0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for block in (0, 1, 3, 68, 69):
        assert bool(data[0, block].any()) == (block not in (0, 3, 69))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activation_equals_the_reference(kind: str, dtype: torch.dtype) -> None:
    gpu_rig.check_activation("cuda", kind, dtype, 3072)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_embedding_equals_the_reference(dtype: torch.dtype) -> None:
    gpu_rig.check_embedding("cuda", dtype)


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("shape", HEADS)
def test_rope_equals_the_reference(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    gpu_rig.check_rope("cuda", dtype, shape, 100)


@pytest.mark.parametrize("scales", [quantized_rig.USUAL, quantized_rig.UNUSUAL])
def test_every_value_of_a_quantized_cache_is_rounded_as_torch_rounds(scales: tuple[float, ...]) -> None:
    quantized_rig.check_quotients("cuda", scales)
    quantized_rig.check_every_value("cuda", scales)


@pytest.mark.parametrize(("width", "dtype"), [(1024, BF16), (2560, BF16), (4096, BF16), (1000, F16), (2560, F32)])
def test_norms_of_a_row(width: int, dtype: torch.dtype) -> None:
    x, residual = heavy(DISTINCT, width, dtype, "cuda"), heavy(DISTINCT, width, dtype, "cuda", 1)
    residual[:, ::2] = -x[:, ::2] * 1.01  # sums that cancel
    weight = torch.rand(width, device="cuda") + 0.5
    assert_rows_keep_their_bits(
        lambda pick: (rms_norm(x[pick], weight, 1e-6), *add_rms_norm(x[pick], residual[pick], weight, 1e-6))
    )


def test_neither_strides_nor_alignment_move_bits() -> None:
    values, weight = heavy(64, 4100, F32, "cuda"), torch.rand(4096, device="cuda")
    shifted, whole = values[:, 3:4099], values[:, 3:4099].contiguous()
    assert torch.equal(rms_norm(shifted, weight, 1e-6), rms_norm(whole, weight, 1e-6))
    gate_up = heavy(64, 2050, BF16, "cuda")[:, 1:2049]
    assert torch.equal(gated_activation(gate_up, "silu"), gated_activation(gate_up.contiguous(), "silu"))


def test_activation_and_embedding_of_a_row() -> None:
    x, table = heavy(DISTINCT, 6144, BF16, "cuda"), heavy(DISTINCT, 1024, BF16, "cuda").contiguous()
    assert_rows_keep_their_bits(lambda pick: (gated_activation(x[pick], "silu"), gather_rows(pick, table, BF16, 32.0)))


@pytest.mark.parametrize("shape", [HEADS[0], HEADS[2]])
def test_q_and_stored_kv_of_a_token(shape: tuple[int, int, int, int]) -> None:
    case = RopeCase("cuda", BF16, shape, DISTINCT)
    slots = torch.arange(DISTINCT, device="cuda") + 16

    def call(pick: torch.Tensor) -> tuple[torch.Tensor, ...]:
        case.slots, kv = slots, torch.zeros_like(case.kv)
        q = qk_norm_rope_store(
            case.qkv[pick], case.positions[pick], case.table, *case.norms, 1e-6, *case.shape, kv, slots[pick]
        )
        stored = kv.transpose(1, 2).flatten(0, 1)[slots[pick]]
        return q, stored

    assert_rows_keep_their_bits(call)


def test_a_cache_beyond_32_bit_offsets() -> None:
    case = RopeCase("cuda", BF16, (2, 8, 128, 0), 3)
    kv = torch.zeros(70_000, 8, 16, 256, dtype=BF16, device="cuda")  # 2.3e9 elements
    slots = torch.tensor([69_999 * 16 + 5, -1, 20], device="cuda")
    arguments = (case.qkv, case.positions, case.table, *case.norms, 1e-6, *case.shape)
    qk_norm_rope_store(*arguments, kv, slots)
    near = torch.zeros(2, 8, 16, 256, dtype=BF16, device="cuda")
    qk_norm_rope_store(*arguments, near, torch.tensor([5, -1, 20], device="cuda"))
    assert torch.equal(kv[69_999], near[0]) and torch.equal(kv[1], near[1])
    assert int(kv.count_nonzero()) == int(near.count_nonzero()), "something else was written"


def test_operators_run_in_a_graph_without_a_wait() -> None:
    x, weight = heavy(4, 1024, BF16, "cuda").contiguous(), torch.ones(1024, device="cuda")
    expected = rms_norm(x, weight, 1e-6)
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = rms_norm(x, weight, 1e-6)
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out, expected)
