"""Attention over the paged cache in Triton: one operator for prefill, decode and verification.

Owns the canonical order of the sums; the arithmetic is in `paged_kernels`, what is launched for a batch in
`paged_plan`, the division of short rows among programs in `paged_workload`. Does not know requests,
layers or backends. Invariant: the bits of a (query, head) depend on its own q and on its own K and V in logical order,
never on the batch, the chunk, the split, the block size, the tile or where blocks lie. Its reference implementation is
`octavo.ops.attention.paged_attention_eager`.

The canonical order: absolute leaves from position 0, whose starts `paged_workload` states; inside a leaf an
online softmax, from scratch, over tiles of BN tokens in ascending order, whose weights the matrix units add up as they
do a channel of V; leaves folded in ascending order with one formula (the split-KV scheme of Flash-Decoding with splits
at fixed places), a sink last. A fold in registers and a fold of leaves that programs wrote apart are the same
operations, so how many programs share a row is free. All sums are float32; a hidden token weighs 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from octavo.ops.attention import decode, prefill
from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.attention.paged_decode_kernels import attend_few, attend_rows, merge, rotate_and_attend_few
from octavo.ops.attention.paged_kernels import attend_tiles
from octavo.ops.attention.paged_plan import Heads, Plan, RowsLaunch, Scratch, power_of_two, sees
from octavo.ops.compile.launch import chained
from octavo.ops.compile.row_sum import padded_length
from octavo.ops.rope import Rotation

_GATHERED_BYTES = 16 << 10  # leaves whose loads a folding program has in flight
_CHANNELS, _MERGE_GATHER, _MERGED_ROWS = 32, 128, 16  # of one merging program; rows that merge at a time
_LOG2_E = math.log2(math.e)


def paged_attention(
    q: Tensor,
    kv: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    out: Tensor,
    *,
    mask_spec: MaskSpec,
    plan: Plan,
    scratch: Scratch,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    rotation: Rotation | None = None,
) -> None:
    """Attention of each row's queries, the last of its `seq_lens[row]` tokens, written to `out`.

    q, out: [tokens, heads, head_size] float32, bfloat16 or float16; kv: [blocks, kv_heads, block_size, 2 * head_size]
    of the same dtype, float8_e4m3fn or int8, K then V; all with any strides but a contiguous last axis; block_size is a
    multiple of 16. query_start: [rows + 1], seq_lens: [rows], block_table: [rows, width], all int32. Tokens of a
    row with seq_len 0 become 0; tokens beyond `query_start[-1]` stay as they are. plan: from a Planner of the same
    `mask_spec` and `scratch`, for this batch. key_scale, value_scale: [kv_heads] float32, what stored K and V are
    multiplied with. sinks: [heads], a score that takes part in the softmax and has no value. slopes: [heads], ALiBi:
    times (key - query), what joins a capped score. Both any float type. rotation: of what
    `octavo.ops.attention.rope_decode` serves; q is then the projection.
    """
    assert query_start.dtype == seq_lens.dtype == block_table.dtype == torch.int32, "lengths and tables are int32"
    assert q.stride(-1) == kv.stride(3) == out.stride(2) == block_table.stride(1) == 1, "last axes are contiguous"
    heads = Heads(out.shape[1], kv.shape[1], out.shape[2])
    score, cap = mask_spec.scale * _LOG2_E, 0.0
    if mask_spec.soft_cap:
        score, cap = mask_spec.soft_cap * _LOG2_E, 2.0 * _LOG2_E * mask_spec.scale / mask_spec.soft_cap
    strides = (q.stride(0), q.stride(1), out.stride(0), out.stride(1), *kv.stride()[:3], block_table.stride(0))
    tensors = (q, kv, out, query_start, seq_lens, block_table)
    fixed = _fixed_options(heads, kv.shape[2], mask_spec)
    extras = (key_scale, value_scale, sinks, slopes)
    if plan.rows:
        parts = scratch.parts(plan.capacity * heads.num_kv_heads, plan.rows.lines, heads.padded)
        _attend_rows(plan, heads, tensors, parts, (*extras, *strides), (mask_spec.reach, score, cap), fixed, rotation)
        if plan.rows.merges:
            _merge(out, query_start, seq_lens, plan, parts[:2], heads, mask_spec, value_scale, sinks)
    if plan.tiles and not _serve_prompts(tensors, extras, plan, scratch, mask_spec, score, cap):
        tiles, tile = plan.tiles, plan.tiles.tile
        num_leaves = tiles.num_tiles * heads.num_kv_heads * tiles.max_leaves if tiles.splits > 1 else 0
        parts = scratch.parts(num_leaves, tile.lines, heads.padded)
        attend_tiles[(heads.num_kv_heads, tiles.num_tiles, tiles.splits)](
            *tensors, *parts, *extras, *strides, seq_lens.shape[0], tiles.short, tiles.splits, tiles.max_leaves,
            mask_spec.reach, score, cap, BM=tile.lines, STAGES=tile.stages, SPLIT=tiles.splits > 1,
            GATHER=_gathered(tile.lines, heads), num_warps=tile.warps, maxnreg=tile.registers, PDL=False, **fixed,
        )  # fmt: skip


def _fixed_options(heads: Heads, block_size: int, mask_spec: MaskSpec) -> dict[str, Any]:
    """What all kernels are compiled for."""
    return {
        "GROUP": heads.group,
        "HEAD": heads.size,
        "PADDED": heads.padded,
        "BLOCK": block_size,
        "SEES": sees(mask_spec),
        "CAUSAL": mask_spec.causal,
        "SOFT_CAP": mask_spec.soft_cap > 0,
        "PRECISION": "ieee",
    }


def _row_options(rows: RowsLaunch, heads: Heads, device: torch.device) -> dict[str, Any]:
    """What a kernel for rows of few queries is compiled for beside that."""
    return {
        "KV_HEADS": heads.num_kv_heads,
        "BM": rows.tile.lines,
        "LINES": rows.lines,
        "STAGES": rows.tile.stages,
        "GATHER": _gathered(rows.lines, heads),
        "num_warps": rows.tile.warps,
        **chained(device),
    }


def _attend_rows(
    plan: Plan,
    heads: Heads,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    parts: tuple[Tensor, ...],
    rest: tuple[Any, ...],
    numbers: tuple[Any, ...],
    fixed: dict[str, Any],
    rotation: Rotation | None,
) -> None:
    rows = plan.rows
    assert rows is not None, "the plan has short rows"
    options = _row_options(rows, heads, tensors[0].device) | fixed
    if rows.max_leaves and rotation is not None:
        _rotate_and_attend_few(rows, tensors, parts, rest[4:], numbers, options, rotation)
    elif rows.max_leaves:
        attend_few[(rows.programs,)](
            *tensors,
            *parts,
            *rest,
            rows.short,
            *numbers,
            rows.num_rows,
            rows.max_leaves,
            ROWS=power_of_two(rows.num_rows),
            **options,
        )
    elif not rows.is_copied or not decode.launch(
        *tensors,
        plan.work,
        plan.leaf_base,
        parts,
        rest[:4],
        programs=rows.programs,
        lines=rows.lines,
        short=rows.short,
        capacity=plan.capacity,
        fold_limit=rows.fold_limit,
        sees=fixed["SEES"],
        merges=rows.merges,
        numbers=numbers,
        rotation=rotation,
    ):
        assert rotation is None, "rotated rows are served"
        attend_rows[(rows.programs,)](
            *tensors,
            plan.work,
            plan.leaf_base,
            *parts,
            *rest,
            rows.short,
            *numbers,
            plan.capacity,
            rows.fold_limit,
            maxnreg=rows.tile.registers,
            **options,
        )


def _rotate_and_attend_few(
    rows: RowsLaunch,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    parts: tuple[Tensor, ...],
    strides: tuple[Any, ...],
    numbers: tuple[Any, ...],
    options: dict[str, Any],
    rotation: Rotation,
) -> None:
    qkv, *rest = tensors
    q_norm, k_norm = (rotation.cos_sin if norm is None else norm for norm in (rotation.q_norm, rotation.k_norm))
    half = options["HEAD"] // 2
    of_rows = ("PADDED", "SEES", "CAUSAL", "SOFT_CAP")  # rows that are rotated see all before them
    rotate_and_attend_few[(rows.programs,)](
        qkv,
        rotation.positions,
        rotation.cos_sin,
        q_norm,
        k_norm,
        rotation.slot_mapping,
        *rest,
        *parts,
        strides[0],
        *strides[2:],
        rows.short,
        rotation.eps,
        numbers[1],
        rows.num_rows,
        rows.max_leaves,
        ROWS=power_of_two(rows.num_rows),
        TOKENS=max(power_of_two(rows.max_queries), 2),
        LEVELS=padded_length(half).bit_length() - 1,
        NORM=rotation.q_norm is not None,
        enable_fp_fusion=False,
        **{name: value for name, value in options.items() if name not in of_rows},
    )


def _serve_prompts(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    extras: tuple[Tensor | None, ...],
    plan: Plan,
    scratch: Scratch,
    mask_spec: MaskSpec,
    score: float,
    cap: float,
) -> bool:
    """Whether the rows of many queries were served by the kernel made for them."""
    key_scale, value_scale, sinks, slopes = extras
    if not plan.prompts or slopes is not None:
        return False
    return prefill.launch(
        *tensors,
        plan.prompts.tile_start,
        scratch.counters,
        programs=plan.prompts.programs,
        sees=sees(mask_spec),
        reach=mask_spec.reach,
        score_scale=score,
        cap_scale=cap,
        sinks=sinks,
        key_scale=key_scale,
        value_scale=value_scale,
    )


def _merge(
    out: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    plan: Plan,
    parts: tuple[Tensor, ...],
    heads: Heads,
    mask_spec: MaskSpec,
    value_scale: Tensor | None,
    sinks: Tensor | None,
) -> None:
    rows = plan.rows
    assert rows is not None, "what merges are short rows"
    channels = min(heads.padded, _CHANNELS)
    merge[(heads.num_kv_heads * rows.lines, heads.padded // channels, min(rows.num_rows, _MERGED_ROWS))](
        out, query_start, seq_lens, plan.leaf_base, plan.leaf_base[rows.num_rows :], *parts, value_scale, sinks,
        out.stride(0), out.stride(1), rows.short, mask_spec.reach, KV_HEADS=heads.num_kv_heads, GROUP=heads.group,
        HEAD=heads.size, PADDED=heads.padded, LINES=rows.lines, SEES=sees(mask_spec), GATHER=_MERGE_GATHER,
        CHANNELS=channels, num_warps=1, maxnreg=255, **chained(out.device),
    )  # fmt: skip


def _gathered(lines: int, heads: Heads) -> int:
    """How many leaves a folding program loads at once."""
    return max(1, min(32, _GATHERED_BYTES // (4 * lines * heads.padded)))
