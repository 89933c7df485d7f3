"""The worker's half of a connector that was written for vLLM: its methods, in vLLM's order, by one thread at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from octavo.cache.groups import CacheGroup
from octavo.config.kv_transfer import KVTransferConfig, refuse
from octavo.kv_connector import ConnectorStats
from octavo.kv_connector.guard import Troubles
from octavo.kv_connector.orders import Order, Report
from octavo.kv_connector.vllm.turn import Turn
from octavo.kv_connector.vllm.views import layer_name
from octavo.kv_connector.worker import NO_WORKER_CONNECTOR
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.mover import Job, Mover

_POLL = 0.002  # seconds between two questions whether a transfer of the connector's own has ended


class VLLMWorker:
    """See WorkerConnector."""

    begin_now, arrivals = NO_WORKER_CONNECTOR.begin_now, NO_WORKER_CONNECTOR.arrivals

    def __init__(self, cache: CacheBytes, make: Callable[..., Any], transfer: KVTransferConfig) -> None:
        """`make`: the connector, of groups and how many blocks."""
        self._cache, self._make, self._transfer = cache, make, transfer

    def setup(self, groups: Sequence[CacheGroup], num_blocks: int) -> None:
        """Make the connector, and show it the cache: [num_blocks, heads, tokens, channels] of each layer."""
        sizes = {layer: group.states_per_block for group in groups for layer in group.layers}
        caches = {layer: whole_blocks(self._cache.views[layer], num_blocks, size) for layer, size in sizes.items()}
        for layer, view in caches.items():
            if view.shape[0] != num_blocks:
                limit = f"takes whole blocks, and kernel blocks of layer {layer} have their heads apart"
                change = (
                    "set kv_cache_layout to LBNHC or BLNHC, or attention_config kernel_block_size to the block size"
                )
                raise refuse("kv_connector", self._transfer.kv_connector, limit, change)
        connector = self._make(groups, num_blocks)
        named = {layer_name(layer): view for layer, view in caches.items()}
        connector.register_kv_caches(named)
        timeout, troubles = self._transfer.timeout, Troubles(self._transfer.kv_connector)
        steps = _Steps(connector, named, timeout)
        self._mover = Mover(steps, self._cache.block_bytes, timeout=timeout, troubles=troubles)

    def begin(self, order: Order) -> None:
        """See WorkerConnector."""
        self._mover.begin(order)

    def take(self) -> Sequence[Report]:
        """See WorkerConnector."""
        return self._mover.take()

    def cancel(self, number: int) -> bool:
        """See WorkerConnector."""
        return self._mover.cancel(number)

    def wait(self, seconds: float) -> None:
        """See WorkerConnector."""
        self._mover.wait(seconds)

    def reset(self) -> bool:
        """See WorkerConnector."""
        return True

    def stats(self) -> ConnectorStats:
        """See WorkerConnector."""
        return self._mover.stats()

    def close(self) -> None:
        """See WorkerConnector."""
        self._mover.close()


def whole_blocks(view: torch.Tensor, num_blocks: int, size: int) -> torch.Tensor:
    """A layer's view [kernel blocks, heads, tokens, channels] by blocks of `size` tokens, the same bytes.

    As it is where blocks are not split, or the tokens of their parts do not follow each other: heads lie between them.
    """
    kernel_blocks, heads, tokens, channels = view.shape
    ratio = size // tokens
    if ratio == 1 or view.stride(0) != tokens * view.stride(2):
        return view
    step = (kernel_blocks - ratio) // (num_blocks - 1)  # kernel blocks from one block to the next
    strides = (step * view.stride(0), *view.stride()[1:])
    return view.as_strided((num_blocks, heads, size, channels), strides, view.storage_offset())


class _Steps:
    """See Handler: each order is a step of the connector."""

    stored_bytes = 0
    num_evicted = 0

    def __init__(self, connector: Any, caches: dict[str, torch.Tensor], timeout: float) -> None:
        self._connector, self._caches, self._timeout = connector, caches, timeout
        self._lock = threading.Lock()
        self._sent: set[str] = set()  # requests that get_finished has named
        self._received: set[str] = set()
        layers = {name: SimpleNamespace(kv_cache=view) for name, view in caches.items()}
        metadata = dict.fromkeys(caches, SimpleNamespace())
        self._context = SimpleNamespace(no_compile_layers=layers, attn_metadata=metadata, virtual_engine=0)

    def reset(self) -> bool:
        return True

    def close(self) -> None:
        getattr(self._connector, "shutdown", lambda: None)()  # the mover waits for it no longer than for a transfer

    def handle(self, job: Job) -> Report:
        turn = job.order
        assert isinstance(turn, Turn), "this connector is given its own orders"
        bad: set[int] = set()
        with torch.inference_mode():
            if turn.meta is not None:
                with self._lock, job.touching():
                    bad = self._step(turn)
            if turn.waits:
                self._wait(job, turn)
        return Report(number=turn.number, failed=sorted(bad & set(turn.blocks)))

    def _step(self, turn: Turn) -> set[int]:
        """A step without a forward. The blocks that it could not load."""
        connector = self._connector
        getattr(connector, "handle_preemptions", lambda meta: None)(turn.meta)
        connector.bind_connector_metadata(turn.meta)
        try:
            connector.start_load_kv(self._context)
            for name, view in self._caches.items():
                connector.wait_for_layer_load(name)
                connector.save_kv_layer(name, view, self._context.attn_metadata[name])
            connector.wait_for_save()
            self._look(set())
            return set(connector.get_block_ids_with_load_errors())
        finally:
            connector.clear_connector_metadata()

    def _look(self, ended: set[str]) -> None:
        sent, received = self._connector.get_finished(ended)
        self._sent |= set(sent or ())
        self._received |= set(received or ())

    def _wait(self, job: Job, turn: Turn) -> None:
        """Until the connector says that a transfer of its own is over. Raises TimeoutError, and as `Job.touching`."""
        named, until = self._received if turn.is_load else self._sent, time.monotonic() + self._timeout
        ended = set() if turn.is_load else {turn.request_id}
        while True:
            with self._lock, job.touching():
                self._look(ended)
                if turn.request_id in named:
                    named.discard(turn.request_id)
                    return
            ended = set()
            if time.monotonic() > until:
                raise TimeoutError(f"request {turn.request_id} is not among those that get_finished names")
            time.sleep(_POLL)
