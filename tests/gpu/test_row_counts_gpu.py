"""A row's bits at every number of rows, for the operators whose files test nothing of the kind.

Attention, latent attention, experts, and products with what is fused to them where a layer changes kernels. Inputs are
signed and heavy-tailed, and half of them nearly cancel the other half.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attention"))

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import latent_rig
import moe_rig
from batches import Batch, make_batch, make_history
from gpu_rig import BF16, F16, F32, heavy
from octavo.ops.gemm import fused, pack_linear
from octavo.ops.latent import gpu as latent
from octavo.ops.latent.state import LatentState
from octavo.ops.rope import rope_table
from paged_rig import attend, to_device
from row_counts import DISTINCT, MAX_ROWS, ROWS, assert_rows_keep_their_bits

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def cancelling(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Signed, heavy-tailed; the second half is nearly the first, turned round."""
    half = heavy(rows, width // 2, F32, "cuda", seed)
    return torch.cat([half, -half * (1 + 2**-6 * heavy(rows, width // 2, F32, "cuda", seed + 1).sign())], 1).to(dtype)


def doubled(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Weights whose halves are alike, so that products with cancelling rows nearly vanish."""
    half = heavy(rows, width // 2, dtype, "cuda", seed)
    return torch.cat([half, half], 1)


@pytest.mark.parametrize(
    ("n", "k", "dtype"),
    [(4096, 1024, BF16), (1024, 3072, BF16), (2048, 4096, BF16), (4096, 1024, F16), (4096, 1024, F32)],
)
def test_products_as_a_layer_runs_them(n: int, k: int, dtype: torch.dtype) -> None:
    """Norm, product and activation, then product and addition: in one kernel each where rows are few."""
    x, residual = cancelling(DISTINCT, k, dtype), heavy(DISTINCT, n, dtype, "cuda", 3)
    norm, weight = torch.rand(k // 2, device=DEVICE).repeat(2) + 0.5, pack_linear(doubled(n, k, dtype, 9) / 64)

    def call(pick: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows, before = x[pick], residual[pick]
        return (
            fused.normed_linear(rows, norm, 1e-6, weight),
            fused.normed_linear(rows, norm, 1e-6, weight, activation="silu"),
            fused.linear_add(rows, weight, None, before),
        )

    assert_rows_keep_their_bits(call)


@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 8, 128)])
def test_decode_attention(heads: tuple[int, int, int]) -> None:
    """Requests share blocks, so that any number of rows fits: a row is one of 40 of all lengths."""
    rows = []
    for row in range(40):
        history = make_history(row, 30 * row + 1, *heads, BF16)
        history.kv[1::2] = -history.kv[::2][: len(history.kv[1::2])]
        rows.append((history, 30 * row + 1, 1))
    whole = to_device(make_batch(rows, 64), DEVICE)

    def call(pick: torch.Tensor) -> tuple[torch.Tensor, ...]:
        start = torch.arange(len(pick) + 1, dtype=torch.int32, device=DEVICE)
        return (attend(Batch(whole.q[pick], whole.kv, start, whole.seq_lens[pick], whole.block_table[pick])),)

    assert_rows_keep_their_bits(call, 40)


def test_prefill_attention() -> None:
    """The last query of a chunk of any length has the bits that it has alone."""
    history = make_history(3, MAX_ROWS, 4, 2, 64, BF16)
    history.kv[1::2] = -history.kv[::2]
    seq_len = MAX_ROWS - 5
    whole, q = to_device(make_batch([(history, seq_len, 1)], 64), DEVICE), history.q[:seq_len].to(DEVICE)
    alone = attend(whole)[0]
    for queries in (*ROWS[:-1], seq_len):
        start = torch.tensor([0, queries], dtype=torch.int32, device=DEVICE)
        out = attend(Batch(q[-queries:], whole.kv, start, whole.seq_lens, whole.block_table))
        assert torch.equal(out[-1], alone), queries


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_latent_products_and_stores(dtype: torch.dtype) -> None:
    heads, size = latent_rig.HEADS, latent_rig.STATE
    x = cancelling(DISTINCT, heads * 64, dtype).view(DISTINCT, heads, 64)
    weight = doubled(heads * 70, 64, dtype, 5).view(heads, 70, 64)
    state, query = cancelling(DISTINCT, size, dtype, 2), cancelling(DISTINCT, heads * latent_rig.ROPE, dtype, 3)
    query = query.view(DISTINCT, heads, latent_rig.ROPE)
    positions, slots = torch.arange(DISTINCT, device=DEVICE) % 64, torch.arange(DISTINCT, device=DEVICE)
    norm, table = torch.rand(latent_rig.LATENT, device=DEVICE) + 0.5, rope_table(latent_rig.ROPE, 64).to(DEVICE)
    layer = LatentState(table, norm, 1e-6, False)

    def call(pick: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kv = torch.zeros(DISTINCT // 10, 1, 10, size, dtype=dtype, device=DEVICE)
        rotated = torch.empty_like(query[pick])
        latent.latent_rope_store(layer, query[pick], state[pick], positions[pick], rotated, kv, slots[pick])
        product = latent.head_linear(x[pick], weight, x.new_empty(len(pick), heads, 70))
        return product, rotated, kv.view(DISTINCT, size)[slots[pick]]

    assert_rows_keep_their_bits(call)


def test_latent_attention() -> None:
    batch = latent_rig.Batch([(17 * row + 1, 1) for row in range(40)], BF16, DEVICE)
    q, inputs = batch.q, batch.inputs

    def call(pick: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch.q = q[pick]
        batch.inputs = dataclasses.replace(
            inputs,
            num_rows=len(pick),
            num_tokens=len(pick),
            seq_lens=inputs.seq_lens[pick],
            query_start=torch.arange(len(pick) + 1, dtype=torch.int32, device=DEVICE),
            block_table=inputs.block_table[pick],
            slot_mapping=torch.full((len(pick),), -1, device=DEVICE),
        )
        return (batch.run("mla"),)

    assert_rows_keep_their_bits(call, 40)


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("ranks", [1, 3])
def test_experts(ranks: int, dtype: torch.dtype) -> None:
    x, shape = cancelling(DISTINCT, moe_rig.SIZE, dtype), (moe_rig.EXPERTS, moe_rig.OUT, moe_rig.SIZE)
    weight = doubled(shape[0] * shape[1], shape[2], dtype, 4).view(shape)
    generator = torch.Generator().manual_seed(1)
    experts = torch.rand(DISTINCT, moe_rig.EXPERTS, generator=generator).argsort(1)[:, :ranks].contiguous().cuda()

    def call(pick: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (moe_rig.run(x[pick], experts[pick], weight).view(len(pick), ranks, -1),)

    assert_rows_keep_their_bits(call)
