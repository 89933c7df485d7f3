"""Embedding rows gathered from a table, or from a packed weight, so that tied embeddings are stored once.

Owns the gather and the scale. Invariant: values are exact (widened, then rounded once to the wanted dtype, and once
more after a scale), so both forms of a weight give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops import native
from octavo.ops.gemm import LinearWeight, unpack

native.declare("octavo_gather_rows", [native.PTR, native.I64, native.PTR, native.PTR, native.I32])


def gather_rows(ids: Tensor, table: Tensor, out_dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Rows `ids` [T] int64 (each in [0, N)) of a plain table [N, K], times `scale` -> [T, K] of `out_dtype`."""
    if table.is_cuda:
        from octavo.ops.embedding import gpu

        return gpu.gather_rows(ids, table, out_dtype, scale)
    return gather_rows_reference(ids, table, out_dtype, scale)


def embed_rows(ids: Tensor, weight: LinearWeight, out_dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Rows `ids` [T] int64 (contiguous, each in [0, N)) of weight [N, K], times `scale` -> [T, K] of `out_dtype`."""
    if weight.storage.is_cuda:
        return gather_rows(ids, weight.storage, out_dtype, scale)
    lib = native.lib()
    if not (lib and weight.header):
        return embed_rows_reference(ids, weight, out_dtype, scale)
    out = torch.empty((ids.shape[0], weight.k), dtype=out_dtype)
    lib.octavo_gather_rows(ids.data_ptr(), ids.shape[0], weight.header, out.data_ptr(), native.DTYPE_CODES[out_dtype])
    return out if scale == 1.0 else out.mul_(scale)


def gather_rows_reference(ids: Tensor, table: Tensor, out_dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """The reference implementation of `gather_rows`, the same bits."""
    rows = table.index_select(0, ids).to(out_dtype)
    return rows if scale == 1.0 else rows.mul_(scale)


def embed_rows_reference(ids: Tensor, weight: LinearWeight, out_dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """The reference implementation of `embed_rows`, the same bits."""
    return gather_rows_reference(ids, unpack(weight), out_dtype, scale)
