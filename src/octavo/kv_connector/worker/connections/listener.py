"""Listener: who asks this engine for blocks is heard, each on a connection and a thread of its own.

Owns the listening socket, the connections that it took and their threads. Invariants: whatever a connection costs, and
whoever makes it, the next one is taken; there are no more of them than `_MOST`; one that says nothing is closed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable

from octavo.config.kv_peers import NO_PEERS, Peers
from octavo.config.quoted import describe, said
from octavo.kv_connector.guard import Troubles
from octavo.kv_connector.worker.pair import Hello, Pair

_LOG = logging.getLogger(__name__)
_MOST = 512  # connections at once
_FIRST_WORD = 5.0  # seconds in which a connection has said what it is for
_PAUSE = 0.05  # seconds before a connection that could not be taken is tried once more
_BACKLOG = 64


def _serve_nobody(pair: Pair, hello: Hello) -> None:
    """Who has come behind the end is cut off."""


class Listener:
    """At one address."""

    def __init__(
        self,
        host: str,
        port: int,
        timeout: float,
        serve: Callable[[Pair, Hello], None],
        troubles: Troubles,
        peers: Peers = NO_PEERS,
    ) -> None:
        """serve: a connection that has said its first word, until it ends. Raises OSError for the address."""
        self._timeout, self._serve, self._troubles, self._peers = timeout, serve, troubles, peers
        self._lock = threading.Lock()
        self._silent: dict[Pair, None] = {}  # have said nothing, the oldest first
        self._open: set[Pair] = set()
        self._threads: set[threading.Thread] = set()
        self._closing = threading.Event()
        self._sock = socket.create_server((host, port), backlog=_BACKLOG)
        self._accepting = threading.Thread(target=self._accept, name="octavo-kv-listen", daemon=True)
        self._accepting.start()

    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self._sock.getsockname()[:2]
        return str(host), int(port)

    @property
    def is_closing(self) -> bool:
        """Whether nobody is to be served any more."""
        return self._closing.is_set()

    def close(self) -> None:
        """Take no more, and cut all that there are."""
        self._closing.set()
        self._serve = _serve_nobody  # who serves may go, and the cache with it
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        with self._lock:
            for pair in self._open:
                pair.cut()

    def join(self, seconds: float) -> None:
        """Wait for their threads: a process group that outlives the interpreter would end it by abort()."""
        until = time.monotonic() + seconds
        with self._lock:
            threads = [self._accepting, *self._threads]
        for thread in threads:
            thread.join(max(until - time.monotonic(), 0))

    def _accept(self) -> None:
        while not self.is_closing:
            try:
                sock, _ = self._sock.accept()
            except OSError as error:  # no more files, mostly: who comes waits until something is closed
                self._tell(error)
                self._closing.wait(_PAUSE)
                continue
            self._take(sock)

    def _take(self, sock: socket.socket) -> None:
        try:
            with self._lock:
                is_full = len(self._open) >= _MOST
            if is_full and not self._end_oldest():
                raise OSError(f"{_MOST} are open, and all of them are served")
            pair = Pair(sock, self._timeout)
            if not self._peers.may_come(pair.peer_host):
                raise OSError(f"{pair.peer_host} is not among {', '.join(self._peers.given)} (kv_peers)")
        except OSError as error:
            self._tell(error)  # ahead of the end, which who came may see
            sock.close()
            return
        thread = threading.Thread(target=self._run, args=(pair,), name="octavo-kv-serve", daemon=True)
        with self._lock:
            self._open.add(pair)
            self._silent[pair] = None
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no more
            self._forget(pair, thread)
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        if not self.is_closing:
            text = f"a connection was not taken, and the next one may be: {describe(error)}"
            self._troubles.tell(f"accept {type(error).__name__}", text)

    def _end_oldest(self) -> bool:
        """Whether there was one that has said nothing, which ends."""
        with self._lock:
            pair = next(iter(self._silent), None)
            if pair is not None:
                del self._silent[pair]
                self._open.discard(pair)
                pair.cut()
            return pair is not None

    def _forget(self, pair: Pair, thread: threading.Thread) -> None:
        with self._lock:
            self._silent.pop(pair, None)
            self._open.discard(pair)
            self._threads.discard(thread)
        pair.close()

    def _run(self, pair: Pair) -> None:
        try:
            pair.until = time.monotonic() + _FIRST_WORD
            hello = pair.receive(Hello)
            pair.until = math.inf
            with self._lock:
                self._silent.pop(pair, None)
            self._serve(pair, hello)
        except EOFError:
            pass
        except Exception as error:  # the peer's, or of the way to it: it asks again, or computes
            if pair in self._silent:
                self._tell(error)
            elif not self.is_closing:
                _LOG.warning("blocks for %s did not arrive: %s", pair.peer, said(error))
        finally:
            self._forget(pair, threading.current_thread())
