"""The flex backend's block sizes: defaults, and every wrong value refused with its real cause."""

from __future__ import annotations

import pytest
import torch

from octavo import LLM
from octavo.attention.base import Setup
from octavo.attention.flex.backend import FlexBackend
from octavo.attention.flex.block_sizes import resolve_flex_sizes
from octavo.cache.specs import AttentionSpec
from octavo.config.settings import ConfigError

M, N, Q, KV = "flex_attn_block_m", "flex_attn_block_n", "flex_attn_q_block_size", "flex_attn_kv_block_size"


@pytest.mark.parametrize("block", [16, 32, 48, 64, 128, 256, 528])
@pytest.mark.parametrize("group", [1, 3, 4, 8, 32])
def test_K4_1_and_K4_G3_defaults_are_legal_for_every_cache_block(block: int, group: int) -> None:
    """And the same for all of them: bits follow from sizes, and must not follow from the cache's block."""
    for float32 in (False, True):
        sizes = resolve_flex_sizes({}, kernel_block=block, group=group, float32=float32)
        assert sizes == resolve_flex_sizes({}, kernel_block=64, group=group, float32=float32)
        assert sizes.kv_block == 64 and sizes.kv_block % sizes.block_n == 0 and sizes.leaf % sizes.kv_block == 0
        for size in (sizes.decode_lines, sizes.prefill_lines, sizes.block_n, sizes.q_block):
            assert size >= 16 and size & (size - 1) == 0
        assert group <= sizes.decode_lines <= sizes.prefill_lines


@pytest.mark.parametrize("head_size", [64, 128, 256, 512])
def test_a_cache_of_8_bits_has_one_kind_of_matrix_instruction_in_all_tiles(head_size: int) -> None:
    """That of a warp would take channels in fours, as they were loaded, and that of four warps takes them in twos."""
    sizes = resolve_flex_sizes({}, kernel_block=64, group=4, head_size=head_size, narrow=True)
    assert sizes.decode_lines >= 64 or sizes.decode_lines == sizes.prefill_lines
    assert sizes.prefill_lines == resolve_flex_sizes({}, kernel_block=64, group=4, head_size=head_size).prefill_lines
    pinned = resolve_flex_sizes({M: 32}, kernel_block=64, group=4, head_size=head_size, narrow=True)
    assert pinned.decode_lines == pinned.prefill_lines == 32


def test_K4_5_what_a_user_sets_is_used() -> None:
    sizes = resolve_flex_sizes({M: 32, N: 16, Q: 64, KV: 32}, kernel_block=32, group=4)
    assert (sizes.prefill_lines, sizes.decode_lines, sizes.block_n, sizes.q_block, sizes.kv_block) == (
        32,
        32,
        16,
        64,
        32,
    )
    assert sizes.leaf == 0 and not sizes.decode_launch and not sizes.prefill_launch, (
        "keys are walked in one pass, as a trainer walks them"
    )


def test_a_users_tile_is_the_masks_block_whatever_the_caches_is() -> None:
    for block in (32, 48, 64, 256):
        sizes = resolve_flex_sizes({M: 16, N: 16}, kernel_block=block, group=4)
        assert (sizes.block_n, sizes.kv_block, sizes.leaf) == (16, 16, 0)
        sizes = resolve_flex_sizes({M: 16}, kernel_block=block, group=4)
        assert (sizes.block_n, sizes.kv_block, sizes.leaf) == (64, 64, 0)


