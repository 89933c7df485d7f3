"""What the router tells servers of blocks, and asks them: beside the requests, which wait for none of it.

Owns the offers that no decode server will fetch, of which their prefill servers are told, and what decode servers say
of blocks that they could not take. Knows no request. Invariants: a server is asked at most once a second; what a
server does not hear within a minute it hears no more, since an offer ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from octavo.router.http import Lines, Response, UpstreamError, send
from octavo.router.metrics import RouterMetrics
from octavo.router.pools import Upstream
from octavo.router.settings import RouterConfig

_LOG = logging.getLogger(__name__)
_MAX_SECONDS = 60.0  # in which a server is told
_EVERY = 1.0  # seconds between two questions to a server
_MAX_IDS = 4096  # that a server takes at once
_MAX_WARNED = 1024  # refusals that are remembered
_KEYS = (b"authorization", b"x-api-key")  # a server lets in who has brought the request
Headers = Sequence[tuple[bytes, bytes]]


@dataclasses.dataclass(slots=True)
class Offer:
    """Blocks of one request that a prefill server keeps for a decode server."""

    server: Upstream
    transfer_ids: list[str]
    told: dict[str, Any]  # the kv_transfer_params that a decode server needs
    is_settled: bool = False  # a decode server has dealt with it, or the prefill server was told


class Transfers:
    """Of one router."""

    def __init__(self, config: RouterConfig, metrics: RouterMetrics) -> None:
        """Nothing is sent before `run` runs."""
        self._config, self._metrics = config, metrics
        self._due: dict[tuple[int, tuple[tuple[bytes, bytes], ...]], tuple[Upstream, list[str]]] = {}
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: set[int] = set()  # ids of servers that are going to be asked
        self._failures: dict[int, int] = {}  # as it said then
        self._warned: dict[str, None] = {}

    def release(self, server: Upstream, transfer_ids: Sequence[str], headers: Headers) -> None:
        """Nobody will fetch these offers: tell who has them, soon. headers: of the request that they were for."""
        keys = _keys_of(headers)
        self._due.setdefault((id(server), keys), (server, []))[1].extend(transfer_ids)
        self._wake.set()

    def settle(self, offer: Offer, headers: Headers) -> None:
        """Release an offer, unless it is settled."""
        if not offer.is_settled:
            offer.is_settled = True
            self.release(offer.server, offer.transfer_ids, headers)

    def look(self, server: Upstream, headers: Headers) -> None:
        """Blocks were to go to a decode server: ask it soon whether it could take them."""
        if id(server) not in self._looking:
            self._looking.add(id(server))
            self._begin(self._look(server, _keys_of(headers)))

    def _begin(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def run(self) -> None:
        """Tell, for ever."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                due, self._due = self._due, {}
                for (_, keys), (server, ids) in due.items():
                    self._begin(self._tell(server, keys, ids))
        finally:
            for task in self._tasks:
                task.cancel()

    async def _tell(self, server: Upstream, keys: Headers, ids: Sequence[str]) -> None:
        until = time.monotonic() + _MAX_SECONDS
        for start in range(0, len(ids), _MAX_IDS):
            body = json.dumps({"transfer_ids": ids[start : start + _MAX_IDS]}).encode()
            headers = [*keys, (b"content-type", b"application/json")]
            while True:
                try:
                    response = await self._send(server, "POST", "/kv_transfer/release", headers, body)
                    response.close()
                    if response.status < 500:
                        break
                except UpstreamError as error:
                    if not error.was_sent:  # nobody listens, so nobody keeps blocks
                        return
                except TimeoutError:
                    pass
                if time.monotonic() > until:
                    _LOG.info("prefill server %s was not told of %d offers", server.address, len(ids))
                    return
                await asyncio.sleep(self._config.health_interval)

    async def _look(self, server: Upstream, keys: Headers) -> None:
        await asyncio.sleep(_EVERY)
        self._looking.discard(id(server))
        with contextlib.suppress(UpstreamError, TimeoutError, ValueError, KeyError, TypeError):
            response = await self._send(server, "GET", "/kv_transfer", keys, b"")
            with contextlib.closing(response):
                if response.status != 200:
                    return
                said = json.loads(await response.body())
            count, refusal = int(said["num_load_failures"]), str(said["refusal"])
            before = self._failures.get(id(server), 0)
            self._failures[id(server)] = count
            self._metrics.load_failures(str(server.address), count - before if count >= before else count)
            self._warn(f"decode server {server.address} cannot take blocks, and computes prompts: {refusal}", refusal)

    def _warn(self, line: str, refusal: str) -> None:
        if not refusal or line in self._warned:
            return
        self._warned[line] = None
        if len(self._warned) > _MAX_WARNED:
            del self._warned[next(iter(self._warned))]
        _LOG.warning("%s", " ".join(line.split()))

    async def _send(self, server: Upstream, method: str, path: str, headers: Headers, body: bytes) -> Response:
        seconds = self._config.health_timeout
        async with asyncio.timeout(seconds):
            return await send(
                server.address, method, path, headers, body, lines=Lines(), connect_timeout=seconds, timeout=seconds
            )


def _keys_of(headers: Headers) -> tuple[tuple[bytes, bytes], ...]:
    return tuple(pair for pair in headers if pair[0].lower() in _KEYS)
