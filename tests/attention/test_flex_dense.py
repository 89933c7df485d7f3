"""FlexAttention over plain K and V has the bits of the flex backend; what upstream's Flex refuses works."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import octavo.attention as A
from batches import make_history
from contract_rig import CPU, Row, Setting, as_read, attend_plainly, make_step
from octavo.attention.base import NO_SETUP, LayerTensors, Setup, alibi_slopes
from octavo.attention.flex.backend import FlexBackend
from octavo.attention.flex.block_sizes import resolve_flex_sizes
from octavo.attention.flex.kernel import kernel_options
from octavo.attention.mods import AttentionMods
from octavo.cache.specs import AttentionSpec
from octavo.config.settings import ConfigError

HEADS, KV_HEADS, SIZE, LENGTH = 4, 2, 32, 256
FULL = AttentionSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, scale=0.2)
field = A.request_field("instructions")
MODS = {
    "causal": AttentionMods(),
    "sliding window": A.sliding_window(70),
    "soft cap": A.soft_cap(5.0),
    "a user's": AttentionMods(mask_mod=lambda b, h, q, kv: (kv % 3 == h % 3) | (q - kv < 9)),
    "with data": AttentionMods(mask_mod=lambda b, h, q, kv: (kv < field[b]) | (q - kv < 20), fields=(field,)),
}


def names(size: int) -> dict[str, int]:
    return dict.fromkeys(
        (f"flex_attn_{name}" for name in ("block_m", "block_n", "q_block_size", "kv_block_size")), size
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("name", MODS)
def test_K4_8_a_trainers_call_has_the_bits_of_serving(name: str, size: int, dtype: torch.dtype) -> None:
    """Two sequences at once; served whole, in chunks and in decode, beside neighbours of huge scores."""
    spec, data = dataclasses.replace(FULL, mods=MODS[name]), torch.tensor([40, 7], dtype=torch.int32)
    made = [make_history(seed, LENGTH, HEADS, KV_HEADS, SIZE, dtype) for seed in range(2)]
    q, kv = (torch.stack([getattr(one, part) for one in made]).transpose(1, 2) for part in ("q", "kv"))
    trained = A.flex_attention(
        q, *kv.chunk(2, dim=-1), MODS[name], scale=FULL.scale, sizes=names(size), fields={"instructions": data}
    ).transpose(1, 2)
    other = make_history(9, 200, HEADS, KV_HEADS, SIZE, dtype)
    other.q *= 30
    setup = Setup(
        num_blocks=400,
        max_model_len=300,
        block_size=size,
        options=names(size),
        fields={"instructions": torch.tensor([0, 40, 7], dtype=torch.int32)},
    )
    backend, setting = FlexBackend([spec], dtype, CPU, setup), Setting("BLHNC", 64, size)
    for end, count in ((LENGTH, LENGTH), (50, 50), (130, 80), (131, 1), (200, 3), (LENGTH, 1)):
        rows: list[Row] = [(other, 150, 1), (made[0], end, count), (made[1], min(end + 1, LENGTH), 1)]
        out = make_step(rows, setting, seed=end).run(backend, spec)
        assert torch.equal(out[1 : 1 + count], trained[0, end - count : end]), end
        assert torch.equal(out[-1], trained[1, min(end, LENGTH - 1)]), end


def test_K4_8_what_bits_depend_on_must_be_said() -> None:
    q, kv = torch.zeros(1, HEADS, 96, SIZE), torch.zeros(1, KV_HEADS, 96, SIZE)
    with pytest.raises(ConfigError, match="flex_attn_kv_block_size"):
        A.flex_attention(q, kv, kv, scale=1.0, sizes={"flex_attn_block_m": 16})
    with pytest.raises(ValueError, match="length=96 must be a multiple of 64"):
        A.flex_attention(q, kv, kv, scale=1.0, sizes=names(64))


@pytest.mark.parametrize("group", [1, 4, 7, 16])
@pytest.mark.parametrize("block", [16, 48, 64, 128])
def test_K4_6_what_kernels_are_compiled_with(block: int, group: int) -> None:
    """A tile lies in its mask block; no warp shares a row's keys with another; a user's tile is the trainer's."""
    size = 32 if block % 32 == 0 else 16
    pinned = resolve_flex_sizes(names(size) | {"flex_attn_kv_block_size": None}, kernel_block=block, group=group)
    assert kernel_options(pinned, size) == {
        "FORCE_USE_FLEX_ATTENTION": True,
        "BLOCK_M": size,
        "BLOCK_N": size,
        "IS_DIVISIBLE": False,
    }
    sizes = resolve_flex_sizes({}, kernel_block=block, group=group)
    for lines in (sizes.decode_lines, sizes.prefill_lines):
        options = kernel_options(sizes, lines)
        assert options["BLOCK_M"] == lines and 64 % options["BLOCK_N"] == 0 and options["IS_DIVISIBLE"]
        assert options["num_warps"] == 1 or lines >= options["BLOCK_N"]


NO_ALIBI_THERE = {
    "alibi": dataclasses.replace(FULL, alibi_slopes=alibi_slopes(HEADS)),
    "logits soft cap": dataclasses.replace(FULL, soft_cap=5.0),
    "encoder-only": dataclasses.replace(FULL, causal=False),
    "any head size": dataclasses.replace(FULL, head_size=24),
    "all at once": dataclasses.replace(
        FULL, alibi_slopes=alibi_slopes(HEADS), soft_cap=5.0, causal=False, window=50, head_size=40
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", [None, torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("name", NO_ALIBI_THERE)
def test_K4_9_what_upstream_refuses_works(name: str, stored: torch.dtype | None, dtype: torch.dtype) -> None:
    """Each also with a quantized cache, kernel blocks of 48 and two layers that share K and V."""
    spec = NO_ALIBI_THERE[name]
    scales = LayerTensors()
    if stored is not None:
        scales = LayerTensors(key_scale=torch.tensor([0.02, 0.05]), value_scale=torch.tensor([0.03, 0.01]))
    rows: list[Row] = [
        (make_history(seed, length, HEADS, KV_HEADS, spec.head_size, dtype), length, count)
        for seed, (length, count) in enumerate([(90, 90), (64, 64), (3, 3), (17, 17)])
    ]
    backend = FlexBackend([spec], dtype, CPU, dataclasses.replace(NO_SETUP, cache_dtype=stored))
    step = make_step(rows, Setting("LBHNC", 96, 48), cache=stored, scales=scales)
    read = rows if stored is None else as_read(rows, stored, scales)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    first = step.run(backend, spec, scales)
    torch.testing.assert_close(first.double(), attend_plainly(read, spec), atol=tolerance, rtol=tolerance)
    step.q = -step.q  # a second layer's queries over the first one's K and V
    read = [(dataclasses.replace(one, q=-one.q), length, count) for one, length, count in read]
    second = torch.full_like(first, 7.0)
    backend.run(step.q, step.kv, spec, second, scales)
    torch.testing.assert_close(second.double(), attend_plainly(read, spec), atol=tolerance, rtol=tolerance)


def test_fields_that_a_mod_reads_and_that_are_not_given_are_named() -> None:
    q = torch.randn(1, 2, 64, 16)
    sizes = {"flex_attn_block_m": 64, "flex_attn_kv_block_size": 64}
    with pytest.raises(ValueError, match=r"attention mod document reads document_ids: give fields="):
        A.flex_attention(q, q, q, A.document(), scale=1.0, sizes=sizes)
