"""HTTP/1.1 on a socket: uvicorn's protocol on httptools, with the limits and clocks that it lacks.

Owns what is refused before there is a request to speak of: bytes that are no HTTP, heads that are too long, too slow or
ambiguous, clients that do not read, too many connections. Knows no route. Invariants: a connection that is not being
answered has a clock running; what is read before a request is known to be one is bounded; a request is taken when the
last one is answered and its reply is on its way.
"""

from __future__ import annotations

import asyncio
import http
import re
from collections import deque
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.serve.errors import ApiError, bad_request, not_ready
from octavo.serve.http.exchange import IDLE_EVENT, Exchange, Receive, Scope, Send
from octavo.serve.http.small import ShortQueue, SmallEvent
from octavo.serve.http.turns import Flow, Held, Turns
from octavo.serve.settings import ServeConfig

MAX_HEAD_BYTES = 32 << 10
MAX_HEADERS = 100
MAX_HEADER_BYTES = 16 << 10
MAX_CHUNK_EXTRA_BYTES = 1024  # of a chunked body: extensions and trailers, beyond sizes and line ends
_CHUNK_LINE_BYTES = 24
_MAX_PIECES = 64  # of what is held, in one turn: blank lines before a request are many
_REQUEST_LINE_BYTES = 16  # beside the target
_DISCARD_SECONDS = 5.0  # for the rest of a body whose reply is sent
_LINGER_SECONDS = 1.0  # without a byte, between our last word and the end: a reset would take the word back
_MAX_LINGER_SECONDS = 30.0
MAX_LINGER_BYTES = 1 << 27
_FIRST_PROBE_SECONDS, _MAX_PROBE_SECONDS = 0.05, 1.0  # whether a client that says no more still listens
_SEND_BUFFER_BYTES = 64 << 10

_METHOD = re.compile(rb"[A-Za-z!#$%&'*+.^_`|~0-9-]{1,32} /")
_VERSION = re.compile(rb"^[^\r\n]* HTTP/([0-9])\.[0-9]\r?\n")
_NO_VERSION = re.compile(rb"(?![^\r\n]* HTTP/)[^\r\n]+\r?\n")
_BAD_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_TOKEN = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


