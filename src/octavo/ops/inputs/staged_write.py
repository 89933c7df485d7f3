"""Staged writes: ragged host values into a flat CPU tensor, in order.

Owns the eager form; `octavo.ops.inputs.staged_write_gpu` is the GPU's. Invariant: a later write to the same element
wins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


def staged_write(
    dst: torch.Tensor,
    places: Sequence[int | NDArray[np.int64]],
    values: Sequence[Sequence[int | float] | NDArray[np.generic]],
) -> None:
    """Write values[i] to dst[places[i] : places[i] + len(values[i])], or to the places of an array. dst: [numel]."""
    array = dst.numpy()
    for place, run in zip(places, values, strict=True):
        if isinstance(place, int):
            array[place : place + len(run)] = run
        else:
            array[place] = run
