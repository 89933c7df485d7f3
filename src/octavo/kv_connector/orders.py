"""Orders: what the scheduler's half of a connector tells the worker's, and the reports that come back.

Owns the two messages and the way between the halves, which passes beside the steps: no step waits for an order, and no
order for a step. Knows neither queues nor bytes. Invariant: an order is reported once, unless its cancellation was
granted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from octavo.cache.groups import CacheGroup
from octavo.config.kv_transfer import KVTransferConfig
from octavo.kv_connector import ConnectorStats
from octavo.kv_connector.peers.offers import Wanted


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Move blocks of the cache to or from where `keys` or `slots` say, one for each block."""

    number: int
    is_load: bool
    blocks: list[int]
    keys: list[bytes] = []
    slots: list[int] = []
    spills: list[tuple[int, bytes]] = []  # (slot, key): what is kept elsewhere before the slot is written
    wanted: Wanted | None = None  # of `p2p` and its kin: what is said beside


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """An order has ended. Blocks that did not arrive are named; a save has none."""

    number: int
    failed: list[int] = []  # blocks that were lost on the way
    missed: list[int] = []  # blocks that were not there any more
    partial: list[int] = []  # blocks of which only what the request reads has come
    refusal: str = ""  # of a load: why no block of that peer can be taken, until one of the two changes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineSide:
    """What the scheduler's half of a connector is made of."""

    transfer: KVTransferConfig
    groups: tuple[CacheGroup, ...]
    block_bytes: int
    num_blocks: int
    identity: str  # what the cache follows from, as hexadecimal digits; empty: its names do not leave the process
    ask: Callable[..., list[Any]]  # a method of every worker's half, by name, beside the steps


class Orders:
    """The way to all workers: an order ends when it has ended at each of them."""

    def __init__(self, ask: Callable[..., list[Any]]) -> None:
        """`ask`: see EngineSide."""
        self._ask = ask
        self._due: dict[int, list[Report]] = {}  # order -> the reports that have come

    def __len__(self) -> int:
        """Orders that have not ended."""
        return len(self._due)

    def begin(self, order: Order) -> None:
        """Give an order."""
        self._due[order.number] = []
        self._ask("begin", order)

    def begin_now(self, order: Order) -> bool:
        """Give a load that the next step waits for. False: nothing was begun."""
        begun = self._ask("begin_now", order)
        if all(begun):
            self._due[order.number] = []
        elif any(begun):
            self._ask("cancel", order.number)
        return all(begun)

    def take(self) -> list[Report]:
        """Those that have ended since the last call."""
        if not self._due:
            return []
        ended = []
        answers: list[Sequence[Report]] = self._ask("take")
        for reports in answers:
            for report in reports:
                due = self._due.get(report.number)
                if due is None:
                    continue
                due.append(report)
                if len(due) == len(answers):
                    del self._due[report.number]
                    ended.append(_merge(due))
        return ended

    def cancel(self, number: int) -> bool:
        """Whether it touches no block from now on; then it will not be reported."""
        if number not in self._due:
            return True
        if all(self._ask("cancel", number)):
            del self._due[number]
            return True
        return False

    def wait(self, seconds: float) -> None:
        """Until something may have ended."""
        self._ask("wait", seconds)

    def forget_all(self) -> bool:
        """Forget what is stored."""
        return all(self._ask("reset"))

    def close(self) -> None:
        """The engine ends."""
        self._ask("close")

    def stats(self, **own: int) -> ConnectorStats:
        """The sum over the workers. own: what the scheduler's half adds."""
        found: list[ConnectorStats] = self._ask("stats")
        names = [field.name for field in dataclasses.fields(ConnectorStats)]
        sums = {name: sum(getattr(stats, name) for stats in found) + own.get(name, 0) for name in names}
        return ConnectorStats(**sums)


def _merge(reports: Sequence[Report]) -> Report:
    """One worker's bad block is bad for all."""
    failed = {block for report in reports for block in report.failed}
    missed = {block for report in reports for block in report.missed}
    partial = {block for report in reports for block in report.partial}
    refusal = next(filter(None, (report.refusal for report in reports)), "")
    return Report(
        number=reports[0].number,
        failed=sorted(failed),
        missed=sorted(missed),
        partial=sorted(partial),
        refusal=refusal,
    )
