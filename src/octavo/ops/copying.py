"""Copies of a CPU's tensors that wait for nobody: small ones are made by the thread that asks for them.

Owns how a copy is cut into parts that torch does not share out among threads of OpenMP. Each thread that asks has a
team of its own, of as many threads as the machine has cores; where others use the cores, a copy of a tenth of a
millisecond waits for the last of them to be given one. Invariant: the values are those of `Tensor.copy_`.
"""

from __future__ import annotations

import torch

_PART = (1 << 15) - 64  # elements: one less than torch shares out, in whole lines of a cache
_MAX_ALONE = 1 << 22  # elements of which one thread is not long in making a copy


def copy_alone(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`target.copy_(source)`, of one shape and any types and devices; what is large is shared out. The target."""
    if (
        _PART < target.numel() <= _MAX_ALONE
        and target.device.type == source.device.type == "cpu"
        and target.shape == source.shape
        and target.is_contiguous()
        and source.is_contiguous()
        and torch.get_num_threads() > 1
    ):
        parts = zip(target.view(-1).split(_PART), source.view(-1).split(_PART), strict=True)
        for own, other in parts:
            own.copy_(other)
        return target
    return target.copy_(source)