def guarded(config: ServeConfig) -> type[HttpToolsProtocol]:
    """The protocol class for a server with these settings."""

    class Guarded(GuardedProtocol):
        __slots__ = ()
        limits = config
        turns = Turns()

    return Guarded


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    # Beside uvicorn's 28 attributes: a class of up to 30 keeps them in its objects, more need a dict each of some KB.
    __slots__ = (
        "_answering", "_body_bytes", "_body_length", "_clock", "_deaf", "_half_closed", "_header_bytes", "_heard_at",
        "_held", "_in_body", "_in_message", "_is_in_line", "_lingers_until", "_num_begun", "_num_chunks",
        "_num_headers", "_num_left_bytes", "_opening", "_probe_clock", "_raw_bytes", "_refusal", "_send_clock",
    )  # fmt: skip
    limits: ServeConfig
    turns: Turns

    def __init__(self, *args: Any, **options: Any) -> None:
        """As uvicorn calls it."""
        super().__init__(*args, **options)
        self.pipeline = cast(deque[tuple[RequestResponseCycle, Any]], ShortQueue())
        self._clock: asyncio.TimerHandle | None = None
        self._send_clock: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        self._in_message = False  # a request has begun to arrive and is not complete
        self._in_body = False
        self._num_begun = 0  # requests that began in the bytes at hand
        self._raw_bytes = self._num_headers = self._header_bytes = 0  # of the request that arrives
        self._body_bytes = self._num_chunks = 0
        self._body_length: int | None = 0  # of the request that arrives; None: it comes in chunks
        self._opening = b""  # what the request that arrives begins with
        self._held = Held()
        self._is_in_line = False  # for a turn with what is held
        self._deaf = False  # nothing more is read from this connection
        self._answering: RequestResponseCycle | None = None
        self._lingers_until = self._heard_at = 0.0  # 0: it does not linger
        self._num_left_bytes = MAX_LINGER_BYTES  # that are read and thrown away, once nothing more is listened to
        self._half_closed = False  # the client says no more, and may listen
        self._probe_clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there."""
        super().connection_made(transport)
        self.flow = Flow(transport, self._held)
        transport.set_write_buffer_limits(high=_SEND_BUFFER_BYTES)
        if len(self.connections) > self.limits.max_connections:
            self._refuse(ApiError(503, "overloaded", "too many connections", headers=[(b"retry-after", b"1")]))
            return
        self._start_clock(self.limits.header_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left, or we closed."""
        self._stop_clock()
        self._stop_probes()
        self.resume_writing()
        self._deaf = True
        running = self._answering
        if running is not None and not running.response_complete:  # uvicorn tells the last one only
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes arrived."""
        if self._deaf:
            self._heard_at = self.loop.time()
            self._num_left_bytes -= len(data)
            if self._num_left_bytes < 0:
                self.transport.close()
            return
        self._unset_keepalive_if_required()
        self._held.add(data)
        if not self._is_in_line:
            self._go_on()

    def _go_on(self) -> None:
        """Take what may be taken now of what is held."""
        self._is_in_line = False
        if self.transport.is_closing():
            return
        for _ in range(_MAX_PIECES):
            if not self._held or self._deaf or self._is_occupied or self.transport.is_closing():
                break
            length = self._body_length
            self._take(self._held.piece(length - self._body_bytes if self._in_body and length is not None else None))
        if self._held.is_full:
            self.flow.pause_reading()
        elif not self._in_body:
            self.flow.resume_reading()
        self._ask_turn()
        running = self._answering
        if self._half_closed and not self._held and running is not None:
            if running.response_complete:  # what was left is no request
                self.transport.close()
            elif self._probe_clock is None:
                self._probe(running, _FIRST_PROBE_SECONDS)

    @property
    def _is_occupied(self) -> bool:
        """Whether a next request has to wait: for a reply to be made, or for its reader."""
        if self._in_message:
            return False
        running = self._answering
        return self.flow.write_paused or (running is not None and not running.response_complete)

    def _ask_turn(self) -> None:
        """Go on with what is held in a later turn, if nothing else has to come before."""
        if self._held and not (self._is_in_line or self._is_occupied or self._deaf or self.transport.is_closing()):
            self._unset_keepalive_if_required()
            self._is_in_line = True
            self.turns.ask(self._go_on)

    def _take(self, data: bytes) -> None:
        begins = not self._in_message
        if begins:
            self._raw_bytes = 0
            self._opening = data
            self._start_clock(self.limits.header_timeout)
        self._raw_bytes += len(data)
        self._num_begun = 0
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._deaf = True  # we speak no other protocol; the request itself is answered
        except httptools.HttpParserError:
            self._refuse(self._refusal or _parse_refusal(self._opening))
            return
        if self._num_begun > begins:
            self._raw_bytes = 0  # several requests in one piece: their parts cannot be told apart
        if not self._in_message:
            self._opening = b""
        error = self._measure()
        if begins and error is None and not self._in_body and _NO_VERSION.match(data):
            error = _parse_refusal(data)  # HTTP/0.9
        if error is not None and not self._deaf:
            self._refuse(error)

    def _measure(self) -> ApiError | None:
        """What is wrong with the size of the request that arrives."""
        if not self._in_message and not self._num_chunks:
            return None
        if not self._in_body and not self._num_chunks:
            return _head_too_large() if self._raw_bytes > MAX_HEAD_BYTES else None
        if self._body_length is not None:
            return None
        num_lines = self._num_chunks + 1  # the first one counts before it has ended
        extra = self._raw_bytes - self._header_bytes - self._body_bytes - _CHUNK_LINE_BYTES * num_lines
        if extra > MAX_CHUNK_EXTRA_BYTES:
            message = f"chunk extensions and trailers may have {MAX_CHUNK_EXTRA_BYTES} bytes together"
            return bad_request("invalid_http", message)
        return None

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client says no more. Whether the connection stays open: for answers that it may wait for."""
        running = self._answering
        if self.scheme == "https":  # there both sides close at once
            return False
        if self._deaf or self._in_message or running is None or (running.response_complete and not self._held):
            return False
        self._half_closed = True
        self._stop_clock()
        if not running.response_complete:
            self._probe(running, _FIRST_PROBE_SECONDS)
        return True

    def _probe(self, running: RequestResponseCycle, seconds: float) -> None:
        """See in a while whether the client is there: what is sent to one that has left comes back as an error."""
        self._probe_clock = self.loop.call_later(seconds, self._probe_now, running, seconds)

    def _probe_now(self, running: RequestResponseCycle, seconds: float) -> None:
        self._probe_clock = None
        if running is not self._answering:
            running, seconds = self._answering or running, _FIRST_PROBE_SECONDS
        if self.transport.is_closing() or running.response_complete:
            return
        idle = cast(Scope, running.scope).get(IDLE_EVENT)
        if running.response_started:
            if idle is not None and not self.flow.write_paused:
                self.transport.write(b"%x\r\n%s\r\n" % (len(idle), idle))
        elif running.scope["http_version"] == "1.0":  # there is nothing that it would skip
            if seconds >= _MAX_PROBE_SECONDS:
                self.transport.abort()
                return
        else:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._probe(running, min(2 * seconds, _MAX_PROBE_SECONDS))

    def _stop_probes(self) -> None:
        if self._probe_clock is not None:
            self._probe_clock.cancel()
            self._probe_clock = None

    def pause_writing(self) -> None:
        """The client does not read as fast as we write."""
        super().pause_writing()
        if self._send_clock is None:
            self._send_clock = self.loop.call_later(self.limits.send_timeout, self._give_up)

    def resume_writing(self) -> None:
        """It does again."""
        super().resume_writing()
        if self._send_clock is not None:
            self._send_clock.cancel()
            self._send_clock = None
        self._ask_turn()

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._in_message, self._in_body = True, False
        self._refusal = None
        self._num_begun += 1
        self._num_headers = self._body_bytes = self._num_chunks = 0
        self._header_bytes = _REQUEST_LINE_BYTES

    def on_url(self, url: bytes) -> None:
        """A part of the request's target."""
        self._header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A whole header, or a trailer: that comes too late to say anything, and counts as a chunk's extension."""
        if self._in_body:
            return
        self._num_headers += 1
        size = len(name) + len(value) + 4
        self._header_bytes += size
        if size > MAX_HEADER_BYTES or self._header_bytes > MAX_HEAD_BYTES or self._num_headers > MAX_HEADERS:
            self._refusal = self._refusal or _head_too_large()
        elif _BAD_VALUE.search(value) or not _TOKEN.fullmatch(name):
            self._refusal = self._refusal or bad_request("invalid_http", "a header holds characters that none may hold")
        else:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is there: an answer may begin."""
        self._stop_clock()
        self._in_body = True
        self._body_length = self._told_length()
        refusal = self._refusal or self._ambiguous()
        if self._deaf or (refusal is None and self.parser.get_http_version() not in ("1.0", "1.1")):
            refusal = refusal or ApiError(505, "http_version", "use HTTP/1.1")
        if refusal is None:
            self._begin_cycle()
            return
        self._refusal = refusal
        if not self._deaf:
            self._deaf = True
            usual, self.app = self.app, _Refusal(refusal, self.limits)
            try:
                self._begin_cycle()
            finally:
                self.app = usual

    def _begin_cycle(self) -> None:
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = cast(asyncio.Transport, _ReplyTransport(self))
            self.cycle.message_event = cast(asyncio.Event, SmallEvent())

    def on_chunk_header(self) -> None:
        """A chunk begins."""
        self._num_chunks += 1

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._body_bytes += len(body)
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The last byte of a request."""
        self._in_message = self._in_body = False
        self._stop_clock()
        if self.cycle is not None:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """A reply is sent; what is left of its request's body is thrown away, for a while."""
        if self._lingers_until:
            self.server_state.total_requests += 1
            return
        super().on_response_complete()
        if self.transport.is_closing() or (self._answering and not self._answering.response_complete):
            return  # the next one's turn
        if self._held and not self._deaf:
            self._unset_keepalive_if_required()
            self._ask_turn()
        elif self._half_closed:
            self.transport.close()
        elif self._deaf:
            self._linger()
        elif self._in_message:
            self._unset_keepalive_if_required()
            self._start_clock(_DISCARD_SECONDS)

    def end(self) -> None:
        """Close behind a reply. A body that still comes is read: unread, it would reset the connection."""
        if self._in_message:
            self._deaf = True
            self._linger()
        else:
            self.transport.close()

    def cut(self) -> None:
        """The server ends: tell a client whose reply has not begun, wait no longer for one that does not read."""
        running = self._answering
        if running is not None and not running.response_started:
            self._refuse(not_ready("draining"))
        else:
            self.transport.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def _ambiguous(self) -> ApiError | None:
        """Whether two readers of this head could disagree about where the request ends."""
        lengths = [value for name, value in self.headers if name == b"content-length"]
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        plain = all(value.isdigit() and len(value) < 19 for value in lengths)
        if len(lengths) > 1 or not plain or codings not in ([], [b"chunked"]) or (lengths and codings):
            return bad_request("invalid_http", "the length of the body is not clear")
        return None

    def _told_length(self) -> int | None:
        """Bytes of the body that the head tells, or None for chunks."""
        for name, value in self.headers:
            if name == b"content-length" and value.isdigit() and len(value) < 19:
                return int(value)
            if name == b"transfer-encoding":
                return None
        return 0

    def _refuse(self, error: ApiError) -> None:
        """Answer on the socket itself, unless a reply has begun, and close."""
        self._deaf = True
        if self.transport.is_closing():
            return
        running = self._answering
        if running is not None and not running.response_complete:
            if running.response_started:
                self.transport.close()
                return
            running.disconnected = True
            running.message_event.set()
        self.pipeline.clear()
        body = error.body()
        phrase = http.HTTPStatus(error.status).phrase.encode()
        lines = [
            b"HTTP/1.1 %d %s" % (error.status, phrase),
            b"content-type: application/json",
            b"content-length: %d" % len(body),
            b"connection: close",
            *(name + b": " + value for name, value in error.headers),
            b"",
            body,
        ]
        self.transport.write(b"\r\n".join(lines))
        self._linger()

    def _linger(self) -> None:
        """Say no more, read what still comes, and close when nothing does."""
        self._held.clear()
        self._stop_clock()
        self._stop_probes()
        self._unset_keepalive_if_required()
        self._heard_at = self.loop.time()
        self._lingers_until = self._heard_at + _MAX_LINGER_SECONDS
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._start_clock(_LINGER_SECONDS)

    def _start_clock(self, seconds: float) -> None:
        if self._clock is None:
            self._clock = self.loop.call_later(seconds, self._too_late)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _too_late(self) -> None:
        self._clock = None
        if self._in_message and not self._in_body and not self._deaf:
            self._refuse(ApiError(408, "header_timeout", "the head of the request did not arrive in time"))
            return
        now = self.loop.time()
        if not self._lingers_until and self._in_message:  # a body that nobody wants, and its reply is sent
            self._deaf = True
            self._linger()
        elif now < self._lingers_until and now - self._heard_at < _LINGER_SECONDS:
            self._start_clock(_LINGER_SECONDS)
        else:
            self.transport.close()

    def _give_up(self) -> None:
        self._send_clock = None
        self.transport.abort()


