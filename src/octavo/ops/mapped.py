"""A GPU's memory that other processes of the host map, by the driver's handles, and copies out of what was mapped.

Owns the driver's calls for both. Does not know what is in the memory. What is opened stays mapped until it is closed,
even if who owns it has ended. The calling thread has a context of the driver's: torch has asked something in it.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import torch

from octavo.ops.compile import driver
from octavo.ops.copying import BlockCopy

_LOG = logging.getLogger(__name__)
HANDLE_BYTES = 64
_PEER_ACCESS = 1  # opened memory may be another GPU's


class _Handle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_ubyte * HANDLE_BYTES)]


def share(address: int) -> tuple[bytes, int]:
    """What others open the memory at an address by, and how far behind its first byte that is. Raises DriverError."""
    handle, (first, _) = _Handle(), _allocation(address)
    driver.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(first))
    return bytes(handle.data), address - first


def open_handle(handle: bytes) -> tuple[int, int]:
    """The address of what a handle opens, and its bytes, 0 where the driver does not say. Raises DriverError."""
    if len(handle) != HANDLE_BYTES:
        raise driver.DriverError(f"a handle has {HANDLE_BYTES} bytes, not {len(handle)}")
    address = ctypes.c_uint64()
    driver.call(
        "cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), ctypes.c_uint(_PEER_ACCESS)
    )
    try:
        return address.value, _allocation(address.value)[1]
    except driver.DriverError as error:
        _LOG.warning("how much memory of a peer was mapped is not known: %s", error)
        return address.value, 0


def close_handle(address: int) -> None:
    """Unmap what was opened. Raises DriverError."""
    driver.call("cuIpcCloseMemHandle", ctypes.c_uint64(address))


def _allocation(address: int) -> tuple[int, int]:
    """The first byte of what was allocated there, and how many they are."""
    first, size = ctypes.c_uint64(), ctypes.c_size_t()
    driver.call("cuMemGetAddressRange_v2", ctypes.byref(first), ctypes.byref(size), ctypes.c_uint64(address))
    return first.value, size.value


def prepare(device: torch.device) -> None:
    """Have the kernel ready that copies blocks, if it need not be compiled for each kind of them."""
    bulk, _ = _kernels()
    bulk.is_there(device)


def copy_blocks(copy: BlockCopy, stream: torch.cuda.Stream) -> None:
    """Copy by a kernel, on a stream of the current device, and do not wait."""
    bulk, plain = _kernels()
    if bulk.serves(copy):  # torch need not know its stream
        bulk.copy_blocks(copy, stream=stream.cuda_stream)
        return
    with torch.inference_mode(), torch.cuda.stream(stream):
        plain.copy_blocks(copy)


@functools.cache
def _kernels() -> Any:
    from octavo.ops.cache_write import copy_blocks_bulk, copy_blocks_gpu  # needs Triton

    return copy_blocks_bulk, copy_blocks_gpu
