"""Transfers in the scheduler: requests whose blocks are filled from elsewhere, and blocks that a save still reads.

Owns the transfers that are under way, their deadlines and counters, and who has got blocks without running yet. Knows
no queue: the scheduler takes requests out of its own, and `requeue` puts them back. A transfer begins when the steps
are done that may touch its blocks, and what it fills is published when it has arrived and not before. Invariant: the
blocks of a transfer that has begun are reserved by its request or held until the connector has reported or given it up.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from octavo.kv_connector import LATER, NO_CONNECTOR, Connector, Later, Transfer
from octavo.request.request import Request, Status
from octavo.sched.kv_manager import KVManager
from octavo.sched.order import OrderOf
from octavo.sched.running import Running
from octavo.sched.transfers.holds import Hold
from octavo.sched.transfers.saves import Saves

_LOG = logging.getLogger(__name__)
LOAD_TIMEOUT = 30.0  # seconds
WAIT = 0.01  # seconds between two looks of an engine that has nothing else to do
FAILURE_POLICIES = ("recompute", "fail")


@dataclasses.dataclass(slots=True)
class TransferStats:
    """Counters since the start."""

    num_matched_tokens: int = 0  # that the connector was asked for
    num_loaded_tokens: int = 0
    num_load_failures: int = 0  # loads that brought less than they offered
    num_load_misses: int = 0  # loads of which some was not there any more
    num_expired_holds: int = 0  # holds whose transfer did not end in time
    refusal: str = ""  # why the blocks of a peer could not be taken, when that was found last


@dataclasses.dataclass(eq=False, slots=True)
class _Underway:
    transfer: Transfer
    after: int  # it begins when all steps before this one are done
    until: float
    before: Status  # of a loading request: what it returns to
    hold: Hold | None = None  # the blocks have no request any more
    begun: bool = False
    loads: bool = True
    goes_on: bool = False  # of a save: its request has not ended
    is_left: bool = False  # it did not end in time and cannot be stopped: nobody waits for it


class Ended(NamedTuple):
    """A load that is over: its request has `num_computed` tokens, and blocks for them or none."""

    request: Request
    failed: bool


class Loads:
    """Transfers of one scheduler."""

    def __init__(
        self,
        kv: KVManager,
        connector: Connector,
        timeout: float,
        clock: Callable[[], float],
        order: OrderOf,
        requeue: Callable[[Request], None],
        num_rows: int,
    ) -> None:
        """`timeout`: seconds that a load, a hold or the word LATER may take. `clock`: in seconds, never going back.

        `order`: see order_of. `requeue`: puts a request among the waiting ones.
        """
        self.stats = TransferStats()
        self.connector = connector
        self.is_on = connector is not NO_CONNECTOR
        assert not self.is_on or kv.can_load, "what a group keeps beside blocks of tokens cannot be loaded"
        self._kv, self._timeout, self._clock, self._order, self._requeue = kv, timeout, clock, order, requeue
        self._numbers = itertools.count()
        self._underway: dict[int, _Underway] = {}  # by the transfer's number
        self._loading: dict[str, _Underway] = {}  # by request
        self._later: dict[str, float] = {}  # request -> when `match` is asked for the last time
        self._refused: set[str] = set()  # requests that are not matched again
        self._asked: set[str] = set()  # requests that were matched
        self.num_preemptions = 0
        self._saves_running = self.is_on and connector.saves_running
        self._saves = Saves(num_rows, connector.save_unit, slides=kv.slides, num_next_tokens=kv.num_next_tokens)
        self.arrived: dict[str, Request] = {}  # they have blocks and wait for a row
        self.awaited = -1  # a load for which the next step that computes waits

    @property
    def num_loading(self) -> int:
        """Requests that wait for their blocks."""
        return len(self._loading)

    @property
    def are_on_offer(self) -> bool:
        """Whether all transfers are saves that wait for somebody else, or hang and are left behind."""
        others = [entry for entry in self._underway.values() if not entry.is_left]
        offers = self.connector.offers or len(others) < len(self._underway)
        return offers and all(self.connector.offers and entry.begun and not entry.loads for entry in others)

    @property
    def end_by_themselves(self) -> bool:
        """Whether there are transfers that wait for nobody else."""
        return bool(self._underway) and not self.are_on_offer

    def figures(self) -> dict[str, Any]:
        """What SchedulerStats says of transfers."""
        return {"num_loading": self.num_loading, **dataclasses.asdict(self.stats)}

    @property
    def keeps_blocks(self) -> bool:
        """Whether blocks are taken that no running request has."""
        return bool(self._underway or self.arrived)

    def match(self, request: Request, num_local: int, unit: int = 0) -> int | Later:
        """Tokens that can be loaded behind `num_local`, of those that need not be computed.

        unit: what is found ends behind a multiple of it, and not behind the last token that is there; 0: anywhere.
        """
        if request.waits_for in self._loading:  # the cache has them soon
            return LATER
        if request.request_id in self._refused or (most := self._max_load(request)) <= num_local:
            return 0
        self._kv.name_blocks(request)
        if request.request_id not in self._asked:
            self._asked.add(request.request_id)
            self.stats.num_matched_tokens += most - num_local
        found = self.connector.match(request, num_local)
        if isinstance(found, int):
            self._later.pop(request.request_id, None)
            most = min(num_local + found, most)
            wanted = (most - 1) // unit * unit if unit else most
            if num_local < wanted < num_local + found:
                wanted = self.connector.shorter(request, num_local, wanted)
            return max(wanted - num_local, 0)
        if self._clock() < self._later.setdefault(request.request_id, self._clock() + self._timeout):
            return found
        self.refuse(request)
        _LOG.warning("request %s: the connector said for %g s that it answers later", request.request_id, self._timeout)
        return 0

    def _max_load(self, request: Request) -> int:
        """All tokens, unless log-probabilities of the prompt are owed: those take what `max_hit` says."""
        return request.num_tokens if request.max_hit == request.num_tokens - 1 else request.max_hit

    def begin(self, request: Request, start: int, end: int, after: int) -> None:
        """`request`, which has blocks for tokens up to `end`, waits for those from `start` on."""
        transfer = self._transfer(request, start, end)
        load = _Underway(transfer, after, self._clock() + self._timeout, request.status)
        self._underway[transfer.number] = self._loading[request.request_id] = load
        request.status = Status.LOADING

    def begin_now(self, request: Request, start: int, end: int) -> bool:
        """As `begin`, and the request has arrived: the next step waits for its blocks. False: `begin` is to be called.

        For when all steps are done, and nobody else is computed: they would wait too.
        """
        transfer = self._transfer(request, start, end)
        if self.awaited >= 0 or not self.connector.allocated_now(transfer):
            return False
        self.awaited = transfer.number
        self._arrive(request, start, self._kv.finish_load(request, start, end, None))
        return True

    def _arrive(self, request: Request, start: int, end: int) -> None:
        """Tokens from `start` to `end` are there, or will be for the next step."""
        self.stats.num_loaded_tokens += end - start
        if not request.num_preemptions:
            request.num_loaded = max(end - start, 0)
        request.num_computed = min(end, request.num_tokens - 1)
        self.arrived[request.request_id] = request

    def start(self, first_outstanding: float) -> None:
        """Begin the transfers whose blocks no step touches any more. `first_outstanding`: the oldest step under way."""
        for entry in [entry for entry in self._underway.values() if not entry.begun]:
            if entry.after > first_outstanding:
                continue
            entry.begun = True
            if entry.loads:
                self.connector.allocated(entry.transfer)
                continue
            save = self.connector.computed if entry.goes_on else self.connector.finished
            if not save(entry.transfer):
                self._release(entry)

    def keep(self, request: Request, after: int) -> None:
        """Hold the blocks of a request that ends until its save is over, if the connector wants one."""
        transfer = self._transfer(request, self._saves.forget(request), min(request.num_computed, request.num_tokens))
        request.kv_transfer_params = self.connector.ending(transfer)
        until = self._clock() + self._timeout
        self._underway[transfer.number] = _Underway(
            transfer, after, until, request.status, hold=self._kv.hold(request, until), loads=False
        )

    def enter(self, request: Request) -> None:
        """A request runs from now on."""
        if self.is_on:
            self.connector.loads_no_more(request)
        if self._saves_running:
            self._saves.enter(request)

    def save_running(self, running: Running, after: int) -> None:
        """Offer the connector what the steps before `after` compute of the requests that run."""
        for request, start, end in self._saves.due(running) if self._saves_running else ():
            if self._kv.is_current(request):
                self._save(request, start, end, after)

    def num_offered(self, request: Request) -> int:
        """Leading tokens that saves of a running request were for."""
        return self._saves.num_offered(request)

    def _save(self, request: Request, start: int, end: int, after: int) -> None:
        transfer, until = self._transfer(request, start, end), self._clock() + self._timeout
        hold = self._kv.share(request, start, end, until)
        self._underway[transfer.number] = _Underway(
            transfer, after, until, request.status, hold=hold, loads=False, goes_on=True
        )

    def distrust(self, request: Request) -> None:
        """What steps under way compute for `request` may not be there: none of it is saved."""
        for entry in list(self._underway.values()):
            if entry.transfer.request is request and not entry.begun and not entry.loads:
                self._release(entry)

    def _transfer(self, request: Request, start: int, end: int) -> Transfer:
        self._kv.name_blocks(request)
        names = tuple(request.block_hashes[: end // self._kv.block_size])
        number, blocks = next(self._numbers), self._blocks(request)
        version = self._kv.identity.weights_version
        return Transfer(
            number=number, request=request, start=start, end=end, blocks=blocks, names=names, version=version
        )

    def take(self) -> Iterator[Ended]:
        """What has ended, in time or not, of loads."""
        results, now = self.connector.take_results(), self._clock()
        self.stats.refusal = results.refusal or self.stats.refusal
        for number in results.done:
            self._hide(number, results.partial.get(number, frozenset()))
            yield from self._end(number, None)
        for number, bad in results.failed.items():
            yield from self._end(number, bad)
        for number, missed in results.missed.items():
            yield from self._end(number, missed, is_failure=False)
        for number, entry in [pair for pair in self._underway.items() if pair[1].until <= now]:
            yield from self._expire(number, entry)

    def _hide(self, number: int, blocks: frozenset[int]) -> None:
        entry = self._underway.get(number)
        if blocks and entry is not None and entry.loads and entry.hold is None:
            self._kv.hide(entry.transfer.request, blocks)

    def _end(self, number: int, bad: frozenset[int] | None, *, is_failure: bool = True) -> Iterator[Ended]:
        entry = self._underway.get(number)
        if entry is None or not entry.begun:
            _LOG.error("the connector reports transfer %d, which is not under way", number)
            return
        if entry.hold is not None:
            self._release(entry)
            return
        request, transfer = entry.transfer.request, entry.transfer
        del self._underway[number], self._loading[request.request_id]
        end = self._kv.finish_load(request, transfer.start, transfer.end, bad)
        if bad is not None:
            self.stats.num_load_failures += is_failure
            self.stats.num_load_misses += not is_failure
            self.refuse(request)
            _LOG.warning(
                "request %s: of tokens %d to %d, which were to be loaded, the first %d arrived",
                request.request_id,
                transfer.start,
                transfer.end - 1,
                end - transfer.start,
            )
        self._arrive(request, transfer.start, end)
        self._kv.publish(request, request.num_computed)
        request.status = entry.before
        yield Ended(request, bad is not None and is_failure)

    def _expire(self, number: int, entry: _Underway) -> Iterator[Ended]:
        if entry.begun and not self.connector.cancel(number, force=True):
            entry.until += self._timeout
            _LOG.error("transfer %d does not end: %d blocks stay taken", number, sum(map(len, entry.transfer.blocks)))
            entry.is_left = True
            if entry.hold is None:
                yield self._leave(entry)
        elif entry.hold is not None:
            self.stats.num_expired_holds += 1
            _LOG.warning("transfer %d of request %s did not end in time", number, entry.transfer.request.request_id)
            self._release(entry)
        else:
            entry.begun = True
            yield from self._end(number, frozenset())

    def _leave(self, load: _Underway) -> Ended:
        """A load that cannot be stopped keeps its blocks, and its request goes on without them."""
        request = load.transfer.request
        del self._loading[request.request_id]
        load.hold, request.status, request.num_computed = self._kv.hold(request, load.until), load.before, 0
        self.stats.num_load_failures += 1
        self.refuse(request)
        return Ended(request, True)

    def stop(self, request: Request) -> None:
        """Take its blocks from a request that is loading, or has loaded and does not run yet."""
        if self.arrived.pop(request.request_id, None) is not None:
            self._kv.release(request)
        else:
            load = self._loading.pop(request.request_id)
            request.status, number = load.before, load.transfer.number
            if not load.begun or self.connector.cancel(number, force=False):
                del self._underway[number]
                self._kv.release(request)
            else:
                load.hold = self._kv.hold(request, load.until)
        request.num_computed = 0

    def has_blocks(self, request: Request) -> bool:
        """Whether `request` is loading, or has loaded and does not run yet."""
        return request.request_id in self._loading or request.request_id in self.arrived

    def parked(self) -> list[Request]:
        """Who has blocks and does not run."""
        return [*self.arrived.values(), *(load.transfer.request for load in self._loading.values())]

    def unpark(self, request: Request) -> None:
        """Let a request that has blocks and does not run wait without them."""
        is_queued = request.status is not Status.LOADING
        self.stop(request)
        request.num_preemptions += 1
        self.num_preemptions += 1
        if not is_queued:
            self._requeue(request)

    def unpark_all(self) -> None:
        """Take the blocks of all who have some and do not run."""
        for request in self.parked():
            self.unpark(request)

    def unpark_behind(self, request: Request) -> bool:
        """Take the blocks of the last one in order that has some and does not run, if it is behind `request`."""
        last = max(self.parked(), key=self._order, default=request)
        if self._order(last) <= self._order(request):
            return False
        self.unpark(last)
        return True

    def forget(self, request: Request) -> None:
        """`request` has ended."""
        if self.is_on:
            self.connector.loads_no_more(request)
        self._refused.discard(request.request_id)
        self._asked.discard(request.request_id)
        self._saves.forget(request)
        self._later.pop(request.request_id, None)

    def wait(self) -> None:
        """Wait a little for the connector, if somebody does: new requests are to be seen too."""
        if self._underway or self._later:
            self.connector.wait(WAIT)

    def close(self) -> None:
        """The engine ends. May be called twice."""
        self.is_on, connector = False, self.connector
        self.connector = NO_CONNECTOR
        connector.close()

    def refuse(self, request: Request) -> None:
        """Match `request` no more."""
        self._refused.add(request.request_id)
        self._later.pop(request.request_id, None)

    def _blocks(self, request: Request) -> tuple[tuple[int, ...], ...]:
        return tuple(map(tuple, self._kv.tables(request)))

    def _release(self, entry: _Underway) -> None:
        assert entry.hold is not None, "blocks without a request are held"
        del self._underway[entry.transfer.number]
        self._kv.release_hold(entry.hold)


NEVER = math.inf  # the oldest step under way, where there is none
