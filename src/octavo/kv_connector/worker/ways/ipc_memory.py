"""DeviceMemory: a GPU's memory that other processes of the host map, by the driver's handles, and copies out of theirs.

Owns how blocks are copied, and the stream for it. Knows no peer. Invariants: when `order` raises, or what it gives has
been waited for, no byte is under way; what was opened stays mapped until it is closed, even if who owns it has ended.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import torch

from octavo.kv_connector.worker.pair import Meanwhile, yield_interpreter
from octavo.kv_connector.worker.ways.regions import Region
from octavo.ops import mapped
from octavo.ops.copying import BlockCopy

_POLL = 2e-5  # seconds between two looks whether a copy has ended: the system makes it 8e-5, and so of none at all
_EAGER = 0.005  # seconds in which they follow each other at once
_FASTEST = 450e9  # bytes a second: before those have passed nobody looks


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
        """Address of what a handle opens, and its bytes, if that is known. Raises RuntimeError."""

    def close(self, address: int) -> None:
        """Unmap what was opened."""

    def order(self, own: torch.Tensor, target: Region, source: Region) -> Callable[..., object]:
        """Begin to copy the source's blocks to the target's, which are of `own`; the wait, by any thread.

        That takes what is done meanwhile, if anything.
        """


def _wait(done: torch.cuda.Event, earliest: float, meanwhile: Meanwhile = yield_interpreter) -> None:
    """Until a copy has ended, which it does not before a moment on the monotonic clock."""
    if (seconds := earliest - time.monotonic() - 5 * _POLL) > 0:
        time.sleep(seconds)
    until = time.monotonic() + _EAGER
    try:
        while not done.query():
            meanwhile()
            if time.monotonic() > until:
                time.sleep(_POLL)
    except BaseException:
        done.synchronize()
        raise


def host_name() -> str:
    """Of this machine since it was started: no other one's handles can be opened here."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # a container that shows none
        return socket.gethostname()


class DeviceMemory:
    """See Memory. Any thread may use it."""

    def __init__(self, device: torch.device) -> None:
        """device: where copies go to, and what is shared lies."""
        self._device, self._stream = device, torch.cuda.Stream(device)
        with torch.cuda.device(device):
            self._stream.query()
            mapped.prepare(device)

    def share(self, tensor: torch.Tensor) -> Shared:
        """See Memory."""
        self._enter()
        handle, offset = mapped.share(tensor.data_ptr())
        return Shared(host=host_name(), handle=handle, offset=offset)

    def open(self, shared: Shared) -> tuple[int, int]:
        """See Memory."""
        self._enter()
        return mapped.open_handle(shared.handle)

    def close(self, address: int) -> None:
        """See Memory."""
        self._enter()
        mapped.close_handle(address)

    def order(self, own: torch.Tensor, target: Region, source: Region) -> Callable[..., object]:
        """See Memory. By a kernel: copy engines take as long for runs of 16 MiB, and longer for all shorter ones."""
        with torch.cuda.device(self._device):
            done = torch.cuda.Event()
            self._stream.query()  # a thread has no context of the driver's before torch has asked something in it
            try:
                self._order(own, target, source)
                done.record(self._stream)
            except BaseException:
                self._stream.synchronize()
                raise
        num_bytes = len(target.blocks) * target.num_pages * target.page_bytes
        return functools.partial(_wait, done, time.monotonic() + num_bytes / _FASTEST)

    def _order(self, own: torch.Tensor, target: Region, source: Region) -> None:
        parts = max(target.num_pages, source.num_pages)
        strides = target.strides(parts), source.strides(parts)
        blocks = np.array([target.blocks, source.blocks], np.int64)
        part_bytes = target.num_pages * target.page_bytes // parts
        mapped.copy_blocks(BlockCopy(own, source.base, blocks, strides, parts, part_bytes), self._stream)

    def _enter(self) -> None:
        """A new thread has no context of the driver's before torch has asked something in it."""
        with torch.cuda.device(self._device):
            torch.cuda.current_stream(self._device).query()
