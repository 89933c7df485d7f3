"""Opening a GPU beside Python: CUDA takes 0.3 s before it can run anything, in which torch would hold Python up.

Owns the calls of CUDA's libraries that do it. Imports no torch. Invariant: nothing but time depends on it; what fails
here fails again, and is told, where torch does it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any


def has_driver() -> bool:
    """Whether there may be a GPU of CUDA's."""
    return _library("libcuda.so.1") is not None


def has_device_file() -> bool:
    """The same by the system's files. The driver itself may be asked by one thread at a time, and one opens it."""
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg")))


def open_driver() -> None:
    """Start CUDA's driver, and make the context of the first device as torch will find it. Needs no torch."""
    driver, device, context = _library("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
    with contextlib.suppress(AttributeError):  # no driver, or another one
        if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), 0):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def open_counter() -> None:
    """Start what torch asks how many devices there are, which takes 15 ms. Needs no torch."""
    with contextlib.suppress(AttributeError):
        _library("libnvidia-ml.so.1").nvmlInit_v2()


def open_runtime(version: str) -> None:
    """Let CUDA's runtime of torch, which is loaded, find the driver and torch's kernels. version: of CUDA, as 12.8."""
    runtime = _library(f"libcudart.so.{version.partition('.')[0]}")
    with contextlib.suppress(AttributeError):
        runtime.cudaFree(None)


def _library(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None
