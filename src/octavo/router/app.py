"""The router: one address for servers that compute prompts and servers that go on with them.

Owns what becomes of a request: its prompt is computed by a prefill server, with one token; what that says of the blocks
goes with the request to a decode server, whose answer is the client's. Knows no model and no text. Invariants: a
request whose prefill fails, or whose blocks are lost, is computed by a decode server alone, so that a fault costs time
and no request; once a byte of an answer has been passed on, a fault ends it; a client that goes away stops
both servers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from octavo.router.http import Address, Response, UpstreamError, send
from octavo.router.metrics import RouterMetrics
from octavo.router.pools import Pool, Upstream

_LOG = logging.getLogger(__name__)
ROUTES = ("/v1/completions", "/v1/chat/completions")
_PASSED = ("/v1/models", "/tokenize", "/detokenize", "/version")
_DROPPED = {b"host", b"content-length", b"connection", b"transfer-encoding", b"keep-alive", b"accept-encoding"}
_MAX_BODY = 64 << 20
_AFFINITY_CHARS = 512  # of a prompt: what begins alike so far goes to one prefill server
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RouterSettings:
    """How long the router waits, in seconds, and how often it tries."""

    prefill: tuple[Address, ...]
    decode: tuple[Address, ...]
    connect_timeout: float = 5.0
    timeout: float = 300.0  # that a server may be silent
    health_interval: float = 1.0
    retries: int = 2  # of each phase, on other servers


class Refused(RuntimeError):
    """What a client is told instead of an answer."""

    def __init__(self, status: int, code: str, message: str) -> None:
        """As OpenAI's errors."""
        super().__init__(message)
        self.status, self.code = status, code


class Router:
    """The ASGI application."""

    def __init__(self, settings: RouterSettings) -> None:
        """Nobody is asked before `watch` runs."""
        self.settings = settings
        self.prefill, self.decode = Pool("prefill", settings.prefill), Pool("decode", settings.decode)
        self.metrics = RouterMetrics((self.prefill, self.decode))

    async def watch(self) -> None:
        """Look after all servers, for ever."""
        seconds, timeout = self.settings.health_interval, self.settings.connect_timeout
        await asyncio.gather(self.prefill.watch(seconds, timeout), self.decode.watch(seconds, timeout))

    async def __call__(self, scope: Scope, receive: Receive, send_event: Send) -> None:
        """One exchange."""
        assert scope["type"] == "http", "nothing else is routed"
        exchange = _Exchange(scope, receive, send_event)
        try:
            await self._answer(exchange)
        except Refused as error:
            await exchange.refuse(error)
        except UpstreamError as error:
            await exchange.refuse(Refused(502, "upstream_failed", str(error)))

    async def _answer(self, exchange: _Exchange) -> None:
        path, method = exchange.path, exchange.method
        if path in ("/health", "/ready", "/ping"):
            status = 200 if self.decode.is_well else 503
            await exchange.reply(status, self._standing(), b"application/json")
        elif path == "/metrics":
            await exchange.reply(200, self.metrics.render(), b"text/plain; version=0.0.4; charset=utf-8")
        elif path in ROUTES and method == "POST":
            await self._generate(exchange)
        elif path in _PASSED:
            await self._pass_on(exchange, await exchange.body())
        else:
            raise Refused(404, "not_found", f"the router has no {method} {path}")

    def _standing(self) -> bytes:
        pools = {
            pool.name: {str(server.address): "up" if server.is_well else "down" for server in pool.servers}
            for pool in (self.prefill, self.decode)
        }
        return json.dumps(pools).encode()

    async def _generate(self, exchange: _Exchange) -> None:
        began, body = time.monotonic(), await exchange.body()
        try:
            given = json.loads(body)
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):  # a server says what is wrong with it
            await self._pass_on(exchange, body)
            return
        gone = asyncio.create_task(exchange.gone())
        work = asyncio.create_task(self._both(exchange, given, began))
        try:
            await asyncio.wait((gone, work), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
                return
            self.metrics.ended("client_gone")
        finally:
            for task in (gone, work):
                task.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)

    async def _both(self, exchange: _Exchange, given: dict[str, Any], began: float) -> None:
        told = await self._prefill(exchange, given)
        self.metrics.prefilled(time.monotonic() - began)
        wanted = given if told is None else {**given, "kv_transfer_params": told}
        await self._pass_on(exchange, json.dumps(wanted).encode(), alone=None if told is None else given)

    async def _prefill(self, exchange: _Exchange, given: dict[str, Any]) -> dict[str, Any] | None:
        """What a prefill server says of the blocks; None: the decode server computes the prompt."""
        if given.get("kv_transfer_params") is not None or given.get("n") not in (None, 1):
            return None
        first = {key: value for key, value in given.items() if key not in ("stream_options", "max_completion_tokens")}
        first |= {"max_tokens": 1, "stream": False}
        first.pop("min_tokens", None)
        tried: list[Upstream] = []
        while len(tried) <= self.settings.retries:
            server = self.prefill.choose(_affinity(given), tried)
            if server is None:
                break
            first["kv_transfer_params"] = {"do_remote_decode": True, "transfer_id": str(uuid.uuid4())}
            try:
                with self.prefill.working(server):
                    response = await self._send(server, exchange, json.dumps(first).encode())
                    try:
                        body = await response.body()
                    finally:
                        response.close()
                if response.status < 500:  # what is wrong with a request the decode server says, in full
                    told = json.loads(body).get("kv_transfer_params") if response.status == 200 else None
                    return told if isinstance(told, dict) else None
                raise UpstreamError(f"{server.address} answers {response.status}")
            except (UpstreamError, ValueError) as error:
                self.prefill.failed(server, error)
                tried.append(server)
                self.metrics.retried("prefill")
        self.metrics.skipped_prefill()
        return None

    async def _pass_on(self, exchange: _Exchange, body: bytes, *, alone: dict[str, Any] | None = None) -> None:
        """The answer of a decode server. alone: the request without blocks from elsewhere, if these are lost."""
        tried: list[Upstream] = []
        reason = "no decode server is up"
        while len(tried) <= self.settings.retries:
            server = self.decode.choose(b"", tried)
            if server is None:
                break
            try:
                with self.decode.working(server):
                    response = await self._send(server, exchange, body)
                    try:
                        if response.status < 500:
                            await exchange.forward(response)
                            self.metrics.ended("answered" if response.status < 400 else "refused")
                            return
                        reason = f"{server.address} answers {response.status}"
                    finally:
                        response.close()
                if alone is not None:  # its blocks were lost: the same server can compute them
                    body, alone = json.dumps(alone).encode(), None
                    self.metrics.retried("blocks")
                    continue
            except UpstreamError as error:
                self.decode.failed(server, error)
                if exchange.has_begun:
                    self.metrics.ended("broken")
                    raise
                reason = str(error)
            tried.append(server)
            self.metrics.retried("decode")
        self.metrics.ended("failed")
        raise Refused(503, "no_server", reason)

    async def _send(self, server: Upstream, exchange: _Exchange, body: bytes) -> Response:
        return await send(
            server.address,
            exchange.method,
            exchange.target,
            exchange.headers,
            body,
            connect_timeout=self.settings.connect_timeout,
            timeout=self.settings.timeout,
        )


