"""CudaPages: a CUDA device's memory apart from its addresses, by the driver's virtual memory.

Owns the driver's words for it. Knows no tensors but those that it makes. Invariant: whoever is refused memory was
refused it with torch's own spare memory given back.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from octavo.ops import captures
from octavo.ops.compile.driver import DriverError, call

_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3  # the driver's words
_LEAST_GRANULARITY = 0
_OUT_OF_MEMORY = 2
_NO_FLAGS = ctypes.c_uint64(0)


class Location(ctypes.Structure):
    """`CUmemLocation`."""

    _fields_ = [("kind", ctypes.c_int), ("index", ctypes.c_int)]


class Kind(ctypes.Structure):
    """`CUmemAllocationProp`."""

    _fields_ = [
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", Location),
        ("of_windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    """`CUmemAccessDesc`."""

    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


class _Span:
    """Bytes that torch makes a tensor of, which keeps this, and so their owner."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self._address, self._size, self._owner = address, size, owner

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = self._address, False
        return {"shape": (self._size,), "typestr": "|u1", "data": data, "version": 2, "strides": None}


class CudaPages:
    """See octavo.device.virtual_memory.Pages."""

    def __init__(self, device: torch.device) -> None:
        """Nothing is taken. The device is this thread's from now on."""
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", self._index)
        torch.cuda.current_stream(self._device).query()  # the driver has a context then
        self.total_bytes = int(torch.cuda.mem_get_info(self._device)[1])
        self._location = Location(_ON_DEVICE, self._index)
        self._kind = Kind(_PINNED, 0, self._location)
        page = ctypes.c_size_t()
        call("cuMemGetAllocationGranularity", ctypes.byref(page), ctypes.byref(self._kind), _LEAST_GRANULARITY)
        self.page = page.value

    def reserve(self, size: int) -> int:
        """See Pages."""
        address = ctypes.c_uint64()
        anywhere = ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0)  # alignment, address, flags
        call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), *anywhere)
        return address.value

    def create(self, size: int) -> int:
        """See Pages."""
        handle = ctypes.c_uint64()
        words: tuple[Any, ...] = ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(self._kind), _NO_FLAGS
        try:
            try:
                call("cuMemCreate", *words)
            except DriverError as error:
                if error.status != _OUT_OF_MEMORY:
                    raise
                torch.cuda.empty_cache()
                call("cuMemCreate", *words)
        except DriverError as error:
            if error.status != _OUT_OF_MEMORY:
                raise
            raise torch.OutOfMemoryError(f"{size} bytes of a GPU's memory: {error}") from None
        return handle.value

    def map(self, address: int, size: int, handle: int) -> None:
        """See Pages."""
        first = ctypes.c_size_t(0)
        call("cuMemMap", ctypes.c_uint64(address), ctypes.c_size_t(size), first, ctypes.c_uint64(handle), _NO_FLAGS)

    def allow(self, address: int, size: int) -> None:
        """See Pages."""
        access = Access(self._location, _READ_WRITE)
        one = ctypes.c_size_t(1)
        call("cuMemSetAccess", ctypes.c_uint64(address), ctypes.c_size_t(size), ctypes.byref(access), one)

    def unmap(self, address: int, size: int) -> None:
        """See Pages."""
        call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def release(self, handle: int) -> None:
        """See Pages."""
        call("cuMemRelease", ctypes.c_uint64(handle))

    def free(self, address: int, size: int) -> None:
        """See Pages."""
        call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def settle(self) -> None:
        """See Pages."""
        captures.wait_for_device(self._device)

    def may_settle(self) -> bool:
        """See Pages: a graph's capture breaks where anybody waits for the device."""
        return not torch.cuda.is_current_stream_capturing()

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        """See Pages."""
        if not size:
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        found = torch.as_tensor(_Span(address, size, owner), device=self._device)
        assert found.data_ptr() == address, "the tensor lies in the range"
        return found

    def host(self, size: int) -> torch.Tensor:
        """See Pages: pinned."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)
