"""`multi`: several connectors of one engine. vLLM's MultiConnector by alias.

Owns who of the children is asked for what: a request is loaded by the first child, in the order in which they are
listed, that has tokens of it; all children save. Invariants: a save has ended when it has ended for every child that
kept it; names of blocks are keyed by the first child that has a secret.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.config.kv_peers import KEY as PEERS
from octavo.config.kv_transfer import EXTRA, LOOKUP_TIMEOUT, Extra, KVTransferConfig, read_kv_transfer, refuse
from octavo.kv_connector import LATER, Connector, ConnectorStats, Later, SilentConnector, Transfer, TransferResults
from octavo.kv_connector.orders import EngineSide
from octavo.kv_connector.table import (
    Kind,
    brings,
    make_kind,
    moves_runs,
    moves_states,
    scheduler_half,
    secret_of,
    worker_half,
)
from octavo.request.request import Request

if TYPE_CHECKING:
    from octavo.kv_connector.worker import WorkerConnector
    from octavo.kv_connector.worker.cache_bytes import CacheBytes

_MAX_CHOSEN = 1 << 16  # requests that were matched, most of which will be loaded


class Multi:
    """See Kind."""

    shares_names = False

    def __init__(self, transfer: KVTransferConfig) -> None:
        """See Kind."""
        extra = Extra(transfer.extra)
        extra.check_keys(("connectors",))
        self._transfers: list[KVTransferConfig] = []
        for place, given in enumerate(extra.mappings("connectors")):
            label = f"{EXTRA}.connectors[{place}]."
            common = {"engine_id": transfer.engine_id, "kv_transfer_timeout": transfer.timeout}
            common[LOOKUP_TIMEOUT] = transfer.lookup  # a child may have another one
            common[PEERS] = transfer.peers.given or None
            child = read_kv_transfer({**common, **given}, label)
            if child.kv_connector == transfer.kv_connector:
                raise refuse(f"{label}kv_connector", child.kv_connector, "connectors of a multi are no multi")
            for key in ("kv_load_failure_policy", "kv_transfer_timeout", PEERS):
                if key in given:
                    raise refuse(f"{label}{key}", given[key], "holds for all connectors", f"set it beside {EXTRA}")
            self._transfers.append(child)
        self._kinds: list[Kind] = [make_kind(child) for child in self._transfers]
        self.shares_names = any(kind.shares_names for kind in self._kinds)
        self.moves_states = all(moves_states(kind) for kind in self._kinds)
        self.brings = any(brings(kind) for kind in self._kinds)
        self.moves_runs = any(moves_runs(kind) for kind in self._kinds)
        telling = [t.kv_connector for t, kind in zip(self._transfers, self._kinds, strict=True) if _tells(kind)]
        if len(telling) > 1:
            limit = f"{' and '.join(telling)} both answer with kv_transfer_params: only one may"
            raise refuse(f"{EXTRA}.connectors", telling, limit)

    def secret(self) -> bytes:
        """See Kind."""
        return next(filter(None, map(secret_of, self._kinds, self._transfers)), b"")

    def scheduler_half(self, engine: EngineSide) -> Connector:
        """See Kind."""
        children = [
            scheduler_half(
                kind, dataclasses.replace(engine, transfer=transfer, ask=functools.partial(engine.ask, "of", place))
            )
            for place, (kind, transfer) in enumerate(zip(self._kinds, self._transfers, strict=True))
        ]
        return _MultiConnector(children)

    def worker_half(self, cache: CacheBytes, identity: str) -> WorkerConnector:
        """See Kind."""
        from octavo.kv_connector.worker.several import SeveralWorkers

        return SeveralWorkers(
            [worker_half(*child, cache, identity) for child in zip(self._kinds, self._transfers, strict=True)]
        )


def _tells(kind: Kind) -> bool:
    return bool(getattr(kind, "answers", False))


class _MultiConnector(SilentConnector):
    """See Connector."""

    def __init__(self, children: Sequence[Connector]) -> None:
        self._children = children
        self.saves_running = any(child.saves_running for child in children)
        self.save_unit = math.lcm(*(child.save_unit for child in children))
        self.has_own_names = any(child.has_own_names for child in children)
        self.offers = any(child.offers for child in children)
        self._chosen = collections.OrderedDict[str, int]()  # request -> the child that has tokens of it
        self._loads: dict[int, int] = {}  # load -> its child
        self._saves: dict[int, set[int]] = {}  # save -> children that keep it

    def match(self, request: Request, num_local: int) -> int | Later:
        found = [child.match(request, num_local) for child in self._children]
        if any(each is LATER for each in found):
            return LATER
        for place, count in enumerate(found):
            if isinstance(count, int) and count:
                self._chosen[request.request_id] = place
                self._chosen.move_to_end(request.request_id)
                while len(self._chosen) > _MAX_CHOSEN:
                    self._chosen.popitem(last=False)
                return count
        return 0

    def shorter(self, request: Request, num_local: int, end: int) -> int:
        return self._children[self._chosen[request.request_id]].shorter(request, num_local, end)

    def allocated(self, load: Transfer) -> None:
        place = self._chosen.pop(load.request.request_id)
        self._loads[load.number] = place
        self._children[place].allocated(load)

    def allocated_now(self, load: Transfer) -> bool:
        place = self._chosen[load.request.request_id]
        if self._children[place].allocated_now(load):
            del self._chosen[load.request.request_id]
            return True
        return False

    def loads_no_more(self, request: Request) -> None:
        for child in self._children:
            child.loads_no_more(request)

    def release(self, transfer_ids: Sequence[str]) -> int:
        return sum(child.release(transfer_ids) for child in self._children)

    def computed(self, save: Transfer) -> bool:
        return self._save(save, [child.saves_running and child.computed(save) for child in self._children])

    def finished(self, save: Transfer) -> bool:
        return self._save(save, [child.finished(save) for child in self._children])

    def _save(self, save: Transfer, kept: Sequence[bool]) -> bool:
        keeping = {place for place, is_saving in enumerate(kept) if is_saving}
        if keeping:
            self._saves[save.number] = keeping
        return bool(keeping)

    def ending(self, save: Transfer) -> dict[str, Any] | None:
        said = [child.ending(save) for child in self._children]
        return next((each for each in said if each is not None), None)

    def cancel(self, number: int, *, force: bool) -> bool:
        if number in self._loads:
            if not self._children[self._loads[number]].cancel(number, force=force):
                return False
            del self._loads[number]
            return True
        keeping = self._saves.get(number, set())
        keeping -= {place for place in list(keeping) if self._children[place].cancel(number, force=force)}
        if not keeping:
            self._saves.pop(number, None)
        return not keeping

    def take_results(self) -> TransferResults:
        done: list[int] = []
        failed: dict[int, frozenset[int]] = {}
        missed: dict[int, frozenset[int]] = {}
        partial: dict[int, frozenset[int]] = {}
        refusal = ""
        for place, child in enumerate(self._children):
            results = child.take_results()
            refusal = results.refusal or refusal
            for number in (*results.done, *results.failed, *results.missed):
                if number in self._saves:  # a child that could not save has ended too
                    self._saves[number].discard(place)
                    if not self._saves[number]:
                        del self._saves[number]
                        done.append(number)
                elif self._loads.pop(number, None) is not None:
                    if number in results.failed:
                        failed[number] = results.failed[number]
                    elif number in results.missed:
                        missed[number] = results.missed[number]
                    else:
                        done.append(number)
                        partial[number] = results.partial.get(number, frozenset())
        return TransferResults(done=done, failed=failed, missed=missed, partial=partial, refusal=refusal)

    def wait(self, seconds: float) -> None:
        for child in self._children:
            child.wait(seconds / len(self._children))

    def reset(self) -> bool:
        reset = [child.reset() for child in self._children]  # all of them, whatever one says
        return all(reset)

    def stats(self) -> ConnectorStats:
        stats = [dataclasses.asdict(child.stats()) for child in self._children]
        return ConnectorStats(**{name: sum(each[name] for each in stats) for name in stats[0]})

    def close(self) -> None:
        for child in self._children:
            child.close()
