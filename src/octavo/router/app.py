"""The router: one address for servers that compute prompts and servers that go on with them.

Owns what becomes of a request: its prompt is computed by a prefill server, with one token; what that says of the blocks
goes with the request to a decode server, whose answer is the client's. Knows no model and no text. Invariants: a
request whose prefill fails, or whose blocks are lost, is computed by a decode server alone, so that a fault costs time
and no request; blocks that a decode server may have asked for are asked for by no other; a client that goes away stops
both servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from octavo.router.exchange import Answer, ClientLeftError, Exchange, Receive, Refused, Scope, Send
from octavo.router.http import Address, Response, UpstreamError, send
from octavo.router.metrics import CONTENT_TYPE, RouterMetrics
from octavo.router.pools import Pool, Upstream
from octavo.router.settings import RouterConfig

ROUTES = ("/v1/completions", "/v1/chat/completions")
_PASSED = ("/v1/models", "/tokenize", "/detokenize", "/version")
_AFFINITY_CHARS = 512  # of a prompt: what begins alike so far goes to one prefill server


class Router:
    """The ASGI application."""

    def __init__(self, config: RouterConfig, prefill: Sequence[Address], decode: Sequence[Address]) -> None:
        """Nobody is asked before `watch` runs."""
        self.config = config
        self.prefill, self.decode = Pool("prefill", prefill), Pool("decode", decode)
        self.metrics = RouterMetrics((self.prefill, self.decode))

    @property
    def is_ready(self) -> bool:
        """Whether each pool has a server that is well."""
        return self.decode.is_well and (self.prefill.is_well or not self.prefill.servers)

    async def watch(self) -> None:
        """Look after all servers, for ever."""
        await asyncio.gather(self.prefill.watch(self.config), self.decode.watch(self.config))

    async def __call__(self, scope: Scope, receive: Receive, send_event: Send) -> None:
        """One exchange."""
        assert scope["type"] == "http", "nothing else is routed"
        exchange = Exchange(scope, receive, send_event, self.config.timeout)
        with contextlib.suppress(ClientLeftError):
            try:
                await self._answer(exchange)
            except Refused as error:
                await exchange.refuse(error)

    async def _answer(self, exchange: Exchange) -> None:
        path, method = exchange.path, exchange.method
        if path in ("/health", "/ready", "/ping"):
            await exchange.reply(200 if self.decode.is_well else 503, self._standing())
        elif path == "/metrics":
            await exchange.reply(200, self.metrics.render(), CONTENT_TYPE)
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

    async def _generate(self, exchange: Exchange) -> None:
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
            raise ClientLeftError
        except ClientLeftError:
            self.metrics.ended("client_gone")
            raise
        finally:
            for task in (gone, work):
                task.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)

    async def _both(self, exchange: Exchange, given: dict[str, Any], began: float) -> None:
        told = await self._prefill(exchange, given)
        self.metrics.prefilled(time.monotonic() - began)
        wanted = given if told is None else {**given, "kv_transfer_params": told}
        await self._pass_on(exchange, json.dumps(wanted).encode(), alone=None if told is None else given)

    async def _prefill(self, exchange: Exchange, given: dict[str, Any]) -> dict[str, Any] | None:
        """What a prefill server says of the blocks; None: the decode server computes the prompt."""
        if given.get("kv_transfer_params") is not None or given.get("n") not in (None, 1):
            return None
        first = {key: value for key, value in given.items() if key not in ("stream_options", "max_completion_tokens")}
        first |= {"max_tokens": 1, "stream": False}
        first.pop("min_tokens", None)
        tried: list[Upstream] = []
        while len(tried) <= self.config.retries:
            server = self.prefill.choose(_affinity(given), tried)
            if server is None:
                break
            first["kv_transfer_params"] = {"do_remote_decode": True, "transfer_id": str(uuid.uuid4())}
            try:
                with self.prefill.working(server):
                    response = await self._send(server, exchange, json.dumps(first).encode())
                    with contextlib.closing(response):
                        body = await response.body()
                if response.status < 500:  # what is wrong with a request the decode server says, in full
                    return _told(json.loads(body)) if response.status == 200 else None
                raise UpstreamError(f"{server.address} answers {response.status}")
            except (UpstreamError, ValueError) as error:
                self.prefill.failed(server, error)
                tried.append(server)
                self.metrics.retried("prefill")
        self.metrics.skipped_prefill()
        return None

    async def _pass_on(self, exchange: Exchange, body: bytes, *, alone: dict[str, Any] | None = None) -> None:
        """The answer of a decode server. alone: the request without blocks from elsewhere, if these are lost."""
        tried: list[Upstream] = []
        failure: Answer | Refused = Refused(503, "no_server", "no decode server is up")
        while len(tried) <= self.config.retries:
            server = self.decode.choose(b"", tried)
            if server is None:
                break
            spent = True
            try:
                with self.decode.working(server):
                    response = await self._send(server, exchange, body)
                    with contextlib.closing(response):
                        failed = await exchange.forward(response)
                if failed is None:
                    self.metrics.ended("answered" if response.status < 400 else "refused")
                    return
                failure = failed
                if failed.is_final:
                    break
                if alone is None:
                    tried.append(server)
            except UpstreamError as error:
                self.decode.failed(server, error)
                if exchange.has_spoken:
                    self.metrics.ended("broken")
                    raise Refused(502, "upstream_failed", str(error)) from None
                failure, spent = Refused(503, "no_server", str(error)), error.was_sent
                tried.append(server)
            if spent and alone is not None:  # its blocks may be lost: any server can compute them
                body, alone = json.dumps(alone).encode(), None
                self.metrics.retried("blocks")
            else:
                self.metrics.retried("decode")
        self.metrics.ended("failed")
        if isinstance(failure, Refused):
            raise failure
        await exchange.give(failure)

    async def _send(self, server: Upstream, exchange: Exchange, body: bytes) -> Response:
        return await send(
            server.address,
            exchange.method,
            exchange.target,
            exchange.headers,
            body,
            lines=server.lines,
            connect_timeout=self.config.connect_timeout,
            timeout=self.config.timeout,
        )


def _told(answer: Any) -> dict[str, Any] | None:
    """What an answer says of its blocks."""
    told = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    return told if isinstance(told, dict) else None


def _affinity(given: dict[str, Any]) -> bytes:
    """What requests that begin alike share."""
    said = given.get("messages") if "messages" in given else given.get("prompt")
    return json.dumps(said, sort_keys=True)[:_AFFINITY_CHARS].encode()
