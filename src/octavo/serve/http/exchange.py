"""One HTTP exchange: a request's body in, a reply or a stream of events out.

Owns the limits and clocks of reading a body, the form of every reply, and the watch for a client that leaves. Knows no
route. Invariants: exactly one reply is sent; once a stream has begun, an error is its last event; after the client has
left nothing is sent, and whoever works for it is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import secrets
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from typing import Any

import msgspec

from octavo.serve.errors import ApiError, Headers, bad_request
from octavo.serve.http.auth import HostNames
from octavo.serve.settings import ServeConfig

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Parse = Callable[[bytes, int], Awaitable[dict[str, Any]]]  # a body and the most values that it may hold: see Texts

JSON = b"application/json"
_PIECE_BYTES = 65_536  # of a reply that is made while it is sent
CLIENT_LEFT = 499  # for logs and metrics; never sent
_WATCHED_BYTES = 1 << 16  # a body that is longer may wait to be read, and its client may leave meanwhile
_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.-]{1,128}")
_MAX_QUERY = 64
_COMMENT = b": keep-alive\n\n"
IDLE_EVENT = "octavo.idle_event"  # of a scope whose reply streams: bytes that say nothing and may be sent at any time


class ClientLeftError(Exception):
    """There is nobody to answer."""


class Exchange:
    """One request and its reply."""

    __slots__ = (
        "_config", "_ended", "_left", "_parse", "_read", "_receive", "_scope", "_send", "_streaming", "client",
        "http_version", "last_sent", "method", "notes", "own_id", "path", "path_value", "raw_headers", "request_id",
        "route", "started", "status",
    )  # fmt: skip

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, config: ServeConfig, parse: Parse | None = None
    ) -> None:
        """`scope`, `receive` and `send` are ASGI's. `parse`: how bodies are read, if any are: see `json`."""
        self._scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.raw_headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.client: str = (scope.get("client") or ("",))[0]
        self.http_version: str = scope.get("http_version", "1.1")
        self.path_value = ""  # what stands for {...} in the route's path
        self.route: str | None = None  # the path of the route that answers
        self.own_id = secrets.token_hex(16)
        self.request_id = self._client_id() or self.own_id  # shown, never used as a key
        self.status = 0  # 0: nothing was sent
        self.started = time.monotonic()
        self.notes: dict[str, Any] = {}  # figures for the log
        self.last_sent = self.started  # of a stream
        self._streaming = self._ended = self._left = False
        self._read: bytes | None = None  # the body, once it was read ahead
        self._config, self._receive, self._send = config, receive, send
        self._parse = parse

    def header(self, name: bytes) -> bytes:
        """A header's value; b"" if it is not there, values with commas if it is there twice."""
        return b",".join(value for key, value in self.raw_headers if key == name)

    def query(self) -> dict[str, list[str]]:
        """What stands behind the path's question mark. Raises ApiError for more than a few fields."""
        try:
            return urllib.parse.parse_qs(
                self._scope.get("query_string", b"").decode("ascii"), max_num_fields=_MAX_QUERY
            )
        except ValueError:
            text = f"the query may hold at most {_MAX_QUERY} fields, in ASCII"
            raise bad_request("invalid_query", text) from None

    @property
    def has_body(self) -> bool:
        """Whether a body was announced."""
        return self.header(b"content-length") not in (b"", b"0") or bool(self.header(b"transfer-encoding"))

    @property
    def has_left(self) -> bool:
        """Whether the client has left."""
        return self._left

    async def read_ahead(self) -> None:
        """Read the body, if there is one: then `watching` may begin before `json`. Raises ApiError."""
        if self.has_body:
            self._read = await self._body()

    async def json(self) -> dict[str, Any]:
        """The body, which must be a JSON object. Raises ApiError."""
        media, _, parameters = self.header(b"content-type").lower().partition(b";")
        charset = parameters.strip().removeprefix(b"charset=").strip(b'"')
        if media.strip() != JSON or charset not in (b"", b"utf-8", b"utf8"):
            raise ApiError(415, "unsupported_media_type", "use Content-Type: application/json in UTF-8")
        if self.header(b"content-encoding").lower() not in (b"", b"identity"):
            raise ApiError(415, "unsupported_encoding", "Content-Encoding is not supported")
        assert self._parse is not None, "an exchange that has a body knows how to read it"
        body = await self._body()
        if len(body) <= _WATCHED_BYTES or self._read is not None:
            return await self._parse(body, self._config.max_items)
        async with self.watching():
            return await self._parse(body, self._config.max_items)

    async def reply(self, status: int, body: bytes, content_type: bytes = JSON, headers: Headers = ()) -> None:
        """Send a whole reply."""
        if self._left:
            return
        sent = [
            (b"content-type", content_type),
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self.request_id.encode()),
            (b"x-content-type-options", b"nosniff"),
            *headers,
        ]
        self.status = status
        self._ended = True  # who is answered may go
        await self._send({"type": "http.response.start", "status": status, "headers": sent})
        await self._send({"type": "http.response.body", "body": body})

    async def reply_json(self, value: Any) -> None:
        """200 with a value as JSON."""
        await self.reply(200, msgspec.json.encode(value))

    async def reply_pieces(self, pieces: Iterable[bytes]) -> None:
        """200 with JSON that is made while it is sent, a piece at a time: others have their turn in between.

        Raises ClientLeftError once there is nobody to read the rest.
        """
        parts = _in_parts(pieces)
        first = next(parts, b"")
        second = next(parts, None)
        if second is None:
            await self.reply(200, first)
            return
        self.status = 200
        sent = [
            (b"content-type", JSON),
            (b"x-request-id", self.request_id.encode()),
            (b"x-content-type-options", b"nosniff"),
        ]
        async with self.watching():
            await self._send({"type": "http.response.start", "status": 200, "headers": sent})
            for part in itertools.chain((first, second), parts):
                await self._send({"type": "http.response.body", "body": part, "more_body": True})
                await asyncio.sleep(0)
            self._ended = True
        await self._send({"type": "http.response.body", "body": b""})

    async def begin_events(self) -> None:
        """Begin a text/event-stream."""
        sent = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            (b"x-request-id", self.request_id.encode()),
        ]
        self.status, self._streaming = 200, True
        self._scope[IDLE_EVENT] = _COMMENT
        await self._send({"type": "http.response.start", "status": 200, "headers": sent})

    async def send(self, frames: bytes) -> None:
        """Send whole events."""
        self.last_sent = time.monotonic()
        await self._send({"type": "http.response.body", "body": frames, "more_body": True})

    async def send_comment(self) -> None:
        """Show life on an idle stream."""
        if self._streaming and not self._ended and not self._left:
            with contextlib.suppress(RuntimeError):  # the stream may end while this waits for room
                await self.send(_COMMENT)

    async def end_events(self, last: bytes = b"") -> None:
        """End the stream."""
        self._ended = True
        await self._send({"type": "http.response.body", "body": last})

    async def fail(self, error: ApiError) -> None:
        """Reply with an error, or end the stream with it."""
        if self._left or self._ended:
            return
        self.notes["error"] = error.code
        if self._streaming:
            self.notes["stream_status"] = error.status
            await self.end_events(error.event())
        elif self.status == 0:
            headers = [*error.headers, *([(b"connection", b"close")] if error.close else [])]
            await self.reply(error.status, error.body(), headers=headers)

    def watching(self) -> Watching:
        """Within: when the client leaves, the running task is cancelled, which comes out as ClientLeftError."""
        return Watching(self)

    async def cancel_when_left(self, task: asyncio.Task[Any]) -> None:
        """Cancel `task` when the client leaves, if it does before the end."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._ended:
            self._left = True
            task.cancel()

    async def _body(self) -> bytes:
        if self._read is not None:
            return self._read
        limit = self._config.max_body_bytes
        too_long = ApiError(413, "body_too_large", f"the body exceeds {limit} bytes (max_body_bytes)")
        length = self.header(b"content-length")
        if length and (not length.isdigit() or int(length[:20]) > limit):
            raise too_long
        pieces: list[bytes] = []
        num_bytes = 0
        while True:
            try:
                async with asyncio.timeout(self._config.body_timeout):
                    message = await self._receive()
            except TimeoutError:
                text = f"the body did not go on for {self._config.body_timeout:g} s (body_timeout)"
                raise ApiError(408, "body_timeout", text, close=True) from None
            if message["type"] == "http.disconnect":
                self._left = True
                raise ClientLeftError
            piece = message.get("body", b"")
            num_bytes += len(piece)
            if num_bytes > limit:
                raise too_long
            pieces.append(piece)
            if not message.get("more_body", False):
                return b"".join(pieces)

    def _client_id(self) -> str:
        given = [value for name, value in self.raw_headers if name == b"x-request-id"]
        return given[0].decode() if len(given) == 1 and _REQUEST_ID.fullmatch(given[0]) else ""


class Watching:
    """See Exchange.watching. As a generator it would take ten times the memory, for as long as a stream lasts."""

    __slots__ = ("_exchange", "_watch")

    def __init__(self, exchange: Exchange) -> None:
        """Of whose client."""
        self._exchange = exchange
        self._watch: asyncio.Task[None]

    async def __aenter__(self) -> None:
        """Begin."""
        task = asyncio.current_task()
        assert task is not None, "an exchange is answered by a task"
        self._watch = asyncio.create_task(self._exchange.cancel_when_left(task))

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End, with ClientLeftError if the client did it."""
        self._watch.cancel()
        if kind is not None and issubclass(kind, asyncio.CancelledError) and self._exchange.has_left:
            task = asyncio.current_task()
            assert task is not None, "an exchange is answered by a task"
            task.uncancel()
            raise ClientLeftError from None


def _in_parts(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Neighbouring pieces together, as long as they are short."""
    parts: list[bytes] = []
    num_bytes = 0
    for piece in pieces:
        parts.append(piece)
        num_bytes += len(piece)
        if num_bytes >= _PIECE_BYTES:
            yield b"".join(parts)
            parts, num_bytes = [], 0
    if parts:
        yield b"".join(parts)


def check_host(exchange: Exchange, names: HostNames) -> None:
    """Refuse a request without exactly one plain Host (HTTP/1.0 may have none) that is ours. Raises ApiError."""
    hosts = [value for name, value in exchange.raw_headers if name == b"host"]
    if not hosts and exchange.http_version == "1.0":
        return
    if len(hosts) != 1 or not re.fullmatch(rb"[A-Za-z0-9_.:\[\]%-]{1,255}", hosts[0]):
        raise bad_request("invalid_host", "exactly one valid Host header is needed")
    names.check(hosts[0])
