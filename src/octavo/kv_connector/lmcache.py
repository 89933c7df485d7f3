"""`lmcache`: blocks in LMCache, in this host's memory and disks and in what it shares with others. LMCacheConnectorV1.

Owns the options: LMCache's own, from its file and environment and as `lmcache.NAME` here. LMCache is a library for it,
asked by its engine's public calls (`worker.lmcache_store`); which block is called what is Octavo's, so LMCache's chunks
are blocks, and what it says of tokens, layers and layouts is not asked for.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

from octavo.config.kv_transfer import EXTRA, Extra, KVTransferConfig, refuse
from octavo.config.settings import ConfigError
from octavo.kv_connector import Connector
from octavo.kv_connector.guard import Troubles
from octavo.kv_connector.lookups import LookedUp
from octavo.kv_connector.orders import EngineSide
from octavo.kv_connector.stored import StoredConnector

if TYPE_CHECKING:
    from octavo.kv_connector.worker import WorkerConnector
    from octavo.kv_connector.worker.cache_bytes import CacheBytes

_PREFIX = "lmcache."
_INSTALL = "pip install 'octavo[lmcache]'; without a GPU as docs/connectors.md says"


class LMCache:
    """See Kind."""

    shares_names = True
    moves_states = True

    def __init__(self, transfer: KVTransferConfig) -> None:
        """See Kind."""
        if importlib.util.find_spec("lmcache") is None:
            raise self._lacks(transfer, "no module is called lmcache")
        self._transfer = transfer
        self._own = {
            name.removeprefix(_PREFIX): value for name, value in transfer.extra.items() if name.startswith(_PREFIX)
        }
        extra = Extra({name: value for name, value in transfer.extra.items() if not name.startswith(_PREFIX)})
        extra.check_keys(("prompt_only", "lookup_timeout"))
        self._prompt_only = extra.flag("prompt_only", False)
        self._lookup = extra.seconds("lookup_timeout", transfer.lookup)

    @staticmethod
    def _lacks(transfer: KVTransferConfig, why: str) -> Exception:
        return refuse("kv_connector", transfer.kv_connector, f"needs the library lmcache: {why}", _INSTALL)

    def secret(self) -> bytes:
        """See Kind. The same for all: who reaches LMCache's server reads what is in it."""
        return b"octavo: blocks in LMCache"

    def scheduler_half(self, engine: EngineSide) -> Connector:
        """See Kind."""
        troubles = Troubles(self._transfer.kv_connector)
        index = LookedUp(engine.ask, self._lookup, troubles=troubles, setting="lookup_timeout")
        return StoredConnector(engine, index, prompt_only=self._prompt_only)

    def worker_half(self, cache: CacheBytes, identity: str) -> WorkerConnector:
        """See Kind."""
        from octavo.kv_connector.worker.remote_store import RemoteMover

        os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")  # it is read when the library is loaded; INFO: each block
        try:
            from octavo.kv_connector.worker.lmcache_store import LMCacheStore, WrongSetting
        except ImportError as error:
            raise self._lacks(self._transfer, " ".join(str(error).split())[:160]) from None
        timeout, troubles = self._transfer.timeout, Troubles(self._transfer.kv_connector)
        try:
            store = LMCacheStore(cache, identity, self._own, timeout, troubles)
        except WrongSetting as error:
            change = "change it in --kv-transfer-config, or in LMCACHE_CONFIG_FILE"
            if error.name in self._own:
                raise refuse(f"{EXTRA}.{_PREFIX}{error.name}", error.value, error.limit, change) from None
            raise ConfigError(error.name, error.value, error.limit, change) from None
        return RemoteMover(cache, store, 1, self._lookup, timeout=timeout, troubles=troubles)
