"""A connector by hand: what it offers, when it answers and what arrives is the test's to say.

It writes where FakeWorker's memory is, as the worker would have, and checks what the scheduler promises: nobody else
touches a transfer's blocks while it is under way, the steps in flight when it begins included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from octavo.kv_connector import LATER, Later, SilentConnector, Transfer, TransferResults
from octavo.request.request import Request
from sched_harness import BLOCK, Driver, Place


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclasses.dataclass
class FakeConnector(SilentConnector):
    offers: dict[str, int] = dataclasses.field(default_factory=dict)  # request id -> tokens that it has, from 0 on
    later: set[str] = dataclasses.field(default_factory=set)
    saves: bool = False
    stops: bool = True  # whether `cancel` stops a transfer at once
    hurries: bool = False  # whatever begins is over at once
    saves_running: bool = False
    save_unit: int = BLOCK
    matched: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    begun: dict[int, Transfer] = dataclasses.field(default_factory=dict)
    saving: dict[int, dict[Place, object]] = dataclasses.field(default_factory=dict)
    num_waits: int = 0

    def __post_init__(self) -> None:
        self.done: list[int] = []
        self.failed: dict[int, frozenset[int]] = {}

    def attach(self, driver: Driver) -> None:
        self.driver, self.worker = driver, driver.worker

    def match(self, request: Request, num_local: int) -> int | Later:
        kv = self.driver.scheduler.kv
        assert len(request.block_hashes) == max(request.num_tokens - kv.num_next_tokens, 0) // kv.block_size
        sizes = [group.block_size for group in self.worker.groups if group.kind != "state"]
        assert not any(num_local % size for size in sizes), "it is asked at a block's border"
        self.matched.append((request.request_id, num_local))
        if request.request_id in self.later:
            return LATER
        return max(self.offers.get(request.request_id, 0) - num_local, 0)

    def allocated(self, load: Transfer) -> None:
        self._begin(load, self.worker.touched)
        self.worker.foreign |= self._blocks(load)
        if self.hurries:
            self.arrive(load.number)

    def computed(self, save: Transfer) -> bool:
        assert save.end <= save.request.num_prompt + save.request.max_tokens and save.end % self.save_unit == 0
        return self.finished(save)

    def finished(self, save: Transfer) -> bool:
        if not self.saves:
            return False
        self._begin(save, self.worker.written)
        self.saving[save.number] = {place: self.worker.memory.get(place) for place, _ in self._content(save)}
        if self.hurries:
            self.arrive(save.number)
        return True

    def _begin(self, transfer: Transfer, by_step: dict[int, set[int]]) -> None:
        for plan, _ in self.driver.in_flight:
            assert not by_step[plan.step] & self._blocks(transfer), "a step under way is in its way"
        assert not self._blocks(transfer) & self.worker.foreign
        self.begun[transfer.number] = transfer

    def arrive(self, number: int, bad: Iterable[int] | None = None) -> None:
        """The transfer ends: what was loaded lies there but for the `bad` blocks, empty: all."""
        transfer = self.begun.pop(number)
        self.worker.foreign -= self._blocks(transfer)
        saved = self.saving.pop(number, None)
        if saved is not None:
            assert all(self.worker.memory.get(place) == value for place, value in saved.items()), "saved as it was"
        elif bad is None or (bad := frozenset(bad)):
            for place, value in self._content(transfer):
                if place[0] not in (bad or ()):
                    self.worker.memory[place] = value
                    self.worker.unwritten.discard(place)
        if bad is None:
            self.done.append(number)
        else:
            self.failed[number] = frozenset(bad)

    def cancel(self, number: int, *, force: bool) -> bool:
        if number not in self.begun:
            return False  # reported already, not taken yet
        if self.stops or force:
            self.worker.foreign -= self._blocks(self.begun.pop(number))
            self.saving.pop(number, None)
            return True
        return False

    def take_results(self) -> TransferResults:
        results = TransferResults(done=self.done, failed=self.failed)
        self.done, self.failed = [], {}
        return results

    def wait(self, seconds: float) -> None:
        self.num_waits += 1

    def _blocks(self, transfer: Transfer) -> set[int]:
        """Those that move, by the bytes: what lies before the start is shared with others."""
        return {place[0] for place, _ in self._content(transfer)} if transfer.number not in self.saving else set()

    def _content(self, transfer: Transfer) -> list[tuple[Place, object]]:
        return list(self.worker.content(transfer.request, transfer.blocks, transfer.start, transfer.end))
