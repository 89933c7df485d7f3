"""Mover: orders that threads work off, for connectors whose bytes go through host memory.

Owns the threads, the states of orders and the figures. What is done with an order is a Handler's. Invariant: an order
whose cancellation was granted touches the cache no more, which it does only within `Job.touching`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from octavo.kv_connector import ConnectorStats
from octavo.kv_connector.orders import Order, Report

_LOG = logging.getLogger(__name__)


class Cancelled(Exception):
    """The order is to be left as it is."""


class Job:
    """An order that a thread works off."""

    def __init__(self, order: Order) -> None:
        """Not begun."""
        self.order = order
        self.began = time.monotonic()
        self._lock = threading.Lock()
        self._num_touching = 0
        self._is_cancelled = False
        self._is_done = False

    @contextlib.contextmanager
    def touching(self) -> Iterator[None]:
        """Within: blocks of the order are read or written, by several threads perhaps. Raises Cancelled."""
        with self._lock:
            if self._is_cancelled:
                raise Cancelled
            self._num_touching += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_touching -= 1

    def cancel(self) -> bool:
        """Whether it touches no block from now on. False: it does at this moment, or has ended."""
        with self._lock:
            self._is_cancelled |= not self._is_done and not self._num_touching
            return self._is_cancelled

    def finish(self) -> bool:
        """Whether it is to be reported."""
        with self._lock:
            self._is_done = True
            return not self._is_cancelled


class Handler(Protocol):
    """What is done with an order, on one of the threads. What is raised is logged and fails the whole order."""

    def handle(self, job: Job) -> Report:
        """Move the order's blocks. Raises Cancelled."""

    def reset(self) -> bool:
        """See WorkerConnector."""

    @property
    def stored_bytes(self) -> int:
        """Bytes that are kept now."""

    @property
    def num_evicted(self) -> int:
        """Blocks that gave way to others since the start."""

    def close(self) -> None:
        """No order comes any more."""


class Mover:
    """See WorkerConnector. Loads and saves have threads of their own, so that neither waits for the other."""

    def __init__(self, handler: Handler, block_bytes: int, num_threads: int = 1) -> None:
        """num_threads: of each direction."""
        self._handler, self._block_bytes = handler, block_bytes
        self._queues: dict[bool, queue.SimpleQueue[Job | None]] = {way: queue.SimpleQueue() for way in (False, True)}
        self._jobs: dict[int, Job] = {}
        self._ended: list[Report] = []
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._blocks, self._seconds = {True: 0, False: 0}, {True: 0.0, False: 0.0}
        self._threads = [
            threading.Thread(target=self._work, args=(way,), name=f"octavo-kv-{'load' if way else 'save'}", daemon=True)
            for way in (False, True)
            for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, order: Order) -> None:
        """See WorkerConnector."""
        job = self._jobs[order.number] = Job(order)
        self._queues[order.is_load].put(job)

    def take(self) -> Sequence[Report]:
        """See WorkerConnector."""
        with self._lock:
            ended, self._ended = self._ended, []
            self._changed.clear()
        for report in ended:
            self._jobs.pop(report.number, None)
        return ended

    def cancel(self, number: int) -> bool:
        """See WorkerConnector."""
        job = self._jobs.get(number)
        if job is None:
            return True
        if not job.cancel():
            return False
        del self._jobs[number]
        return True

    def wait(self, seconds: float) -> None:
        """See WorkerConnector."""
        self._changed.wait(seconds)

    def reset(self) -> bool:
        """See WorkerConnector."""
        return self._handler.reset()

    def stats(self) -> ConnectorStats:
        """See WorkerConnector."""
        with self._lock:
            loaded, saved = self._blocks[True], self._blocks[False]
            return ConnectorStats(
                num_saved_blocks=saved,
                num_loaded_blocks=loaded,
                saved_bytes=saved * self._block_bytes,
                loaded_bytes=loaded * self._block_bytes,
                save_seconds=self._seconds[False],
                load_seconds=self._seconds[True],
                num_evicted_blocks=self._handler.num_evicted,
                stored_bytes=self._handler.stored_bytes,
            )

    def close(self) -> None:
        """See WorkerConnector. What has begun is ended."""
        for line in self._queues.values():
            for _ in range(len(self._threads) // len(self._queues)):
                line.put(None)
        for thread in self._threads:
            thread.join()
        self._handler.close()

    def _work(self, is_load: bool) -> None:
        while (job := self._queues[is_load].get()) is not None:
            order = job.order
            try:
                with job.touching():  # one that was cancelled while it waited for a thread keeps none
                    pass
                report = self._handler.handle(job)
            except Cancelled:
                continue
            except Exception as error:  # of a disk, a peer or a library: this order's alone
                way = "load" if is_load else "save"
                _LOG.warning("a %s of %d blocks failed: %s: %s", way, len(order.blocks), type(error).__name__, error)
                report = Report(number=order.number, failed=order.blocks)
            if not job.finish():
                continue
            with self._lock:
                self._ended.append(report)
                self._blocks[is_load] += len(order.blocks) - len(report.failed) - len(report.missed)
                self._seconds[is_load] += time.monotonic() - job.began
                self._changed.set()
