"""Mover: orders that threads work off, for connectors whose bytes go through host memory.

Owns the states of orders and the figures. What is done with an order is a Handler's. Invariant: an order
whose cancellation was granted touches the cache no more, which it does only within `Job.touching`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple, Protocol

from octavo.config.kv_transfer import DEFAULT_TIMEOUT
from octavo.config.quoted import describe, said
from octavo.kv_connector import ConnectorStats
from octavo.kv_connector.guard import Troubles, ends_within
from octavo.kv_connector.orders import Order, Report
from octavo.kv_connector.worker.turns import Turns
from octavo.ops.arrivals import NO_ARRIVALS, Arrivals

_LOG = logging.getLogger(__name__)


class Cancelled(Exception):
    """The order is to be left as it is."""


class RefusedError(RuntimeError):
    """What an order wants cannot be had, nor what the next one like it wants, until somebody changes a setting."""


class Begun(NamedTuple):
    """A load that who gave its order has begun."""

    rest: Callable[[], Report]  # what is left of it, in place of `Handler.handle`
    drop: Callable[[], object]  # instead of that, where it was cancelled by then


class Job:
    """An order that a thread works off."""

    def __init__(self, order: Order) -> None:
        """Not begun."""
        self.order = order
        self._lock = threading.Lock()
        self._num_touching = 0
        self._is_cancelled = False
        self._is_done = False
        self.begun: Begun | None = None  # what is left of a load that is under way
        self.afterwards: Callable[[], object] = bool  # what is due once it is reported; raises nothing
        self._awaited: threading.Event | None = None  # set when it is under way
        self._cuts: list[Callable[[], object]] = []  # what ends the waits of whoever works it off; none raises
        self.until = 0.0  # on the monotonic clock, once it is worked off: all of its waits together

    def touch(self) -> None:
        """Blocks of the order are read or written from now on, until `leave`. Raises Cancelled."""
        with self._lock:
            if self._is_cancelled:
                raise Cancelled
            self._num_touching += 1

    def leave(self) -> None:
        """They are not any more."""
        with self._lock:
            self._num_touching -= 1

    @contextlib.contextmanager
    def touching(self) -> Iterator[None]:
        """Within: blocks of the order are read or written, by several threads perhaps. Raises Cancelled."""
        self.touch()
        try:
            yield
        finally:
            self.leave()

    def await_way(self) -> threading.Event:
        """Before a thread has it: what is set when that waits for others, or has ended."""
        self._awaited = threading.Event()
        return self._awaited

    def is_under_way(self) -> None:
        """Whoever works it off waits for others now, or has ended."""
        if self._awaited is not None:
            self._awaited.set()

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody wants it any more."""
        return self._is_cancelled

    def waits_by(self, cut: Callable[[], object]) -> None:
        """Who works it off may wait from now on: `cut` ends that, where it is cancelled. Raises Cancelled."""
        with self._lock:
            if self._is_cancelled:
                raise Cancelled
            self._cuts.append(cut)

    def waits_no_more(self) -> None:
        """Whoever works it off has nothing to wait for. Raises Cancelled."""
        with self._lock:
            if self._is_cancelled:
                raise Cancelled
            self._cuts = []

    def cancel(self) -> bool:
        """Whether it touches no block from now on. False: it does at this moment, or has ended."""
        with self._lock:
            self._is_cancelled |= not self._is_done and not self._num_touching
            cuts, self._cuts = (self._cuts, []) if self._is_cancelled else ([], self._cuts)
        for cut in cuts:
            cut()
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


def _bring_nothing(order: Order) -> Arrivals | None:
    return None


def _start_nothing(job: Job) -> Begun | None:
    return None


def _no_lane(order: Order) -> Hashable:
    return None


