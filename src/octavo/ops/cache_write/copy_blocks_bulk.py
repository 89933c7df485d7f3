"""Blocks from memory that a GPU can reach, as another one's, into its own cache, by bulk copies of a few programs.

Owns the kernel's tiles, its compilation and launch; `copy_blocks.cu` does the work. Does not know whose memory it is.
Invariant: what is copied are the bytes that `copy_blocks_gpu` copies.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from pathlib import Path

import numpy as np
import torch

from octavo.ops.compile import driver, nvrtc
from octavo.ops.copying import BlockCopy
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
_SIDES_BYTES = _Params.count.offset  # numbers of 64 bits come first


def text(chunk: int, stages: int) -> tuple[str, dict[str, int | str], str]:
    """What the compiler is given: source, macros, and the kind of GPU."""
    source = Path(__file__).with_name("copy_blocks.cu").read_text(encoding="utf-8")
    return source, {"CHUNK": chunk, "STAGES": stages, "BLOCKS": _BLOCKS}, "sm_90a"


class _Kernel:
    """The kernel, and the memory that its parameters are read from at a launch: one thread's at a time."""

    def __init__(self, device: torch.device, chunk: int, stages: int) -> None:
        """Compile and load it, in a thread with the device's context. Raises OSError, DriverError, CompileError."""
        self.function = driver.load(nvrtc.machine_code(*text(chunk, stages)), "copy_blocks", chunk * stages)
        memory = np.zeros(ctypes.sizeof(_Params), np.uint8)
        self.params, self.lock = _Params.from_buffer(memory.data), threading.Lock()
        self.sides = memory[:_SIDES_BYTES].view(np.int64)
        self.numbers = memory[_OFFSETS[-1] :][: 8 * _BLOCKS].view(np.int32).reshape(2, _BLOCKS)
        start = ctypes.addressof(self.params)
        self.places = (ctypes.c_void_p * len(_OFFSETS))(*(start + offset for offset in _OFFSETS))


_load = functools.cache(_Kernel)


def serves(copy: BlockCopy) -> bool:
    """Whether bulk copies can move these parts: a GPU has them, and the kernel was found."""
    (own_part, own_block), (their_part, their_block) = copy.strides
    bits = copy.address | copy.own.data_ptr() | copy.part_bytes | own_part | own_block | their_part | their_block
    return bits % _UNIT == 0 and is_there(copy.own.device)


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
    copy: BlockCopy,
    *,
    stream: int | None = None,
    chunk: int = CHUNK,
    stages: int = STAGES,
    programs: int = PROGRAMS,
) -> None:
    """See `octavo.ops.mapped.copy_blocks`. For what it serves. stream: torch's current one, if none is named.

    Raises DriverError.
    """
    own, blocks = copy.own, copy.blocks
    kernel = _load(own.device, chunk, stages)
    stream = torch.cuda.current_stream(own.device).cuda_stream if stream is None else stream
    with kernel.lock:
        params = kernel.params
        kernel.sides[:] = (own.data_ptr(), *copy.strides[0], copy.address, *copy.strides[1], copy.part_bytes)
        params.parts = copy.num_parts
        for first in range(0, blocks.shape[1], _BLOCKS):
            part = blocks[:, first : first + _BLOCKS]
            params.count = count = part.shape[1]
            kernel.numbers[:, :count] = part
            driver.launch(kernel.function, (programs, 1, 1), _THREADS, chunk * stages, stream, kernel.places)
