"""Attention of rows of few queries on Hopper GPUs, with the bits of `paged_decode_kernels.attend_rows`.

Owns which calls it serves and the launch; `hopper.decode_kernel` does the work, and descriptors are
`octavo.ops.compile.tensor_maps`'. Does not know plans or requests. Invariant: it refuses what its descriptors cannot
state, and what it serves has the bits of `attend_rows`. A launch allocates nothing and may be captured.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from octavo.ops.attention.paged_workload import BN
from octavo.ops.attention.prefill import NARROW, describe_cache, view_words
from octavo.ops.compile.launch import Direct, chained
from octavo.ops.compile.tensor_maps import ALIGNED, describe, takes_gluon
from octavo.ops.rope import Rotation

PROGRAMS = 2  # for each processor, of what its shared memory and registers hold
_HEAD_SIZES = (64, 128)
_GROUPS = (1, 2, 4, 8)  # heads of a KV head
_LINES, _PIECE = 8, 16  # see the kernel
_STAGES, _NARROW_STAGES = 3, 6  # of a cache of 16 bits a number, and of 8
_WARPS, _REGISTERS = 4, 128  # registers of a thread at the launch


def can_serve(
    device: torch.device,
    dtype: torch.dtype,
    group: int,
    head_size: int,
    causal: bool,
    lines: int,
    cache_dtype: torch.dtype,
) -> bool:
    """Whether calls of this kind may be served, lines being queries x heads of a KV head; `launch` may still refuse."""
    is_known = dtype in (torch.bfloat16, torch.float16) and head_size in _HEAD_SIZES and group in _GROUPS and causal
    is_known &= cache_dtype == dtype or cache_dtype in NARROW
    return is_known and lines <= _LINES and takes_gluon(device)


def supports(kv: Tensor) -> bool:
    """Whether a cache is one that descriptors can state."""
    return kv.data_ptr() % ALIGNED == 0 and view_words(kv) is not None


@functools.cache
def _kernel() -> Any:
    from octavo.ops.attention.hopper.decode_kernel import attend_rows_copied

    return Direct(attend_rows_copied)


def launch(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    work: Tensor,
    leaf_base: Tensor,
    parts: tuple[Tensor, ...],
    extras: tuple[Tensor | None, ...],
    *,
    programs: int,
    lines: int,
    short: int,
    capacity: int,
    fold_limit: int,
    sees: int,
    merges: bool,
    numbers: tuple[int, float, float],
    rotation: Rotation | None = None,
) -> bool:
    """Attend as `attend_rows` does; False if the tensors do not allow it.

    The tensors and rotation are those of `paged_attention`; work, leaf_base and parts those of `attend_rows`; extras:
    key scales, value scales, sinks, slopes, or None for each. programs: of the division. lines: of a leaf in `parts`.
    merges: the kernel behind it folds long rows. numbers: the reach, the scale of scores, that of the soft cap, 0 for
    none. The rest: see `attend_rows`.
    """
    key_scale, value_scale, sinks, slopes = extras
    view, is_narrow = view_words(kv), kv.dtype in NARROW
    steps = 0 if rotation is not None else (q.stride(0) | q.stride(1)) * q.element_size() | q.data_ptr()
    if view is None or slopes is not None or (steps | kv.data_ptr()) % ALIGNED:
        return False
    if not is_narrow and (kv.dtype != q.dtype or key_scale is not None or value_scale is not None):
        return False
    (num_tokens, num_heads, size), (_, kv_heads, block_size, _) = out.shape, kv.shape
    group, piece = num_heads // kv_heads, BN if block_size % BN == 0 else _PIECE
    of_q = None
    if rotation is None:
        lengths, strides = (num_tokens, num_heads, size), (q.stride(0), q.stride(1), 1)
        of_q = describe(q.data_ptr(), q.dtype, lengths, strides, (_LINES // group, group, size))
    _kernel()[(programs,)](
        of_q, describe_cache(kv, view, piece, size), describe_cache(kv, view, _PIECE, size), out, query_start, seq_lens,
        block_table, work, leaf_base, *parts, key_scale, value_scale, sinks, out.stride(0), out.stride(1),
        block_table.stride(0), short, numbers[0], capacity, fold_limit, view.block_rows, view.head_rows,
        view.head_channels, *numbers[1:], *_turns(q, kv, rotation), KV_HEADS=kv_heads, GROUP=group, LINES=lines,
        HEAD=size, BLOCK=block_size, STAGES=_NARROW_STAGES if is_narrow else _STAGES, SEES=sees,
        SOFT_CAP=numbers[2] > 0, ROTATES=rotation is not None, MERGED=merges, NARROW=NARROW.get(kv.dtype, ""),
        num_warps=_WARPS, maxnreg=_REGISTERS, enable_fp_fusion=False, **chained(q.device),
    )  # fmt: skip
    return True


def _turns(q: Tensor, kv: Tensor, rotation: Rotation | None) -> tuple[Any, ...]:
    """What the kernel rotates and stores with; nothing where q is rotated already."""
    if rotation is None:
        return (None,) * 12
    return (
        q,
        rotation.positions,
        rotation.cos_sin,
        rotation.q_norm,
        rotation.k_norm,
        rotation.slot_mapping,
        kv,
        q.stride(0),
        *kv.stride()[:3],
        rotation.eps,
    )
