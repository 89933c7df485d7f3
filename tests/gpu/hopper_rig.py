"""What the tests of Hopper's two attention kernels share: calls that both must take, and batches of unusual tensors."""

from __future__ import annotations

from typing import Any

import torch

from batches import Batch

DEVICE = torch.device("cuda")
BF16, FP16 = torch.bfloat16, torch.float16
# (block size, what queries see)
MASKS: list[tuple[int, dict[str, Any]]] = [
    (16, {}),
    (64, {}),
    (128, {}),
    (64, {"window": 1}),
    (64, {"window": 700, "soft_cap": 20.0}),
    (64, {"chunk": 300}),
]
# (heads, KV heads, size, dtype, block size, whether heads lie behind tokens in the cache)
HEADS = [(4, 2, 128, BF16, 64, True), (4, 4, 128, FP16, 16, True), (8, 2, 64, FP16, 16, False)]


def with_strided_queries(batch: Batch) -> Batch:
    """The same batch, whose queries lie among other heads, which are NaN."""
    tokens, heads, size = batch.q.shape
    fused = torch.full((tokens, heads + 4, size), float("nan"), dtype=batch.q.dtype, device=batch.q.device)
    fused[:, :heads] = batch.q
    batch.q = fused[:, :heads]
    return batch


def in_a_large_pool(batch: Batch, lengths: tuple[int, ...]) -> Batch:
    """The same batch of rows of 64-token blocks, which lie at the end of a pool of 700,000 tokens."""
    pool = torch.empty(700_000 // 64, *batch.kv.shape[1:], dtype=batch.kv.dtype, device=batch.kv.device)
    live = len(batch.kv)
    pool[-live:] = batch.kv
    for row, length in enumerate(lengths):
        batch.block_table[row, : -(-length // 64)] += len(pool) - live
    return Batch(batch.q, pool, batch.query_start, batch.seq_lens, batch.block_table)
