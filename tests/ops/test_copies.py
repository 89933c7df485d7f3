"""Copies over the bus in one call: what the driver is told, of either version, and what becomes of one without it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from octavo.ops import copying
from octavo.ops.compile import driver

ARRAYS = [np.array(values, np.uint64) for values in ([1 << 40, 2], [3, 4])]


class _Driver:
    """Keeps what it was asked, as the driver reads it. names: of the functions that it has."""

    def __init__(self, *names: str, status: int = 0) -> None:
        self.asked: list[tuple[str, list[int], list[int]]] = []
        self._status = status
        for name in names:
            setattr(self, name, lambda *args, name=name: self._take(name, args))

    def _take(self, name: str, args: tuple[object, ...]) -> int:
        addresses, count = args[:3], args[3].value
        copies = [
            int.from_bytes(ctypes.string_at(array.value + 8 * i, 8), "little")
            for array in addresses
            for i in range(count)
        ]
        attributes = bytes(args[4]._obj)
        assert len(attributes) == 24 and bytes(args[5]._obj) == bytes(8) and args[6].value == 1
        assert len(args) == (8 if name.endswith("_v2") else 9) and args[-1].value == 5
        self.asked.append((name, copies, np.frombuffer(attributes, np.int32).tolist()))
        return self._status


@pytest.mark.parametrize("names", [["cuMemcpyBatchAsync"], ["cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"]])
def test_pieces_are_one_call_of_the_driver(names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = _Driver(*names)
    monkeypatch.setattr(driver, "_library", lambda: asked)
    copying.copy_pieces(*ARRAYS, 96, 5)
    assert asked.asked == [(names[-1], [1 << 40, 2, 3, 4, 96, 96], [1, 0, 0, 0, 0, 1])]
    driver.copies_in_batches.cache_clear()
    assert driver.copies_in_batches()
    driver.copies_in_batches.cache_clear()


def test_a_driver_that_is_older_or_refuses_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    driver.copies_in_batches.cache_clear()
    monkeypatch.setattr(driver, "_library", lambda: SimpleNamespace())
    assert not driver.copies_in_batches() and not copying.can_copy_pieces(torch.device("cuda"))
    driver.copies_in_batches.cache_clear()
    monkeypatch.setattr(driver, "_library", lambda: _Driver("cuMemcpyBatchAsync", status=801))
    with pytest.raises(driver.DriverError, match="cuMemcpyBatchAsync failed with 801"):
        copying.copy_pieces(*ARRAYS, 96, 5)
