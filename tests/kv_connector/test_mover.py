"""What a connector's figures say of orders that are under way at once."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from octavo.kv_connector.orders import Order, Report
from octavo.kv_connector.worker import mover
from octavo.kv_connector.worker.mover import Begun, Cancelled, Job, Mover


class _Handler:
    """Ends an order when it is told to."""

    stored_bytes = num_evicted = 0

    def __init__(self) -> None:
        self.may_end = threading.Semaphore(0)

    def handle(self, job: Job) -> Report:
        assert self.may_end.acquire(timeout=30)
        return Report(number=job.order.number)

    def reset(self) -> bool:
        return True

    def close(self) -> None:
        pass


@pytest.mark.parametrize("num_threads", [1, 2])
def test_orders_that_wait_for_each_other_are_under_way_once(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So bytes by seconds are a rate, however many orders are given at once; the rest of a copy's time is no copy's."""
    now = [100.0]
    monkeypatch.setattr(mover, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    handler = _Handler()
    moved = Mover(handler, 10, num_threads)
    ended = 0

    def end_one() -> None:
        nonlocal ended
        handler.may_end.release()
        wanted = ended + 1
        while ended < wanted:
            moved.wait(30)
            ended += len(moved.take())

    for number in range(3):
        moved.begin(Order(number=number, is_load=False, blocks=[1, 2], slots=[1, 2]))
    for _ in range(3):
        now[0] += 1
        assert moved.stats().save_seconds == pytest.approx(now[0] - 100)
        end_one()
    now[0] += 50  # nothing is under way
    moved.begin(Order(number=3, is_load=False, blocks=[3], slots=[3]))
    now[0] += 1
    end_one()
    stats = moved.stats()
    assert (stats.saved_bytes, stats.save_seconds, stats.load_seconds) == (70, pytest.approx(4), 0)
    moved.close()


def test_a_load_that_cannot_be_dropped_takes_no_thread_with_it() -> None:
    """Its lane has one: what comes behind would wait for ever."""

    def is_cancelled() -> Report:
        raise Cancelled

    def fail() -> None:
        raise OSError("the peer's socket")

    handler = _Handler()
    moved = Mover(handler, 10, start=lambda job: Begun(is_cancelled, fail) if job.order.number == 0 else None)
    for number in range(2):
        moved.begin(Order(number=number, is_load=True, blocks=[1], slots=[1]))
    handler.may_end.release()
    moved.wait(30)
    assert [report.number for report in moved.take()] == [1]
    assert moved.stats().num_errors == 1
    moved.close()