class Mover:
    """See WorkerConnector. Loads and saves have threads of their own, so that neither waits for the other."""

    def __init__(
        self,
        handler: Handler,
        block_bytes: int,
        num_threads: int = 1,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        troubles: Troubles | None = None,
        bring: Callable[[Order], Arrivals | None] = _bring_nothing,
        gives_way: float = 0.0,
        start: Callable[[Job], Begun | None] = _start_nothing,
        lane: Callable[[Order], Hashable] = _no_lane,
    ) -> None:
        """num_threads: of each direction, and lane. lane: of a load; loads of different ones wait for no other's.

        timeout: seconds that `close` waits for an order. troubles: of the connector, where what the handler raises is
        told. bring: see `CacheBytes.bring`, of a load that is ordered by who calls. gives_way: seconds that who begins
        a load leaves the interpreter to its thread, until it is under way. start: of a load, by who begins it; what is
        left for its thread.
        """
        self._handler, self._block_bytes, self._timeout = handler, block_bytes, timeout
        self.troubles = troubles or Troubles(type(handler).__name__)
        self._since: dict[str, float] = {}  # thread that works off an order -> since when
        self._jobs: dict[int, Job] = {}
        self._num_threads, self._gives_way, self._start, self._lane = num_threads, gives_way, start, lane
        self._under_way = collections.Counter[tuple[bool, Hashable]]()  # orders of a direction and lane
        self._bring, self._brought = bring, dict[int, tuple[Order, Arrivals, float]]()  # loads; what they took here
        self._ended: list[Report] = []
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._blocks, self._seconds = {True: 0, False: 0}, {True: _Busy(), False: _Busy()}
        self._turns = {
            way: Turns(functools.partial(self._work, way), f"octavo-kv-{'load' if way else 'save'}", num_threads)
            for way in (False, True)
        }

    def begin(self, order: Order) -> None:
        """See WorkerConnector."""
        job = self._jobs[order.number] = Job(order)
        turns, lane = self._turns[order.is_load], self._lane(order) if order.is_load else None
        with self._lock:
            self._seconds[order.is_load].begin()
            self._under_way[order.is_load, lane] += 1
            has_thread = self._under_way[order.is_load, lane] <= self._num_threads
        if order.is_load and has_thread:
            job.begun = self._start(job)
        gives_way = order.is_load and has_thread and job.begun is None and self._gives_way > 0
        awaited = job.await_way() if gives_way else None
        turns.put(lane, job)
        if awaited is not None:
            awaited.wait(self._gives_way)

    def begin_now(self, order: Order) -> bool:
        """See WorkerConnector."""
        started = time.monotonic()
        try:
            arrivals = self._bring(order)
        except Exception as error:  # of a driver: `begin` tries it once more, and fails the load
            self.troubles.tell(
                f"bring {said(error)}", f"a load of {len(order.blocks)} blocks failed: {describe(error)}"
            )
            return False
        if arrivals is None:
            return False
        self._brought[order.number] = order, arrivals, time.monotonic() - started
        return True

    def arrivals(self, number: int) -> Arrivals:
        """See WorkerConnector."""
        brought = self._brought.get(number)
        return NO_ARRIVALS if brought is None else brought[1]

    def _collect(self) -> None:
        """Take in which loads that were begun at once have ended."""
        for number, (order, arrivals, seconds) in list(self._brought.items()):
            if arrivals.have_come():
                del self._brought[number]
                with self._lock:
                    self._seconds[True].add(arrivals.seconds or seconds)
                    self._blocks[True] += len(order.blocks)
                    self._ended.append(Report(number=number))

    def take(self) -> Sequence[Report]:
        """See WorkerConnector."""
        self._collect()
        with self._lock:
            ended, self._ended = self._ended, []
            self._changed.clear()
        for report in ended:
            self._jobs.pop(report.number, None)
        return ended

    def cancel(self, number: int) -> bool:
        """See WorkerConnector."""
        if (brought := self._brought.pop(number, None)) is not None:  # it is not stopped, and takes milliseconds
            brought[1].wait()
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
        self._collect()
        with self._lock:
            loaded, saved = self._blocks[True], self._blocks[False]
            return ConnectorStats(
                num_saved_blocks=saved,
                num_loaded_blocks=loaded,
                saved_bytes=saved * self._block_bytes,
                loaded_bytes=loaded * self._block_bytes,
                save_seconds=self._seconds[False].until_now(),
                load_seconds=self._seconds[True].until_now(),
                num_evicted_blocks=self._handler.num_evicted,
                stored_bytes=self._handler.stored_bytes,
                num_errors=self.troubles.num,
            )

    def close(self) -> None:
        """See WorkerConnector. What has begun is ended, but for what takes longer than a transfer may."""
        for number in list(self._brought):
            self.cancel(number)
        threads = [thread for turns in self._turns.values() for thread in turns.close()]
        until = time.monotonic() + self._timeout
        hanging = [thread for thread in threads if not self._ends(thread, until)]
        if hanging:
            for job in list(self._jobs.values()):
                job.cancel()
            _LOG.warning(
                "kv_connector %s: %s did not end within %g s (kv_transfer_timeout) and will not be waited for",
                self.troubles.name,
                ", ".join(thread.name for thread in hanging),
                self._timeout,
            )
        else:
            ends_within(self._timeout, self.troubles, "its end beside the cache", self._handler.close)
        self.troubles.close()

    def _ends(self, thread: threading.Thread, until: float) -> bool:
        """Wait for a thread until it has ended, or the order that it has is late."""
        while thread.is_alive():
            since = self._since.get(thread.name)
            left = min(until, until if since is None else since + self._timeout) - time.monotonic()
            if left <= 0 and since == self._since.get(thread.name):
                return False
            thread.join(max(left, 0))
        return True

    def _work(self, is_load: bool, job: Job) -> None:
        order, name = job.order, threading.current_thread().name
        self._since[name] = time.monotonic()
        try:
            with job.touching():  # one that was cancelled while it waited for a thread keeps none
                pass
            report = job.begun.rest() if job.begun else self._handler.handle(job)
        except Cancelled:
            self._drop(job)
            return
        except BaseException as error:  # of a disk, a peer or a library, which may exit: this order's alone
            if job.is_cancelled:  # what it waited for was cut
                self._drop(job)
                return
            report = self._failed(order, error)
        finally:
            del self._since[name]
            job.is_under_way()
        is_wanted = job.finish()
        with self._lock:
            self._end(order)
            if is_wanted:
                self._ended.append(report)
                self._blocks[is_load] += len(order.blocks) - len(report.failed) - len(report.missed)
                self._changed.set()
        job.afterwards()

    def _drop(self, job: Job) -> None:
        if job.begun:
            try:
                job.begun.drop()
            except BaseException as error:  # of a socket, say: its thread goes on, and its lane has an order less
                text = f"what was left of a load that was cancelled failed: {describe(error)}"
                self.troubles.tell(f"drop {said(error)}", text)
        with self._lock:
            self._end(job.order)

    def _end(self, order: Order) -> None:
        """It is under way no more, before it is reported: the next one of its lane may begin at once."""
        self._seconds[order.is_load].end()
        key = order.is_load, self._lane(order) if order.is_load else None
        self._under_way[key] -= 1
        if not self._under_way[key]:
            del self._under_way[key]

    def _failed(self, order: Order, error: BaseException) -> Report:
        way = "load" if order.is_load else "save"
        text = f"a {way} of {len(order.blocks)} blocks failed: {describe(error)}"
        self.troubles.tell(f"{way} {said(error)}", text)
        refusal = str(error) if isinstance(error, RefusedError) else ""
        return Report(number=order.number, failed=order.blocks, refusal=refusal)


class _Busy:
    """The time in which at least one order was under way: many of them at once count once."""

    def __init__(self) -> None:
        self._seconds, self.num, self._since = 0.0, 0, 0.0

    def begin(self) -> None:
        if not self.num:
            self._since = time.monotonic()
        self.num += 1

    def end(self) -> None:
        self.num -= 1
        if not self.num:
            self._seconds += time.monotonic() - self._since

    def add(self, seconds: float) -> None:
        """Of an order that no other one was beside."""
        self._seconds += seconds

    def until_now(self) -> float:
        return self._seconds + (time.monotonic() - self._since if self.num else 0.0)
