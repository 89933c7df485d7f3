"""BlockFiles: blocks of a cache in a folder, one file each, named by what they hold.

Owns the form of a file (safetensors, with a checksum), its way into the folder and out of it, and which files give way.
Several engines may share a folder. Knows keys and bytes, and no cache. Invariant: what `read` gives under a key is what
`write` was given under it, whole, or nothing: a file appears under its name when it is complete, and one that is
truncated, changed, another's or no file at all is told, removed if it can be, and counts as none.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xxhash

from octavo.kv_connector.guard import Troubles
from octavo.kv_connector.keys import MAX_HEADER_BYTES, SUFFIX, file_path

_FORMAT = "octavo block 1"
_LENGTH = struct.Struct("<Q")
_KEPT_SHARE = 0.9  # of the limit: what is left when files had to give way
_MAX_TAKEN = 1 << 16
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENXIO)  # no engine wrote it, or another user's
_MAX_WRITE_SECONDS = 3600.0  # after which who writes a file is taken for dead


class BlockFiles:
    """A folder of blocks of one size. Any thread may call."""

    def __init__(
        self,
        folder: str | Path,
        block_bytes: int,
        *,
        max_bytes: int = 0,
        label: str = "",
        troubles: Troubles | None = None,
        furnish: Callable[[], object] = lambda: None,
    ) -> None:
        """max_bytes: of all files; 0: no limit. label: what the cache follows from; it stands in each file.

        troubles: of the connector. furnish: puts into the folder what it had beside blocks, when it had to be made
        again. Raises OSError where the folder cannot be made.
        """
        self._folder, self._block_bytes = Path(folder), block_bytes
        self._troubles, self._furnish = troubles or Troubles(str(folder)), furnish
        self._taken: set[bytes] = set()  # keys under whose names there is what is no file and cannot be removed
        self._max_bytes, self._label = max_bytes, label
        self._lock = threading.Lock()
        self._num_evicted = 0
        self._folder.mkdir(parents=True, exist_ok=True)
        self._sweep()
        self._found = sum(size for _, size, _ in self._scan())  # bytes of all files when they were last counted
        self._new = 0  # bytes written since
        self._writing = 0  # bytes on their way

    @property
    def stored_bytes(self) -> int:
        """Bytes of the folder's files, as far as this one knows."""
        return self._found + self._new + self._writing

    @property
    def num_evicted(self) -> int:
        """Files that gave way since the start."""
        return self._num_evicted

    def path(self, key: bytes) -> Path:
        """Where a key's file is."""
        return Path(file_path(str(self._folder), key))

    def write(self, key: bytes, block: np.ndarray) -> None:
        """Keep a block, uint8 [block_bytes]; others give way to it first, or, if there is no room, it to them.

        Raises OSError.
        """
        assert block.nbytes == self._block_bytes, "a folder holds blocks of one size"
        if key in self._taken and not self._free(key):
            return
        header = self._header(key, block)
        size = len(header) + block.nbytes
        with self._lock:
            if self._max_bytes and self.stored_bytes + size > self._max_bytes:
                self._evict(size)
                if self.stored_bytes + size > self._max_bytes:  # other threads write now
                    self._num_evicted += 1
                    return
            self._writing += size
        written = 0
        try:
            try:
                self._put(self.path(key), header, block)
            except IsADirectoryError:
                if not self._free(key):
                    return
                self._put(self.path(key), header, block)
            written = size
        finally:
            with self._lock:
                self._writing -= size
                self._new += written

    def _put(self, path: Path, header: bytes, block: np.ndarray) -> None:
        self._make_folder(path.parent)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                _write_all(file.fileno(), header, block.data)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def _make_folder(self, folder: Path) -> None:
        """Make a folder of blocks, and the folder of all if it is gone."""
        try:
            folder.mkdir(exist_ok=True)
        except FileNotFoundError:
            with self._lock:
                self._found = self._new = 0
            folder.mkdir(parents=True, exist_ok=True)
            self._furnish()
            self._troubles.tell("gone", f"{self._folder} was gone and is made again")

    def _free(self, key: bytes) -> bool:
        """Whether nothing is in the way of a key's file any more."""
        path = self.path(key)
        try:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        except OSError as error:
            if len(self._taken) < _MAX_TAKEN:
                self._taken.add(key)
            text = f"{path} cannot be removed ({error.strerror}): its tokens are computed each time"
            self._troubles.tell("in the way", text)
            return False
        self._taken.discard(key)
        return True

    def read(self, key: bytes, block: np.ndarray) -> bool:
        """Fill uint8 [block_bytes] with what is kept. False: there is nothing, or nothing that can be used.

        Raises OSError where the folder fails.
        """
        path = self.path(key)
        try:
            wrong = self._read(path, key, block)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise
            wrong = f"it cannot be opened ({error.strerror})"
        if wrong:
            text = f"{path} is no block of this cache: {wrong}; it is removed and its tokens are computed"
            if self._free(key):
                self._troubles.tell("damaged", text)
            return False
        if self._max_bytes:
            with contextlib.suppress(OSError):
                os.utime(path)  # the least recently used go first
        return True

    def _read(self, path: Path, key: bytes, block: np.ndarray) -> str:
        """Why what has the name cannot be used; empty: it can. What is no file is not opened: it may never answer."""
        if not stat.S_ISREG(os.stat(path).st_mode):
            return "it is no file"
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # it may have changed just now
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return "it is no file"
            return self._fill(descriptor, key, block)
        finally:
            os.close(descriptor)

    def _header(self, key: bytes, block: np.ndarray) -> bytes:
        checksum = xxhash.xxh3_128_hexdigest(block.data)
        facts = {"format": _FORMAT, "key": key.hex(), "xxh3": checksum, "cache": self._label}
        tensor = {"dtype": "U8", "shape": [block.nbytes], "data_offsets": [0, block.nbytes]}
        text = json.dumps({"__metadata__": facts, "block": tensor}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return _LENGTH.pack(len(text)) + text

    def _fill(self, descriptor: int, key: bytes, block: np.ndarray) -> str:
        """Why the file cannot be used; empty: it can."""
        start = os.read(descriptor, _LENGTH.size)
        if len(start) < _LENGTH.size or not 0 < (length := _LENGTH.unpack(start)[0]) <= MAX_HEADER_BYTES:
            return "it has no header"
        try:
            facts = json.loads(os.read(descriptor, length))["__metadata__"]
            said = [facts[name] for name in ("format", "key", "cache")]
            checksum = str(facts["xxh3"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return "its header cannot be read"
        if said != [_FORMAT, key.hex(), self._label]:
            return "its header says something else"
        size = os.fstat(descriptor).st_size - _LENGTH.size - length
        if size != self._block_bytes:
            return f"it holds {size} bytes, a block has {self._block_bytes}"
        view, done = block.data.cast("B"), 0
        while done < size:
            count = os.readv(descriptor, [view[done:]])
            if not count:
                return f"it ends after {done} of {size} bytes"
            done += count
        return "" if xxhash.xxh3_128_hexdigest(block.data) == checksum else "its checksum is wrong"

    def _sweep(self) -> None:
        """Remove what engines that were killed had half written."""
        for path in self._folder.glob(f"??/.*{SUFFIX}.*"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < time.time() - _MAX_WRITE_SECONDS:
                    path.unlink()

    def _scan(self) -> list[tuple[float, int, str]]:
        """(last use, bytes, path) of each file."""
        found = []
        for folder in self._folder.glob("??"):
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.endswith(SUFFIX):
                        with contextlib.suppress(OSError):
                            facts = entry.stat()
                            found.append((facts.st_mtime, facts.st_size, entry.path))
        return found

    def _evict(self, size: int) -> None:
        """Let the least recently used give way to `size` bytes, and to some more: a look at all takes time."""
        files = sorted(self._scan())
        left = sum(each for _, each, _ in files)
        most = max(self._max_bytes * _KEPT_SHARE - self._writing - size, 0)
        for _, each, path in files:
            if left <= most:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
                self._num_evicted += 1
                left -= each
        self._found, self._new = left, 0

    def clear(self) -> None:
        """Remove all files."""
        with self._lock:
            for _, _, path in self._scan():
                with contextlib.suppress(OSError):
                    os.unlink(path)
            self._found = self._new = 0


def _write_all(descriptor: int, *parts: bytes | memoryview) -> None:
    for part in parts:
        rest = memoryview(part).cast("B")
        while rest:
            rest = rest[os.write(descriptor, rest) :]
