"""Staged writes: ragged host values into a flat device tensor, in order.

Owns the eager form. Invariant: a later write to the same element wins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def staged_write(dst: torch.Tensor, starts: Sequence[int], values: Sequence[Sequence[int | float]]) -> None:
    """Write values[i] to dst[starts[i] : starts[i] + len(values[i])], in order. dst: [numel], contiguous."""
    if dst.device.type == "cpu":
        array = dst.numpy()
        for start, run in zip(starts, values, strict=True):
            array[start : start + len(run)] = run
        return
    for start, run in zip(starts, values, strict=True):
        dst[start : start + len(run)] = torch.as_tensor(run, dtype=dst.dtype).to(dst.device, non_blocking=True)
