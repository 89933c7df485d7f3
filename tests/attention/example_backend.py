"""An attention backend in sixty lines, outside the package: chosen as "example_backend:LoopBackend".

It states what it takes (CPU, float32, kernel blocks of 64 only) and walks its block table one kernel block at a time,
with a running softmax. Everything else (which layout, how blocks are split, where slots lie) is done for it.
"""

from __future__ import annotations

import torch

from octavo.attention.base import Capability, LayerTensors
from octavo.attention.frame import BackendFrame
from octavo.cache.specs import AttentionSpec


class LoopBackend(BackendFrame):
    """An AttentionBackend for kernel blocks of 64 tokens."""

    name = "LoopBackend"
    capability = Capability(devices=("cpu",), dtypes=(torch.float32,), kernel_block_sizes=(64,))

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, spec: AttentionSpec, out: torch.Tensor, layer: LayerTensors
    ) -> None:
        inputs = self.inputs
        starts = inputs.query_start.tolist()
        for row, seq_len in enumerate(inputs.seq_lens[: inputs.num_rows].tolist()):
            queries = slice(starts[row], starts[row + 1])
            out[queries] = self._row(q[queries], kv, spec, seq_len, inputs.block_table[row].tolist())

    def _row(
        self, q: torch.Tensor, kv: torch.Tensor, spec: AttentionSpec, seq_len: int, table: list[int]
    ) -> torch.Tensor:
        size = self.inputs.block_size
        q = q.unflatten(1, (spec.num_kv_heads, -1)) * spec.scale  # [n, kv heads, group, head size]
        position = torch.arange(seq_len - len(q), seq_len)[:, None, None, None]
        best = torch.full((*q.shape[:3], 1), -torch.inf)
        total, mixed = torch.zeros_like(best), torch.zeros_like(q)
        for first in range(0, seq_len, size):
            key, value = kv[table[first // size], :, : seq_len - first].chunk(2, dim=-1)
            scores = torch.einsum("nkgd,ktd->nkgt", q, key)
            if spec.soft_cap:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            at = torch.arange(first, first + key.shape[1])
            hidden = at > position
            if spec.window:
                hidden = hidden | (at <= position - spec.window)
            scores = scores.masked_fill(hidden, -torch.inf)
            higher = torch.maximum(best, scores.amax(-1, keepdim=True))
            weights = (scores - higher).exp().nan_to_num(0.0)  # nothing seen yet: -inf - -inf
            kept = (best - higher).exp().nan_to_num(0.0)
            total = total * kept + weights.sum(-1, keepdim=True)
            mixed = mixed * kept + torch.einsum("nkgt,ktd->nkgd", weights, value)
            best = higher
        return (mixed / total).flatten(1, 2)
