"""StoredConnector: the scheduler's half of every connector that keeps blocks by their names.

Owns which blocks of a request are looked for, loaded and saved. What they are called `keys` knows; where they are kept
an Index (files, host memory, a server), and how they get there the worker's half. Invariant: a block is saved once
under one key, however many requests have it.
"""

from __future__ import annotations

import abc
import logging
import math
import time
from collections.abc import Iterable, Sequence

from octavo.kv_connector import LATER, ConnectorStats, Later, SilentConnector, Transfer, TransferResults
from octavo.kv_connector.keys import GroupKeys, Pair, group_keys
from octavo.kv_connector.orders import EngineSide, Order, Orders, Report
from octavo.request.request import Request

_LOG = logging.getLogger(__name__)
_MOST_BYTES_NOW = 1 << 30  # that a step waits for: some 20 ms of a GPU's bus, in which nobody else is computed


class Index(abc.ABC):
    """What is stored, as the scheduler knows it."""

    answers_later = False  # `is_known` has to be asked
    is_memory = False  # what an order's slots name is in this host's memory

    def is_known(self, request_id: str, keys: Sequence[bytes], stops: Sequence[bool]) -> bool:
        """Whether it knows which of these there are. False: ask again in a later step.

        stops: of each, whether those behind it are of no use where it is not there.
        """
        return True

    def forget(self, request_id: str) -> None:  # noqa: B027 (what answers at once remembers nobody)
        """A request runs, or has ended: what was asked for it is asked anew if it waits once more."""

    @property
    def is_looking(self) -> bool:
        """Whether `is_known` may say more soon."""
        return False

    def wait(self, seconds: float) -> bool:
        """Wait until `is_known` may say more, and for so long at most. False: it comes as orders end."""
        return False

    @abc.abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether a key can be loaded. Waits for nothing."""

    @abc.abstractmethod
    def order_load(self, number: int, pairs: Sequence[Pair]) -> tuple[Order | None, list[int]]:
        """The order that loads these, and the blocks for which there is nothing any more."""

    @abc.abstractmethod
    def order_save(self, number: int, pairs: Sequence[Pair]) -> Order | None:
        """The order that saves these, none of which it has; None: they are not kept."""

    def ended(self, number: int, report: Report | None) -> None:  # noqa: B027 (what keeps no books has nothing to do)
        """An order has ended; None: it was cancelled."""

    def reset(self) -> bool:
        """Forget everything; False: it is not this engine's alone."""
        return False

    @property
    def num_evicted(self) -> int:
        """Blocks that gave way to others since the start."""
        return 0

    @property
    def num_errors(self) -> int:
        """Questions that ended in an error since the start."""
        return 0

    @property
    def num_late(self) -> int:
        """Questions that were not answered in time since the start."""
        return 0

    def close(self) -> None:  # noqa: B027 (what tells nothing has nothing to do)
        """The engine ends."""

    @property
    def stored_bytes(self) -> int:
        """Bytes that are kept now, as far as the scheduler's half knows; 0: the worker's half tells."""
        return 0


class _Known:
    """What a group's policy looks for: names of what the cache has itself, and of what is stored, all blocks of it."""

    def __init__(self, own: Iterable[bytes], keys: GroupKeys, index: Index) -> None:
        self._own, self._keys, self._index = frozenset(own), keys, index

    def __contains__(self, name: object) -> bool:
        assert isinstance(name, bytes), "blocks are looked for by name"
        if name in self._own:
            return True
        keys = self._keys.keys(name)
        return bool(keys) and all(key in self._index for key in keys)


