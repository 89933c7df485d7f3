"""Weights that a graph's kernels read as what leaves the L2 first, so that others stay there until they are read again.

Owns which weights, and the change of a captured graph's nodes. Does not know what a kernel computes. Invariant: a hint
moves no bit; a graph whose nodes take none replays without.
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from octavo.ops.compile import driver

_LOG = logging.getLogger(__name__)
_weights: dict[int, tuple[StorageWeakRef, int]] = {}  # by address: whose memory it is, and how many bytes lie there


def let_leave(weight: Tensor) -> None:
    """Of graphs that are captured from now on."""
    _weights[weight.data_ptr()] = StorageWeakRef(weight.untyped_storage()), weight.numel() * weight.element_size()


def is_asked() -> bool:
    """Whether there are such weights: graphs are then captured to be kept, and instantiated behind `mark`."""
    return bool(_there())


def _there() -> dict[int, int]:
    """Bytes by address, of weights that still are."""
    for address in [address for address, (memory, _) in _weights.items() if memory.expired()]:
        del _weights[address]
    return {address: size for address, (_, size) in _weights.items()}


def mark(graph: Any) -> None:
    """Give the hint to the nodes of a captured graph, not instantiated yet, that are given a weight's address."""
    try:
        driver.let_leave(graph.raw_cuda_graph(), _there())
    except driver.DriverError as error:
        _LOG.warning("a drafter's head pushes its layer out of the GPU's L2: %s", error)
