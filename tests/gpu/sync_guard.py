"""The guard under which engines run on a GPU: whatever lets the host wait for the device raises."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Within: torch raises where an operation would wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
