"""Every kernel in Gluon compiles for Hopper with the Triton that is installed: its language is not settled.

Their wrappers are called with tensors of the CPU, and a driver that has no device: what would be launched is compiled,
down to machine code. What the kernels compute is for the tests on a GPU.
"""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from octavo.ops.attention import (  # noqa: E402
    decode,
    paged,
    paged_plan,
    prefill,
    rope_decode,
    rope_decode_kernel,
    rope_verify_kernel,
)
from octavo.ops.attention.mask_spec import MaskSpec  # noqa: E402
from octavo.ops.compile import launch  # noqa: E402
from octavo.ops.compile.tensor_maps import ALIGNED  # noqa: E402
from octavo.ops.embedding import beside_gemv  # noqa: E402
from octavo.ops.gemm import gemv, held_gemm, streamed_gemm  # noqa: E402
from octavo.ops.inputs.tensors import DraftRows, RowTensors  # noqa: E402
from octavo.ops.latent import gpu as latent  # noqa: E402
from octavo.ops.latent.state import LatentState  # noqa: E402
from octavo.ops.rope import Rotation  # noqa: E402
from octavo.ops.rope import gpu as rope  # noqa: E402
from octavo.ops.sampling import drafts_gpu, drafts_head  # noqa: E402
from octavo.ops.sampling import gpu as drawing  # noqa: E402

CPU, BF16, FP16, FP8 = torch.device("cpu"), torch.bfloat16, torch.float16, torch.float8_e4m3fn
PROCESSORS = 132
SHARED_BYTES = 232448  # of a processor, for one program
_TERMS = 16  # of the two logarithms of an entry's noise, products with sums at least
SCRATCH: Any = SimpleNamespace(
    parts=lambda *sizes: (torch.zeros(4096), torch.zeros(64), torch.zeros(64, dtype=torch.int32))
)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """What has been compiled instead of launched."""
    found: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        found.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return found[-1]

    no_device = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: "a Hopper that is not there",
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(driver, "_active", no_device)
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(launch, "_has_pdl", lambda device: True)
    for module in (rope_decode_kernel, rope_verify_kernel):
        monkeypatch.setattr(module, "num_processors", lambda device: PROCESSORS)
    monkeypatch.setattr(gemv, "_device", lambda index: {"multiprocessor_count": PROCESSORS})
    yield found
    assert found, "nothing was compiled"
    for kernel in found:
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= SHARED_BYTES


def cache(block: int, size: int, dtype: torch.dtype, kv_heads: int = 2) -> torch.Tensor:
    """[blocks, KV heads, block, 2 * size], each block contiguous."""
    return torch.zeros(4, block, kv_heads, 2 * size, dtype=dtype).transpose(1, 2)


