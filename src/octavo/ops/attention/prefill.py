"""Attention of rows of many queries on Hopper GPUs, with the bits of `octavo.ops.attention.paged_kernels`.

Owns which calls it serves, the copy engine's descriptors and the launch; `prefill_kernel` does the work. Does
not know plans or requests. Invariant: it refuses what its descriptors cannot state, and what it serves has the bits of
`attend_tiles`. A launch allocates nothing and may be captured: descriptors travel in its arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
from torch import Tensor

from octavo.ops.attention.paged_workload import BN
from octavo.ops.compile.launch import Direct
from octavo.ops.compile.tensor_maps import ALIGNED, describe, takes_gluon

_HEAD_SIZES = (64, 128)
_LINES = 128  # of a tile, see the kernel
_MAX_GROUP = 64  # heads of a KV head; a part of a tile holds a query of them at least
_STAGES = 4
_WARPS, _REGISTERS = 4, 168  # of a consumer; for a thread at the launch, before consumers take over the producer's
_LIMIT = 1 << 31  # of a coordinate


@dataclasses.dataclass(frozen=True, slots=True)
class CacheView:
    """A layer's cache as rows of channels, a token's K and V of a head being in one row.

    The token at place t of block b has row b * block_rows + head * head_rows + t and channels from
    head * head_channels on. Sizes in rows and channels.
    """

    rows: int
    channels: int
    block_rows: int
    head_rows: int
    head_channels: int


def queries_of_tile(group: int) -> int:
    """Queries that a tile holds, where `group` heads share a KV head."""
    return _LINES // _padded(group)


def can_serve(device: torch.device, dtype: torch.dtype, group: int, head_size: int, causal: bool) -> bool:
    """Whether calls of this kind may be served; `launch` may still refuse a cache."""
    is_known = dtype in (torch.bfloat16, torch.float16) and head_size in _HEAD_SIZES and group <= _MAX_GROUP and causal
    return is_known and takes_gluon(device)


@functools.cache
def _kernel() -> Any:
    from octavo.ops.attention.prefill_kernel import attend_prompts

    return Direct(attend_prompts)


def _padded(group: int) -> int:
    return 1 << (group - 1).bit_length()


@functools.lru_cache(maxsize=1024)
def view_cache(shape: tuple[int, ...], strides: tuple[int, ...], item_size: int) -> CacheView | None:
    """The view of a cache [blocks, kv_heads, block_size, 2 * head_size] of these strides; None if there is none."""
    blocks, heads, block_size, channels = shape
    of_block, of_head, of_token, _ = strides
    if of_block % of_token or of_token * item_size % ALIGNED:
        return None
    head_rows, head_channels = (of_head // of_token, 0) if of_head % of_token == 0 else (0, of_head)
    rows = (blocks - 1) * (of_block // of_token) + (heads - 1) * head_rows + block_size
    width = (heads - 1) * head_channels + channels
    if width > of_token or head_channels * item_size % ALIGNED or rows >= _LIMIT:
        return None
    return CacheView(rows, width, of_block // of_token, head_rows, head_channels)


def launch(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    tile_start: Tensor,
    counter: Tensor,
    *,
    programs: int,
    sees: int,
    reach: int,
    score_scale: float,
    cap_scale: float,
    sinks: Tensor | None,
) -> bool:
    """Attend as `paged_attention` does, for rows that have tiles; False if the tensors do not allow it.

    The tensors are those of `paged_attention`, with a cache of q's dtype; tile_start: [rows + 1] int32, of
    `count_tiles` for `queries_of_tile` queries; counter: [1] or more int32, 0 before and after. programs: to launch.
    sees, reach: what a query sees. score_scale, cap_scale: of the kernel's, cap_scale 0 for no soft cap.
    """
    view = view_cache(kv.shape, kv.stride(), kv.element_size())
    token, head = q.stride(0), q.stride(1)
    if view is None or (token | head) * q.element_size() % ALIGNED or (q.data_ptr() | kv.data_ptr()) % ALIGNED:
        return False
    (num_tokens, num_heads, size), (_, kv_heads, block_size, _) = q.shape, kv.shape
    group = num_heads // kv_heads
    padded, piece = _padded(group), math.gcd(block_size, BN)
    of_q = describe(
        q.data_ptr(), q.dtype, (num_tokens, num_heads, size), (token, head, 1), (_LINES // 2 // padded, padded, size)
    )
    of_cache = describe(kv.data_ptr(), kv.dtype, (view.rows, view.channels), (kv.stride(2), 1), (piece, size))
    _kernel()[(programs,)](
        of_q, of_cache, out, query_start, seq_lens, block_table, tile_start, counter, sinks, out.stride(0),
        out.stride(1), block_table.stride(0), seq_lens.shape[0], reach, view.block_rows, view.head_rows,
        view.head_channels, view.rows, score_scale, cap_scale, KV_HEADS=kv_heads, GROUP=group, PADDED_GROUP=padded,
        HEAD=size, BLOCK=block_size, PIECE=piece, STAGES=_STAGES, SEES=sees, SOFT_CAP=cap_scale > 0,
        num_warps=_WARPS, maxnreg=_REGISTERS,
    )  # fmt: skip
    return True
