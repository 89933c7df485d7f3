"""Weights through shared memory of one host: a sender writes a file that lies in memory, and tells its name.

Owns both ends. Who receives reads the file and never maps it: one that its owner cuts short is an error, and no crash.
A sender keeps its file for the next buffer, since a system takes longer to give pages than to copy into them; a sender
that is killed leaves one behind, which the next sender of this host takes away.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import stat
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from octavo.config.quoted import quoted
from octavo.rl.plan import Incoming
from octavo.rl.session import WeightTransferError, WeightUpdateError
from octavo.rl.transport import BUFFER_BYTES, Alone, Put, Read, buffers, field, split, told

FOLDER = "/dev/shm"
PREFIX = "octavo-weights-"
_NAME = re.compile(re.escape(PREFIX) + r"[0-9a-f]{32}")
_KEPT_BYTES = 64 << 20  # of a file that stays for the next buffer
_NEW_SECONDS = 60.0  # of a file whose sender may not have locked it yet


class SharedBuffer:
    """A sender's file, for one buffer after another. Its sender has it locked: what is not is nobody's."""

    def __init__(self) -> None:
        """There is none."""
        self.name, self._memory = "", torch.empty(0, dtype=torch.uint8)
        self._remove: Callable[[], object] = _nothing

    def take(self, num_bytes: int) -> torch.Tensor:
        """[bytes] uint8 to be filled, which `name` names; it is no longer the buffer before. Raises OSError."""
        if len(self._memory) != num_bytes:
            self.close()
            _clear()
            name = f"{PREFIX}{secrets.token_hex(16)}"
            path = f"{FOLDER}/{name}"
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                self._remove = weakref.finalize(self, _remove, path, file, os.getpid())
                fcntl.flock(file, fcntl.LOCK_EX)
                os.posix_fallocate(file, 0, num_bytes)  # no room is an error here, and a crash where memory is mapped
                self._memory = torch.frombuffer(mmap.mmap(file, num_bytes), dtype=torch.uint8)
            except BaseException:
                self._remove()
                raise
            self.name = name
        return self._memory

    def let_go(self) -> None:
        """The buffer was read: its memory is kept for the next one, unless it is large."""
        if len(self._memory) > _KEPT_BYTES:
            self.close()

    def close(self) -> None:
        """Take the file away."""
        self._remove()
        self.name, self._memory = "", torch.empty(0, dtype=torch.uint8)


def _remove(path: str, file: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked process ends, too
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        os.close(file)


def _nothing() -> None:
    """There is no file."""


def _clear() -> None:
    """Take files away whose senders have ended without it."""
    for path in Path(FOLDER).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _NEW_SECONDS:
                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


class ShmTransport(Alone):
    """See octavo.rl.transport.Transport. A message has `shm_name`; its tensors lie one behind the other."""

    def __init__(self, device: torch.device, options: Mapping[str, Any]) -> None:
        """Nothing is opened."""
        super().__init__()

    def receive(self, info: Mapping[str, Any], read: Read, put: Put) -> list[Incoming]:
        """Read the file, a buffer at a time."""
        name = field(info, "shm_name", str)
        if not _NAME.fullmatch(name):
            raise WeightUpdateError(f"shm_name must be {PREFIX} and 32 hexadecimal digits, got {quoted(name, 80)}")
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
