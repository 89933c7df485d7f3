"""Blocks in Mooncake's store: memory that many engines and machines give, found through a master.

Owns the client, the memory that it registers, and its codes. A put under a key that is there changes nothing, so keys
name all that a block's bytes follow from.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import socket
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo.kv_connector.guard import Troubles
from octavo.kv_connector.worker.cache_bytes import CacheBytes
from octavo.kv_connector.worker.remote_store import CHECKSUM_BYTES, seal, unseal

_LOG = logging.getLogger(__name__)
_NOT_THERE = -704
_NO_SPACE = -200
_NO_MASTER = -900  # and below


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoreOptions:
    """How a client reaches the store, and what it gives."""

    master: str  # host:port
    metadata_server: str
    protocol: str
    device_name: str
    own_host: str
    segment_bytes: int  # of memory that this engine gives; 0: none
    buffer_bytes: int  # of the client's own
    timeout: float  # seconds


class MooncakeStore:
    """See RemoteStore."""

    stored_bytes = 0  # the master knows

    def __init__(self, cache: CacheBytes, options: StoreOptions, num_rows: int, troubles: Troubles) -> None:
        """num_rows: blocks that move at a time. Raises RuntimeError where the store cannot be reached."""
        self._troubles = troubles
        self.num_evicted = 0  # blocks for which there was no space
        self._row_bytes = CHECKSUM_BYTES + cache.block_bytes
        self._memory = cache.host_memory(num_rows, self._row_bytes)
        self._client = _connected(options)
        if code := self._client.register_buffer(self._memory.data_ptr(), self._memory.numel()):
            raise RuntimeError(f"Mooncake's store does not take {self._memory.numel()} bytes of memory: {code}")
        self._rows = queue.SimpleQueue[np.ndarray]()
        for row in self._memory.numpy():
            self._rows.put(row)

    def find(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """See RemoteStore."""
        codes = self._client.batch_is_exist([_name(key) for key in keys])
        failed = [code for code in codes if code < 0]
        if failed:
            raise RuntimeError(f"Mooncake's store answered {failed[0]}")
        return [code == 1 for code in codes]

    def write(self, key: bytes, block: np.ndarray) -> None:
        """See Blocks."""
        row = self._rows.get()
        try:
            seal(key, block, row)
            code = self._client.put_from(_name(key), row.ctypes.data, self._row_bytes)
        finally:
            self._rows.put(row)
        if code == _NO_SPACE:
            if not self.num_evicted:
                _LOG.warning("Mooncake's store is full: some blocks are not kept; raise global_segment_size")
            self.num_evicted += 1
        elif code:
            raise RuntimeError(f"Mooncake's store did not keep a block: it answered {code}")

    def read(self, key: bytes, block: np.ndarray) -> bool:
        """See Blocks."""
        row = self._rows.get()
        try:
            code = self._client.get_into(_name(key), row.ctypes.data, self._row_bytes)
            if code == self._row_bytes and unseal(key, row, block, self._troubles):
                return True
        finally:
            self._rows.put(row)
        if code <= _NO_MASTER:
            raise RuntimeError(f"Mooncake's store did not give a block: it answered {code}")
        if code != _NOT_THERE:  # another block, or whose memory it was in is gone; the next one is kept
            self._client.remove(_name(key))
        return False

    def close(self) -> None:
        """See RemoteStore."""
        self._client.close()


def _name(key: bytes) -> str:
    return f"octavo-{key.hex()}"


def _connected(options: StoreOptions) -> Any:
    """A client. The library tries for minutes where nobody listens, so who listens is asked before."""
    from mooncake.store import MooncakeDistributedStore

    host, _, port = options.master.rpartition(":")
    try:
        socket.create_connection((host, int(port)), options.timeout).close()
    except OSError as error:
        raise RuntimeError(f"nobody listens there: {error.strerror or error}") from None
    client, codes = MooncakeDistributedStore(), list[int]()

    def connect() -> None:
        codes.append(
            client.setup(
                options.own_host,
                options.metadata_server,
                options.segment_bytes,
                options.buffer_bytes,
                options.protocol,
                options.device_name,
                options.master,
            )
        )

    thread = threading.Thread(target=connect, name="octavo-kv-connect", daemon=True)
    thread.start()
    thread.join(options.timeout)
    if not codes:
        raise RuntimeError(f"it does not answer within {options.timeout:g} s")
    if codes[0]:
        raise RuntimeError(f"Mooncake's store does not start: {codes[0]}")
    return client