def lengths() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query_start, seq_lens and block_table of four rows."""
    return torch.arange(5, dtype=torch.int32), torch.ones(4, dtype=torch.int32), torch.zeros(4, 16, dtype=torch.int32)


def rotation_of(size: int, *, normed: bool) -> Rotation:
    """What becomes of the projection of four tokens."""
    norm, ints = torch.ones(size) if normed else None, torch.zeros(4, dtype=torch.int64)
    return Rotation(
        positions=ints, cos_sin=torch.zeros(64, size), q_norm=norm, k_norm=norm, eps=1e-6, slot_mapping=ints
    )


@pytest.mark.parametrize(
    ("block", "size", "group", "sees", "cap", "dtype", "with_sinks", "stored"),
    [
        (64, 128, 4, 0, 0.0, BF16, False, None),
        (16, 128, 2, 0, 0.0, BF16, False, None),
        (48, 64, 1, 2, 0.0, FP16, False, None),
        (32, 128, 8, 1, 30.0, BF16, True, None),
        (128, 64, 4, 0, 0.0, FP16, True, None),
        (64, 128, 2, 0, 0.0, BF16, False, FP8),
        (16, 64, 4, 1, 30.0, FP16, True, FP8),
        (48, 128, 8, 2, 0.0, BF16, True, torch.int8),
    ],
)
def test_rows(
    compiled: list[Any],
    block: int,
    size: int,
    group: int,
    sees: int,
    cap: float,
    dtype: torch.dtype,
    with_sinks: bool,
    stored: torch.dtype | None,
) -> None:
    q = torch.zeros(4, 2 * group, size, dtype=dtype)
    projected = torch.zeros(4, (2 * group + 4) * size, dtype=dtype)
    sinks = torch.zeros(2 * group) if with_sinks else None
    work, parts, stats = torch.zeros(512, dtype=torch.int32), torch.zeros(4096), torch.zeros(64)
    counters, scale = torch.zeros(64, dtype=torch.int32), torch.ones(2) if stored and with_sinks else None
    for of_q, rotation in ((q, None), (projected, rotation_of(size, normed=not cap))):
        assert decode.launch(
            of_q, cache(block, size, stored or dtype), torch.zeros_like(q), *lengths(), work, work[264:],
            (parts, stats, counters), (scale, scale, sinks, None), programs=132, lines=group, short=1, capacity=16,
            fold_limit=96, sees=sees, merges=with_sinks, numbers=(100, 0.1, cap), rotation=rotation,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("block", "size", "group", "sees", "cap", "dtype", "stored"),
    [
        (64, 128, 4, 0, 0.0, BF16, None),
        (16, 128, 2, 1, 30.0, BF16, None),
        (48, 64, 3, 2, 0.0, FP16, None),
        (64, 128, 2, 0, 0.0, BF16, FP8),
        (16, 64, 3, 2, 30.0, FP16, torch.int8),
    ],
)
def test_prompts(
    compiled: list[Any],
    block: int,
    size: int,
    group: int,
    sees: int,
    cap: float,
    dtype: torch.dtype,
    stored: torch.dtype | None,
) -> None:
    q, numbers = torch.zeros(256, 2 * group, size, dtype=dtype), torch.zeros(8, dtype=torch.int32)
    scale = torch.ones(2) if stored and cap else None
    assert prefill.launch(
        q,
        cache(block, size, stored or dtype),
        torch.zeros_like(q),
        *lengths(),
        numbers,
        numbers,
        programs=132,
        sees=sees,
        reach=100,
        score_scale=0.1,
        cap_scale=cap,
        sinks=None,
        key_scale=scale,
        value_scale=scale,
    )


@pytest.mark.parametrize(("stored", "processors"), [(BF16, 1), (FP8, 1), (FP8, PROCESSORS), (torch.int8, PROCESSORS)])
def test_what_rotation_serves_is_launched(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch, stored: torch.dtype, processors: int
) -> None:
    """Rows that are few, too, over a cache of 8 bits: no kernel for few rows reads that."""
    monkeypatch.setattr(decode, "takes_gluon", lambda device: True)
    heads, mask_spec, scratch = paged_plan.Heads(4, 2, 64), MaskSpec(scale=0.1), paged_plan.Scratch(CPU)
    planner = paged_plan.Planner(heads, mask_spec, BF16, CPU, scratch, processors, cache_dtype=stored)
    rows, kv = lengths(), cache(16, 64, stored)
    plan = planner.plan(*rows[:2], num_tokens=4, max_query_len=1, max_seq_len=256)
    rotation, out = rotation_of(64, normed=True), torch.zeros(4, 4, 64, dtype=BF16)
    memory, odd = torch.zeros(1 << 15, dtype=stored), [*kv.stride()]
    odd[2] += ALIGNED // kv.element_size() // 2
    for refused in (memory.as_strided(kv.shape, kv.stride(), 8 // kv.element_size()), memory.as_strided(kv.shape, odd)):
        assert not rope_decode.serves(heads, mask_spec, plan, refused, rotation)
    scaled = dataclasses.replace(rotation, key_scale=torch.ones(2), value_scale=torch.ones(2))
    assert rope_decode.serves(heads, mask_spec, plan, kv, scaled) is (stored != BF16)
    assert rope_decode.serves(heads, mask_spec, plan, kv, rotation)
    projected = torch.zeros(4, 8 * 64, dtype=BF16)
    rope_decode.fused_rope_decode(projected, rotation, kv, *rows, out, mask_spec=mask_spec, plan=plan, scratch=scratch)
    assert compiled[-1].name == "attend_rows_copied"


@pytest.mark.parametrize("stored", [FP8, torch.int8])
def test_stores_in_8_bits(compiled: list[Any], stored: torch.dtype) -> None:
    """Triton's own language too: a scale is one for a program in a latent cache, and one for a head elsewhere."""
    ints, scale = torch.zeros(4, dtype=torch.int64), torch.ones(2)
    for scales in ((scale, scale), (None, None)):
        given = (torch.zeros(4, 6 * 64, dtype=BF16), ints, torch.zeros(64, 64), None, None, 1e-6, 2, 2, 64)
        rope.qk_norm_rope_store(*given, cache(16, 64, stored), ints, 1.0, *scales)
    q, state = torch.zeros(4, 2, 64, dtype=BF16), torch.zeros(4, 512 + 64, dtype=BF16)
    layer = LatentState(torch.zeros(64, 64), torch.ones(512), 1e-6, False, scale[:1])
    latent.latent_rope_store(layer, q, state, ints, torch.zeros_like(q), cache(16, 288, stored, 1), ints)


