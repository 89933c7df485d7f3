"""Fresh pages for a model's weights, asked of the system while Python imports torch.

Owns the thread that does it and what it has made. A system gives a program memory by zeroing it, a GB in half a second
and more, which is as long as reading and packing weights takes; a processor that has nothing to do meanwhile can do it.
Imports no torch. Invariants: nothing but time depends on it; what nobody took is given back by `end`.
"""

from __future__ import annotations

import collections
import ctypes
import json
import mmap
import os
import sys
import threading
from pathlib import Path

CHUNK_BYTES = 64 << 20
_HUGE_PAGE = 2 << 20
_SHARE = 0.5  # of the memory that is free: a model for which this is not enough is refused, or loads as it did
_POPULATE = 23  # MADV_POPULATE_WRITE of Linux 5.14; mmap does not name it
_STORED, _PACKED = {"BF16": 2, "F16": 2, "F32": 4}, {"BF16": 2, "F16": 4, "F32": 4}  # bytes of a weight
_HEADER_BYTES = 1 << 20


class FreshPages:
    """Chunks of CHUNK_BYTES and a huge page, whose pages are there; made by a thread, for one consumer."""

    def __init__(self) -> None:
        """Nothing is made."""
        self._lock = threading.Lock()
        self._ready: collections.deque[mmap.mmap] = collections.deque()
        self._wanted = 0  # chunks still to be made
        self._ends = threading.Event()

    def begin(self, num_bytes: int) -> None:
        """Make chunks for so many bytes, in a thread. Where the system cannot, nothing is made."""
        if not sys.platform.startswith("linux") or num_bytes < CHUNK_BYTES:
            return
        with self._lock:
            if self._wanted or self._ready:  # another engine's start is not through
                return
            self._wanted = -(-num_bytes // CHUNK_BYTES)
            self._ends.clear()
        threading.Thread(target=self._make, name="octavo-fresh-pages", daemon=True).start()

    def take(self) -> mmap.mmap | None:
        """A chunk; None if none is ready: then one fewer is made."""
        with self._lock:
            if self._ready:
                return self._ready.popleft()
            self._wanted = max(self._wanted - 1, 0)
            return None

    @property
    def num_bytes(self) -> int:
        """That were made and not taken."""
        return len(self._ready) * CHUNK_BYTES

    def end(self) -> None:
        """Give back what nobody took, and make no more."""
        with self._lock:
            self._wanted = 0
            self._ends.set()
            self._ready.clear()

    def __enter__(self) -> None:
        """Until the end of this, at most."""

    def __exit__(self, *_: object) -> None:
        """See `end`."""
        self.end()

    def _make(self) -> None:
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        while True:
            with self._lock:
                if self._wanted == 0:
                    return
                self._wanted -= 1
            chunk = mmap.mmap(-1, CHUNK_BYTES + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            chunk.madvise(mmap.MADV_HUGEPAGE)
            address = ctypes.addressof(ctypes.c_char.from_buffer(chunk))
            for begin in range(0, len(chunk), _HUGE_PAGE):  # an end is not waited for
                if self._ends.is_set() or advise(address + begin, _HUGE_PAGE, _POPULATE):
                    break
            with self._lock:
                if self._ends.is_set():
                    return
                self._ready.append(chunk)


FRESH_PAGES = FreshPages()


def bytes_of_weights(folder: Path, quantization: str | None) -> int:
    """About the bytes of a folder's packed weights, at most half of the memory that is free; 0 if nothing is known."""
    try:
        files = list(folder.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        stored = _stored_dtype(files[0]) if files else ""
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
    if stored not in _PACKED:
        return 0
    num_weights = size // _STORED[stored]
    packed = num_weights * 17 // 16 if quantization == "int8" else num_weights * _PACKED[stored]
    return min(packed, int(free * _SHARE))


def _stored_dtype(file: Path) -> str:
    """Of the largest tensor of a safetensors file; empty where its header is not small and plain."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _HEADER_BYTES:
            return ""
        header = json.loads(opened.read(length))
    try:
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        largest = max(tensors, key=lambda entry: entry["data_offsets"][1] - entry["data_offsets"][0])
        return str(largest["dtype"])
    except (AttributeError, TypeError, KeyError, IndexError, ValueError):
        return ""
