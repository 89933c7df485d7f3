"""The worker's half of connectors over a store elsewhere, which may take long to say anything.

Owns the questions what is there, and the checksum around what it keeps. Invariants: what a store gives for a
key is used only if it is, bit for bit, what was kept under that key; nothing that the store does late touches a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import xxhash

from octavo.config.kv_transfer import DEFAULT_TIMEOUT
from octavo.kv_connector.guard import Troubles, ends_within
from octavo.kv_connector.lookups import Questions
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.file_store import Blocks, FileHandler
from octavo.kv_connector.worker.mover import Mover

CHECKSUM_BYTES = 16


class RemoteStore(Blocks, Protocol):
    """Blocks elsewhere. Any thread may call."""

    def find(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Which keys there are. Raises what the store's library does."""

    def close(self) -> None:
        """Nothing is asked any more."""


class RemoteMover(Mover):
    """See WorkerConnector. Besides it answers which blocks the store has."""

    def __init__(
        self,
        cache: CacheBytes,
        store: RemoteStore,
        num_threads: int,
        limit: float,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        troubles: Troubles | None = None,
    ) -> None:
        """limit: seconds for which an answer is wanted. The others: see Mover."""
        handler = FileHandler(cache, store)
        super().__init__(handler, cache.block_bytes, num_threads, timeout=timeout, troubles=troubles)
        self._store = store
        self._questions = Questions(lambda keys, stops: store.find(keys), limit, self.troubles, self._changed.set)

    def look(self, name: str, keys: Sequence[bytes], stops: Sequence[bool] = ()) -> None:
        """Ask for keys, all at once; `looked` answers under the name."""
        self._questions.look(name, keys, stops)

    def looked(self) -> Sequence[tuple[str, Sequence[bool]]]:
        """(name, whether each key is there) since the last call."""
        with self._lock:
            if not self._ended:
                self._changed.clear()
        return self._questions.looked()

    def close(self) -> None:
        """See WorkerConnector."""
        super().close()
        self._questions.close()
        ends_within(self._timeout, self.troubles, "the store's end", self._store.close)


def seal(key: bytes, block: np.ndarray, row: np.ndarray) -> None:
    """Write a block and its checksum to a row, uint8 [CHECKSUM_BYTES + block_bytes] or longer."""
    row[:CHECKSUM_BYTES] = np.frombuffer(_checksum(key, block), np.uint8)
    row[CHECKSUM_BYTES : CHECKSUM_BYTES + block.nbytes] = block


def unseal(key: bytes, row: np.ndarray, block: np.ndarray, troubles: Troubles) -> bool:
    """Fill a block with what a row holds, and say whether it is what was sealed under the key."""
    block[:] = row[CHECKSUM_BYTES : CHECKSUM_BYTES + block.nbytes]  # first: a row may be written late
    if _checksum(key, block) == row[:CHECKSUM_BYTES].tobytes():
        return True
    text = f"the store gave something else for {key.hex()} than was put: its tokens are computed"
    troubles.tell("something else", text)
    return False


def _checksum(key: bytes, block: np.ndarray) -> bytes:
    digest = xxhash.xxh3_128(key)
    digest.update(block.data)
    return digest.digest()