@pytest.mark.parametrize(("block", "group", "normed"), [(64, 2, True), (16, 7, False)])
def test_rotation_and_attention(compiled: list[Any], block: int, group: int, normed: bool) -> None:
    kv, out = cache(block, 128, BF16), torch.zeros(4, 2 * group, 128, dtype=BF16)
    rotation = rotation_of(128, normed=normed)
    rows = paged_plan.RowsLaunch(paged_plan.Tile(16, 4, 3), 1, 8, 132, 4, 0, False, 2, max_queries=1)
    rope_decode_kernel.fused_rope_decode(
        torch.zeros(4, (2 * group + 4) * 128, dtype=BF16),
        rotation,
        kv,
        *lengths(),
        out,
        mask_spec=MaskSpec(scale=0.1),
        plan=SimpleNamespace(rows=rows, capacity=8),
        scratch=SCRATCH,
    )


@pytest.mark.parametrize(("block", "group", "queries"), [(64, 2, 5), (64, 4, 16), (16, 7, 2)])
def test_rotation_and_attention_of_rows_that_verify(compiled: list[Any], block: int, group: int, queries: int) -> None:
    kv, out = cache(block, 128, BF16), torch.zeros(16, 2 * group, 128, dtype=BF16)
    lines = paged_plan.power_of_two(queries * group)
    rows = paged_plan.RowsLaunch(paged_plan.Tile(64, 4, 4), 16, lines, 132, 4, 0, False, 2, queries)
    rope_verify_kernel.fused_rope_decode(
        torch.zeros(16, (2 * group + 4) * 128, dtype=BF16),
        rotation_of(128, normed=group != 7),
        kv,
        *lengths(),
        out,
        mask_spec=MaskSpec(scale=0.1),
        plan=SimpleNamespace(rows=rows, capacity=8),
        scratch=SCRATCH,
    )


