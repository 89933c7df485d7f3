"""Captures of graphs, and waits for a whole device: CUDA ends a capture where any thread of the process waits for all.

So they take turns. Waits for an event, or for a stream that is not captured, may run beside a capture.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

_TURN = threading.RLock()


@contextmanager
def capturing() -> Iterator[None]:
    """Within: a graph may be captured by this thread, and no other one waits for a device."""
    with _TURN:
        yield


def end(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """End a capture into a pool. One that broke leaves the pool as it found it, for the next ones."""
    try:
        graph.capture_end()
    except RuntimeError:
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
        raise


def wait_for_device(device: torch.device | int | None = None) -> None:
    """Wait until all that was asked of a device is done. None: the current one. Not within a capture."""
    with _TURN:
        torch.cuda.synchronize(device)