def _affinity(given: dict[str, Any]) -> bytes:
    """What requests that begin alike share."""
    said = given.get("messages") if "messages" in given else given.get("prompt")
    return json.dumps(said, sort_keys=True)[:_AFFINITY_CHARS].encode()


class _Exchange:
    """A client's request, and the reply to it."""

    def __init__(self, scope: Scope, receive: Receive, send_event: Send) -> None:
        self._receive, self._send = receive, send_event
        self.method, self.path = str(scope["method"]), str(scope["path"])
        query = scope.get("query_string", b"").decode("latin-1")
        self.target = self.path + (f"?{query}" if query else "")
        self.headers = [(name, value) for name, value in scope["headers"] if name not in _DROPPED]
        self.has_begun = False

    async def body(self) -> bytes:
        """All of it. Raises Refused for one that is too long."""
        data = bytearray()
        while True:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise Refused(400, "client_gone", "the client went away")
            data += event.get("body", b"")
            if len(data) > _MAX_BODY:
                raise Refused(413, "too_large", f"the body is longer than {_MAX_BODY} bytes")
            if not event.get("more_body"):
                return bytes(data)

    async def gone(self) -> None:
        """Until the client goes away."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def forward(self, response: Response) -> None:
        """Pass a response on as it comes. Raises UpstreamError."""
        headers = [(name, value) for name, value in response.headers if name not in _DROPPED]
        begins: MutableMapping[str, Any] | None = {
            "type": "http.response.start",
            "status": response.status,
            "headers": headers,
        }
        async for piece in response.pieces():
            if begins is not None:
                await self._send(begins)
                begins, self.has_begun = None, True
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        if begins is not None:
            await self._send(begins)
            self.has_begun = True
        await self._send({"type": "http.response.body", "body": b""})

    async def reply(self, status: int, body: bytes, content_type: bytes) -> None:
        """A whole reply."""
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body))]
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def refuse(self, error: Refused) -> None:
        """Say why not; of an answer that has begun the end is missing."""
        if self.has_begun:
            raise error
        said = {"message": str(error), "type": "router_error", "param": None, "code": error.code}
        await self.reply(error.status, json.dumps({"error": said}).encode(), b"application/json")
