"""Who gives way (O.3): the least recently used, and with ARC never what is used all the time for a scan."""

from __future__ import annotations

import itertools
import random

import pytest

from octavo.kv_connector.eviction import EVICTION, Eviction


def key(number: int) -> bytes:
    return number.to_bytes(4, "little")


class Memory:
    """So many keys, as an index keeps them."""

    def __init__(self, name: str, size: int) -> None:
        self.size, self.eviction, self.kept, self.hits = size, EVICTION[name](size), set[bytes](), 0
        self.used = set[bytes]()

    def want(self, wanted: bytes) -> None:
        if wanted in self.kept:
            self.eviction.use(wanted)
            self.hits += 1
            return
        if len(self.kept) == self.size:
            gone = self.eviction.give_way(wanted, lambda other: other not in self.used)
            if gone is None:
                return
            assert gone in self.kept and gone not in self.used
            self.kept.remove(gone)
        self.eviction.add(wanted)
        self.kept.add(wanted)


def test_O_3_the_least_recently_used_goes_first():
    memory = Memory("lru", 3)
    for number in (0, 1, 2, 0, 3):
        memory.want(key(number))
    assert memory.kept == {key(0), key(2), key(3)}


@pytest.mark.parametrize("name", EVICTION)
def test_O_3_who_is_used_stays(name):
    memory = Memory(name, 4)
    for number in range(4):
        memory.want(key(number))
    memory.used = {key(0), key(1)}
    for number in range(4, 40):
        memory.want(key(number))
    assert memory.used <= memory.kept
    memory.used = set(memory.kept)
    memory.want(key(99))
    assert key(99) not in memory.kept


def test_O_3_a_scan_does_not_drive_out_what_is_used_all_the_time_with_arc():
    hits = {}
    for name in EVICTION:
        memory, scan = Memory(name, 50), itertools.count(1000)
        for _ in range(3):
            for number in range(40):
                memory.want(key(number))
        for _ in range(20):
            for _ in range(100):
                memory.want(key(next(scan)))
            before = memory.hits
            for number in range(40):
                memory.want(key(number))
        hits[name] = memory.hits - before
    assert hits["lru"] == 0 and hits["arc"] > 30


@pytest.mark.parametrize("name", EVICTION)
def test_O_3_at_random_books_agree(name):
    rng, memory = random.Random(3), Memory(name, 20)
    for _ in range(5000):
        memory.want(key(int(rng.expovariate(0.05))))
        memory.used = set(rng.sample(sorted(memory.kept), min(3, len(memory.kept))))
        if rng.random() < 0.02:
            gone = rng.choice(sorted(memory.kept))
            memory.eviction.drop(gone)
            memory.kept.remove(gone)
            memory.used.discard(gone)
    assert isinstance(memory.eviction, Eviction) and memory.hits > 100
