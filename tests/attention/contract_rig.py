"""A cache in any layout and kernel block size, filled by hand and poisoned, and attention computed the plain way."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from batches import History
from octavo.attention.base import BACKENDS, NO_TENSORS, AttentionBackend, AttentionInputs, LayerTensors
from octavo.cache.groups import CacheGroup, table_of_each
from octavo.cache.kernel_blocks import takes_size
from octavo.cache.layout import layout_by_name
from octavo.cache.pool import KVCachePool
from octavo.cache.specs import AttentionSpec
from octavo.ops.cache_write.quantize import quantize, store
from octavo.ops.inputs.tensors import LogitTokens

CPU = torch.device("cpu")
GARBAGE = 2**31 - 1  # a kernel block id that no pool has
NUM_LAYERS, LAYER = 3, 1  # neighbours on both sides

Row = tuple[History, int, int]  # what a request computed, how much of it is there, and how many queries it has


class Setting(NamedTuple):
    """How the cache lies."""

    layout: str = "LBHNC"
    block: int = 16
    kernel: int = 16


SETTINGS = [
    Setting(layout, block, kernel)
    for layout in ("LBHNC", "LBNHC", "BLHNC", "BLNHC")
    for block, kernel in ((16, 16), (32, 16), (128, 16), (128, 32), (144, 48), (128, 64), (64, 64), (128, 128))
]


def backends_here(device: str = "cpu") -> list[str]:
    """The names of the table whose backends take tensors of a device."""
    names = []
    for name in BACKENDS:
        try:
            backend = BACKENDS.resolve(name)
        except ValueError:  # what it needs is not installed
            continue
        if device in backend.capability.devices:
            names.append(name)
    return names


def takes(name: str, setting: Setting) -> bool:
    """Whether the backend states that it takes the setting."""
    capability = BACKENDS.resolve(name).capability
    return setting.layout in capability.layouts and takes_size(capability.kernel_block_sizes, setting.kernel)


@dataclasses.dataclass
class Step:
    """A filled pool and the inputs of one step over it."""

    pool: KVCachePool
    inputs: AttentionInputs
    q: torch.Tensor

    @property
    def kv(self) -> torch.Tensor:
        return middle(self.pool)

    def run(self, backend: AttentionBackend, spec: AttentionSpec, layer: LayerTensors = NO_TENSORS) -> torch.Tensor:
        """The outputs of all tokens; what is beyond the last one must stay as it was."""
        size = spec.value_size or spec.head_size
        out = self.q.new_full((len(self.q) + 3, spec.num_heads, size), 7.0)
        backend.prepare(self.inputs)
        backend.run(self.q, self.kv, spec, out, layer)
        assert (out[len(self.q) :] == 7).all()
        return out[: len(self.q)]

    def run_last(
        self, backend: AttentionBackend, spec: AttentionSpec, layer: LayerTensors = NO_TENSORS
    ) -> torch.Tensor:
        """The outputs of each row's last token, after the step was prepared, and prepared again for these alone."""
        num_rows, tokens = self.inputs.num_rows, self.inputs.query_start[1:].long() - 1
        start = torch.arange(len(tokens) + 1, dtype=torch.int32, device=self.q.device).clip(max=num_rows)
        padded = dataclasses.replace(self.inputs, num_rows=len(tokens))
        backend.prepare(padded)
        backend.prepare(padded.of(LogitTokens(tokens, tokens, tokens, start)))
        out = self.q.new_empty(len(tokens), spec.num_heads, spec.value_size or spec.head_size)
        backend.run(self.q[tokens], self.kv, spec, out, layer)
        return out[:num_rows]


