"""StoredConnector: the scheduler's half of every connector that keeps blocks by their names.

Owns which blocks of a request are looked for, loaded and saved, under which keys. Where they are kept an Index knows
(files, host memory, a server), and how they get there the worker's half. A key is a block's name and its cache group.
Invariant: a block is saved once under one key, however many requests have it.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence

from octavo.cache.policies import make_policies
from octavo.kv_connector import ConnectorStats, SilentConnector, Transfer, TransferResults
from octavo.kv_connector.keys import Pair, make_key
from octavo.kv_connector.orders import EngineSide, Order, Orders, Report
from octavo.request.request import Request


class Index(abc.ABC):
    """What is stored, as the scheduler knows it."""

    @abc.abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether a key can be loaded."""

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
    def stored_bytes(self) -> int:
        """Bytes that are kept now, as far as the scheduler's half knows; 0: the worker's half tells."""
        return 0


class _Known:
    """What a group's policy looks for: names of what the cache has itself, and of what is stored."""

    def __init__(self, own: Iterable[bytes], group: int, index: Index) -> None:
        self._own, self._group, self._index = frozenset(own), group, index

    def __contains__(self, name: object) -> bool:
        assert isinstance(name, bytes), "blocks are looked for by name"
        return name in self._own or make_key(name, self._group) in self._index


class StoredConnector(SilentConnector):
    """See Connector."""

    def __init__(self, engine: EngineSide, index: Index, *, prompt_only: bool = False) -> None:
        """prompt_only: what was generated is not saved."""
        groups = engine.groups
        self._policies, self._sizes = make_policies(groups), [group.block_size for group in groups]
        self._smallest = min(self._sizes)
        self.save_unit = max(self._sizes)
        self.saves_running = engine.transfer.produces
        self._loads, self._saves = engine.transfer.consumes, engine.transfer.produces
        self._prompt_only = prompt_only
        self.index, self._orders = index, Orders(engine.ask)
        self._saving: set[bytes] = set()  # keys on their way
        self._under_way: dict[int, tuple[Pair, ...]] = {}
        self._missing: dict[int, list[int]] = {}  # load -> blocks for which there was nothing
        self._missed: dict[int, frozenset[int]] = {}  # loads that ended before they began

    def match(self, request: Request, num_local: int) -> int:
        """See Connector. The longest end that every group can continue from."""
        if not self._loads:
            return 0
        end = self._limit(request, "max_load_tokens", request.num_tokens, num_local) // self.save_unit * self.save_unit
        names = [self._names(request.block_hashes, group) for group in range(len(self._sizes))]
        known = [
            _Known(own[: num_local // size], group, self.index)
            for group, (own, size) in enumerate(zip(names, self._sizes, strict=True))
        ]
        while end > num_local:
            settled = -1
            while settled != end:
                settled = end
                for policy, own, stored in zip(self._policies, names, known, strict=True):
                    end = policy.longest_hit(stored, own, end) // self.save_unit * self.save_unit
            if end < request.num_tokens or self._has_last(names, known, end):
                break
            end -= self.save_unit
        return max(end - num_local, 0)

    def _limit(self, request: Request, name: str, most: int, base: int = 0) -> int:
        """A token up to which a request wants something done, counted from `base`."""
        wanted = (request.params.extra_args or {}).get("kv_transfer_params")
        count = wanted.get(name) if isinstance(wanted, dict) else None
        return min(most, base + count) if isinstance(count, int) and count >= 0 else most

    def _has_last(self, names: Sequence[Sequence[bytes]], known: Sequence[_Known], end: int) -> bool:
        """Where all tokens of a request are to be loaded: whether what its last one reads is there too."""
        return all(
            own[policy.first_needed(end - 1)] in stored
            for policy, own, stored in zip(self._policies, names, known, strict=True)
        )

    def _names(self, hashes: Sequence[bytes], group: int) -> Sequence[bytes]:
        ratio = self._sizes[group] // self._smallest
        return hashes[ratio - 1 :: ratio]

    def _pairs(self, transfer: Transfer, end: int) -> list[Pair]:
        """Blocks that move, up to token `end`, group by group."""
        found: list[Pair] = []
        for group, (table, size) in enumerate(zip(transfer.blocks, self._sizes, strict=True)):
            first, names = transfer.start // size, self._names(transfer.names, group)
            places = range(first, min(end // size, len(names), len(table)))
            found += [Pair(table[i], make_key(names[i], group)) for i in places if table[i]]
        return found

    def allocated(self, load: Transfer) -> None:
        """See Connector."""
        pairs = self._pairs(load, load.end)
        order, missing = self.index.order_load(load.number, pairs)
        if order is None:
            self._missed[load.number] = frozenset()
            return
        self._under_way[load.number] = tuple(pairs)
        self._missing[load.number] = missing
        self._orders.begin(order)

    def computed(self, save: Transfer) -> bool:
        """See Connector."""
        return self.finished(save)

    def finished(self, save: Transfer) -> bool:
        """See Connector."""
        if not self._saves:
            return False
        end = save.request.num_prompt if self._prompt_only else save.end
        end = min(save.end, self._limit(save.request, "max_offload_tokens", end))
        pairs = [pair for pair in self._pairs(save, end) if pair.key not in self._saving and pair.key not in self.index]
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
        if not self._orders.cancel(number):
            return False
        self._end(number, None)
        return True

    def take_results(self) -> TransferResults:
        """See Connector."""
        missed, self._missed = self._missed, {}
        done: list[int] = []
        failed: dict[int, frozenset[int]] = {}
        for report in self._orders.take():
            missing = self._end(report.number, report)
            if report.failed:
                failed[report.number] = frozenset([*report.failed, *report.missed, *missing])
            elif report.missed or missing:
                missed[report.number] = frozenset([*report.missed, *missing])
            else:
                done.append(report.number)
        return TransferResults(done=done, failed=failed, missed=missed)

    def _end(self, number: int, report: Report | None) -> list[int]:
        """Forget an order. Blocks that it never asked for."""
        self.index.ended(number, report)
        self._saving.difference_update(pair.key for pair in self._under_way.pop(number, ()))
        return self._missing.pop(number, [])

    def wait(self, seconds: float) -> None:
        """See Connector."""
        if self._orders and not self._missed:
            self._orders.wait(seconds)

    def reset(self) -> bool:
        """See Connector."""
        return self.index.reset() and self._orders.forget_all()

    def close(self) -> None:
        """See Connector."""
        self._orders.close()

    def stats(self) -> ConnectorStats:
        """See Connector."""
        return self._orders.stats(num_evicted_blocks=self.index.num_evicted, stored_bytes=self.index.stored_bytes)
