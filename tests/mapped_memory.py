"""Memory of a host that stands for a GPU's: a handle is an address, and a mapping shows the same bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
import torch

from octavo.kv_connector.worker.ways.ipc_memory import Shared, host_name
from octavo.kv_connector.worker.ways.regions import Region, joined_runs


class MappedMemory:
    """See Memory."""

    host = ""  # where what is shared claims to be
    lacking = 0  # bytes that a mapping has too few of

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"
        self.open_ones: list[int] = []

    def share(self, tensor: torch.Tensor) -> Shared:
        """Its allocation begins 64 bytes before."""
        numbers = np.array([tensor.data_ptr() - 64, tensor.nbytes + 64], np.int64)
        return Shared(host=self.host or host_name(), handle=numbers.tobytes(), offset=64)

    def open(self, shared: Shared) -> tuple[int, int]:
        address, num_bytes = np.frombuffer(shared.handle, np.int64).tolist()
        self.open_ones.append(address)
        return address, num_bytes - self.lacking

    def close(self, address: int) -> None:
        self.open_ones.remove(address)

    def order(self, own: torch.Tensor, target: Region, source: Region) -> Callable[..., object]:
        return lambda *_: self.copy(own, target, source)

    def copy(self, own: torch.Tensor, target: Region, source: Region) -> None:
        for (to, size), (of, same) in zip(*(side.tolist() for side in joined_runs(target, source)), strict=True):
            assert size == same
            assert own.data_ptr() <= to <= to + size <= own.data_ptr() + own.nbytes
            ctypes.memmove(to, of, size)
