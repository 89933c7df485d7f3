"""`mooncake`: the blocks of one request, by Mooncake's transfer engine, from engine to engine.

Owns the options. The rest is `p2p`'s; the bytes are `worker.mooncake`'s.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
from typing import TYPE_CHECKING

from octavo.config.kv_transfer import EXTRA, Extra, KVTransferConfig, refuse
from octavo.kv_connector.p2p import P2P

if TYPE_CHECKING:
    from octavo.kv_connector.worker.cache_bytes import CacheBytes
    from octavo.kv_connector.worker.pair import Way

_HOST_ONLY = "mooncake-transfer-engine-non-cuda"
_INSTALL = "pip install 'octavo[mooncake]' and apt-get install libibverbs1"


class Mooncake(P2P):
    """See Kind. As `p2p`, and the bytes go from memory to memory by Mooncake's transfer engine."""

    keys = ("mooncake_protocol", "num_threads")
    registers = True

    def __init__(self, transfer: KVTransferConfig) -> None:
        """See Kind."""
        check_library(transfer, "mooncake.engine")
        super().__init__(transfer)
        self._protocol = Extra(transfer.extra).choice("mooncake_protocol", "tcp", ("tcp", "rdma"))

    def make_way(self, cache: CacheBytes) -> Way:
        """See P2P."""
        from octavo.kv_connector.worker.mooncake import MooncakeWay

        transfer = self._transfer
        if cache.on_gpu and transfer.produces and _moves_host_memory_alone():
            limit = f"{_HOST_ONLY} reads host memory alone, and this cache is a GPU's"
            raise refuse("kv_connector", transfer.kv_connector, limit, "install mooncake-transfer-engine in its place")
        try:
            return MooncakeWay(cache, transfer.kv_ip, self._protocol, transfer.timeout, gives=transfer.produces)
        except RuntimeError as error:
            raise refuse(f"{EXTRA}.mooncake_protocol", self._protocol, str(error), "change it, or kv_ip") from None


def check_library(transfer: KVTransferConfig, module: str) -> None:
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
