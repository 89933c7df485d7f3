"""Rotation and attention in one kernel against the two operators: what the GPU's tests and its sanitizer share."""

from __future__ import annotations

import torch

from batches import make_batch, make_history
from octavo.ops.gpu import rotate_attend
from octavo.ops.paged_attention import Heads, Planner, Scratch, Sight, paged_attention
from octavo.ops.rope import Rotation, qk_norm_rope_store, rope_table

SIZE, BF16 = 128, torch.bfloat16


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def check(
    lengths: list[int],
    heads: int,
    kv_heads: int,
    block_size: int,
    *,
    normed: bool = True,
    seed: int = 0,
    heads_last: bool = False,
) -> None:
    """Rows of one query, with what does not belong to them poisoned: the same results and the same cache, twice.

    A length of 0 is a padding row.
    """
    live = [length for length in lengths if length]
    histories = [make_history(seed + length, length, heads, kv_heads, SIZE, BF16) for length in live]
    batch = make_batch([(h, len(h.kv), 1) for h in histories], block_size, seed=seed, heads_last=heads_last)
    num_rows, device = len(lengths), torch.device("cuda")
    counts, generator = torch.tensor([int(length > 0) for length in lengths]), torch.Generator().manual_seed(seed)
    table = torch.zeros(num_rows, batch.block_table.shape[1], dtype=torch.int32)
    table[counts > 0] = batch.block_table
    rows = [
        torch.cat((torch.zeros(1), counts.cumsum(0))).int().to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        table.to(device),
    ]
    last = torch.tensor(live) - 1
    blocks = batch.block_table[torch.arange(len(live)), last // block_size].long()
    size = torch.exp2(4 * torch.rand(num_rows, 1, SIZE, generator=generator) - 2)
    projected = torch.randn(num_rows, heads + 2 * kv_heads, SIZE, generator=generator) * size
    padding = torch.zeros(num_rows - len(live), dtype=torch.int64)
    q_norm, k_norm = (torch.rand(SIZE, generator=generator).add(0.5).to(device) for _ in range(2))
    rotation = Rotation(
        positions=torch.cat((last, padding)).to(device), cos_sin=rope_table(SIZE, max(lengths)).to(device),
        q_norm=q_norm if normed else None, k_norm=k_norm if normed else None, eps=1e-6,
        slot_mapping=torch.cat((blocks * block_size + last % block_size, padding - 1)).to(device),
    )  # fmt: skip
    sight, scratch, of = Sight(scale=SIZE**-0.5), Scratch(device), Heads(heads, kv_heads, SIZE)
    plan = Planner(of, sight, BF16, device, scratch).plan(
        rows[0], rows[1], num_tokens=num_rows, max_query_len=1, max_seq_len=max(lengths)
    )
    projected = projected.to(BF16).flatten(1).to(device)
    kv = batch.kv.to(device)
    expected_kv = kv.clone()
    q = qk_norm_rope_store(
        projected, rotation.positions, rotation.cos_sin, rotation.q_norm, rotation.k_norm, rotation.eps, heads,
        kv_heads, SIZE, expected_kv, rotation.slot_mapping,
    )  # fmt: skip
    expected = torch.full_like(q, 7.0)
    paged_attention(q, expected_kv, *rows, expected, sight=sight, plan=plan, scratch=scratch)
    torch.cuda.synchronize()
    assert not expected[: len(live)].isnan().any() and rotate_attend.serves(of, sight, plan, kv, rotation)
    for _ in range(2):
        out = torch.full_like(q, 7.0)
        torch.cuda.synchronize()  # what it reads early is there
        rotate_attend.rotate_and_attend(projected, rotation, kv, *rows, out, sight=sight, plan=plan, scratch=scratch)
        assert torch.equal(_bits(out), _bits(expected)), (lengths, (out != expected).sum())
        assert torch.equal(_bits(kv), _bits(expected_kv)), (lengths, "cache")
