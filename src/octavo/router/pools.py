"""Pools: the servers that prompts are computed on, and those that go on with them.

Owns which servers are well, how much each has to do, and who is chosen next. Knows no request but by its affinity: what
begins alike goes to the same prefill server, whose cache has its beginning, unless that has far more to do than others.
Invariants: a server that failed a request is looked at at once, and until then asked only if there is no other; whoever
waits for a server that does not answer a look hears of it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Collection, Iterator, Sequence

from octavo.router.http import Address, Lines, UpstreamError, send
from octavo.router.settings import RouterConfig

_LOG = logging.getLogger(__name__)
_MORE = 4  # requests that the preferred server may have open beyond the idlest one


@dataclasses.dataclass(eq=False, slots=True)
class Upstream:
    """One server."""

    address: Address
    is_well: bool = False  # by its last look
    is_suspect: bool = False  # it has failed a request since
    was_well: bool = False  # ever
    num_open: int = 0  # exchanges
    num_requests: int = 0
    num_failures: int = 0
    lines: Lines = dataclasses.field(default_factory=Lines)
    look: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)  # set: now


class Pool:
    """Servers that do the same."""

    def __init__(self, name: str, addresses: Sequence[Address]) -> None:
        """`name`: prefill or decode."""
        self.name = name
        self.servers = [Upstream(address) for address in addresses]

    @property
    def is_well(self) -> bool:
        """Whether some server is."""
        return any(server.is_well for server in self.servers)

    def choose(self, affinity: bytes, tried: Collection[Upstream]) -> Upstream | None:
        """The server for a request, none of those `tried`. affinity: what requests share; or empty."""
        well = [server for server in self.servers if server.is_well and server not in tried]
        well = [server for server in well if not server.is_suspect] or well
        if not well:
            return None
        idlest = min(well, key=lambda server: server.num_open)
        if not affinity:
            return idlest
        preferred = max(well, key=lambda server: _weight(affinity, server.address))
        return preferred if preferred.num_open <= idlest.num_open + _MORE else idlest

    @contextlib.contextmanager
    def working(self, server: Upstream) -> Iterator[None]:
        """Within: it has one request more."""
        server.num_open += 1
        server.num_requests += 1
        try:
            yield
        finally:
            server.num_open -= 1

    def failed(self, server: Upstream, error: object) -> None:
        """It did not do what it should: whether it is well is looked at now."""
        server.num_failures += 1
        if server.is_well and not server.is_suspect:
            _LOG.warning("%s server %s failed a request: %s", self.name, server.address, error)
        server.is_suspect = True
        server.look.set()

    async def watch(self, config: RouterConfig) -> None:
        """Ask all servers how they are, for ever, each by itself."""
        await asyncio.gather(*(self._watch(server, config) for server in self.servers))

    async def _watch(self, server: Upstream, config: RouterConfig) -> None:
        while True:
            server.look.clear()
            await self._look(server, config.health_timeout)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(config.health_interval):
                    await server.look.wait()

    async def _look(self, server: Upstream, seconds: float) -> None:
        answers, why, own = True, "", Lines()
        try:
            try:
                async with asyncio.timeout(seconds):
                    response = await send(
                        server.address, "GET", "/health", lines=own, connect_timeout=seconds, timeout=seconds
                    )
            except TimeoutError:
                raise UpstreamError(f"no answer within {seconds:g} s") from None
            response.close()
            is_well, why = response.status == 200, f"it answers {response.status}"
        except UpstreamError as error:
            answers, is_well, why = False, False, str(error)
        if is_well != server.is_well:
            level = logging.INFO if is_well and not server.was_well else logging.WARNING  # the first time is no news
            _LOG.log(level, "%s server %s is %s", self.name, server.address, "up" if is_well else f"down: {why}")
        server.is_well, server.is_suspect = is_well, False
        server.was_well = server.was_well or is_well
        if not answers:  # one that does says itself what becomes of its requests
            server.lines.cut(f"{server.address} is down: {why}")


def _weight(affinity: bytes, address: Address) -> bytes:
    """Of a server for a beginning: when one comes or goes the others keep theirs."""
    return hashlib.blake2b(affinity + str(address).encode(), digest_size=8).digest()
