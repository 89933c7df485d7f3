"""The worker's half of `shared_storage`: blocks go to files, and come from them."""

from __future__ import annotations

import concurrent.futures
import queue
import threading
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import torch

from octavo.kv_connector.orders import Report
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job

_PIECE_BYTES = 64 << 20  # host memory of a thread: what it moves at a time


class Blocks(Protocol):
    """Where blocks are kept by their keys: BlockFiles, or a store of one's own. Any thread may call."""

    @property
    def stored_bytes(self) -> int:
        """Bytes that are kept now."""

    @property
    def num_evicted(self) -> int:
        """Blocks that gave way to others since the start."""

    def write(self, key: bytes, block: np.ndarray) -> None:
        """Keep a block, uint8 [block_bytes]."""

    def read(self, key: bytes, block: np.ndarray) -> bool:
        """Fill a block with what is kept. False: there is nothing, or nothing that can be used."""


class _Readers:
    """Threads that fill rows side by side, for any thread that asks. No exit waits for them: a disk may hang."""

    def __init__(self, files: Blocks, count: int) -> None:
        """They begin when they are first asked."""
        self._files, self._count = files, count
        self._queue = queue.SimpleQueue[tuple[Future[bool], bytes, np.ndarray] | None]()
        self._lock, self._threads = threading.Lock(), list[threading.Thread]()

    def read(self, keys: list[bytes], rows: list[np.ndarray]) -> list[bool]:
        """`Blocks.read` of each; all have ended when it returns, or raises what one of them did."""
        if self._count < 2 or len(keys) < 2:
            return [self._files.read(key, row) for key, row in zip(keys, rows, strict=True)]
        with self._lock:
            while len(self._threads) < self._count:
                name = f"octavo-kv-read-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
        futures = [Future[bool]() for _ in keys]
        for asked in zip(futures, keys, rows, strict=True):
            self._queue.put(asked)
        concurrent.futures.wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        for _ in self._threads:
            self._queue.put(None)

    def _work(self) -> None:
        while (asked := self._queue.get()) is not None:
            future, key, row = asked
            try:
                future.set_result(self._files.read(key, row))
            except BaseException as error:  # who asked is told
                future.set_exception(error)


class FileHandler:
    """See Handler. Each thread moves an order by pieces, through host memory of its own."""

    def __init__(self, cache: CacheBytes, files: Blocks, num_readers: int = 1) -> None:
        """`files`: of blocks as large as the cache's. num_readers: threads that read them, beside each other."""
        self._cache, self._files = cache, files
        self._readers = _Readers(files, num_readers)
        self._count = max(_PIECE_BYTES // cache.block_bytes, 1)
        self._memory: list[torch.Tensor] = []  # that no thread uses

    @property
    def stored_bytes(self) -> int:
        """See Handler."""
        return self._files.stored_bytes

    @property
    def num_evicted(self) -> int:
        """See Handler."""
        return self._files.num_evicted

    def reset(self) -> bool:
        """See Handler. Other engines may use the folder: what is in it is named by what it follows from."""
        return True

    def close(self) -> None:
        """See Handler."""
        self._readers.close()
        self._memory.clear()

    def handle(self, job: Job) -> Report:
        """See Handler."""
        order = job.order
        memory = self._memory.pop() if self._memory else self._cache.host_memory(self._count, self._cache.block_bytes)
        missed: list[int] = []
        move = self._load if order.is_load else self._save
        try:
            for start in range(0, len(order.blocks), self._count):
                part = slice(start, start + self._count)
                missed += move(job, order.blocks[part], order.keys[part], memory)
        finally:
            self._memory.append(memory)
        return Report(number=order.number, missed=missed)

    def _load(self, job: Job, blocks: list[int], keys: list[bytes], memory: torch.Tensor) -> list[int]:
        """Blocks for which there was no file."""
        rows = [memory[place] for place in range(len(blocks))]
        found = self._readers.read(keys, [row.numpy() for row in rows])
        there = [place for place, is_there in enumerate(found) if is_there]
        with job.touching():
            self._cache.write([blocks[place] for place in there], [rows[place] for place in there])
        return [block for block, is_there in zip(blocks, found, strict=True) if not is_there]

    def _save(self, job: Job, blocks: list[int], keys: list[bytes], memory: torch.Tensor) -> list[int]:
        rows = [memory[place] for place in range(len(blocks))]
        with job.touching():
            self._cache.read(blocks, rows)
        for key, row in zip(keys, rows, strict=True):
            self._files.write(key, row.numpy())
        return []
