"""`mooncake` and `mooncake_store`: blocks from engine to engine by Mooncake's transfer engine, and in Mooncake's store.

Owns the options. The rest of the first is `p2p`'s, its bytes are `worker.ways.mooncake`'s; the second keeps blocks by
their names, as files do, and its bytes are `worker.mooncake_store`'s.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config.kv_transfer import EXTRA, Extra, KVTransferConfig, refuse
from octavo.config.settings import ConfigError
from octavo.kv_connector import Connector
from octavo.kv_connector.guard import Troubles
from octavo.kv_connector.lookups import LookedUp
from octavo.kv_connector.orders import EngineSide
from octavo.kv_connector.p2p import P2P
from octavo.kv_connector.stored import StoredConnector

if TYPE_CHECKING:
    from octavo.kv_connector.worker import WorkerConnector
    from octavo.kv_connector.worker.cache_bytes import CacheBytes
    from octavo.kv_connector.worker.pair import Way

_HOST_ONLY = "mooncake-transfer-engine-non-cuda"
_INSTALL = "pip install 'octavo[mooncake]' and apt-get install libibverbs1"
_SETTINGS_PATH = "MOONCAKE_CONFIG_PATH"
_FILE_KEYS = (
    "master_server_address",
    "metadata_server",
    "protocol",
    "device_name",
    "global_segment_size",
    "local_buffer_size",
)
_STORE_KEYS = (*_FILE_KEYS, "num_threads", "prompt_only", "lookup_timeout")


class Mooncake(P2P):
    """See Kind. As `p2p`, and the bytes go from memory to memory by Mooncake's transfer engine."""

    keys = ("mooncake_protocol", "num_threads")
    registers = moves_runs = True

    def __init__(self, transfer: KVTransferConfig) -> None:
        """See Kind."""
        _check_library(transfer, "mooncake.engine")
        super().__init__(transfer)
        self._protocol = Extra(transfer.extra).choice("mooncake_protocol", "tcp", ("tcp", "rdma"))

    def make_way(self, cache: CacheBytes) -> Way:
        """See P2P."""
        from octavo.kv_connector.worker.ways.mooncake import MooncakeWay

        transfer = self._transfer
        if cache.on_gpu and transfer.produces and _moves_host_memory_alone():
            limit = f"{_HOST_ONLY} reads host memory alone, and this cache is a GPU's"
            raise refuse("kv_connector", transfer.kv_connector, limit, "install mooncake-transfer-engine in its place")
        try:
            return MooncakeWay(cache, transfer.kv_ip, self._protocol, transfer.timeout, gives=transfer.produces)
        except RuntimeError as error:
            raise refuse(f"{EXTRA}.mooncake_protocol", self._protocol, str(error), "change it, or kv_ip") from None


class MooncakeStore:
    """See Kind."""

    shares_names = True
    moves_states = True

    def __init__(self, transfer: KVTransferConfig) -> None:
        """See Kind."""
        _check_library(transfer, "mooncake.store")
        Extra(transfer.extra).check_keys(_STORE_KEYS)
        extra = Extra({**_settings_file(), **transfer.extra})
        self._master = extra.text("master_server_address", "")
        host, _, port = self._master.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            limit = "must name the master of the store: host:port"
            raise refuse(f"{EXTRA}.master_server_address", self._master or None, limit)
        self._transfer = transfer
        self._metadata = extra.text("metadata_server", "P2PHANDSHAKE")
        self._protocol = extra.choice("protocol", "tcp", ("tcp", "rdma"))
        self._device = extra.text("device_name", "")
        self._segment_bytes = extra.size("global_segment_size", 1 << 30, low=0)
        self._buffer_bytes = extra.size("local_buffer_size", 64 << 20, low=1 << 20)
        self._num_threads = extra.number("num_threads", 2, 1, 64)
        self._prompt_only = extra.flag("prompt_only", False)
        self._lookup = extra.seconds("lookup_timeout", transfer.lookup)

    def secret(self) -> bytes:
        """See Kind. The same for all: who reaches the store reads what is in it."""
        return b"octavo: blocks in a store of Mooncake's"

    def scheduler_half(self, engine: EngineSide) -> Connector:
        """See Kind."""
        troubles = Troubles(self._transfer.kv_connector)
        index = LookedUp(engine.ask, self._lookup, troubles=troubles, setting="lookup_timeout")
        return StoredConnector(engine, index, prompt_only=self._prompt_only)

    def worker_half(self, cache: CacheBytes, identity: str) -> WorkerConnector:
        """See Kind."""
        from octavo.kv_connector.worker import mooncake_store
        from octavo.kv_connector.worker.remote_store import RemoteMover

        needed = self._segment_bytes + self._buffer_bytes
        if needed > cache.free_bytes:
            limit = f"and {self._buffer_bytes} of local_buffer_size: the host has {cache.free_bytes} bytes left"
            raise refuse(f"{EXTRA}.global_segment_size", self._segment_bytes, limit, "lower it; 0: give none")
        options = mooncake_store.StoreOptions(
            master=self._master,
            metadata_server=self._metadata,
            protocol=self._protocol,
            device_name=self._device,
            own_host=self._transfer.kv_ip,
            segment_bytes=self._segment_bytes,
            buffer_bytes=self._buffer_bytes,
            timeout=self._transfer.timeout,
        )
        timeout, troubles = self._transfer.timeout, Troubles(self._transfer.kv_connector)
        try:
            store = mooncake_store.MooncakeStore(cache, options, 2 * self._num_threads, troubles)
        except RuntimeError as error:
            change = "start mooncake_master there, or change it"
            raise refuse(f"{EXTRA}.master_server_address", self._master, str(error), change) from None
        return RemoteMover(cache, store, self._num_threads, self._lookup, timeout=timeout, troubles=troubles)


def _settings_file() -> dict[str, Any]:
    """What the file of Mooncake's own setting says, whose keys are the same. Raises ConfigError."""
    path = os.environ.get(_SETTINGS_PATH)
    if not path:
        return {}
    try:
        told = json.loads(Path(path).read_bytes())
        return {key: told[key] for key in _FILE_KEYS if told.get(key) not in (None, "")}
    except (OSError, ValueError, AttributeError) as error:
        text = " ".join(str(error).split())[:160]
        raise ConfigError(_SETTINGS_PATH, path, f"cannot be read: {text}", "name a JSON file, or unset it") from None


def _check_library(transfer: KVTransferConfig, module: str) -> None:
    """Raise ConfigError where a module of Mooncake's cannot be had."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # it is read when the library is loaded
    try:
        importlib.import_module(module)
    except ImportError as error:
        limit = f"needs the library {_HOST_ONLY}: {' '.join(str(error).split())[:160]}"
        raise refuse("kv_connector", transfer.kv_connector, limit, _INSTALL) from None


def _moves_host_memory_alone() -> bool:
    try:
        importlib.metadata.distribution(_HOST_ONLY)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
