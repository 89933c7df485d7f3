"""What kernels were found to give, when they were compared with those that they stand for: kept for later processes.

Owns what an answer follows from, and where it is kept. Does not know what is compared. Invariant: an answer that is
trusted was given by these sources on such a GPU with this driver and these libraries; where not all of it can be told,
every process compares.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from octavo.ops.compile import disk_cache

_DRIVER = Path("/proc/driver/nvidia/version")
_SETTINGS = ("CUBLAS", "NVIDIA_TF32_OVERRIDE", "TORCH_", "PYTORCH_")  # variables that the library's choice may follow


def holds(what: list[Any], device: torch.device, compare: Callable[[], bool]) -> bool:
    """What `compare`, which may wait for the GPU, finds: now, or found when it was kept.

    what: all that tells this comparison from others beside the machine and the operators' sources, of JSON's types.
    What `compare` raises is not kept. Nothing is captured meanwhile.
    """

    def look() -> bool:
        with _unwatched():
            return compare()

    facts = _facts(device)
    return bool(disk_cache.find("products", [facts, what], look) if facts else look())


@contextlib.contextmanager
def _unwatched() -> Iterator[None]:
    """Within: no one is told that something waits for the GPU."""
    watched = torch.cuda.is_initialized() and torch.cuda.get_sync_debug_mode()
    if not watched:
        yield
        return
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(watched)


def _facts(device: torch.device) -> list[Any]:
    """What the library's choice of a kernel follows from, and its bits and ours; nothing where not all can be told."""
    try:
        version = ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}").cublasLtGetVersion
        driver = _DRIVER.read_text(encoding="utf-8")
    except (OSError, AttributeError):
        return []
    version.restype = ctypes.c_size_t
    gpu = torch.cuda.get_device_properties(device)
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_SETTINGS))
    return [
        disk_cache.versions(),
        version(),
        driver,
        gpu.name,
        gpu.major,
        gpu.minor,
        gpu.multi_processor_count,
        settings,
        _sources(),
    ]


@functools.cache
def _sources() -> str:
    """The sum of all operators and states: kernels, what launches them, and what they are compared with."""
    root = Path(__file__).parents[2]
    found = (path for folder in ("ops", "states") for path in (root / folder).rglob("*"))
    files = sorted(path for path in found if path.suffix in (".py", ".cu"))
    return disk_cache.sum_of(
        b"\0".join(part for path in files for part in (path.relative_to(root).as_posix().encode(), path.read_bytes()))
    )
