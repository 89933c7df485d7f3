"""The products of a trainer's backward on a GPU: the library's own, free to split what a sampler's may not.

Owns the switch of the library's ways (`octavo.ops.gemm.gpu`) for these calls. Their bits follow no canonical order;
they are the same from run to run.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from octavo.ops.gemm import gpu


def product(a: Tensor, b: Tensor, out_dtype: torch.dtype, add_to: Tensor | None = None) -> Tensor:
    """a [M, K] @ b [K, N], of one 16-bit dtype or float32 -> [M, N] of `out_dtype`; add_to: what it is added to.

    `add_to` has out_dtype, is overwritten and is the result.
    """
    with gpu.free_library():
        if a.dtype == out_dtype:
            return torch.mm(a, b) if add_to is None else add_to.addmm_(a, b)
        if add_to is None:
            return torch.mm(a, b, out_dtype=out_dtype)
        if _adds_wider(a.device, a.dtype, out_dtype):
            return torch.addmm(add_to, a, b, out_dtype=out_dtype, out=add_to)
        return add_to.add_(torch.mm(a, b, out_dtype=out_dtype))


@functools.cache
def _adds_wider(device: torch.device, dtype: torch.dtype, out_dtype: torch.dtype) -> bool:
    """Whether torch adds a product of a narrow dtype to a wide matrix: some versions refuse."""
    ones, total = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(16, 16, dtype=out_dtype, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=out_dtype, out=total)
    except RuntimeError:
        return False
    return bool((total == 17).all())
