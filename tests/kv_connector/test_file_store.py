"""Blocks that threads read side by side: whole orders, and what one of them raises."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from octavo.kv_connector.orders import Order
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.file_store import FileHandler
from octavo.kv_connector.worker.mover import Job
from patience import patient


class _Files:
    """Of blocks of one byte each; reads wait for each other, two at a time."""

    stored_bytes = num_evicted = 0

    def __init__(self) -> None:
        self.meeting, self.ended = threading.Barrier(2), 0

    def write(self, key: bytes, block: np.ndarray) -> None:
        raise AssertionError("nothing is saved")

    def read(self, key: bytes, block: np.ndarray) -> bool:
        self.meeting.wait(patient(30))
        if key == b"bad":
            raise OSError("the disk failed")
        time.sleep(0.02)
        block[:] = key[0]
        self.ended += 1
        return key != b"gone"


def handler_of(files: _Files) -> tuple[CacheBytes, FileHandler]:
    cache = CacheBytes(torch.zeros((2, 9, 8), dtype=torch.uint8), 1 << 30)
    return cache, FileHandler(cache, files, num_readers=2)


def order(keys: list[bytes]) -> Job:
    return Job(Order(number=1, is_load=True, blocks=list(range(1, 1 + len(keys))), keys=keys))


def test_an_orders_files_are_read_side_by_side() -> None:
    before, files = set(threading.enumerate()), _Files()
    cache, handler = handler_of(files)
    for _ in range(2):
        report = handler.handle(order([b"a", b"b", b"gone", b"c"]))
        assert list(report.missed) == [3] and not report.failed
        found = cache.data[:, :6].amax(0).amax(1)
        assert found.tolist() == [0, ord("a"), ord("b"), 0, ord("c"), 0]
        assert torch.equal(cache.data.amin(0).amin(1)[:6], found)
    handler.close()
    until = time.monotonic() + patient(30)
    while (left := set(threading.enumerate()) - before) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left  # of others some may have ended meanwhile


def test_what_one_read_raises_fails_the_order_when_all_have_ended() -> None:
    files = _Files()
    cache, handler = handler_of(files)
    with pytest.raises(OSError, match="the disk failed"):
        handler.handle(order([b"a", b"bad", b"b", b"c"]))
    assert files.ended == 3 and not cache.data.any()
    handler.close()
