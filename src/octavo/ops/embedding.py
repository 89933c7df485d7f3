"""Embedding rows gathered from a packed weight, so that tied embeddings are stored once.

Owns the gather only; an untied embedding table is plain torch indexing. Invariant: values are exact (widened, then
rounded once to the wanted dtype), so both forms of a weight give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops import native
from octavo.ops.matmul import LinearWeight, unpack

native.declare("octavo_gather_rows", [native.PTR, native.I64, native.PTR, native.PTR, native.I32])


def embed_rows(ids: Tensor, weight: LinearWeight, out_dtype: torch.dtype) -> Tensor:
    """Rows `ids` [T] int64 (contiguous, each in [0, N)) of weight [N, K] -> [T, K] of float32 or bfloat16."""
    lib = native.lib()
    if not (lib and weight.header):
        return embed_rows_reference(ids, weight, out_dtype)
    out = torch.empty((ids.shape[0], weight.k), dtype=out_dtype)
    lib.octavo_gather_rows(ids.data_ptr(), ids.shape[0], weight.header, out.data_ptr(), native.DTYPE_CODES[out_dtype])
    return out


def embed_rows_reference(ids: Tensor, weight: LinearWeight, out_dtype: torch.dtype) -> Tensor:
    """The eager twin of `embed_rows`, the same bits."""
    return unpack(weight)[ids].to(out_dtype)
