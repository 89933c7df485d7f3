"""Attention of rows of many queries on Hopper GPUs, with the bits of `octavo.ops.attention.paged_kernels`.

Owns which calls it serves, the copy engine's descriptors and the launch; `hopper.prefill_kernel` does the work. Does
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
_STAGES, _STAGED = 4, 3  # tiles in shared memory: to be multiplied, and of 8 bits a number to be widened
NARROW = {torch.float8_e4m3fn: "float8", torch.int8: "int8"}  # what a cache of 8 bits a number holds, for kernels
_WARPS, _REGISTERS = 4, 168  # of a consumer; for a thread at the launch, before consumers take over the producer's
_NARROW_REGISTERS = 128  # where others widen what is copied
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
    from octavo.ops.attention.hopper.prefill_kernel import attend_prompts

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


def view_words(kv: Tensor) -> CacheView | None:
    """The view of a cache in numbers of 16 bits, or in words of two of 8; None if there is none."""
    of_word = 2 // kv.element_size()
    *steps, _ = kv.stride()
    if not of_word or any(step % of_word for step in steps):
        return None
    blocks, heads, block_size, channels = kv.shape
    return view_cache((blocks, heads, block_size, channels // of_word), (*(step // of_word for step in steps), 1), 2)


def describe_cache(kv: Tensor, view: CacheView, tokens: int, head_size: int) -> Any:
    """The descriptor of its view, of which K or V of a head of so many tokens are copied at a time."""
    of_word = 2 // kv.element_size()
    dtype = torch.int16 if of_word > 1 else kv.dtype
    strides, box = (kv.stride(2) // of_word, 1), (tokens, head_size // of_word)
    return describe(kv.data_ptr(), dtype, (view.rows, view.channels), strides, box)


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
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> bool:
    """Attend as `paged_attention` does, for rows that have tiles; False if the tensors do not allow it.

    The tensors are those of `paged_attention`; tile_start: [rows + 1] int32, of
    `count_tiles` for `queries_of_tile` queries; counter: [1] or more int32, 0 before and after. programs: to launch.
    sees, reach: what a query sees. score_scale, cap_scale: of the kernel's, cap_scale 0 for no soft cap.
    """
    view, is_narrow = view_words(kv), kv.dtype in NARROW
    token, head = q.stride(0), q.stride(1)
    if view is None or (token | head) * q.element_size() % ALIGNED or (q.data_ptr() | kv.data_ptr()) % ALIGNED:
        return False
    if not is_narrow and (kv.dtype != q.dtype or key_scale is not None or value_scale is not None):
        return False
    (num_tokens, num_heads, size), (_, kv_heads, block_size, _) = q.shape, kv.shape
    group = num_heads // kv_heads
    padded, piece = _padded(group), math.gcd(block_size, BN)
    of_q = describe(
        q.data_ptr(), q.dtype, (num_tokens, num_heads, size), (token, head, 1), (_LINES // 2 // padded, padded, size)
    )
    of_cache = describe_cache(kv, view, piece, size)
    _kernel()[(programs,)](
        of_q, of_cache, out, query_start, seq_lens, block_table, tile_start, counter, key_scale, value_scale,
        sinks, out.stride(0), out.stride(1), block_table.stride(0), seq_lens.shape[0], reach, view.block_rows,
        view.head_rows, view.head_channels, view.rows, score_scale, cap_scale, KV_HEADS=kv_heads, GROUP=group,
        PADDED_GROUP=padded, HEAD=size, BLOCK=block_size, PIECE=piece, STAGES=_STAGES, STAGED=_STAGED, SEES=sees,
        SOFT_CAP=cap_scale > 0, NARROW=NARROW.get(kv.dtype, ""), num_warps=_WARPS,
        maxnreg=_NARROW_REGISTERS if is_narrow else _REGISTERS,
    )  # fmt: skip
    return True
