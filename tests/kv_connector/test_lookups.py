"""A store that takes long to say what it has: nobody waits for it but who asked, and not for long."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from octavo.kv_connector.guard import Troubles
from octavo.kv_connector.lookups import LookedUp
from octavo.kv_connector.orders import Order
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.remote_store import RemoteMover, seal, unseal

KEYS = [b"a0", b"b0", b"c0"]


class Store:
    """What was written; a question waits for its gate."""

    stored_bytes = num_evicted = 0

    def __init__(self) -> None:
        self.kept: dict[bytes, np.ndarray] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def find(self, keys: Sequence[bytes]) -> list[bool]:
        self.gate.wait(60)
        if self.error is not None:
            raise self.error
        return [key in self.kept for key in keys]

    def write(self, key: bytes, block: np.ndarray) -> None:
        self.kept.setdefault(key, block.copy())

    def read(self, key: bytes, block: np.ndarray) -> bool:
        if key not in self.kept:
            return False
        block[:] = self.kept[key]
        return True

    def close(self) -> None:
        self.gate.set()


class Rig:
    def __init__(self, limit: float = 60.0) -> None:
        self.now = 0.0
        self.store = Store()
        self.data = torch.arange(64, dtype=torch.uint8).view(1, 4, 16)
        self.mover = RemoteMover(CacheBytes(self.data, 1 << 30), self.store, 1, limit)
        self.index = LookedUp(self.ask, limit, lambda: self.now)

    def ask(self, name: str, *args: Any) -> list[Any]:
        return [getattr(self.mover, name)(*args)]

    def answered(self, request_id: str) -> list[bool]:
        while not self.index.is_known(request_id, KEYS):
            self.mover.wait(60)
        return [key in self.index for key in KEYS]


@pytest.fixture
def rig() -> Any:
    made = Rig()
    yield made
    made.store.gate.set()
    made.mover.close()


def ended(mover: RemoteMover) -> Any:
    while not (reports := mover.take()):
        mover.wait(60)
    return reports[0]


def test_what_is_saved_is_found_and_loaded_and_the_rest_is_missed(rig: Rig):
    assert rig.answered("first") == [False] * 3
    rig.mover.begin(Order(number=1, is_load=False, blocks=[0, 2], keys=KEYS[:2]))
    assert not ended(rig.mover).failed and rig.answered("second") == [True, True, False]
    rig.data[0, 0] = 0
    rig.mover.begin(Order(number=2, is_load=True, blocks=[0, 1, 3], keys=KEYS))
    assert ended(rig.mover).missed == [3]
    assert rig.data[0, 0].tolist() == list(range(16)) and rig.data[0, 1].tolist() == list(range(32, 48))


def test_a_silent_store_costs_its_request_the_limit_and_nobody_else_anything(rig: Rig, caplog):
    rig.store.gate.clear()
    assert not rig.index.is_known("first", KEYS) and rig.index.is_looking
    assert rig.index.is_known("who has no block to ask for", [])
    rig.now = 61.0
    assert rig.index.is_known("first", KEYS) and not rig.index.is_looking
    assert "request first: the store did not answer within 60 s" in caplog.text
    assert rig.index.is_known("first", KEYS), "it is asked once"
    assert rig.index.is_known("second", KEYS), "who is silent is not waited for again"
    rig.store.kept = dict.fromkeys(KEYS, np.zeros(16, np.uint8))
    rig.store.gate.set()
    rig.mover.wait(60)  # it has answered the first one
    assert rig.answered("third") == [True] * 3


def test_what_was_there_is_not_there_when_the_store_does_not_answer_any_more(rig: Rig):
    rig.store.kept = dict.fromkeys(KEYS, np.zeros(16, np.uint8))
    assert rig.answered("first") == [True] * 3
    rig.store.gate.clear()
    assert not rig.index.is_known("second", KEYS)
    rig.now = 61.0
    assert rig.index.is_known("second", KEYS)
    assert rig.answered("third") == [False] * 3


def test_a_store_that_fails_has_nothing(rig: Rig, caplog):
    rig.store.error = OSError("no route")
    assert rig.answered("first") == [False] * 3 and "the store cannot be asked: OSError: no route" in caplog.text


def test_what_is_not_asked_in_time_is_not_asked_any_more():
    rig = Rig(limit=1e-9)
    rig.store.kept = dict.fromkeys(KEYS, np.zeros(16, np.uint8))
    rig.mover.look("late", KEYS)
    while not (answers := rig.mover.looked()):
        rig.mover.wait(60)
    assert answers == [("late", [False] * 3)]
    rig.mover.close()


def test_a_block_that_was_changed_is_no_block(caplog):
    block, row, out = np.arange(16, dtype=np.uint8), np.zeros(32, np.uint8), np.zeros(16, np.uint8)
    troubles = Troubles("there")
    seal(b"key", block, row)
    assert unseal(b"key", row, out, troubles) and (out == block).all()
    assert not unseal(b"another", row, out, troubles)
    row[20] ^= 1
    assert not unseal(b"key", row, out, troubles) and troubles.num == 2
    assert "there: the store gave something else for" in caplog.text and len(caplog.records) == 1


def test_who_waits_once_more_asks_anew_and_an_answer_that_nobody_wants_any_more_is_nobodys(rig: Rig):
    assert rig.answered("first") == [False] * 3
    rig.store.kept = dict.fromkeys(KEYS, np.zeros(16, np.uint8))
    rig.index.forget("first")  # it has run meanwhile
    assert rig.answered("first") == [True] * 3
    rig.store.gate.clear()
    assert not rig.index.is_known("second", KEYS[:1])
    rig.index.forget("second")  # it is aborted, and its name comes again
    assert not rig.index.is_looking and not rig.index.is_known("second", KEYS)
    rig.store.kept.pop(KEYS[2])
    rig.store.gate.set()
    assert rig.answered("second") == [True, True, False]
