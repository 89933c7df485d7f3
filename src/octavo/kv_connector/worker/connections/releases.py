"""Releases: the word to a peer that blocks which it has on offer will not be fetched.

Owns what is still to be said, and a thread for as long as something is. Invariants: nobody waits for a peer that does
not listen; what cannot be said is not said again, since an offer ends by itself some time.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Sequence

from octavo.kv_connector.worker.pair import Hello, Pair

_LOG = logging.getLogger(__name__)
_MAX_SECONDS = 5.0  # for one peer: offers to others wait meanwhile
_MAX_IDS = 1 << 12  # that are said at once
Address = tuple[str, int]


class Releases:
    """What is to be said, to whom."""

    def __init__(self, hello: Callable[[str, list[str]], Hello], timeout: float) -> None:
        """`hello`: the word, from the engine that is meant and the ids. timeout: seconds that a peer may take."""
        self._hello, self._timeout = hello, min(timeout, _MAX_SECONDS)
        self._lock = threading.Lock()
        self._due: dict[tuple[Address, str], list[str]] = {}
        self._thread: threading.Thread | None = None

    def give(self, addresses: Sequence[Address], engine_id: str, transfer_id: str) -> None:
        """Say it to all ranks of an engine, soon. Does not wait."""
        with self._lock:
            for host, port in addresses:
                self._due.setdefault(((host, port), engine_id), []).append(transfer_id)
            if self._thread is None and self._due:
                self._thread = threading.Thread(target=self._work, name="octavo-kv-release", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._due:
                    self._thread = None
                    return
                (address, engine_id), ids = self._due.popitem()
            try:
                for start in range(0, len(ids), _MAX_IDS):
                    self._say(address, self._hello(engine_id, ids[start : start + _MAX_IDS]))
            except OSError as error:
                _LOG.info("%s:%d was not told that %d offers are not fetched: %s", *address, len(ids), error)

    def _say(self, address: Address, hello: Hello) -> None:
        with contextlib.closing(Pair(socket.create_connection(address, self._timeout), self._timeout)) as pair:
            pair.send(hello)
            pair.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Nothing is given any more."""
        thread = self._thread
        if thread is not None:
            thread.join(self._timeout)
