"""Tables of angles against transformers' formulas; the fused norm, rotation and store against its reference."""

from __future__ import annotations

import math

import pytest
import torch

from octavo.ops import native
from octavo.ops.cache_write.quantize import quantize
from octavo.ops.rope import qk_norm_rope_store, qk_norm_rope_store_eager, rope_table

needs_native = pytest.mark.skipif(not native.available(), reason="the native library is not built")
HF_NAMES = {
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "factor": "factor",
    "original_max_position": "original_max_position_embeddings",
}


@pytest.mark.parametrize(
    "options",
    [
        {"theta": 10000.0},
        {"theta": 1e6, "kind": "linear", "factor": 8.0},
        {
            "theta": 5e5,
            "kind": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position": 8192,
        },
        {"theta": 1e6, "kind": "yarn", "factor": 4.0, "original_max_position": 4096},
    ],
    ids=lambda options: options.get("kind", "default"),
)
def test_table_equals_transformers(options: dict[str, float]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {HF_NAMES[name]: value for name, value in options.items() if name in HF_NAMES}
    parameters = {"rope_type": options.get("kind", "default"), "rope_theta": options["theta"], **scaling}
    config = LlamaConfig(head_dim=64, max_position_embeddings=32768, rope_parameters=parameters)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(200)[None])
    table = rope_table(64, 200, **options)
    # transformers rounds frequencies and angles to float32: 200 * 2^-24 is their error.
    torch.testing.assert_close(table, torch.cat([cos[0, :, :32], sin[0, :, :32]], dim=1), atol=3e-5, rtol=0)


def test_a_table_that_turns_nothing_keeps_bits() -> None:
    table, rows = rope_table(64, 10, kind="none"), torch.randn(10, 32)
    cos, sin = table.split(32, dim=1)
    assert torch.equal(rows * cos - rows.flip(1) * sin, rows) and torch.equal(rows * cos + rows.flip(1) * sin, rows)


