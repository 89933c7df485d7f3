"""DeviceMemory: a GPU's memory that other processes of the host map, by the driver's handles, and copies out of theirs.

Owns the driver's calls and how blocks are copied. Knows no peer. Invariants: when `copy` returns, or raises, no byte is
under way; what was opened stays mapped until it is closed, even if who owns it has ended.
"""

from __future__ import annotations

import ctypes
import logging
import time
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import torch

from octavo.kv_connector.worker.ways.regions import Region, joined_runs
from octavo.ops.compile import driver

_LOG = logging.getLogger(__name__)
_HANDLE_BYTES = 64
_PEER_ACCESS = 1  # opened memory may be another GPU's
_LEAST_RUN = 1 << 20  # bytes: shorter ones take a copy engine longer than the link
_POLL = 2e-5  # seconds between two looks whether a copy has ended


class Shared(msgspec.Struct, frozen=True, kw_only=True):
    """What another process of the host opens memory by."""

    host: str
    handle: bytes
    offset: int  # of the first byte, in what the handle opens


class Memory(Protocol):
    """Memory that processes of a host map."""

    def share(self, tensor: torch.Tensor) -> Shared:
        """What others open a tensor's memory by. Raises RuntimeError where it cannot be had."""

    def open(self, shared: Shared) -> tuple[int, int]:
        """Address of what a handle opens, and its bytes. Raises RuntimeError."""

    def close(self, address: int) -> None:
        """Unmap what was opened."""

    def copy(self, own: torch.Tensor, target: Region, source: Region) -> None:
        """Copy the source's blocks to the target's, which are of `own`, and wait until they are there."""


def host_name() -> str:
    """Of this machine since it was started: no other one's handles can be opened here."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class _Handle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_ubyte * _HANDLE_BYTES)]


class DeviceMemory:
    """See Memory. Any thread may use it."""

    def __init__(self, device: torch.device) -> None:
        """device: where copies go to, and what is shared lies."""
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._takes_batches = driver.copies_in_batches()

    def share(self, tensor: torch.Tensor) -> Shared:
        """See Memory."""
        self._enter()
        handle, address = _Handle(), tensor.data_ptr()
        first, _ = _allocation(address)
        driver.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(first))
        return Shared(host=host_name(), handle=bytes(handle.data), offset=address - first)

    def open(self, shared: Shared) -> tuple[int, int]:
        """See Memory."""
        if len(shared.handle) != _HANDLE_BYTES:
            raise RuntimeError(f"a handle has {_HANDLE_BYTES} bytes, not {len(shared.handle)}")
        self._enter()
        address, handle = ctypes.c_uint64(), _Handle.from_buffer_copy(shared.handle)
        driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, ctypes.c_uint(_PEER_ACCESS))
        try:
            return address.value, _allocation(address.value)[1]
        except driver.DriverError:
            self.close(address.value)
            raise

    def close(self, address: int) -> None:
        """See Memory."""
        self._enter()
        driver.call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def copy(self, own: torch.Tensor, target: Region, source: Region) -> None:
        """See Memory. What lies together goes by a copy engine, blocks here and there by a kernel."""
        with torch.inference_mode(), torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            done = torch.cuda.Event()
            try:
                self._order(own, target, source)
                done.record(self._stream)
                while not done.query():
                    time.sleep(_POLL)
            except BaseException:
                self._stream.synchronize()
                raise

    def _order(self, own: torch.Tensor, target: Region, source: Region) -> None:
        targets, sources = joined_runs(target, source)
        num_bytes = int(targets[:, 1].sum())
        if self._takes_batches and num_bytes >= len(targets) * _LEAST_RUN:
            self._stream.query()  # a thread has no context of the driver's before torch has asked something in it
            try:
                driver.copy_batch(targets[:, 0], sources[:, 0], targets[:, 1], self._stream.cuda_stream)
                return
            except driver.DriverError as error:
                _LOG.warning("blocks of a peer's cache are copied by a kernel: %s", error)
                self._takes_batches = False
        from octavo.ops.cache_write.copy_blocks_gpu import Strides, copy_blocks  # needs Triton

        parts = max(target.num_pages, source.num_pages)
        strides = Strides(*target.strides(parts)), Strides(*source.strides(parts))
        blocks = np.array([target.blocks, source.blocks], np.int64)
        copy_blocks(own, source.base, blocks, strides, parts, target.num_pages * target.page_bytes // parts)

    def _enter(self) -> None:
        """A new thread has no context of the driver's before torch has asked something in it."""
        with torch.cuda.device(self._device):
            torch.cuda.current_stream(self._device).query()


def _allocation(address: int) -> tuple[int, int]:
    """The first byte of what was allocated there, and how many they are."""
    first, size = ctypes.c_uint64(), ctypes.c_size_t()
    driver.call("cuMemGetAddressRange_v2", ctypes.byref(first), ctypes.byref(size), ctypes.c_uint64(address))
    return first.value, size.value
