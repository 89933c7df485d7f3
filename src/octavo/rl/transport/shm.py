"""Weights through shared memory of one host: a sender writes a file that lies in memory, and tells its name.

The file is read, never mapped: one that its owner cuts short is an error, and no crash.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from typing import Any

import torch

from octavo.rl.plan import Incoming
from octavo.rl.session import WeightTransferError, WeightUpdateError
from octavo.rl.transport import BUFFER_BYTES, Alone, Put, Read, buffers, field, split, told

FOLDER = "/dev/shm"
PREFIX = "octavo-weights-"
_NAME = re.compile(re.escape(PREFIX) + r"[0-9a-f]{32}")


class ShmTransport(Alone):
    """See octavo.rl.transport.Transport. A message has `shm_name`; its tensors lie one behind the other."""

    def __init__(self, device: torch.device, options: Mapping[str, Any]) -> None:
        """Nothing is opened."""
        super().__init__()

    def receive(self, info: Mapping[str, Any], read: Read, put: Put) -> list[Incoming]:
        """Read the file, a buffer at a time."""
        name = field(info, "shm_name", str)
        if not _NAME.fullmatch(name):
            raise WeightUpdateError(f"shm_name must be {PREFIX} and 32 hexadecimal digits, got {name[:80]!r}")
        incoming = told(info, read)
        file = _open(name)
        try:
            wanted, size = sum(each.num_bytes for each in incoming), os.fstat(file).st_size
            if size != wanted:
                raise WeightUpdateError(f"{name}: expected {wanted} bytes, found {size}")
            begin = 0
            for part in buffers(incoming, BUFFER_BYTES):
                buffer = torch.empty(sum(each.num_bytes for each in part), dtype=torch.uint8)
                _read(file, begin, buffer, name)
                begin += len(buffer)
                for each, tensor in split(buffer, part):
                    put(each, tensor)
        finally:
            os.close(file)
        return incoming


def _open(name: str) -> int:
    try:
        file = os.open(f"{FOLDER}/{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise WeightTransferError(f"{name}: cannot read: {error.strerror}: its sender may have gone") from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise WeightUpdateError(f"{name}: cannot read: not a regular file")
    return file


def _read(file: int, begin: int, buffer: torch.Tensor, name: str) -> None:
    target, done = memoryview(buffer.numpy()), 0  # type: ignore[arg-type]
    while done < len(target):
        count = os.preadv(file, [target[done:]], begin + done)
        if not count:
            raise WeightTransferError(f"{name}: ends in the middle of a tensor: its sender cut it short")
        done += count


TRANSPORT = ShmTransport
