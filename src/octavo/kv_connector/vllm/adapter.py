"""The adapter: a subclass of vLLM's KVConnectorBase_V1 as a connector of Octavo's.

Owns the scheduler's half: vLLM's scheduler-side methods, in vLLM's order. The worker's half calls the others
(`worker.vllm`). A load, and the save of a prompt, is for the connector a step of its own, that begins when the engine's
steps have left the blocks alone, so it is waited for by nobody. The package `octavo-vllm` has the modules that such a
connector imports. Invariant: `request_finished` is called once for each request that ran, before its blocks are freed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from octavo.config.kv_transfer import KVTransferConfig, refuse
from octavo.kv_connector import LATER, Connector, ConnectorStats, Later, SilentConnector, Transfer, TransferResults
from octavo.kv_connector.guard import Troubles, ends_within
from octavo.kv_connector.orders import EngineSide, Orders
from octavo.kv_connector.vllm.turn import Turn
from octavo.kv_connector.vllm.views import BlocksView, cache_view, config_view, output_view, request_view
from octavo.request.request import Request

if TYPE_CHECKING:
    from octavo.kv_connector.worker import WorkerConnector
    from octavo.kv_connector.worker.cache_bytes import CacheBytes

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


class VLLMConnector:
    """See Kind."""

    shares_names = False
    answers = True
    is_out_of_tree = True  # what it calls

    def __init__(self, transfer: KVTransferConfig, found: type[Any]) -> None:
        """`found`: the subclass."""
        self._transfer, self._found = transfer, found
        try:
            self._base = importlib.import_module(_BASE)
        except ImportError as error:
            limit = f"is written for vLLM, whose module {error.name} is not there"
            change = "install adapters/octavo-vllm (or vLLM)"
            raise refuse("kv_connector", transfer.kv_connector, limit, change) from None

    def secret(self) -> bytes:
        """See Kind. It has names of its own."""
        return b""

    def scheduler_half(self, engine: EngineSide) -> Connector:
        """See Kind."""
        takes_groups = issubclass(self._found, getattr(self._base, "SupportsHMA", ()))
        if len(engine.groups) > 1 and not takes_groups:
            limit = f"does not support HMA, and this model's cache has {len(engine.groups)} groups"
            raise refuse("kv_connector", self._transfer.kv_connector, limit, "take one that subclasses SupportsHMA")
        engine.ask("setup", engine.groups, engine.num_blocks)
        made = self._make("SCHEDULER", engine.groups, engine.num_blocks)
        return _Adapted(made, engine, takes_groups=takes_groups)

    def _make(self, role: str, groups: Any, num_blocks: int) -> Any:
        config = config_view(self._transfer, groups, num_blocks)
        return self._found(config, getattr(self._base.KVConnectorRole, role), cache_view(groups, num_blocks))

    def worker_half(self, cache: CacheBytes, identity: str) -> WorkerConnector:
        """See Kind."""
        from octavo.kv_connector.worker.vllm import VLLMWorker

        return VLLMWorker(cache, lambda groups, num_blocks: self._make("WORKER", groups, num_blocks), self._transfer)


class _Adapted(SilentConnector):
    """See Connector."""

    saves_running = has_own_names = True
    calls_nobody_in = ("finished", "cancel", "take_results", "wait", "stats")

    def __init__(self, connector: Any, engine: EngineSide, *, takes_groups: bool) -> None:
        self._connector, self._orders = connector, Orders(engine.ask)
        self._takes_groups = takes_groups
        self._timeout, self._troubles = engine.transfer.timeout, Troubles(engine.transfer.kv_connector)
        self.save_unit = max(group.block_size for group in engine.groups)
        self._async: dict[str, bool] = {}  # request that was matched -> whether its load is
        self._saved: set[str] = set()  # requests whose prompt was shown
        self._delayed: set[str] = set()  # requests that have ended, and whose blocks are sent
        self._known: set[str] = set()

    def match(self, request: Request, num_local: int) -> int | Later:
        view = request_view(request)
        if request.request_id not in self._known and hasattr(self._connector, "on_new_request"):
            self._known.add(request.request_id)
            self._connector.on_new_request(view)
        count, is_async = self._connector.get_num_new_matched_tokens(view, num_local)
        if count is None:
            return LATER
        if count:
            self._async[request.request_id] = bool(is_async)
        return int(count)

    def allocated(self, load: Transfer) -> None:
        request = load.request
        waits = self._async.pop(request.request_id, False)
        num_external = load.end - load.start
        self._connector.update_state_after_alloc(request_view(request), BlocksView(load.blocks), num_external)
        meta = self._connector.build_connector_meta(output_view(load, load.end))
        self._begin(load, meta, is_load=True, waits=waits)

    def computed(self, save: Transfer) -> bool:
        request = save.request
        if request.request_id in self._saved or save.end < request.num_prompt // self.save_unit * self.save_unit:
            return False
        self._saved.add(request.request_id)
        self._connector.update_state_after_alloc(request_view(request), BlocksView(save.blocks), 0)
        self._begin(save, self._connector.build_connector_meta(output_view(save, 0)), is_load=False)
        return True

    def _begin(self, transfer: Transfer, meta: Any, *, is_load: bool, waits: bool = False) -> None:
        first, last = transfer.start // self.save_unit, -(-transfer.end // self.save_unit)
        blocks = [block for table in transfer.blocks for block in table[first:last] if block]
        self._orders.begin(
            Turn(
                number=transfer.number,
                is_load=is_load,
                blocks=blocks,
                meta=meta,
                request_id=transfer.request.request_id,
                waits=waits,
            )
        )

    def ending(self, save: Transfer) -> dict[str, Any] | None:
        request = save.request
        self._saved.discard(request.request_id)
        self._known.discard(request.request_id)
        self._async.pop(request.request_id, None)
        view = request_view(request)
        tables = [list(table) for table in save.blocks]
        if self._takes_groups:
            delays, told = self._connector.request_finished_all_groups(view, tuple(tables))
        else:
            delays, told = self._connector.request_finished(view, tables[0])
        if delays and any(tables):  # else it hears late of the end, and its blocks are gone
            self._delayed.add(request.request_id)
        return dict(told) if told else None

    def finished(self, save: Transfer) -> bool:
        if save.request.request_id not in self._delayed:
            return False
        self._delayed.discard(save.request.request_id)
        self._begin(save, None, is_load=False, waits=True)
        return True

    def cancel(self, number: int, *, force: bool) -> bool:
        return self._orders.cancel(number)

    def take_results(self) -> TransferResults:
        done: list[int] = []
        failed: dict[int, frozenset[int]] = {}
        for report in self._orders.take():
            if report.failed:
                failed[report.number] = frozenset(report.failed)
            else:
                done.append(report.number)
        return TransferResults(done=done, failed=failed)

    def wait(self, seconds: float) -> None:
        self._orders.wait(seconds)

    def reset(self) -> bool:
        return getattr(self._connector, "reset_cache", lambda: None)() is not False

    def stats(self) -> ConnectorStats:
        return self._orders.stats()

    def close(self) -> None:
        self._orders.close()
        shutdown = getattr(self._connector, "shutdown", lambda: None)
        ends_within(self._timeout, self._troubles, "its end beside the scheduler", shutdown)
        self._troubles.close()
