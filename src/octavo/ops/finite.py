"""Whether a CPU's tensor holds NaN or Inf, at the speed of reading it."""

from __future__ import annotations

import torch

from octavo.ops import native
from octavo.ops.native import I32, I64, PTR

_EXPONENTS = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}

native.declare("octavo_all_finite", [PTR, I64, I64, native.U32], I32)


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no element of a contiguous CPU tensor is NaN or Inf."""
    exponent, lib = _EXPONENTS.get(tensor.dtype), native.lib()
    if exponent is None or not lib:
        return bool(tensor.isfinite().all())
    return bool(lib.octavo_all_finite(tensor.data_ptr(), tensor.numel(), tensor.element_size(), exponent))
