"""Rotation and attention in one kernel against the two operators: what the GPU's tests and its sanitizer share."""

from __future__ import annotations

from typing import Any

import torch

from batches import make_batch, make_history
from octavo.ops.attention import rope_decode
from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.attention.paged import paged_attention
from octavo.ops.attention.paged_plan import Heads, Planner, Scratch
from octavo.ops.rope import Rotation, qk_norm_rope_store, rope_table

BF16, CUDA = torch.bfloat16, torch.device("cuda")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def _make(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    block_size: int,
    size: int,
    dtype: torch.dtype,
    *,
    normed: bool,
    seed: int,
    heads_last: bool,
) -> tuple[torch.Tensor, Rotation, torch.Tensor, list[torch.Tensor], tuple[Any, ...]]:
    """The projection, what becomes of it, the cache, the rows, and where the newest K and V belong in the cache."""
    live = [length for length in lengths if length]
    histories = [make_history(seed + length, length, heads, kv_heads, size, dtype) for length in live]
    batch = make_batch([(h, len(h.kv), 1) for h in histories], block_size, seed=seed, heads_last=heads_last)
    num_rows = len(lengths)
    counts, generator = torch.tensor([int(length > 0) for length in lengths]), torch.Generator().manual_seed(seed)
    table = torch.zeros(num_rows, batch.block_table.shape[1], dtype=torch.int32)
    table[counts > 0] = batch.block_table
    rows = [
        torch.cat((torch.zeros(1), counts.cumsum(0))).int().to(CUDA),
        torch.tensor(lengths, dtype=torch.int32, device=CUDA),
        table.to(CUDA),
    ]
    last = torch.tensor(live) - 1
    blocks = batch.block_table[torch.arange(len(live)), last // block_size].long()
    factor = torch.exp2(4 * torch.rand(num_rows, 1, size, generator=generator) - 2)
    projected = torch.randn(num_rows, heads + 2 * kv_heads, size, generator=generator) * factor
    padding = torch.zeros(num_rows - len(live), dtype=torch.int64)
    q_norm, k_norm = (torch.rand(size, generator=generator).add(0.5).to(CUDA) for _ in range(2))
    rotation = Rotation(
        positions=torch.cat((last, padding)).to(CUDA),
        cos_sin=rope_table(size, max(lengths)).to(CUDA),
        q_norm=q_norm if normed else None,
        k_norm=k_norm if normed else None,
        eps=1e-6,
        slot_mapping=torch.cat((blocks * block_size + last % block_size, padding - 1)).to(CUDA),
    )
    newest = blocks.to(CUDA), slice(None), (last % block_size).to(CUDA)
    return projected.to(dtype).flatten(1).to(CUDA), rotation, batch.kv.to(CUDA), rows, newest


def check(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    block_size: int,
    *,
    normed: bool = True,
    seed: int = 0,
    heads_last: bool = False,
    processors: int = 0,
    size: int = 128,
    dtype: torch.dtype = BF16,
    **options: Any,
) -> None:
    """Rows of one query, with what does not belong to them poisoned: the same results and the same cache, twice.

    A length of 0 is a padding row. processors: to plan for; options: of the sight.
    """
    projected, rotation, kv, rows, newest = _make(
        lengths, heads, kv_heads, block_size, size, dtype, normed=normed, seed=seed, heads_last=heads_last
    )
    num_live = len(newest[0])
    mask_spec, scratch, of = MaskSpec(scale=size**-0.5, **options), Scratch(CUDA), Heads(heads, kv_heads, size)
    plan = Planner(of, mask_spec, dtype, CUDA, scratch, processors).plan(
        rows[0], rows[1], num_tokens=len(lengths), max_query_len=1, max_seq_len=max(lengths)
    )
    expected_kv = kv.clone()
    q = qk_norm_rope_store(
        projected,
        rotation.positions,
        rotation.cos_sin,
        rotation.q_norm,
        rotation.k_norm,
        rotation.eps,
        heads,
        kv_heads,
        size,
        expected_kv,
        rotation.slot_mapping,
    )
    expected = torch.full_like(q, 7.0)
    paged_attention(q, expected_kv, *rows, expected, mask_spec=mask_spec, plan=plan, scratch=scratch)
    torch.cuda.synchronize()
    assert not expected[:num_live].isnan().any() and rope_decode.serves(of, mask_spec, plan, kv, rotation)
    for _ in range(2):
        kv[newest] = float("nan")  # until it is stored
        out = torch.full_like(q, 7.0)
        torch.cuda.synchronize()  # what it reads early is there
        rope_decode.fused_rope_decode(
            projected, rotation, kv, *rows, out, mask_spec=mask_spec, plan=plan, scratch=scratch
        )
        assert torch.equal(_bits(out), _bits(expected)), (lengths, (out != expected).sum())
        assert torch.equal(_bits(kv), _bits(expected_kv)), (lengths, "cache")
