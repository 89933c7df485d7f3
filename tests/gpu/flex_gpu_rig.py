"""What the tests of flex on a CUDA device share: rows over a pool in random order, and how a backend runs them."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attention"))

from batches import History, make_history
from octavo.attention.base import NO_TENSORS, AttentionInputs, LayerTensors, Setup
from octavo.cache.specs import AttentionSpec

DEVICE, BF16 = torch.device("cuda"), torch.bfloat16
HEADS, KV_HEADS, SIZE, BLOCK = 8, 2, 128, 64
PLAIN = AttentionSpec(num_heads=HEADS, num_kv_heads=KV_HEADS, head_size=SIZE, scale=SIZE**-0.5)
FIELDS = {"prefix_len": torch.tensor([70, 0, 300, 5], dtype=torch.int32, device=DEVICE)}
ROWS = [(300, 1), (2500, 1), (64, 64), (4200, 130)]
LIMITS = {"max_num_rows": 8, "max_num_tokens": 8192, "max_model_len": 8192}


def history(seed: int, length: int, dtype: torch.dtype = BF16, heads: int = HEADS) -> History:
    """Heavy-tailed, so that another order of a sum shows."""
    made = make_history(seed, length, heads, KV_HEADS, SIZE, dtype)
    factor = torch.exp2(6 * torch.rand(length, KV_HEADS, 1, generator=torch.Generator().manual_seed(seed)) - 4)
    made.kv = (made.kv.float() * factor).to(dtype)
    return History(made.q.to(DEVICE), made.kv.to(DEVICE))


class Step:
    """Rows of (history, length, queries) over a pool with blocks in random order; unwritten slots hold zeros."""

    def __init__(
        self, rows, block: int = BLOCK, seed: int = 0, *, heads_last: bool = False, num_blocks: int = 800
    ) -> None:
        counts = [-(-length // block) for _, length, _ in rows]
        self.num_blocks = num_blocks
        shape = (self.num_blocks, KV_HEADS, block, 2 * SIZE)
        if heads_last:
            shape = (self.num_blocks, block, KV_HEADS, 2 * SIZE)
        self.kv = torch.zeros(shape, dtype=rows[0][0].kv.dtype, device=DEVICE)
        if heads_last:
            self.kv = self.kv.transpose(1, 2)
        ids = (1 + torch.randperm(self.num_blocks - 1, generator=torch.Generator().manual_seed(seed))).tolist()
        table = torch.full((len(rows), max(counts) + 2), 2**31 - 1, dtype=torch.int32)
        for row, ((made, length, _), count) in enumerate(zip(rows, counts, strict=True)):
            table[row, :count] = torch.tensor([ids.pop() for _ in range(count)])
            at = torch.arange(length, device=DEVICE)
            blocks = table[row, :count].to(DEVICE).long()[at // block]
            kept, target = made.kv[:length], self.kv
            if kept.element_size() == 1:  # bytes, since float8 has no assignment by index
                kept, target = kept.view(torch.uint8), target.view(torch.uint8)
            target[blocks, :, at % block] = kept
        queries = [queries for _, _, queries in rows]
        self.inputs = AttentionInputs(
            num_rows=len(rows),
            num_tokens=sum(queries),
            max_query_len=max(queries),
            max_seq_len=max(length for _, length, _ in rows),
            block_size=block,
            query_start=torch.tensor([0, *queries]).cumsum(0).int().to(DEVICE),
            seq_lens=torch.tensor([length for _, length, _ in rows], dtype=torch.int32, device=DEVICE),
            block_table=table.to(DEVICE),
            slot_mapping=torch.full((sum(queries),), -1, device=DEVICE),
            rows=torch.arange(len(rows), device=DEVICE),
        )
        self.q = torch.cat([made.q[length - queries : length] for made, length, queries in rows])

    def setup(self, **options) -> Setup:
        return Setup(
            **LIMITS, num_blocks=self.num_blocks, block_size=self.inputs.block_size, fields=FIELDS, options=options
        )

    def run(self, backend, spec: AttentionSpec, layer: LayerTensors = NO_TENSORS) -> torch.Tensor:
        out = torch.full_like(self.q, float("nan"))
        backend.prepare(self.inputs)
        backend.run(self.q, self.kv, spec, out, layer)
        return out


def make_rows(shape=ROWS, dtype: torch.dtype = BF16):
    return [(history(seed, length, dtype), length, queries) for seed, (length, queries) in enumerate(shape)]


def odd_keys(b, h, q_idx, kv_idx):
    return (kv_idx % 2 == h % 2) | (kv_idx == q_idx)
