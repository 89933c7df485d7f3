"""A fold of a row's bits: 64 bits that stand for all of them when runs are compared.

Owns one function, on any device. Invariant: the fold is a function of the row's raw bits alone; it is a sum of integers
that wraps, so no order of the sum can change it, and -0.0, 0.0 and every NaN are told apart.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

_ROWS_AT_ONCE = {"cpu": 8, "cuda": 64}  # bounds the scratch: 16 bytes per logit


def digest_rows(rows: torch.Tensor) -> torch.Tensor:
    """The folds of `rows` ([S, N] float32, contiguous), [S] int64, on their device. Waits for nothing."""
    weights, at_once = _weights(rows.shape[1], rows.device), _ROWS_AT_ONCE[rows.device.type]
    parts = [(part.to(torch.int64) * weights).sum(1) for part in rows.view(torch.int32).split(at_once)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=rows.device)


@functools.lru_cache(maxsize=4)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """An odd weight per column: SplitMix64 (Steele, Lea, Flood 2014) of its index."""
    with np.errstate(over="ignore"):
        z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64)).to(device)
