"""The router: one address for servers that compute prompts and servers that go on with them.

Owns what becomes of a request: its prompt is computed by a prefill server, with one token; what that says of the blocks
goes with the request to a decode server, whose answer is the client's. Knows no model and no text. Invariants: a
request whose prefill fails, or whose blocks are lost, is computed by a decode server alone, so that a fault costs time
and no request; blocks that a decode server may have asked for are asked for by no other, and those that none will ask
for are released; a client that goes away stops both servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from octavo.router.bodies import FORMS, TRANSFER, Form, ids_of, read
from octavo.router.exchange import Answer, ClientLeftError, Exchange, Receive, Refused, Scope, Send
from octavo.router.http import Address, Response, UpstreamError, send
from octavo.router.metrics import CONTENT_TYPE, RouterMetrics
from octavo.router.pools import Pool, Upstream
from octavo.router.settings import RouterConfig
from octavo.router.transfers import Offer, Transfers

# a decode server answers these alone
_PASSED = (
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/version",
    "/",
)
_MODELS = "/v1/models/"


class Router:
    """The ASGI application."""

    def __init__(self, config: RouterConfig, prefill: Sequence[Address], decode: Sequence[Address]) -> None:
        """Nobody is asked before `watch` runs."""
        self.config = config
        self.prefill, self.decode = Pool("prefill", prefill), Pool("decode", decode)
        self.metrics = RouterMetrics((self.prefill, self.decode))
        self.transfers = Transfers(config, self.metrics)

    @property
    def is_ready(self) -> bool:
        """Whether each pool has a server that is well."""
        return self.decode.is_well and (self.prefill.is_well or not self.prefill.servers)

    async def watch(self) -> None:
        """Look after all servers, for ever."""
        await asyncio.gather(self.prefill.watch(self.config), self.decode.watch(self.config), self.transfers.run())

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
        path, method = _known(exchange.path), exchange.method
        if path in ("/health", "/ready", "/ping"):
            await exchange.reply(200 if self.decode.is_well else 503, self._standing())
        elif path == "/metrics":
            await exchange.reply(200, self.metrics.render(), CONTENT_TYPE)
        elif path in FORMS and method == "POST":
            await self._generate(exchange, functools.partial(self._both, FORMS[path]))
        elif path in FORMS or path in _PASSED or path.startswith(_MODELS):
            await self._generate(exchange, self._pass_on)
        else:
            raise Refused(404, "not_found", f"the router has no {method} {exchange.path}")

    def _standing(self) -> bytes:
        pools = {
            pool.name: {str(server.address): "up" if server.is_well else "down" for server in pool.servers}
            for pool in (self.prefill, self.decode)
        }
        return json.dumps(pools).encode()

    async def _generate(self, exchange: Exchange, answer: Callable[[Exchange, bytes], Awaitable[None]]) -> None:
        """Until there is an answer, or nobody who wants it."""
        body = await exchange.body()
        gone = asyncio.create_task(exchange.gone())
        work = asyncio.ensure_future(answer(exchange, body))
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

    async def _both(self, form: Form, exchange: Exchange, body: bytes) -> None:
        began = time.monotonic()
        given = read(body)
        if given is None or not form.understands(given):  # a server says what is wrong with it
            await self._pass_on(exchange, body)
            return
        if not self.config.pass_kv_transfer_params and (foreign := form.foreign(given)):
            self.metrics.ended("refused")
            limit = f"{TRANSFER} may say max_load_tokens and max_offload_tokens here, not {foreign[0][:40]!a}"
            raise Refused(400, "not_allowed", f"{limit}: where blocks are the router says (--pass-kv-transfer-params)")
        offer = await self._prefill(form, exchange, given)
        if offer is None:
            self.metrics.skipped_prefill()
            await self._pass_on(exchange, body)
            return
        self.metrics.prefilled(time.monotonic() - began)
        wanted = json.dumps({**given, TRANSFER: offer.told}).encode()
        try:
            await self._pass_on(exchange, wanted, alone=body, offer=offer)
        finally:
            if not exchange.has_spoken:
                self.transfers.settle(offer, exchange.headers)

    async def _prefill(self, form: Form, exchange: Exchange, given: dict[str, Any]) -> Offer | None:
        """What a prefill server has on offer; None: the decode server computes the prompt."""
        if given.get(TRANSFER) is not None or form.computes_whole(given):
            return None
        if not self.decode.is_well:  # nobody would go on with it
            return None
        tried: list[Upstream] = []
        while len(tried) <= self.config.retries:
            server = self.prefill.choose(form.affinity(given), tried)
            if server is None:
                break
            transfer_id = str(uuid.uuid4())
            first, asked = form.first(given, transfer_id), Offer(server, form.transfer_ids(given, transfer_id), {})
            try:
                with self.prefill.working(server):
                    response = await self._send(server, exchange, json.dumps(first).encode())
                    with contextlib.closing(response):
                        body = await response.body()
                if response.status < 500:  # what is wrong with a request the decode server says, in full
                    told = form.told(json.loads(body)) if response.status == 200 else None
                    asked.is_settled = True
                    return None if told is None else Offer(server, ids_of(told), told)
                raise UpstreamError(f"{server.address} answers {response.status}")
            except (UpstreamError, ValueError) as error:
                asked.is_settled = isinstance(error, UpstreamError) and not error.was_sent
                self.prefill.failed(server, error)
                tried.append(server)
                self.metrics.retried("prefill")
            finally:  # nobody will hear what it offers from now on
                self.transfers.settle(asked, exchange.headers)
        return None

    async def _pass_on(
        self, exchange: Exchange, body: bytes, *, alone: bytes | None = None, offer: Offer | None = None
    ) -> None:
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
                if alone is not None:
                    self.transfers.look(server, exchange.headers)
                if failed is None:
                    self.metrics.ended("answered" if response.status < 400 else "refused")
                    if offer is not None and response.status < 400:  # it has fetched them, or said that it will not
                        offer.is_settled = True
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
                body, alone = alone, None
                self.metrics.retried("blocks")
                if offer is not None:
                    self.transfers.settle(offer, exchange.headers)
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


def _known(path: str) -> str:
    """A path as the tables have it, by the servers' rules: a slash at the end, or a missing /v1, is no matter."""
    if len(path) > 2 and path.endswith("/"):
        path = path[:-1]
    whole = f"/v1{path}"
    return whole if whole in FORMS or whole in _PASSED or whole.startswith(_MODELS) else path
