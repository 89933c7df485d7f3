"""StoreKind: a connector of your own in three methods, `has`, `get` and `put`.

Owns what a store of bytes by name needs to be a connector: both halves, and a checksum around each block. Invariant:
what `get` gives for a key is used only if it is, bit for bit, what was `put` under that key.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.config.kv_transfer import KVTransferConfig
from octavo.kv_connector import Connector
from octavo.kv_connector.keys import Pair
from octavo.kv_connector.orders import EngineSide, Order
from octavo.kv_connector.stored import Index, StoredConnector

if TYPE_CHECKING:
    import numpy as np

    from octavo.kv_connector.worker import WorkerConnector
    from octavo.kv_connector.worker.cache_bytes import CacheBytes

_LOG = logging.getLogger(__name__)


class StoreKind(abc.ABC):
    """See Kind. A subclass says where bytes are kept; what it raises fails the transfer, by policy, and no other."""

    shares_names = True
    moves_states = True
    num_threads = 1  # of each direction, that call `get` and `put`

    def __init__(self, transfer: KVTransferConfig) -> None:
        """`transfer.extra`: kv_connector_extra_config. Both halves are made of objects of their own."""
        self.transfer = transfer

    @abc.abstractmethod
    def has(self, key: str) -> bool:
        """Whether `get` will give something. Called by the thread that schedules: it must not take long."""

    @abc.abstractmethod
    def get(self, key: str) -> bytes | None:
        """What was put under a key; None: nothing any more. Called by a thread of its own."""

    @abc.abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Keep bytes under a key. Called by a thread of its own."""

    def secret(self) -> bytes:
        """See Kind: what names are keyed with where prefix_cache_secret_file gives nothing; the same for all users."""
        return b""

    def scheduler_half(self, engine: EngineSide) -> Connector:
        """See Kind."""
        return StoredConnector(engine, _StoreIndex(self))

    def worker_half(self, cache: CacheBytes, identity: str) -> WorkerConnector:
        """See Kind."""
        from octavo.kv_connector.worker.file_store import FileHandler
        from octavo.kv_connector.worker.mover import Mover

        return Mover(FileHandler(cache, _CheckedStore(self)), cache.block_bytes, self.num_threads)


class _StoreIndex(Index):
    def __init__(self, store: StoreKind) -> None:
        self._store = store

    def __contains__(self, key: object) -> bool:
        assert isinstance(key, bytes), "blocks are looked for by key"
        return self._store.has(key.hex())

    def order_load(self, number: int, pairs: Sequence[Pair]) -> tuple[Order | None, list[int]]:
        blocks, keys = [pair.block for pair in pairs], [pair.key for pair in pairs]
        return Order(number=number, is_load=True, blocks=blocks, keys=keys), []

    def order_save(self, number: int, pairs: Sequence[Pair]) -> Order:
        blocks, keys = [pair.block for pair in pairs], [pair.key for pair in pairs]
        return Order(number=number, is_load=False, blocks=blocks, keys=keys)


class _CheckedStore:
    """Blocks as FileHandler moves them, with a checksum before each."""

    num_evicted = 0
    stored_bytes = 0

    def __init__(self, store: StoreKind) -> None:
        self._store = store

    def write(self, key: bytes, block: np.ndarray) -> None:
        self._store.put(key.hex(), _checksum(key, block.data) + block.tobytes())

    def read(self, key: bytes, block: np.ndarray) -> bool:
        data = self._store.get(key.hex())
        if data is None:
            return False
        content = memoryview(data)[16:]
        if len(content) != block.nbytes or _checksum(key, content) != data[:16]:
            _LOG.warning("the store gave something else for %s than was put: its tokens are computed", key.hex())
            return False
        block.data.cast("B")[:] = content
        return True


def _checksum(key: bytes, content: memoryview) -> bytes:
    import xxhash

    digest = xxhash.xxh3_128(key)
    digest.update(content)
    return digest.digest()
