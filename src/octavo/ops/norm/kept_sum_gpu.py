"""Sums kept on a GPU: `octavo.ops.norm.kept_sum`. Owns the kernel, which launches as those beside it do."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.compile.launch import begin_after, chained, launched

_BLOCK = 1024  # channels of a program: moves no bit


@launched(triton.jit)
def _keep(
    x, residual, out, x_row, residual_row, out_row, size, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    begin_after(PDL)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < size
    value = tl.load(x + row * x_row + channel, mask=inside, other=0.0)
    if ADD:
        before = tl.load(residual + row * residual_row + channel, mask=inside, other=0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + row * out_row + channel, value, mask=inside)


def keep_sum(x: Tensor, residual: Tensor | None, out: Tensor) -> None:
    """See `octavo.ops.norm.kept_sum.keep_sum`."""
    (rows, size), before = x.shape, x if residual is None else residual
    assert x.stride(1) == before.stride(1) == out.stride(1) == 1, "channels are contiguous"
    if rows:
        _keep[(rows, triton.cdiv(size, _BLOCK))](
            x,
            before,
            out,
            x.stride(0),
            before.stride(0),
            out.stride(0),
            size,
            ADD=residual is not None,
            BLOCK=_BLOCK,
            num_warps=4,
            **chained(x.device),
        )