@pytest.mark.parametrize("queries", [2, 5])
def test_rotated_queries_are_multiplied_in_the_order_of_others(compiled: list[Any], queries: int) -> None:
    """Of plain Triton: what was joined of halves had k in another order, and so other bits."""
    kv, out, lines = cache(64, 128, BF16), torch.zeros(4, 4, 128, dtype=BF16), 8 if queries == 2 else 16
    rows = paged_plan.RowsLaunch(paged_plan.Tile(lines, 4, 4), lines // 2, lines, 132, 4, 0, False, 2, queries)
    paged.paged_attention(
        torch.zeros(4, 8 * 128, dtype=BF16),
        kv,
        *lengths(),
        out,
        mask_spec=MaskSpec(scale=0.1),
        plan=paged_plan.Plan(rows, None, None, torch.zeros(8, dtype=torch.int32), 8),
        scratch=SCRATCH,
        rotation=rotation_of(128, normed=True),
    )
    assert "kWidth = 4" not in compiled[0].asm["ttgir"] and "tt.join" not in compiled[0].asm["ttir"]


@pytest.mark.parametrize("activation", [None, "silu", "relu2"])
@pytest.mark.parametrize(("n", "k"), [(6144, 1024), (24576, 4096)])
def test_one_row_normed(compiled: list[Any], n: int, k: int, activation: str | None) -> None:
    out = torch.zeros(1, n // (1 + (activation == "silu")), dtype=BF16)
    gemv.product(
        torch.zeros(1, k, dtype=BF16),
        torch.zeros(n, k, dtype=BF16),
        out,
        norm=torch.ones(k),
        eps=1e-6,
        activation=activation,
    )


def test_three_programs_of_a_row_fill_a_processor(compiled: list[Any]) -> None:
    """Nemotron-H's first product of Mamba-2."""
    x, out = torch.zeros(1, 4096, dtype=BF16), torch.zeros(1, 18560, dtype=BF16)
    gemv.product(x, torch.zeros(18560, 4096, dtype=BF16), out, norm=torch.ones(4096), eps=1e-6)
    assert 3 * (compiled[0].metadata.shared + 1024) <= SHARED_BYTES + 1024


@pytest.mark.parametrize(("n", "k"), [(1024, 3072), (4096, 12288)])
def test_one_row_added(compiled: list[Any], n: int, k: int) -> None:
    x, residual = torch.zeros(1, k, dtype=BF16), torch.zeros(1, n, dtype=BF16)
    gemv.product(x, torch.zeros(n, k, dtype=BF16), torch.zeros_like(residual), residual=residual)


@pytest.mark.parametrize("num_rows", [2, 8])
@pytest.mark.parametrize(
    ("n", "k", "activation", "normed"),
    [(6144, 1024, "silu", True), (6144, 1024, "relu2", True), (4096, 1024, None, True), (1024, 3072, None, False)],
)
def test_few_rows_by_held_weights(
    compiled: list[Any], n: int, k: int, activation: str | None, normed: bool, num_rows: int
) -> None:
    x, out = (
        torch.zeros(num_rows, k, dtype=BF16),
        torch.zeros(num_rows, n // 2 if activation == "silu" else n, dtype=BF16),
    )
    held_gemm.product(
        x,
        torch.zeros(n, k, dtype=BF16),
        out,
        norm=torch.ones(k) if normed else None,
        eps=1e-6,
        residual=None if normed else torch.zeros_like(out),
        activation=activation,
    )


@pytest.mark.parametrize(("n", "k"), [(6144, 8192), (4096, 2048), (4096, 21504)])
def test_one_row_alone(compiled: list[Any], n: int, k: int) -> None:
    """As a drafter's first product, whose row is two halves that are normed apart; and Nemotron-H's last of an MLP."""
    x, out = torch.zeros(1, k, dtype=BF16), torch.zeros(1, n, dtype=BF16)
    gemv.product(x, torch.zeros(n, k, dtype=BF16), out)


@pytest.mark.parametrize("k", [1024, 4096])
def test_one_row_of_a_drafters_head(compiled: list[Any], k: int) -> None:
    """Of 32,000 tokens, in float32: its programs stream, however short a row is."""
    x, weight, out = torch.zeros(1, k, dtype=BF16), torch.zeros(32000, k, dtype=BF16), torch.zeros(1, 32000)
    gemv.product(x, weight, out, norm=torch.ones(k), eps=1e-6)


@pytest.mark.parametrize("k", [1024, 4096])
def test_few_rows_of_a_head(compiled: list[Any], k: int) -> None:
    """By two programs a processor, and by one, whose ring is all of the rest of its memory."""
    x, weight, out = torch.zeros(5, k, dtype=BF16), torch.zeros(32000, k, dtype=BF16), torch.zeros(5, 32000)
    streamed_gemm.product(x, weight, out)
    assert compiled[0].metadata.shared <= SHARED_BYTES // (2 if k == 1024 else 1)


def test_attention_has_room_beside_a_drafters_entry(compiled: list[Any]) -> None:
    """So its K and V are on their way when q, k and v are there; the state is normed before the token is there."""
    states, table = torch.zeros(1, 1024, dtype=BF16), torch.zeros(8, 1024, dtype=BF16)
    norms, weight = (torch.ones(1024), torch.ones(1024)), torch.zeros(4096, 2048, dtype=BF16)
    ids = torch.zeros(1, dtype=torch.int64)
    for pick in (None, ids):
        given = ids, table, states, norms, 1e-6, weight, pick
        beside_gemv.project(*given, normed=pick is None, behind_draw=pick is None)
    of_attention = rope_decode_kernel._SHARED_BYTES
    assert compiled[0].metadata.shared + of_attention + 2 * 1024 <= SHARED_BYTES + 1024


def test_noise_is_made_before_a_draw_waits_for_its_logits(compiled: list[Any], tmp_path: Path) -> None:
    """An assembler may put behind a wait what need not be there: it did."""
    rows, numbers = torch.zeros(5, dtype=torch.int64), torch.zeros(5)
    drawing.draw(torch.zeros(5, 5000), rows, numbers, rows, rows, ready=True)
    table = RowTensors(torch.zeros(6, 64, dtype=torch.int32), *torch.zeros(2, 6, dtype=torch.int32))
    live = torch.zeros(2, 5, dtype=torch.int32)
    of = DraftRows(rows, (live[0], live[1]), table, 1, numbers, rows, 0.8, 5000)
    drafts_gpu.draw_drafts(torch.zeros(5, 5000), None, of)
    x, weight = torch.zeros(1, 1024, dtype=BF16), torch.zeros(32000, 1024, dtype=BF16)
    drafts_head.draw(x, torch.ones(1024), 1e-6, weight, None, of)
    assert len(compiled) == 3
    for kernel in compiled:
        path = tmp_path / "kernel.cubin"
        path.write_bytes(kernel.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(path)]
        before, wait, _ = subprocess.run(command, capture_output=True, text=True, check=True).stdout.partition(
            "ACQBULK"
        )
        entries = 2 if "product" in kernel.metadata.name else 4  # of a thread
        assert wait and before.count("FFMA") >= entries * _TERMS, kernel.metadata.name