class StoredConnector(SilentConnector):
    """See Connector."""

    answers_at_once = True  # its index does, or another thread looks

    def __init__(self, engine: EngineSide, index: Index, *, prompt_only: bool = False) -> None:
        """prompt_only: what was generated is not saved."""
        self._groups = group_keys(engine.groups)
        # nobody continues inside a block of tokens
        self.save_unit = max(group.block_size for group in engine.groups if group.kind != "state")
        self.saves_running = engine.transfer.produces
        self._loads, self._saves = engine.transfer.consumes, engine.transfer.produces
        self._prompt_only = prompt_only
        self.index, self._orders = index, Orders(engine.ask)
        self._saving: set[bytes] = set()  # keys on their way
        self._under_way: dict[int, tuple[Pair, ...]] = {}
        self._missing: dict[int, list[int]] = {}  # load -> blocks for which there was nothing
        self._missed: dict[int, frozenset[int]] = {}  # loads that ended before they began
        self._transfer, self._clock = engine.transfer, time.monotonic
        self._loading: set[int] = set()  # loads among the orders
        self._now: set[int] = set()  # loads that a step waits for
        self._due: list[Report] = []  # of all others
        self._loads_now = index.is_memory and len(engine.groups) == 1 and engine.groups[0].is_attention
        self._most_now = _MOST_BYTES_NOW // engine.block_bytes
        self._left_until = -math.inf  # nothing is loaded before: a load has hung

    def match(self, request: Request, num_local: int) -> int | Later:
        """See Connector. The longest end that every group can continue from."""
        if not self._loads or self._clock() < self._left_until:
            return 0
        most = self._limit(request, "max_load_tokens", request.num_tokens, num_local)
        if self.index.answers_later and not self._is_known(request, num_local, most):
            return LATER
        return self.shorter(request, num_local, most) - num_local

    def shorter(self, request: Request, num_local: int, end: int) -> int:
        """See Connector."""
        names = [group.names(request.block_hashes) for group in self._groups]
        named = max(len(own) * group.group.block_size for group, own in zip(self._groups, names, strict=True))
        end = min(end, named) // self.save_unit * self.save_unit
        known = [
            _Known(own[: num_local // group.group.block_size], group, self.index)
            for group, own in zip(self._groups, names, strict=True)
        ]
        while end > num_local:
            settled = -1
            while settled != end:
                settled = end
                for group, own, stored in zip(self._groups, names, known, strict=True):
                    end = group.policy.longest_hit(stored, own, end) // self.save_unit * self.save_unit
            if end < request.num_tokens or self._has_last(names, known, end):
                break
            end -= self.save_unit
        return max(end, num_local)

    def loads_no_more(self, request: Request) -> None:
        """See Connector."""
        self.index.forget(request.request_id)

    def _is_known(self, request: Request, start: int, end: int) -> bool:
        """Whether the index knows all that a search up to `end` looks for: asked for from the first token on.

        Where a group needs every block before, all that comes behind one that is not there is of no use to any.
        """
        asked: list[tuple[int, bool, bytes]] = []  # the end of its tokens, whether it may be done without, the key
        for group in self._groups:
            size, is_optional = group.group.block_size, group.policy.first_needed(end) > 0
            names = group.names(request.block_hashes)[start // size : end // size]
            for place, name in enumerate(names, start // size + 1):
                asked += [(place * size, is_optional, key) for key in group.keys(name)]
        asked.sort(key=lambda each: each[:2])
        stops = [not is_optional for _, is_optional, _ in asked]
        return self.index.is_known(request.request_id, [key for _, _, key in asked], stops)

    def _limit(self, request: Request, name: str, most: int, base: int = 0) -> int:
        """A token up to which a request wants something done, counted from `base`."""
        wanted = (request.params.extra_args or {}).get("kv_transfer_params")
        count = wanted.get(name) if isinstance(wanted, dict) else None
        return min(most, base + count) if isinstance(count, int) and count >= 0 else most

    def _has_last(self, names: Sequence[Sequence[bytes]], known: Sequence[_Known], end: int) -> bool:
        """Where all tokens of a request are to be loaded: whether what its last one reads is there too."""
        return all(
            own[place] in stored
            for group, own, stored in zip(self._groups, names, known, strict=True)
            for place in range(group.policy.first_needed(end - 1), group.policy.first_needed(end))
        )

    def allocated(self, load: Transfer) -> None:
        """See Connector."""
        pairs = [pair for group in self._groups for pair in group.loaded(load)]
        order, missing = self.index.order_load(load.number, pairs)
        if order is None:
            self._missed[load.number] = frozenset()
            return
        self._under_way[load.number] = tuple(pairs)
        self._loading.add(load.number)
        self._missing[load.number] = missing
        self._orders.begin(order)

    def allocated_now(self, load: Transfer) -> bool:
        """See Connector. Of blocks that are in this host's memory, all of them, and so few that who comes can wait."""
        pairs = [pair for group in self._groups for pair in group.loaded(load)]
        if not self._loads_now or len(pairs) > self._most_now:
            return False
        order, missing = self.index.order_load(load.number, pairs)
        if order is None:
            return False
        if missing or min(order.slots, default=-1) < 0 or not self._orders.begin_now(order):
            self.index.ended(load.number, None)
            return False
        self._under_way[load.number] = tuple(pairs)
        self._now.add(load.number)
        return True

    def computed(self, save: Transfer) -> bool:
        """See Connector."""
        return self._save(save, has_ended=False)

    def finished(self, save: Transfer) -> bool:
        """See Connector."""
        return self._save(save, has_ended=True)

    def _save(self, save: Transfer, *, has_ended: bool) -> bool:
        if not self._saves:
            return False
        if self._now:  # what they read may have to give way
            self._look()
        end = save.request.num_prompt if self._prompt_only else save.end
        end = min(save.end, self._limit(save.request, "max_offload_tokens", end))
        pairs = [
            pair
            for group in self._groups
            for pair in group.saved(save, end, has_ended=has_ended)
            if pair.key not in self._saving and pair.key not in self.index
        ]
        order = self.index.order_save(save.number, pairs) if pairs else None
        if order is None:
            return False
        kept = set(order.keys)
        self._under_way[save.number] = tuple(pair for pair in pairs if pair.key in kept)
        self._saving |= kept
        self._orders.begin(order)
        return True

    def cancel(self, number: int, *, force: bool) -> bool:
        """See Connector."""
        if self._missed.pop(number, None) is not None:
            return True
        if force and number in self._loading and self.index.answers_later:  # it is not this host's memory
            self._leave()
        if not self._orders.cancel(number):
            return False
        self._end(number, None)
        return True

    def _leave(self) -> None:
        """Load nothing for a while: a load has hung, and who comes next would wait as long for nothing."""
        now, seconds = self._clock(), self._transfer.timeout
        if now >= self._left_until:
            text = "kv_connector %s: a load did not end within %g s (kv_transfer_timeout): for as long none begins"
            _LOG.warning(text, self._transfer.kv_connector, seconds)
        self._left_until = now + seconds

    def take_results(self) -> TransferResults:
        """See Connector."""
        missed, self._missed = self._missed, {}
        done: list[int] = []
        failed: dict[int, frozenset[int]] = {}
        self._look()
        due, self._due = self._due, []
        for report in due:
            missing = self._end(report.number, report)
            if report.failed:
                failed[report.number] = frozenset([*report.failed, *report.missed, *missing])
            elif report.missed or missing:
                missed[report.number] = frozenset([*report.missed, *missing])
            else:
                done.append(report.number)
        return TransferResults(done=done, failed=failed, missed=missed)

    def _look(self) -> None:
        """Ask which orders have ended. Those that a step waited for are told to nobody."""
        for report in self._orders.take():
            if report.number in self._now:
                self._now.discard(report.number)
                self._end(report.number, report)
            else:
                self._due.append(report)

    def _end(self, number: int, report: Report | None) -> list[int]:
        """Forget an order. Blocks that it never asked for."""
        self.index.ended(number, report)
        self._loading.discard(number)
        self._saving.difference_update(pair.key for pair in self._under_way.pop(number, ()))
        return self._missing.pop(number, [])

    def wait(self, seconds: float) -> None:
        """See Connector."""
        is_looking = self.index.is_looking
        if (self._orders or is_looking) and not self._missed and not (is_looking and self.index.wait(seconds)):
            self._orders.wait(seconds)

    def reset(self) -> bool:
        """See Connector."""
        self._look()
        return self.index.reset() and self._orders.forget_all()

    def close(self) -> None:
        """See Connector."""
        self._orders.close()
        self.index.close()

    def stats(self) -> ConnectorStats:
        """See Connector."""
        index = self.index
        own = {"num_evicted_blocks": index.num_evicted, "stored_bytes": index.stored_bytes}
        return self._orders.stats(**own, num_errors=index.num_errors, num_late_lookups=index.num_late)