class _ReplyTransport:
    """What a reply is written to. Its end is the protocol's to choose."""

    __slots__ = ("_protocol",)

    def __init__(self, protocol: GuardedProtocol) -> None:
        self._protocol = protocol

    def write(self, data: bytes) -> None:
        self._protocol.transport.write(data)

    def is_closing(self) -> bool:
        return self._protocol.transport.is_closing()

    def close(self) -> None:
        self._protocol.end()


class _Refusal:
    """An application that says no."""

    def __init__(self, error: ApiError, config: ServeConfig) -> None:
        self._error, self._config = error, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Exchange(scope, receive, send, self._config).fail(self._error)


def _head_too_large() -> ApiError:
    limits = f"{MAX_HEAD_BYTES} bytes, {MAX_HEADERS} headers, {MAX_HEADER_BYTES} bytes each"
    return ApiError(431, "headers_too_large", f"the head of a request may have {limits}")


def _parse_refusal(data: bytes) -> ApiError:
    """What to say of bytes that the parser did not take."""
    version = _VERSION.match(data)
    if data.startswith(b"PRI * HTTP/2") or (version and version[1] not in (b"0", b"1")):
        return ApiError(505, "http_version", "use HTTP/1.1")
    if version and _METHOD.match(data) and not _KNOWN_METHOD.match(data):
        allow = [(b"allow", b"GET, POST")]
        return ApiError(405, "method_not_allowed", "the method is not allowed here", headers=allow)
    return bad_request("invalid_http", "the request is not HTTP/1.1")


_KNOWN_METHOD = re.compile(rb"(?:GET|POST|PUT|DELETE|PATCH|HEAD|OPTIONS|TRACE|CONNECT) ")