def test_table_is_exact_far_out() -> None:
    table = rope_table(8, 100_001)
    frequency = 10000.0**-0.25
    assert table[100_000, 1].item() == pytest.approx(math.cos(100_000 * frequency), abs=1e-7)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"kind": "longrope"}, "longrope"), ({"kind": "yarn"}, "original_max_position"), ({"rotary_size": 7}, "7")],
)
def test_table_refuses(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        rope_table(64, 10, **options)  # type: ignore[arg-type]


class Case:
    """One call's arguments over a cache that holds NaN."""

    def __init__(self, head_size: int, dtype: torch.dtype, norm: bool, rotary: int = 0, num_tokens: int = 37) -> None:
        generator = torch.Generator().manual_seed(head_size + norm)
        self.heads = (6, 2, head_size)
        self.table = rope_table(head_size, 300, rotary_size=rotary)
        self.qkv = torch.randn(num_tokens, 10 * head_size, generator=generator).to(dtype)
        self.positions = torch.randint(0, 300, (num_tokens,), generator=generator)
        self.slots = torch.randperm(64, generator=generator)[:num_tokens]
        self.slots[num_tokens // 2] = -1
        self.norms = [torch.rand(head_size, generator=generator) + 0.5 if norm else None for _ in range(2)]
        self.kv = torch.full((4, 16, 2, 2 * head_size), float("nan"), dtype=dtype).transpose(1, 2)

    def run(self, function=qk_norm_rope_store, *, q_scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        kv = self.kv.clone(memory_format=torch.preserve_format)
        arguments = (self.qkv, self.positions, self.table, *self.norms, 1e-6, *self.heads, kv, self.slots, q_scale)
        return function(*arguments), kv


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("head_size", "rotary"), [(64, 0), (128, 0), (80, 0), (24, 0), (96, 48)])
def test_native_equals_the_reference(dtype: torch.dtype, norm: bool, head_size: int, rotary: int) -> None:
    case = Case(head_size, dtype, norm, rotary)
    tolerance = {"atol": 2e-6, "rtol": 0} if dtype == torch.float32 else {"atol": 1e-6, "rtol": 2**-7}
    for ours, expected in zip(case.run(), case.run(qk_norm_rope_store_eager), strict=True):
        if norm:
            torch.testing.assert_close(ours, expected, **tolerance, equal_nan=True)
        else:
            assert torch.equal(ours.nan_to_num(99), expected.nan_to_num(99))


def test_only_mapped_slots_are_written() -> None:
    case = Case(64, torch.float32, True)
    _, kv = case.run()
    by_slot = kv.transpose(1, 2).flatten(0, 1)
    written = torch.zeros(64, dtype=torch.bool)
    written[case.slots[case.slots >= 0]] = True
    assert by_slot[written].isfinite().all() and by_slot[~written].isnan().all()


class Scales:
    """What the heads of a quantized cache are divided by."""

    key, value = torch.tensor([0.25, 1.5]), torch.tensor([0.5, 0.03])


@needs_native
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("head_size", "rotary"), [(64, 0), (24, 0), (96, 48)])
def test_a_narrow_cache_holds_what_the_twin_rounds_to(
    cache: torch.dtype, dtype: torch.dtype, head_size: int, rotary: int
) -> None:
    case = Case(head_size, dtype, False, rotary)
    case.qkv[3] *= 4000.0  # beyond the range, and far below
    case.qkv[4] *= 1e-3
    case.kv = torch.zeros((4, 16, 2, 2 * head_size)).to(cache).transpose(1, 2)
    scales = (None, None) if cache == torch.bfloat16 else (Scales.key, Scales.value)
    results = []
    for function in (qk_norm_rope_store, qk_norm_rope_store_eager):
        kv = case.kv.clone(memory_format=torch.preserve_format)
        function(case.qkv, case.positions, case.table, None, None, 1e-6, *case.heads, kv, case.slots, 1.0, *scales)
        results.append(kv.contiguous().view(torch.uint8))
    assert torch.equal(*results)


@needs_native
@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.int8])
def test_every_value_of_a_quantized_cache_is_rounded_as_torch_rounds(cache: torch.dtype) -> None:
    """All 2^16 bfloat16 values, as V."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(1024, 1, 64)
    qkv = torch.cat([torch.zeros(1024, 2 * 64, dtype=torch.bfloat16), values[:, 0]], dim=1)
    kv = torch.zeros(64, 1, 16, 128).to(cache)
    qk_norm_rope_store(
        qkv,
        torch.zeros(1024, dtype=torch.int64),
        rope_table(64, 1),
        None,
        None,
        1e-6,
        1,
        1,
        64,
        kv,
        torch.arange(1024),
    )
    expected = quantize(values, cache, None)[:, 0].view(torch.uint8)
    ours = kv.view(torch.uint8).flatten(0, 2)[:, 64:]
    nan = values[:, 0].isnan()
    assert torch.equal(ours[~nan], expected[~nan])
    stored = kv.flatten(0, 2)[:, 64:].float()
    assert stored[nan].isnan().all() if cache == torch.float8_e4m3fn else (stored[nan] == 0).all()


@needs_native
def test_bits_do_not_depend_on_neighbours_threads_or_instruction_set() -> None:
    case = Case(128, torch.float32, True)
    before, (q, kv) = native.num_threads(), case.run()
    try:
        for isa in native.built_isas():
            with native.using(isa):
                for threads in (1, 2, 3):
                    native.set_num_threads(threads)
                    again = case.run()
                    assert torch.equal(again[0], q) and torch.equal(again[1].nan_to_num(9), kv.nan_to_num(9))
    finally:
        native.set_num_threads(before)
    case.qkv, case.positions, case.slots = case.qkv[5:6], case.positions[5:6], case.slots[5:6]
    assert torch.equal(case.run()[0][0], q[5])


def test_q_scale_multiplies_q_only() -> None:
    case = Case(64, torch.float32, False)
    (q, kv), (scaled, same) = case.run(), case.run(q_scale=0.5)
    assert torch.equal(scaled, q * 0.5) and torch.equal(same.nan_to_num(9), kv.nan_to_num(9))
