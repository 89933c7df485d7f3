"""StoreKind: a connector of your own in three methods, `has`, `get` and `put`.

Owns what a store of bytes by name needs to be a connector: both halves, and a checksum around each block. Invariant:
what `get` gives for a key is used only if it is, bit for bit, what was `put` under that key.
"""

from __future__ import annotations

import abc
import functools
from typing import TYPE_CHECKING

from octavo.config.kv_transfer import KVTransferConfig, refuse
from octavo.config.quoted import describe
from octavo.kv_connector import Connector
from octavo.kv_connector.guard import RAISED, Troubles
from octavo.kv_connector.lookups import LookedUpHere
from octavo.kv_connector.orders import EngineSide
from octavo.kv_connector.stored import StoredConnector

if TYPE_CHECKING:
    import numpy as np

    from octavo.kv_connector.worker import WorkerConnector
    from octavo.kv_connector.worker.cache_bytes import CacheBytes


class StoreKind(abc.ABC):
    """See Kind. A subclass says where bytes are kept; what it raises costs that block or transfer alone."""

    shares_names = True
    moves_states = True
    num_threads = 1  # of each direction, that call `get` and `put`

    def __init__(self, transfer: KVTransferConfig) -> None:
        """`transfer.extra`: kv_connector_extra_config. Both halves are made of objects of their own."""
        self.transfer = transfer

    @abc.abstractmethod
    def has(self, key: str) -> bool:
        """Whether `get` will give something. Called by a thread of its own, of an object that nobody else calls.

        What it raises is taken for a miss, and so is what it does not say within kv_lookup_timeout.
        """

    @abc.abstractmethod
    def get(self, key: str) -> bytes | None:
        """What was put under a key; None: nothing any more. Called by a thread of its own.

        What it raises fails the load, by kv_load_failure_policy.
        """

    @abc.abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Keep bytes under a key. Called by a thread of its own. What it raises ends the save."""

    def secret(self) -> bytes:
        """See Kind: what names are keyed with where prefix_cache_secret_file gives nothing; the same for all users."""
        return b""

    def scheduler_half(self, engine: EngineSide) -> Connector:
        """See Kind."""
        troubles = Troubles(self.transfer.kv_connector)
        index = LookedUpHere(functools.partial(_has, self, troubles), self.transfer.lookup, troubles)
        return StoredConnector(engine, index)

    def worker_half(self, cache: CacheBytes, identity: str) -> WorkerConnector:
        """See Kind."""
        from octavo.kv_connector.worker.file_store import FileHandler
        from octavo.kv_connector.worker.mover import Mover

        transfer, count = self.transfer, self.num_threads
        if not isinstance(count, int) or count < 1:
            raise refuse("kv_connector", transfer.kv_connector, f"has num_threads {count!r}, and must have one or more")
        troubles = Troubles(transfer.kv_connector)
        handler = FileHandler(cache, _CheckedStore(self, troubles))
        return Mover(handler, cache.block_bytes, count, timeout=transfer.timeout, troubles=troubles)


def _has(store: StoreKind, troubles: Troubles, key: bytes) -> bool:
    try:
        return bool(store.has(key.hex()))
    except RAISED as error:
        troubles.tell(f"has {type(error).__name__}", f"{troubles.name}.has is taken for a miss: {describe(error)}")
        return False


class _CheckedStore:
    """Blocks as FileHandler moves them, with a checksum before each."""

    num_evicted = 0
    stored_bytes = 0

    def __init__(self, store: StoreKind, troubles: Troubles) -> None:
        self._store, self._troubles = store, troubles

    def write(self, key: bytes, block: np.ndarray) -> None:
        self._store.put(key.hex(), _checksum(key, block.data) + block.tobytes())

    def read(self, key: bytes, block: np.ndarray) -> bool:
        data = self._store.get(key.hex())
        if data is None:
            return False
        content = memoryview(data)[16:]
        if len(content) != block.nbytes or _checksum(key, content) != data[:16]:
            text = f"it gave something else for {key.hex()} than was put: its tokens are computed"
            self._troubles.tell("something else", text)
            return False
        block.data.cast("B")[:] = content
        return True


def _checksum(key: bytes, content: memoryview) -> bytes:
    import xxhash

    digest = xxhash.xxh3_128(key)
    digest.update(content)
    return digest.digest()
