"""A client's side of HTTP/1.1, as far as a proxy needs it: one request, a response in pieces as they come.

Owns connections, which serve one exchange each. Knows neither routes nor engines. Invariants: every wait has a deadline
and an error that names the server; closing a Response, at any moment, closes its connection, so that the server stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Iterable
from urllib.parse import urlsplit

_MAX_HEAD = 1 << 16  # bytes
_PIECE = 1 << 16


class UpstreamError(RuntimeError):
    """A server that cannot be reached, is silent for too long, or breaks off."""


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, over plain HTTP."""

    host: str
    port: int

    @staticmethod
    def of(url: str) -> Address:
        """Raises ValueError for what is no http://host:port."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ValueError(f"{url!r} is no server: expected http://host:port")
        return Address(parts.hostname, parts.port or 80)

    def __str__(self) -> str:
        """As in a URL."""
        return f"{self.host}:{self.port}"


class Response:
    """What a server answers: status and headers, then `pieces`."""

    def __init__(
        self,
        address: Address,
        status: int,
        headers: list[tuple[bytes, bytes]],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        timeout: float,
    ) -> None:
        """timeout: seconds that a piece may take."""
        self.address, self.status, self.headers = address, status, headers
        self._reader, self._writer, self._timeout = reader, writer, timeout
        known = dict(headers)
        self._chunked = known.get(b"transfer-encoding", b"").lower() == b"chunked"
        self._length = int(known[b"content-length"]) if b"content-length" in known else None

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises UpstreamError."""
        if self._chunked:
            while size := await self._chunk_size():
                yield (await self._wait(self._reader.readexactly(size + 2)))[:-2]
            await self._wait(self._reader.readline())
            return
        left = self._length
        while left is None or left > 0:
            data = await self._wait(self._reader.read(_PIECE if left is None else min(left, _PIECE)))
            if not data:
                if left:
                    raise UpstreamError(f"{self.address} broke off")
                return
            left = None if left is None else left - len(data)
            yield data

    async def _chunk_size(self) -> int:
        line = await self._wait(self._reader.readline())
        try:
            return int(line.split(b";")[0], 16)
        except ValueError:
            raise UpstreamError(f"{self.address} broke off") from None

    async def _wait(self, reading: Awaitable[bytes]) -> bytes:
        async with _within(self.address, self._timeout):
            return await reading

    async def body(self) -> bytes:
        """All of it. Raises UpstreamError."""
        return b"".join([piece async for piece in self.pieces()])

    def close(self) -> None:
        """Nothing more is wanted."""
        self._writer.close()


async def send(
    address: Address,
    method: str,
    path: str,
    headers: Iterable[tuple[bytes, bytes]] = (),
    body: bytes = b"",
    *,
    connect_timeout: float,
    timeout: float,
) -> Response:
    """Send a request; gives the response when its head is there. Raises UpstreamError."""
    try:
        async with asyncio.timeout(connect_timeout):
            reader, writer = await asyncio.open_connection(address.host, address.port, limit=_MAX_HEAD)
    except (OSError, TimeoutError) as error:
        raise UpstreamError(f"{address} cannot be reached: {error or 'no answer'}") from None
    try:
        async with _within(address, timeout):
            lines = [f"{method} {path} HTTP/1.1\r\nhost: {address}\r\ncontent-length: {len(body)}\r\n".encode()]
            lines += [name + b": " + value + b"\r\n" for name, value in headers]
            writer.write(b"".join([*lines, b"connection: close\r\n\r\n", body]))
            await writer.drain()
            head = await reader.readuntil(b"\r\n\r\n")
        status, *rest = head[:-4].split(b"\r\n")
        pairs = [line.partition(b":")[::2] for line in rest]
        return Response(
            address,
            int(status.split()[1]),
            [(name.strip().lower(), value.strip()) for name, value in pairs],
            reader,
            writer,
            timeout,
        )
    except BaseException as error:
        writer.close()
        if isinstance(error, ValueError | IndexError | asyncio.LimitOverrunError):
            raise UpstreamError(f"{address} does not speak HTTP") from None
        raise


@contextlib.asynccontextmanager
async def _within(address: Address, seconds: float) -> AsyncIterator[None]:
    """Within: the server is waited for, and for so long."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise UpstreamError(f"{address} was silent for {seconds:g} s") from None
    except (OSError, asyncio.IncompleteReadError) as error:
        raise UpstreamError(f"{address} broke off: {type(error).__name__}") from None
