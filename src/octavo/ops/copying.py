"""Copies that wait for nobody: of a CPU made by the thread that asks if they are small, to a GPU from pinned memory.

Owns how a copy is cut into parts that torch does not share out among threads of OpenMP. Each thread that asks has a
team of its own, of as many threads as the machine has cores; where others use the cores, a copy of a tenth of a
millisecond waits for the last of them to be given one. Invariant: the values are those of `Tensor.copy_`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

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


def to_device(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """`array` as a tensor on `device`, without waiting for it. On CPU the tensor shares the array's bytes."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
