"""Pools: the servers that prompts are computed on, and those that go on with them.

Owns which servers are well, how much each has to do, and who is chosen next. Knows no request but by its affinity: what
begins alike goes to the same prefill server, whose cache has its beginning, unless that has far more to do than others.
Invariant: a server that failed is asked again only when it says that it is well.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
from collections.abc import Collection, Iterator, Sequence

from octavo.router.http import Address, UpstreamError, send

_LOG = logging.getLogger(__name__)
_MORE = 4  # requests that the preferred server may have open beyond the idlest one


@dataclasses.dataclass(eq=False, slots=True)
class Upstream:
    """One server."""

    address: Address
    is_well: bool = False
    num_open: int = 0  # exchanges
    num_requests: int = 0
    num_failures: int = 0


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
        """The server for a request; `tried` ones only if there is no other. affinity: what requests share; or empty."""
        well = [server for server in self.servers if server.is_well and server not in tried]
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
        """It did not do what it should: it is left alone until it is well again."""
        server.num_failures += 1
        if server.is_well:
            _LOG.warning("%s server %s: %s", self.name, server.address, error)
        server.is_well = False

    async def watch(self, seconds: float, timeout: float) -> None:
        """Ask all servers how they are, for ever."""
        while True:
            await asyncio.gather(*(self._look(server, timeout) for server in self.servers))
            await asyncio.sleep(seconds)

    async def _look(self, server: Upstream, timeout: float) -> None:
        try:
            response = await send(server.address, "GET", "/health", connect_timeout=timeout, timeout=timeout)
            response.close()
            is_well = response.status == 200
        except UpstreamError:
            is_well = False
        if is_well != server.is_well:
            _LOG.warning("%s server %s is %s", self.name, server.address, "up" if is_well else "down")
        server.is_well = is_well


def _weight(affinity: bytes, address: Address) -> bytes:
    """Of a server for a beginning: when one comes or goes the others keep theirs."""
    return hashlib.blake2b(affinity + str(address).encode(), digest_size=8).digest()
