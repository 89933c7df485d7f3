"""ServerCalls: an LLM's methods of an update, by the routes of a server; a trainer's end of its messages.

Owns connections, their deadlines and the words of what a server refuses. Knows neither tensors nor groups. Invariant:
nothing is sent twice; a server that does not answer is an error, in time.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import select
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from octavo.rl.session import WeightConflictError, WeightTransferError, WeightUpdateError
from octavo.rl.transport import deadline


class _Plain(http.client.HTTPConnection):
    """A connection that sends a request's head and body together: whoever reads it wakes once."""

    _said = b""

    def wait_at_most(self, seconds: float) -> None:
        """For each read from now on."""
        self.timeout = seconds
        if self.sock is not None:
            self.sock.settimeout(seconds)

    def send(self, data: Any) -> None:
        """Keep it until `flush`."""
        self._said += data

    def flush(self) -> None:
        """Send what was kept."""
        said, self._said = self._said, b""
        super().send(said)


class _Secure(_Plain, http.client.HTTPSConnection):
    """The same over TLS."""


class ServerCalls:
    """The calls of an LLM, by a server's routes."""

    def __init__(self, url: str, admin_key: str | None, timeout: float) -> None:
        """`timeout`: as a Sender's. Raises WeightUpdateError for what is no address."""
        parts = urllib.parse.urlsplit(url.rstrip("/"))
        kinds = {"http": _Plain, "https": _Secure}
        if parts.scheme not in kinds or not parts.netloc:
            raise WeightUpdateError(f"the address of a server begins with http:// or https://, got {url[:200]!r}")
        self._url, self._path, self._key = url.rstrip("/"), parts.path, admin_key
        self._connect, self._timeout = functools.partial(kinds[parts.scheme], parts.netloc), timeout
        self._idle: list[_Plain] = []  # which the last calls have left

    def init_weight_transfer_engine(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """See LLM; so are the others."""
        found: dict[str, Any] = json.loads(self._post("init_weight_transfer_engine", request))
        return found

    def begin_update(self, request: Mapping[str, Any], num_bytes: int = 0) -> Callable[[], object]:
        """Tell of tensors; what waits until they are there, for as long as so many bytes may take twice."""
        return self._begin("update_weights", request, num_bytes)

    def finish_weight_update(self, weight_version: str | None, *, session: str | None = None) -> None:
        """Apply the update."""
        self._post("finish_weight_update", {"weight_version": weight_version, "session": session})

    def abort_weight_update(self, *, session: str | None = None) -> None:
        """End it without."""
        self._post("abort_weight_update", {"session": session})

    def _post(self, name: str, body: Mapping[str, Any]) -> bytes:
        return self._begin(name, body)()

    def _begin(self, name: str, body: Mapping[str, Any], num_bytes: int = 0) -> Callable[[], bytes]:
        """Send a request; what waits for the answer's body. Both raise WeightUpdateError."""
        headers = {"Content-Type": "application/json"}
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        told = {key: value for key, value in body.items() if value is not None}
        connection, seconds = self._connection(), 2 * deadline({"timeout": self._timeout}, num_bytes)
        connection.wait_at_most(seconds)
        with self._telling(connection):
            connection.request("POST", f"{self._path}/{name}", json.dumps(told).encode(), headers)
            connection.flush()

        def wait() -> bytes:
            with self._telling(connection):
                reply = connection.getresponse()
                said = reply.read()
            if not reply.will_close:
                self._idle.append(connection)
            if reply.status >= 300:
                text = f"{self._url}/{name} answered {reply.status}: {said[:2000].decode(errors='replace')}"
                raise (WeightConflictError if reply.status == 409 else WeightUpdateError)(text)
            return said

        return wait

    @contextlib.contextmanager
    def _telling(self, connection: _Plain) -> Iterator[None]:
        """What goes wrong on a connection ends it, and is told."""
        try:
            yield
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError | http.client.HTTPException):
                raise WeightTransferError(f"{self._url} does not answer: {error!r}") from None
            raise

    def _connection(self) -> _Plain:
        """The one that the last call has left, if the server keeps it."""
        while self._idle:
            if connection := _if_open(self._idle.pop()):
                return connection
        return self._connect()


def _if_open(connection: _Plain) -> _Plain | None:
    """The connection, unless its server has closed it: nothing is sent twice."""
    if connection.sock is not None:
        poll = select.poll()  # select() refuses files with high numbers
        poll.register(connection.sock, select.POLLIN)
        if not poll.poll(0):
            return connection
    connection.close()
    return None
