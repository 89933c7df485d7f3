"""The worker's half of `host`: blocks go to slots of the host's memory, and come from them, or from files behind."""

from __future__ import annotations

import threading

import torch

from octavo.kv_connector.orders import Order, Report
from octavo.kv_connector.worker.block_files import BlockFiles
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job
from octavo.ops.arrivals import Arrivals

_PART_BYTES = 256 << 20  # torch rounds an allocation of pinned memory up to a power of two


class HostHandler:
    """See Handler. The scheduler's half says which slot is whose: nobody else writes one that an order names."""

    def __init__(self, cache: CacheBytes, num_slots: int, files: BlockFiles | None) -> None:
        """files: behind the memory; None: what gives way is lost. Raises RuntimeError for too little memory."""
        self._cache, self._files = cache, files
        self._per_part = max(_PART_BYTES // cache.block_bytes, 1)  # slots
        starts = range(0, num_slots, self._per_part)
        self._memory = [cache.host_memory(min(self._per_part, num_slots - s), cache.block_bytes) for s in starts]
        self._lock = threading.Lock()
        self._spare = cache.host_memory(1, cache.block_bytes)[0] if files is not None else self._row(0)

    @property
    def stored_bytes(self) -> int:
        """See Handler. Those of files: the scheduler's half counts slots."""
        return self._files.stored_bytes if self._files is not None else 0

    @property
    def num_evicted(self) -> int:
        """See Handler. Of files: the scheduler's half counts slots."""
        return self._files.num_evicted if self._files is not None else 0

    def reset(self) -> bool:
        """See Handler."""
        return True

    def close(self) -> None:
        """See Handler."""
        self._memory = []

    def handle(self, job: Job) -> Report:
        """See Handler."""
        order = job.order
        rows = [self._row(slot) for slot in order.slots if slot >= 0]
        if not order.is_load:
            for slot, key in order.spills:
                self._spill(slot, key)
            with job.touching():
                self._cache.read(order.blocks, rows)
            return Report(number=order.number)
        kept = [block for block, slot in zip(order.blocks, order.slots, strict=True) if slot >= 0]
        with job.touching():
            self._cache.write(kept, rows)
        missed = [
            block
            for block, key, slot in zip(order.blocks, order.keys, order.slots, strict=True)
            if slot < 0 and not self._from_file(job, block, key)
        ]
        return Report(number=order.number, missed=missed)

    def bring(self, order: Order) -> Arrivals | None:
        """See Mover: all that a load names is in the memory."""
        return self._cache.bring(order.blocks, [self._row(slot) for slot in order.slots])

    def _row(self, slot: int) -> torch.Tensor:
        part, place = divmod(slot, self._per_part)
        return self._memory[part][place]

    def _spill(self, slot: int, key: bytes) -> None:
        assert self._files is not None, "what gives way is kept only where there are files"
        self._files.write(key, self._row(slot).numpy())

    def _from_file(self, job: Job, block: int, key: bytes) -> bool:
        assert self._files is not None, "a block without a slot has a file"
        with self._lock:
            if not self._files.read(key, self._spare.numpy()):
                return False
            with job.touching():
                self._cache.write([block], [self._spare])
        return True
