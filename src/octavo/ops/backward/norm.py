"""The way back through RMS norms on a GPU, over whole rows.

Owns the kernel. A program walks over every n-th row and keeps its sum for the weight's gradient; those sums are added
up in their order. Invariant: for one number of rows the same from run to run.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.compile.launch import launched

_CHANNELS_PER_WARP = 512
_CHANNELS_IN_FLIGHT, _MOST, _LEAST = 16384, 16, 2  # of a processor's programs; how many these are


@launched(triton.jit)
def _norm_backward(
    grad, x, weight, grad_x, parts, num_rows, programs, grad_row, x_row, eps, SIZE: tl.constexpr, PADDED: tl.constexpr
):
    """Program: rows program, program + programs, ...; parts: [programs, SIZE], their sums of the weight's gradient."""
    program = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, PADDED)
    inside = channel < SIZE
    scale = tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros((PADDED,), tl.float32)
    for row in range(program, num_rows, programs):
        value = tl.load(x + row * x_row + channel, mask=inside, other=0.0).to(tl.float32)
        own = tl.load(grad + row * grad_row + channel, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
        unit = value * inverse
        of_weight += own * unit
        own *= scale
        result = (own - unit * (tl.sum(own * unit, 0) / SIZE)) * inverse
        tl.store(grad_x + row * SIZE + channel, result.to(grad_x.dtype.element_ty), mask=inside)
    tl.store(parts + program * SIZE + channel, of_weight, mask=inside)


def norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float, processors: int) -> tuple[Tensor, Tensor]:
    """(gradient of x [rows, size] in its dtype, of weight [size] float32) of `octavo.ops.norm.rms_norm`.

    grad, x: [rows, size], rows may be strided; weight: [size]. processors: of the device.
    """
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    (num_rows, size), padded = x.shape, triton.next_power_of_2(x.shape[1])
    share = min(max(_CHANNELS_IN_FLIGHT // padded, _LEAST), _MOST)
    programs = max(1, min(num_rows, share * processors))
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    parts = torch.empty((programs, size), dtype=torch.float32, device=x.device)
    _norm_backward[(programs,)](
        grad,
        x,
        weight,
        grad_x,
        parts,
        num_rows,
        programs,
        grad.stride(0),
        x.stride(0),
        eps,
        SIZE=size,
        PADDED=padded,
        num_warps=min(max(padded // _CHANNELS_PER_WARP, 1), 16),
    )
    return grad_x, parts.sum(0)
