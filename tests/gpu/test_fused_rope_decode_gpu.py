"""Rotation and attention of decoding rows in one kernel: the bits of the two operators."""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attention"))

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

import fused_rope_rig
from octavo.attention.base import AttentionInputs
from octavo.attention.paged import PagedBackend
from octavo.cache.specs import AttentionSpec
from octavo.ops.attention import paged_plan
from octavo.ops.rope import Rotation, rope_table

pytestmark = pytest.mark.gpu
BF16, FP16 = torch.bfloat16, torch.float16
# around tiles of 64, halves of 256, leaves of 256 and, behind 1,024 tokens, of 512
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 130, 255, 256, 257, 300, 511, 513, 1000, 1024, 1025, 1281, 1537, 4000, 9000)


@pytest.mark.parametrize(("heads", "kv_heads", "block_size"), [(16, 8, 64), (16, 8, 16), (32, 8, 64), (28, 4, 128)])
def test_a_row_has_the_bits_of_the_two_operators(heads: int, kv_heads: int, block_size: int) -> None:
    for seed, length in enumerate(LENGTHS):
        fused_rope_rig.check([length], heads, kv_heads, block_size, seed=seed, heads_last=block_size == 16)


@pytest.mark.parametrize("lengths", [[300, 5], [700, 1, 64, 1300], [2000, 257, 1], [40, 600, 0, 0], [3, 0]])
def test_rows_beside_it_move_no_bit(lengths: list[int]) -> None:
    for block_size in (16, 64):
        fused_rope_rig.check(lengths, 16, 8, block_size, normed=block_size == 64, seed=len(lengths))


@pytest.mark.parametrize("queries", [2, 5, 8, 16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dtype", "block_size"),
    [(16, 8, 128, BF16, 64), (32, 8, 128, BF16, 16), (28, 4, 128, BF16, 128), (8, 2, 64, FP16, 16)],
)
def test_rows_that_verify(
    heads: int,
    kv_heads: int,
    size: int,
    dtype: torch.dtype,
    block_size: int,
    queries: int,
) -> None:
    """Of one row at every border, and of rows beside each other and padding."""
    if queries * heads > 64 * kv_heads:
        pytest.skip("a tile does not hold them")
    for seed, length in enumerate((1, 5, 16, 64, 67, 130, 256, 258, 300, 513, 1026, 1300, 4000)):
        options = {"seed": seed, "heads_last": seed % 2 > 0, "normed": seed % 3 > 0}
        fused_rope_rig.check([length], heads, kv_heads, block_size, size=size, dtype=dtype, queries=queries, **options)
    for lengths in ([300, 5, 259], [700, 1, 64, 1300], [40, 1030, 0, 0]):
        fused_rope_rig.check(lengths, heads, kv_heads, block_size, size=size, dtype=dtype, queries=queries)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dtype", "block_size", "options"),
    [
        (16, 8, 128, BF16, 64, {}),
        (16, 8, 128, BF16, 16, {"window": 70}),
        (32, 8, 128, BF16, 128, {"window": 700, "soft_cap": 20.0}),
        (16, 2, 128, FP16, 48, {"chunk": 300}),
        (4, 4, 64, BF16, 64, {}),
        (8, 2, 64, FP16, 16, {"window": 1}),
    ],
)
def test_rows_that_are_divided(heads, kv_heads, size, dtype, block_size, options) -> None:
    """Whole, shared by two programs and more, and beside padding rows; programs with a part of a leaf or with many."""
    rng = random.Random(heads * size)
    shuffled = [*LENGTHS[:-2], *(rng.randrange(1, 700) for _ in range(8))]
    rng.shuffle(shuffled)
    for seed, processors in enumerate((1, 3, 11)):
        fused_rope_rig.check(
            [*shuffled, 0, 0],
            heads,
            kv_heads,
            block_size,
            processors=processors,
            size=size,
            dtype=dtype,
            seed=seed,
            normed=seed != 1,
            heads_last=seed == 2,
            **options,
        )


@pytest.mark.parametrize("stored", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dtype", "block_size"),
    [(16, 8, 128, BF16, 64), (32, 8, 128, BF16, 16), (8, 2, 64, FP16, 48)],
)
def test_what_is_stored_in_8_bits_is_read_again(stored, heads, kv_heads, size, dtype, block_size) -> None:
    for seed, (lengths, processors) in enumerate((([300], 0), ([1, 64, 65], 0), ([*LENGTHS, 0, 0], 3))):
        options = {"seed": seed, "normed": seed != 1, "heads_last": block_size == 16, "stored": stored}
        fused_rope_rig.check(
            lengths, heads, kv_heads, block_size, size=size, dtype=dtype, processors=processors, **options
        )


@pytest.mark.parametrize("num_rows", [17, 33, 130, 512])
def test_as_many_rows_as_steps_have(num_rows: int) -> None:
    rng = random.Random(num_rows)
    fused_rope_rig.check([rng.choice((1, 17, 80, 144, 300)) for _ in range(num_rows)], 4, 2, 64, seed=num_rows)


def test_long_rows_are_left_to_merge() -> None:
    with mock.patch.multiple(paged_plan, _FOLDS=4, _LONG=4):
        fused_rope_rig.check([5000, 3, 1300, 0, 2600], 8, 2, 64, processors=3)


def test_only_graphs_store_and_read_in_one_kernel() -> None:
    """Elsewhere a row of one query may read a block that another row completes in the same step."""
    device = torch.device("cuda")
    ints = {"dtype": torch.int32, "device": device}
    spec = AttentionSpec(num_heads=16, num_kv_heads=8, head_size=128, scale=1.0)
    backend = PagedBackend((spec,), torch.bfloat16, device)
    inputs = AttentionInputs(
        num_rows=2,
        num_tokens=2,
        max_query_len=1,
        max_seq_len=64,
        block_size=64,
        query_start=torch.arange(3, **ints),
        seq_lens=torch.ones(2, **ints),
        block_table=torch.ones(2, 1, **ints),
        slot_mapping=torch.zeros(2, dtype=torch.int64, device=device),
    )
    rotation = Rotation(
        positions=inputs.slot_mapping,
        cos_sin=rope_table(128, 64).to(device),
        q_norm=None,
        k_norm=None,
        eps=1e-6,
        slot_mapping=inputs.slot_mapping,
    )
    kv = torch.zeros(2, 8, 64, 256, dtype=torch.bfloat16, device=device)
    for captured in (False, True):
        backend.prepare(inputs, for_capture=captured)
        assert backend.rotates(rotation, kv, spec) is captured
    for apart in (False, True):
        several = dataclasses.replace(inputs, max_query_len=5, apart=apart)
        backend.prepare(several, for_capture=True)
        assert backend.rotates(rotation, kv, spec) is apart
