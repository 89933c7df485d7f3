"""Blocks from memory that a GPU can reach, as another one's, into its own cache, by bulk copies of a few programs.

Owns the kernel's tiles, its compilation and launch; `copy_blocks.cu` does the work. Does not know whose memory it is.
Invariant: what is copied are the bytes that `copy_blocks_gpu` copies.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.ops.compile import driver, nvrtc
from octavo.ops.gemm.gemm_pipeline import is_hopper

_LOG = logging.getLogger(__name__)
CHUNK, STAGES, PROGRAMS = 32 << 10, 6, 16  # bytes that a copy moves, copies under way in a program, programs
_BLOCKS = 224  # of a launch: their numbers are among its parameters, which then need no copy of their own
_UNIT = 16  # bytes: of what a copy's addresses and size are multiples
_THREADS = 32


class _Side(ctypes.Structure):
    _fields_ = [("base", ctypes.c_uint64), ("part", ctypes.c_int64), ("block", ctypes.c_int64)]


class _Params(ctypes.Structure):
    _fields_ = [
        ("own", _Side),
        ("theirs", _Side),
        ("part_bytes", ctypes.c_int64),
        ("count", ctypes.c_int32),
        ("parts", ctypes.c_int32),
        ("blocks", ctypes.c_int32 * (2 * _BLOCKS)),
    ]


_OFFSETS = [getattr(_Params, field[0]).offset for field in _Params._fields_]


def text(chunk: int, stages: int) -> tuple[str, dict[str, int | str], str]:
    """What the compiler is given: source, macros, and the kind of GPU."""
    source = Path(__file__).with_name("copy_blocks.cu").read_text(encoding="utf-8")
    return source, {"CHUNK": chunk, "STAGES": stages, "BLOCKS": _BLOCKS}, "sm_90a"


@functools.cache
def _load(device: torch.device, chunk: int, stages: int) -> int:
    return driver.load(nvrtc.machine_code(*text(chunk, stages)), "copy_blocks", chunk * stages)


def serves(own: torch.Tensor, address: int, strides: tuple[tuple[int, int], tuple[int, int]], part_bytes: int) -> bool:
    """Whether bulk copies can move these parts: a GPU has them, and the kernel was found."""
    numbers = (address, own.data_ptr(), part_bytes, *strides[0], *strides[1])
    return all(number % _UNIT == 0 for number in numbers) and is_there(own.device)


@functools.cache
def is_there(device: torch.device) -> bool:
    """Whether a device has the kernel: it is compiled, or found, and loaded now. In a thread with its context."""
    if not is_hopper(device):
        return False
    try:
        _load(device, CHUNK, STAGES)
    except (OSError, driver.DriverError, nvrtc.CompileError) as error:
        _LOG.warning("a peer's blocks are copied by Triton's kernel: %s", error)
        return False
    return True


def copy_blocks(
    own: torch.Tensor,
    address: int,
    blocks: NDArray[np.int64],
    strides: tuple[tuple[int, int], tuple[int, int]],
    num_parts: int,
    part_bytes: int,
    *,
    chunk: int = CHUNK,
    stages: int = STAGES,
    programs: int = PROGRAMS,
) -> None:
    """See `octavo.ops.mapped.copy_blocks`. For what it serves. Raises DriverError."""
    function = _load(own.device, chunk, stages)
    params = _Params(_Side(own.data_ptr(), *strides[0]), _Side(address, *strides[1]), part_bytes, 0, num_parts)
    start = ctypes.addressof(params)
    numbers = np.frombuffer(params, np.int32, 2 * _BLOCKS, _OFFSETS[-1]).reshape(2, _BLOCKS)
    places = (ctypes.c_void_p * len(_OFFSETS))(*(start + offset for offset in _OFFSETS))
    stream = torch.cuda.current_stream(own.device).cuda_stream
    for first in range(0, blocks.shape[1], _BLOCKS):
        part = blocks[:, first : first + _BLOCKS]
        params.count = part.shape[1]
        numbers[:, : params.count] = part
        driver.launch(function, (programs, 1, 1), _THREADS, chunk * stages, stream, places)
