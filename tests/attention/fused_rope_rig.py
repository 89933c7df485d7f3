"""Rotation and attention in one kernel against the two operators: what the GPU's tests and its sanitizer share."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import paged_rig
from batches import Batch, make_batch, make_history
from octavo.ops.attention import rope_decode
from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.attention.paged import paged_attention
from octavo.ops.attention.paged_plan import Heads, Planner, Scratch
from octavo.ops.rope import Rotation, rope_table
from octavo.ops.rope import gpu as rope_gpu

BF16, CUDA = torch.bfloat16, torch.device("cuda")


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.uint8)


def make(
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
    queries: int,
    device: torch.device,
) -> tuple[torch.Tensor, Rotation, torch.Tensor, list[torch.Tensor], tuple[Any, ...]]:
    """The projection, what becomes of it, the cache, the rows, and where the newest K and V belong in the cache."""
    live = [length for length in lengths if length]
    asked = [min(length, 1 + (queries - 1 + place) % queries) for place, length in enumerate(live)]
    histories = [make_history(seed + length, length, heads, kv_heads, size, dtype) for length in live]
    rows_of = [(h, len(h.kv), count) for h, count in zip(histories, asked, strict=True)]
    batch = make_batch(rows_of, block_size, seed=seed, heads_last=heads_last)
    num_rows, num_tokens, generator = len(lengths), sum(asked), torch.Generator().manual_seed(seed)
    is_live = torch.tensor(lengths) > 0
    counts = torch.zeros(num_rows, dtype=torch.int64).masked_scatter(is_live, torch.tensor(asked))
    table = torch.zeros(num_rows, batch.block_table.shape[1], dtype=torch.int32)
    table[is_live] = batch.block_table
    rows = [
        torch.cat((torch.zeros(1), counts.cumsum(0))).int().to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        table.to(device),
    ]
    last = torch.cat([torch.arange(n - count, n) for n, count in zip(live, asked, strict=True)])
    row = torch.arange(len(live)).repeat_interleave(torch.tensor(asked))
    blocks = batch.block_table[row, last // block_size].long()
    padding = torch.zeros(num_rows - len(live), dtype=torch.int64)
    num_padded = num_tokens + len(padding)
    factor = torch.exp2(4 * torch.rand(num_padded, 1, size, generator=generator) - 2)
    projected = torch.randn(num_padded, heads + 2 * kv_heads, size, generator=generator) * factor
    q_norm, k_norm = (torch.rand(size, generator=generator).add(0.5).to(device) for _ in range(2))
    rotation = Rotation(
        positions=torch.cat((last, padding)).to(device),
        cos_sin=rope_table(size, max(lengths)).to(device),
        q_norm=q_norm if normed else None,
        k_norm=k_norm if normed else None,
        eps=1e-6,
        slot_mapping=torch.cat((blocks * block_size + last % block_size, padding - 1)).to(device),
    )
    newest = blocks.to(device), slice(None), (last % block_size).to(device)
    return projected.to(dtype).flatten(1).to(device), rotation, batch.kv.to(device), rows, newest


def part_of(rotation: Rotation, tokens: slice) -> Rotation:
    """The rotation of some tokens."""
    slots = rotation.slot_mapping
    return dataclasses.replace(rotation, positions=rotation.positions[tokens], slot_mapping=slots[tokens])


def _rotate(projected: torch.Tensor, rotation: Rotation, kv: torch.Tensor, heads: Heads) -> torch.Tensor:
    """q of the operator that only rotates, and stores."""
    return rope_gpu.qk_norm_rope_store(
        projected,
        rotation.positions,
        rotation.cos_sin,
        rotation.q_norm,
        rotation.k_norm,
        rotation.eps,
        heads.num_heads,
        heads.num_kv_heads,
        heads.size,
        kv,
        rotation.slot_mapping,
        1.0,
        rotation.key_scale,
        rotation.value_scale,
    )


def _narrowed(
    kv: torch.Tensor, rows: list[torch.Tensor], rotation: Rotation, stored: torch.dtype
) -> tuple[torch.Tensor, Rotation]:
    """The cache in 8 bits a number, with scales of its heads."""
    scales = [torch.linspace(*ends, kv.shape[1], device=kv.device) for ends in ((0.02, 0.05), (0.04, 0.01))]
    scaled = dataclasses.replace(rotation, key_scale=scales[0], value_scale=scales[1])
    return paged_rig.narrowed(Batch(kv, kv, *rows), stored).kv, scaled


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
    queries: int = 1,
    device: torch.device = CUDA,
    stored: torch.dtype | None = None,
    **options: Any,
) -> None:
    """Rows of few queries, with what does not belong to them poisoned: the same results and the same cache, twice.

    A length of 0 is a padding row. queries: of the first row, fewer of others; stored: of a quantized cache.
    """
    projected, rotation, kv, rows, newest = make(
        lengths,
        heads,
        kv_heads,
        block_size,
        size,
        dtype,
        normed=normed,
        seed=seed,
        heads_last=heads_last,
        queries=queries,
        device=device,
    )
    kv, rotation = _narrowed(kv, rows, rotation, stored) if stored else (kv, rotation)
    of_cache = {"key_scale": rotation.key_scale, "value_scale": rotation.value_scale}
    mask_spec, scratch, of = MaskSpec(scale=size**-0.5, **options), Scratch(device), Heads(heads, kv_heads, size)
    plan = Planner(of, mask_spec, dtype, device, scratch, processors, cache_dtype=kv.dtype).plan(
        rows[0], rows[1], num_tokens=len(projected), max_query_len=queries, max_seq_len=max(lengths)
    )
    expected_kv = kv.clone()
    q = _rotate(projected, rotation, expected_kv, of)
    expected = torch.full_like(q, 7.0)
    paged_attention(q, expected_kv, *rows, expected, mask_spec=mask_spec, plan=plan, scratch=scratch, **of_cache)
    _finish(device)
    assert not expected[: len(newest[0])].isnan().any() and rope_decode.serves(of, mask_spec, plan, kv, rotation)
    for _ in range(2):
        _bits(kv)[newest] = 0x7F if stored else 0x7FFF  # NaN, or the largest integer, until it is stored
        out = torch.full_like(q, 7.0)
        _finish(device)  # what it reads early is there
        rope_decode.fused_rope_decode(
            projected, rotation, kv, *rows, out, mask_spec=mask_spec, plan=plan, scratch=scratch
        )
        assert torch.equal(_bits(out), _bits(expected)), (lengths, (out != expected).sum())
        assert torch.equal(_bits(kv), _bits(expected_kv)), (lengths, "cache")


def check_rows_that_verify() -> None:
    """In a tile and in a leaf, across the borders of both, whole leaves by other programs; beside padding."""
    cpu = torch.device("cpu")
    for lengths, heads, block_size, queries in (([5], 2, 16, 5), ([66, 0, 3], 4, 64, 5), ([258, 300], 2, 16, 3)):
        for normed in (True, False):
            check(
                lengths,
                heads,
                2,
                block_size,
                normed=normed,
                processors=64,
                size=32,
                dtype=torch.float16,
                queries=queries,
                device=cpu,
                heads_last=block_size == 16,
            )


INTERPRETED = {"check_rows_that_verify": check_rows_that_verify}
