"""The residual stream as it is between two layers, kept beside what they hand on.

Owns the operator: one kernel on a GPU. Knows no layers. Invariant: a sum is rounded once, as the norm behind it rounds.
"""

from __future__ import annotations

from torch import Tensor


def keep_sum(x: Tensor, residual: Tensor | None, out: Tensor) -> None:
    """x + residual, or x where there is none, into out: all [T, size] of one dtype, rows may be strided."""
    if x.is_cuda:
        from octavo.ops.norm import kept_sum_gpu

        kept_sum_gpu.keep_sum(x, residual, out)
        return
    out.copy_(x if residual is None else x + residual)
