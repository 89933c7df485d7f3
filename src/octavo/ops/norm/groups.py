"""RMS norms of groups of a row's channels, with a gate ahead or behind: what stands at the end of recurrent mixers.

Owns the order of norm, weights and gate. Knows no layers. Invariants: a group's bits depend on its channels, weights
and gates alone; what stands between norm and gate is rounded to the rows' dtype, so a kernel of a GPU gives what
operators give one by one.
"""

from __future__ import annotations

from torch import Tensor

from octavo.ops.activation import gated_by
from octavo.ops.norm import rms_norm


def group_norm(x: Tensor, weight: Tensor, num_groups: int, eps: float, gate: Tensor | None = None) -> Tensor:
    """The RMS norm of each of `num_groups` groups of channels of x, or of silu(gate) * x, rounded, if there is a gate.

    x, gate [T, n], rows may be strided; weight [n] float32, a channel's own -> [T, n] contiguous, of x's dtype.
    """
    if x.is_cuda:
        from octavo.ops.norm import gpu

        return gpu.group_norm(x, weight, eps, gate, num_groups=num_groups, gates_first=True)
    if gate is not None:
        x = gated_by(x, gate, "silu")
    if num_groups == 1:
        return rms_norm(x, weight, eps)
    ones = weight.new_ones(len(weight) // num_groups)
    normed = rms_norm(x.float().reshape(-1, len(ones)), ones, eps)
    return (normed.view_as(x) * weight).to(x.dtype)


def normed_heads_gated(x: Tensor, weight: Tensor, eps: float, gate: Tensor) -> Tensor:
    """silu(gate) * the RMS norm of each head of x, rounded in between: [T, heads * n], weight [n] float32 of all heads.

    The rows of `gate` may be strided.
    """
    if x.is_cuda:
        from octavo.ops.norm import gpu

        return gpu.group_norm(x, weight, eps, gate, num_groups=x.shape[1] // len(weight), gates_first=False)
    return gated_by(rms_norm(x.view(-1, len(weight)), weight, eps).view_as(x), gate, "silu")