@pytest.mark.parametrize(
    ("options", "field", "cause"),
    [
        ({M: 0}, M, "must be a power of 2 and at least 16"),  # K4.G1, K4.G2
        ({M: 1}, M, "must be a power of 2 and at least 16"),
        ({M: 8}, M, "must be a power of 2 and at least 16"),
        ({M: -16}, M, "must be a power of 2 and at least 16"),
        ({M: 48}, M, "must be a power of 2 and at least 16"),
        ({N: 0}, N, "must be a power of 2 and at least 16"),
        ({N: 7}, N, "must be a power of 2 and at least 16"),
        ({N: 15}, N, "must be a power of 2 and at least 16"),
        ({Q: 0}, Q, "must be a power of 2 and at least 16"),
        ({Q: 24}, Q, "must be a power of 2 and at least 16"),
        ({Q: -16}, Q, "must be a power of 2 and at least 16"),
        ({KV: 0}, KV, "must be a power of 2 and at least 16"),
        ({M: 16.0}, M, "must be a whole number"),
        ({M: True}, M, "must be a whole number"),
        ({M: "16"}, M, "must be a whole number"),
        ({M: 32, Q: 16}, Q, "must be divisible by flex_attn_block_m=32"),  # K4.2
        ({M: 64}, M, "must be <= the cache's kernel block size, 32, for batch invariance"),  # K4.4, K4.G5
        ({N: 64}, N, "must be <= the cache's kernel block size, 32, for batch invariance"),
        ({KV: 16}, KV, "must be the cache's kernel block size, which is 32"),  # K4.G4, F1.10
        ({KV: 64}, KV, "must be the cache's kernel block size, which is 32"),
    ],
)
def test_K4_2_K4_3_K4_G1_K4_G2_K4_G6_wrong_values_are_refused_by_name(options: dict, field: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause) as error:
        resolve_flex_sizes(options, kernel_block=32, group=4)
    assert error.value.field == field


def test_F1_10_and_K4_G4_another_mask_block_than_the_caches_is_refused_never_slow() -> None:
    """There is one way to build a mask, over blocks of the cache, also for both-way attention."""
    both_ways = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, scale=0.25, causal=False)
    for size in (16, 64):
        setup = Setup(num_blocks=9, block_size=32, options={KV: size})
        with pytest.raises(ConfigError, match=f"{KV}={size}: must be the cache's kernel block size, which is 32"):
            FlexBackend([both_ways], torch.float32, torch.device("cpu"), setup)
    FlexBackend([both_ways], torch.float32, torch.device("cpu"), Setup(num_blocks=9, block_size=32, options={KV: 32}))


def test_K4_4_the_limit_holds_in_reproducible_mode_only_and_equality_is_allowed() -> None:
    assert resolve_flex_sizes({M: 32, N: 32}, kernel_block=32, group=4).decode_lines == 32
    assert resolve_flex_sizes({M: 64}, kernel_block=32, group=4, reproducible=False).decode_lines == 64
    with pytest.raises(ConfigError, match="must divide the cache's kernel block size, which is 48"):
        resolve_flex_sizes({N: 32}, kernel_block=48, group=4)
    with pytest.raises(ConfigError, match="must hold the 32 heads of a KV head"):
        resolve_flex_sizes({M: 16}, kernel_block=64, group=32)


def test_sizes_are_checked_at_the_start_of_an_engine() -> None:
    with pytest.raises(ValueError, match="flex_attn_block_m=8: must be a power of 2 and at least 16"):
        LLM(attention_config={"backend": "flex", M: 8})
    with pytest.raises(ValueError, match="unknown key; did you mean flex_attn_block_m"):
        LLM(attention_config={"backend": "flex", "flex_block_m": 16})
    with pytest.raises(ValueError, match="takes dtype bfloat16, float16, float32, got float64"):
        FlexBackend(
            [AttentionSpec(num_heads=2, num_kv_heads=1, head_size=16, scale=1.0)], torch.float64, torch.device("cpu")
        )


def test_kernel_blocks_of_a_split_cache_block_are_the_masks_blocks() -> None:
    """K4.G5: a kernel_block_size smaller than the cache block is what sizes are compared with."""
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, scale=0.25)
    options = {"kernel_block_size": 16, M: 32}
    with pytest.raises(ConfigError, match="kernel block size, 16,"):
        FlexBackend([spec], torch.float32, torch.device("cpu"), Setup(num_blocks=9, block_size=16, options=options))
