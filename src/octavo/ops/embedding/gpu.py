"""Rows gathered from a table on a GPU: `gather_rows` of `octavo.ops.embedding`.

Owns the kernel. Invariant: values are exact up to the one rounding after the scale. It begins when all before it is
done, and so do all kernels behind it, see `octavo.ops.compile.launch`.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.compile.launch import begin_whole, chained, launched

# Channels of a program and its warps: they move no bit.
_BLOCK = 1024
_WARPS = 4


@launched(triton.jit)
def _gather(ids, table, out, scale, SIZE: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin_whole(PDL)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < SIZE
    row = tl.load(ids + token).to(tl.int64)
    value = tl.load(table + row * SIZE + channel, mask=inside).to(out.dtype.element_ty)
    if SCALED:
        value = (value.to(tl.float32) * scale).to(out.dtype.element_ty)
    tl.store(out + token * SIZE + channel, value, mask=inside)


def gather_rows(ids: Tensor, table: Tensor, out_dtype: torch.dtype, scale: float) -> Tensor:
    """See `octavo.ops.embedding.gather_rows`."""
    assert table.is_contiguous(), "the table is contiguous"
    num_tokens, size = ids.shape[0], table.shape[1]
    out = torch.empty((num_tokens, size), dtype=out_dtype, device=table.device)
    if num_tokens:
        _gather[(num_tokens, triton.cdiv(size, _BLOCK))](
            ids,
            table,
            out,
            scale,
            SIZE=size,
            SCALED=scale != 1.0,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            **chained(table.device),
        )
    return out
