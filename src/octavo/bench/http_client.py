"""A small HTTP/1.1 client on asyncio, for measuring: it costs a fraction of what the server spends on a token.

Owns connections, their reuse, and the reading of a response with a length, in chunks, or until the end. It follows no
redirect and knows no proxy. Invariants: every response or failure ends its request exactly once; a connection whose
response was not read to its end is never used again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ssl
import time
import urllib.parse
from collections.abc import Callable, Mapping

_MAX_HEAD = 1 << 16
OnBody = Callable[[bytes, float], bool]  # (bytes, when they came) -> whether to go on
_NO_CALLBACK: OnBody | None = None


class HttpError(ConnectionError):
    """The connection failed, or the server does not speak HTTP/1.1."""


@dataclasses.dataclass(slots=True)
class Response:
    """What came back. `body` is empty where a callback took it."""

    status: int = 0
    headers: dict[str, str] = dataclasses.field(default_factory=dict)  # names in lower case
    body: bytes = b""


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.usable = False
        self.answered = False  # whether a byte of the response came
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Response] | None = None
        self._state = "idle"  # head | size | chunk | trailer | length | to the end
        self._response, self._on_body = Response(), _NO_CALLBACK
        self._buffer, self._parts, self._left = b"", list[bytes](), 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.usable = transport, True  # type: ignore[assignment]

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        if self._state == "to the end" and error is None:
            self._finish()
        self._fail(HttpError(f"the server closed the connection ({error or 'end of stream'})"))

    def send(self, request: bytes, on_body: OnBody | None) -> asyncio.Future[Response]:
        assert self._transport is not None and self._state == "idle", "the pool hands out idle connections"
        self._done = asyncio.get_running_loop().create_future()
        self._response, self._on_body, self._parts = Response(), on_body, []
        self._buffer, self._state, self._left, self.answered = b"", "head", 0, False
        self._transport.write(request)
        return self._done

    def abort(self) -> None:
        """Drop the connection at once: the server sees a reset."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        now, self.answered = time.perf_counter(), True
        self._buffer = self._buffer + data if self._buffer else data
        try:
            while self._state != "idle" and self._step(now):
                pass
        except (ValueError, IndexError) as error:
            self.abort()
            self._fail(HttpError(f"not an HTTP/1.1 response: {error}"))

    def _step(self, now: float) -> bool:
        """Read one piece of the buffer. False: it needs more bytes, or the response is over."""
        match self._state:
            case "head":
                return self._read_head()
            case "size":
                line, found, rest = self._buffer.partition(b"\r\n")
                if not found:
                    return False
                self._left, self._buffer = int(line.partition(b";")[0], 16), rest
                self._state = "chunk" if self._left else "trailer"
                return True
            case "trailer":
                line, found, rest = self._buffer.partition(b"\r\n")
                if found:
                    self._buffer = rest
                    if not line:
                        self._finish()
                return bool(found)
        return self._read_body(now)

    def _read_body(self, now: float) -> bool:
        state = self._state
        piece = self._buffer if state == "to the end" else self._buffer[: self._left]
        if state == "chunk" and len(self._buffer) < self._left + 2:
            return False  # whole chunks: a chunk of a stream is one event, mostly
        self._buffer = self._buffer[len(piece) + (2 if state == "chunk" else 0) :]
        self._left -= len(piece)
        if piece and not self._take(piece, now):
            return False
        if state == "chunk":
            self._state = "size"
            return bool(self._buffer)
        if state == "length" and self._left <= 0:
            self._finish()
        return False

    def _take(self, piece: bytes, now: float) -> bool:
        if self._on_body is None or self._response.status >= 300:
            self._parts.append(piece)
            return True
        try:
            if self._on_body(piece, now):
                return True
        except Exception as error:  # the request's own affair: whoever awaits it is told
            self.abort()
            self._fail(error)
            return False
        self.abort()
        self._finish()
        return False

    def _read_head(self) -> bool:
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            if len(self._buffer) > _MAX_HEAD:
                raise ValueError("the headers have no end")
            return False
        first, *lines = head.decode("latin-1").split("\r\n")
        response, self._buffer = self._response, rest
        response.status = int(first.split(" ", 2)[1])
        if response.status < 200:
            return True  # 100 Continue: the real head follows
        for line in lines:
            name, _, value = line.partition(":")
            response.headers[name.strip().lower()] = value.strip()
        if response.headers.get("transfer-encoding", "").lower() == "chunked":
            self._state = "size"
        elif "content-length" in response.headers:
            self._state, self._left = "length", int(response.headers["content-length"])
        else:
            self._state = "length" if response.status in (204, 304) else "to the end"
        if self._state == "length" and not self._left:
            self._finish()
        return bool(self._buffer) or self._state == "idle"

    def _finish(self) -> None:
        self._state, done = "idle", self._done
        if self._response.headers.get("connection", "").lower() == "close":
            self.usable = False
        if done is not None and not done.done():
            self._response.body = b"".join(self._parts)
            done.set_result(self._response)

    def _fail(self, error: Exception) -> None:
        if self._state != "idle" and self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self._state = "idle"

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.close()


class Client:
    """Requests to one server over as many connections as there are requests at once."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        """Raises ValueError if `base_url` is not http(s)://host[:port][/prefix]."""
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base URL {base_url!r}: expected http://host:port")
        self._host, self._prefix = parts.hostname, parts.path.rstrip("/")
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        lines = {"Host": parts.netloc.rpartition("@")[2], "User-Agent": "octavo-bench", **(headers or {})}
        for name, value in lines.items():
            if any(character in name + value for character in "\r\n\0"):
                raise ValueError(f"header {name!r}: line breaks are not allowed")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        on_body: OnBody | None = None,
    ) -> Response:
        """Send one request. Cancelling it drops its connection.

        Args:
            method: GET, POST, ...
            path: begins with a slash; what the base URL has of a path comes before it.
            body: JSON, if any.
            headers: more of them.
            on_body: takes the body of a success as it comes; False from it drops the connection; what it raises ends
                the request.

        Raises:
            HttpError: no connection, or it broke before the response was whole.

        """
        more = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        if body is not None:
            more += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}{more}\r\n".encode("latin-1")
        connection, response = await self._exchange(head + (body or b""), on_body)
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()
        return response

    async def _exchange(self, request: bytes, on_body: OnBody | None) -> tuple[_Connection, Response]:
        """Send on an idle connection, which the server may just be closing: then again on a new one."""
        while True:
            connection = next((each for each in iter(self._pop_idle, None) if each.usable), None)
            reused = connection is not None
            connection = connection or await self._connect()
            try:
                return connection, await connection.send(request, on_body)
            except asyncio.CancelledError:
                connection.abort()
                raise
            except HttpError:
                if not reused or connection.answered:
                    raise

    def _pop_idle(self) -> _Connection | None:
        return self._idle.pop() if self._idle else None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, made = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        except OSError as error:
            raise HttpError(f"cannot connect to {self._host}:{self._port}: {error}") from None
        return made

    async def close(self) -> None:
        """Close idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)


class EventSplitter:
    """TruncationRows a body into the data of its server-sent events, whatever the cuts of the network."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        """Nothing is held back yet."""
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that end in `data`, without comments."""
        if b"\r" in data:
            data = data.replace(b"\r", b"")  # of \r\n; a lone \r is no line end here
        *events, self._rest = (self._rest + data).split(b"\n\n")
        found = []
        for event in events:
            if event.startswith(b"data:") and b"\n" not in event:
                found.append(event[5:].lstrip(b" "))
                continue
            lines = [line[5:].lstrip(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                found.append(b"\n".join(lines))
        return found