def middle(pool: KVCachePool) -> torch.Tensor:
    """The view of the layer that a test uses: where there are others, some lie before it and some behind."""
    return pool.views[len(pool.views) // 2]


def make_pool(
    setting: Setting,
    num_blocks: int,
    kv_heads: int,
    num_channels: int,
    dtype: torch.dtype,
    *,
    num_layers: int = NUM_LAYERS,
    device: torch.device = CPU,
) -> KVCachePool:
    group = CacheGroup(
        kind="full",
        block_size=setting.block,
        layers=tuple(range(num_layers)),
        num_heads=kv_heads,
        num_channels=num_channels,
    )
    return KVCachePool(
        [group],
        num_blocks=num_blocks,
        dtype=dtype,
        device=device,
        layout=layout_by_name(setting.layout),
        tables=table_of_each([group], [setting.kernel]),
    )


def make_step(
    rows: Sequence[Row],
    setting: Setting,
    *,
    seed: int = 0,
    num_blocks: int = 0,
    cache: torch.dtype | None = None,
    scales: LayerTensors = NO_TENSORS,
    num_layers: int = 1,
    device: torch.device = CPU,
) -> Step:
    """Rows over blocks in random order (at the end of a larger pool if `num_blocks` says so).

    Every slot that no row owns is NaN, in other layers and blocks too, and every table entry beyond a row's length is
    garbage. Two padding rows follow. A larger pool has `num_layers`, and nothing but the rows' slots is touched. cache:
    the cache's type, if it is narrower, with its scales.
    """
    dtype = cache or rows[0][0].kv.dtype
    counts = [-(-seq_len // setting.block) for _, seq_len, _ in rows]
    _, kv_heads, width = rows[0][0].kv.shape
    pool = make_pool(
        setting,
        max(num_blocks, sum(counts) + 4),
        kv_heads,
        width,
        dtype,
        num_layers=num_layers if num_blocks else NUM_LAYERS,
        device=device,
    )
    if not num_blocks:
        pool.buffer.fill_(-99 if dtype == torch.int8 else float("nan"))
    first = pool.num_blocks - sum(counts) - 2 if num_blocks else 1
    ids = (first + torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(seed))).tolist()
    block_map, view = pool.block_maps[0], middle(pool)
    columns = max(counts) * block_map.ratio + 2
    table = torch.full((len(rows) + 2, columns), GARBAGE, dtype=torch.int32)
    table[len(rows) :] = 0
    for row, ((history, seq_len, _), count) in enumerate(zip(rows, counts, strict=True)):
        kernel_ids = torch.tensor(block_map.expand([ids.pop() for _ in range(count)]))
        used = -(-seq_len // setting.kernel)
        table[row, :used] = kernel_ids[:used]
        at = torch.arange(seq_len)
        slots = kernel_ids[at // setting.kernel] * setting.kernel + at % setting.kernel
        store(view, narrowed(history.kv[:seq_len], dtype, scales).to(device), slots.to(device))
    queries = [queries for _, _, queries in rows]
    total = sum(queries)
    inputs = AttentionInputs(
        num_rows=len(rows),
        num_tokens=total,
        max_query_len=max(queries),
        max_seq_len=max(seq_len for _, seq_len, _ in rows),
        block_size=setting.kernel,
        query_start=torch.tensor([0, *queries, 0, 0]).cumsum(0).to(device, torch.int32),
        seq_lens=torch.tensor([*(seq_len for _, seq_len, _ in rows), 0, 0], dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.full((total,), -1, device=device),
    )
    q = torch.cat([history.q[seq_len - queries : seq_len] for history, seq_len, queries in rows])
    return Step(pool, inputs, q.to(device))


def narrowed(kv: torch.Tensor, cache: torch.dtype, scales: LayerTensors) -> torch.Tensor:
    """kv [tokens, kv_heads, 2 * head_size] as a cache holds it."""
    if scales.key_scale is None:
        return kv.to(cache)
    key, value = kv.chunk(2, dim=-1)
    parts = [quantize(key, cache, scales.key_scale), quantize(value, cache, scales.value_scale)]
    return torch.cat([part.float() for part in parts], dim=-1).to(cache)


def as_read(rows: Sequence[Row], cache: torch.dtype, scales: LayerTensors) -> list[Row]:
    """The rows with K and V as they come back from a cache."""
    read = []
    for history, seq_len, queries in rows:
        key, value = narrowed(history.kv, cache, scales).float().chunk(2, dim=-1)
        if scales.key_scale is not None and scales.value_scale is not None:
            key, value = key * scales.key_scale[:, None], value * scales.value_scale[:, None]
        read.append((History(history.q, torch.cat([key, value], dim=-1)), seq_len, queries))
    return read


def attend_plainly(rows: Sequence[Row], spec: AttentionSpec, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax attention in float64 over contiguous keys and values: no pages, no batch."""
    results = []
    for history, seq_len, queries in rows:
        q = history.q[seq_len - queries : seq_len].double()
        kv = history.kv[:seq_len].double()
        key, value = kv[..., : spec.head_size], kv[..., : spec.value_size or None]
        value = value if spec.value_size else kv[..., spec.head_size :]
        key, value = (x.repeat_interleave(spec.num_heads // spec.num_kv_heads, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", q, key) * spec.scale
        if spec.soft_cap:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        at, position = torch.arange(seq_len), torch.arange(seq_len - queries, seq_len)[:, None]
        if spec.alibi_slopes:
            scores += torch.tensor(spec.alibi_slopes)[:, None, None] * (at - position)
        seen = at <= position if spec.causal else torch.ones(queries, seq_len, dtype=torch.bool)
        if spec.window:
            seen &= (at - position).abs() < spec.window
        if spec.chunk:
            seen &= at // spec.chunk == position // spec.chunk
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, queries, 1)], dim=-1)
        weights = scores.softmax(-1)[..., :seq_len]
        results.append(torch.einsum("hqk,khd->qhd", weights, value))
    return torch.cat(results)
