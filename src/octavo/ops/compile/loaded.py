"""Kernels in CUDA C++ that are asked for by name and macros: loaded once for a device, launched in the current stream.

Owns what is loaded, and what was found to give the right bits. Does not know what a kernel computes, or where its text
lies. Invariant: nothing is compiled or loaded while a graph is captured; what cannot be had is told once.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable

import torch
import triton

from octavo.ops.compile import driver, nvrtc, side_by_side, validation_cache

_LOG = logging.getLogger(__name__)
Macros = dict[str, int | str]
_functions: dict[tuple[str, int | None, tuple[tuple[str, int | str], ...]], int | None] = {}  # None: not to be had
_agreed: dict[tuple[object, ...], bool] = {}


def is_found(
    kernel: str, source: Callable[[], str], shared: int, macros: Macros, device: torch.device, whose: str
) -> bool:
    """Whether a kernel is there, whose blocks take so many bytes of shared memory.

    Loads it unless a graph is captured. whose: what runs on other kernels else, for a warning.
    """
    name = kernel, device.index, tuple(macros.items())
    if name not in _functions:
        make = functools.partial(_code, source, macros)
        if (made := side_by_side.current()) is not None:
            made.compile(kernel, name[2], make)
            return True
        if torch.cuda.is_current_stream_capturing():
            return False
        try:
            _functions[name] = driver.load(make(), kernel, shared)
        except (OSError, driver.DriverError, nvrtc.CompileError) as error:
            _LOG.warning("%s on other kernels, which may be slower: %s", whose, error)
            _functions[name] = None
    return _functions[name] is not None


def agrees(
    kernel: str, shape: tuple[int, ...], macros: Macros, device: torch.device, compare: Callable[[], bool], whose: str
) -> bool:
    """Whether a kernel gives, of an example, what those give that it stands for: found once, not while one captures.

    compare: may wait for the GPU. whose: what runs on other kernels else, for a warning.
    """
    name = kernel, device.index, shape, tuple(macros.items())
    if name not in _agreed:
        if side_by_side.current() is not None:
            return True
        if torch.cuda.is_current_stream_capturing():
            return False
        _agreed[name] = validation_cache.holds([kernel, *shape, sorted(map(str, macros.items()))], device, compare)
        if not _agreed[name]:
            _LOG.warning("%s on other kernels: %s gives other bits", whose, kernel)
    return _agreed[name]


def _code(source: Callable[[], str], macros: Macros) -> bytes:
    return nvrtc.machine_code(source(), macros, "sm_90a")


def run(
    kernel: str, told: ctypes.Structure, blocks: int, threads: int, shared: int, macros: Macros, device: torch.device
) -> None:
    """Launch a kernel that `is_found`, or nothing in a pass that compiles. It may begin before the one ahead ends."""
    function = _functions.get((kernel, device.index, tuple(macros.items())))
    if function is not None:
        params = (ctypes.c_void_p * 1)(ctypes.addressof(told))
        stream = triton.runtime.driver.active.get_current_stream(device.index)
        driver.launch_chained(function, blocks, 1, threads, shared, stream, params)
