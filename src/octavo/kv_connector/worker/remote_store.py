"""The worker's half of connectors over a store elsewhere, which may take long to say anything.

Owns the thread that asks it what is there, and the checksum around what it keeps. Invariants: what a store gives for a
key is used only if it is, bit for bit, what was kept under that key; nothing that the store does late touches a block.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import xxhash

from octavo.config.kv_transfer import DEFAULT_TIMEOUT
from octavo.kv_connector.guard import Troubles, describe
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
        self._store, self._limit = store, limit
        self._questions = queue.SimpleQueue[tuple[str, Sequence[bytes], float] | None]()
        self._answers: list[tuple[str, Sequence[bool]]] = []
        self._asking = threading.Thread(target=self._ask, name="octavo-kv-look", daemon=True)
        self._asking.start()

    def look(self, name: str, keys: Sequence[bytes]) -> None:
        """Ask for keys; `looked` answers under the name."""
        self._questions.put((name, keys, time.monotonic() + self._limit))

    def looked(self) -> Sequence[tuple[str, Sequence[bool]]]:
        """(name, whether each key is there) since the last call."""
        with self._lock:
            answers, self._answers = self._answers, []
            if not self._ended:
                self._changed.clear()
        return answers

    def _ask(self) -> None:
        while (question := self._questions.get()) is not None:
            name, keys, until = question
            found: Sequence[bool] = [False] * len(keys)
            try:
                if time.monotonic() < until:
                    found = self._store.find(keys)
            except BaseException as error:  # of a library or a network: nothing is there
                self.troubles.tell(
                    f"ask {type(error).__name__} {error}", f"the store cannot be asked: {describe(error)}"
                )
            with self._lock:
                self._answers.append((name, found))
                self._changed.set()

    def close(self) -> None:
        """See WorkerConnector."""
        self._questions.put(None)
        super().close()
        self._asking.join(self._limit)
        closing = threading.Thread(target=self._store.close, daemon=True)  # it may wait for a call that hangs
        closing.start()
        closing.join(self._timeout)


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
