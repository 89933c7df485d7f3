"""Rotation and attention of few decoding rows in one kernel: the bits of the two operators."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attention"))

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] < 9:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

import rotate_rig
from octavo.attention.base import AttentionInputs, Variant
from octavo.attention.paged import PagedBackend
from octavo.ops.rope import Rotation, rope_table

pytestmark = pytest.mark.gpu
# around tiles of 64, halves of 256, leaves of 256 and, behind 1,024 tokens, of 512
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 130, 255, 256, 257, 300, 511, 513, 1000, 1024, 1025, 1281, 1537, 4000, 9000)


@pytest.mark.parametrize(("heads", "kv_heads", "block_size"), [(16, 8, 64), (16, 8, 16), (32, 8, 64), (28, 4, 128)])
def test_a_row_has_the_bits_of_the_two_operators(heads: int, kv_heads: int, block_size: int) -> None:
    for seed, length in enumerate(LENGTHS):
        rotate_rig.check([length], heads, kv_heads, block_size, seed=seed, heads_last=block_size == 16)


@pytest.mark.parametrize("lengths", [[300, 5], [700, 1, 64, 1300], [2000, 257, 1], [40, 600, 0, 0], [3, 0]])
def test_rows_beside_it_move_no_bit(lengths: list[int]) -> None:
    for block_size in (16, 64):
        rotate_rig.check(lengths, 16, 8, block_size, normed=block_size == 64, seed=len(lengths))


def test_only_graphs_store_and_read_in_one_kernel() -> None:
    """Elsewhere a row of one query may read a block that another row completes in the same step."""
    device = torch.device("cuda")
    ints = {"dtype": torch.int32, "device": device}
    variant = Variant(num_heads=16, num_kv_heads=8, head_size=128, scale=1.0)
    backend = PagedBackend((variant,), torch.bfloat16, device)
    inputs = AttentionInputs(
        num_rows=2, num_tokens=2, max_query_len=1, max_seq_len=64, block_size=64, query_start=torch.arange(3, **ints),
        seq_lens=torch.ones(2, **ints), block_table=torch.ones(2, 1, **ints),
        slot_mapping=torch.zeros(2, dtype=torch.int64, device=device),
    )  # fmt: skip
    rotation = Rotation(
        positions=inputs.slot_mapping, cos_sin=rope_table(128, 64).to(device), q_norm=None, k_norm=None, eps=1e-6,
        slot_mapping=inputs.slot_mapping,
    )  # fmt: skip
    kv = torch.zeros(2, 8, 64, 256, dtype=torch.bfloat16, device=device)
    for captured in (False, True):
        backend.prepare(inputs, for_capture=captured)
        assert backend.rotates(rotation, kv, variant) is captured
