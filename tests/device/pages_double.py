"""A device's memory apart from its addresses, made of the host's: a double of the driver that counts and checks.

Addresses without memory cannot be touched here either: who does ends by a signal.
"""

from __future__ import annotations

import ctypes
import mmap
from collections import Counter
from typing import Any

import torch

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_NOTHING, _FIXED, _UNBACKED = 0, 0x10, 0x4000
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
PAGE = 2 << 20


class PagesDouble:
    """See octavo.device.virtual_memory.Pages."""

    page = PAGE

    def __init__(self, total_bytes: int = 1 << 30) -> None:
        """All of the device is free."""
        self.total_bytes, self.others = total_bytes, 0  # others: bytes that others have
        self.ranges: dict[int, int] = {}
        self.handles: dict[int, int] = {}  # which are not released, and their sizes
        self.mapped: dict[int, int] = {}  # address -> size
        self.allowed: set[int] = set()
        self.calls: Counter[str] = Counter()
        self.fails: dict[str, int] = {}  # call -> that is to fail when it comes for the so-manyth time from now
        self.is_idle, self.captures, self.spare = True, False, 0
        self._handle = 0

    @property
    def used(self) -> int:
        """Bytes that mappings have."""
        return sum(self.mapped.values())

    def _called(self, name: str, address: int = 0, size: int = 0) -> None:
        self.calls[name] += 1
        self.fails[name] = self.fails.get(name, 0) - 1
        if not self.fails[name]:
            raise RuntimeError(f"{name} failed")
        assert address % PAGE == size % PAGE == 0, "whole pages"

    def _within(self, address: int, size: int) -> bool:
        return any(begin <= address and address + size <= begin + length for begin, length in self.ranges.items())

    def reserve(self, size: int) -> int:
        self._called("reserve", 0, size)
        got = _LIBC.mmap(None, size + PAGE, _NOTHING, _PRIVATE | _UNBACKED, -1, 0)
        assert got not in (None, ctypes.c_void_p(-1).value), "there are addresses"
        address = -(-got // PAGE) * PAGE
        self.ranges[address] = size
        return address

    def create(self, size: int) -> int:
        self._called("create", 0, size)
        if self.used + sum(self.handles.values()) + self.others + size > self.total_bytes:
            raise torch.OutOfMemoryError(f"{size} bytes")
        self._handle += 1
        self.handles[self._handle] = size
        return self._handle

    def map(self, address: int, size: int, handle: int) -> None:
        self._called("map", address, size)
        assert self.handles[handle] == size and self._within(address, size), "a handle's memory, in a range"
        assert not any(a < address + size and address < a + s for a, s in self.mapped.items()), "nothing is there yet"
        self.mapped[address] = size

    def allow(self, address: int, size: int) -> None:
        self._called("allow", address, size)
        assert self.mapped[address] == size, "what is mapped"
        assert not _LIBC.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE)
        self.allowed.add(address)

    def unmap(self, address: int, size: int) -> None:
        self._called("unmap", address, size)
        assert self.is_idle, "nobody may use it"
        assert self.mapped.pop(address) == size, "what one call has mapped"
        self.allowed.discard(address)
        assert _LIBC.mmap(address, size, _NOTHING, _PRIVATE | _FIXED | _UNBACKED, -1, 0) == address

    def release(self, handle: int) -> None:
        self._called("release")
        del self.handles[handle]

    def free(self, address: int, size: int) -> None:
        self._called("free", address, size)
        assert self.ranges.pop(address) == size and not self._mapped_within(address, size), "nothing is mapped"
        _LIBC.munmap(address, size)

    def _mapped_within(self, address: int, size: int) -> list[int]:
        return [each for each in self.mapped if address <= each < address + size]

    def settle(self) -> None:
        self._called("settle")
        assert not self.captures, "waiting breaks a capture"
        self.is_idle = True

    def may_settle(self) -> bool:
        return not self.captures

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        kind: Any = type("Bytes", (ctypes.c_uint8 * size,), {"__module__": __name__})
        data = kind.from_address(address)
        data.owner = owner
        return torch.frombuffer(data, dtype=torch.uint8)

    def host(self, size: int) -> torch.Tensor:
        self._called("host")
        return torch.empty(size, dtype=torch.uint8)

    def give_spare(self) -> None:
        """Stands for `torch.cuda.empty_cache`."""
        self.calls["spare"] += 1

    def check(self) -> None:
        """What holds between any two moves."""
        assert not self.handles, "every handle is released"
        assert self.allowed == self.mapped.keys(), "what is mapped may be used"
