"""Random ragged batches over a poisoned cache, for the attention tests."""

from __future__ import annotations

import dataclasses

import torch

from octavo.attention.base import BACKENDS, AttentionInputs
from octavo.cache.specs import AttentionSpec


@dataclasses.dataclass
class History:
    """One request: everything it has computed, in logical order."""

    q: torch.Tensor  # [tokens, heads, head_size]
    kv: torch.Tensor  # [tokens, kv_heads, 2 * head_size]


def make_history(seed: int, num_tokens: int, heads: int, kv_heads: int, head_size: int, dtype: torch.dtype) -> History:
    generator = torch.Generator().manual_seed(seed)
    q = 2 * torch.randn(num_tokens, heads, head_size, generator=generator)
    kv = torch.randn(num_tokens, kv_heads, 2 * head_size, generator=generator)
    return History(q.to(dtype), kv.to(dtype))


@dataclasses.dataclass
class Batch:
    """The arguments of `paged_attention`, in its order but `out`."""

    q: torch.Tensor
    kv: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor

    def args(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.kv, self.query_start, self.seq_lens, self.block_table


def make_batch(
    rows: list[tuple[History, int, int]], block_size: int, *, seed: int = 0, heads_last: bool = False
) -> Batch:
    """Rows of (history, seq_len, queries). Blocks lie in random order; every slot that no row owns is NaN and every
    table entry that no row needs is out of range. `heads_last`: the cache strides of [blocks, tokens, heads, channels].
    """
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-seq_len // block_size) for _, seq_len, _ in rows]
    ids = 1 + torch.randperm(sum(counts) + 3, generator=generator)
    _, kv_heads, width = rows[0][0].kv.shape
    shape = (len(ids) + 1, block_size, kv_heads, width) if heads_last else (len(ids) + 1, kv_heads, block_size, width)
    kv = torch.full(shape, float("nan"), dtype=rows[0][0].kv.dtype)
    kv = kv.transpose(1, 2) if heads_last else kv
    table = torch.full((len(rows), max(counts) + 2), 2**31 - 1, dtype=torch.int32)
    used = 0
    for row, ((history, seq_len, _), count) in enumerate(zip(rows, counts, strict=True)):
        table[row, :count] = ids[used : used + count]
        used += count
        for position in range(0, seq_len, block_size):
            tokens = history.kv[position : min(position + block_size, seq_len)]
            kv[table[row, position // block_size], :, : len(tokens)] = tokens.transpose(0, 1)
    start = torch.tensor([0, *(queries for _, _, queries in rows)]).cumsum(0).to(torch.int32)
    q = torch.cat([history.q[seq_len - queries : seq_len] for history, seq_len, queries in rows])
    return Batch(q, kv, start, torch.tensor([seq_len for _, seq_len, _ in rows], dtype=torch.int32), table)


def to_device(batch: Batch, device: torch.device) -> Batch:
    return Batch(*(tensor.to(device) for tensor in batch.args()))


def run_backend(name: str, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """The results of two specs through the AttentionBackend protocol, with padding rows."""
    specs = (
        AttentionSpec(num_heads=4, num_kv_heads=2, head_size=32, scale=0.2),
        AttentionSpec(num_heads=4, num_kv_heads=2, head_size=32, scale=0.2, window=20, soft_cap=15.0),
    )
    history = make_history(1, 90, 4, 2, 32, dtype)
    batch = to_device(make_batch([(history, 90, 1), (history, 64, 40), (history, 3, 3)], 16), device)
    padding = {"dtype": torch.int32, "device": device}
    inputs = AttentionInputs(
        num_rows=3,
        num_tokens=44,
        max_query_len=40,
        max_seq_len=128,
        block_size=16,
        query_start=torch.cat([batch.query_start, torch.full((4,), 44, **padding)]),
        seq_lens=torch.cat([batch.seq_lens, torch.zeros(4, **padding)]),
        block_table=batch.block_table,
        slot_mapping=torch.full((44,), -1),
    )
    backend = BACKENDS.resolve(name)(specs, dtype, device)
    backend.prepare(inputs)
    results = []
    for spec in specs:
        out = torch.empty_like(batch.q)
        backend.run(batch.q, batch.kv, spec, out)
        results.append(out)
    return results
