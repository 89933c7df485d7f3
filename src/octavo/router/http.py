"""A client's side of HTTP/1.1, as far as a proxy needs it: one request, a response in pieces as they come.

Owns connections, which serve one exchange each. Knows neither routes nor engines. Invariants: every wait has a deadline
and an error that names the server; closing a Response, at any moment, closes its connection, so that the server stops;
cutting a server's lines ends every wait for it at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Iterable
from typing import TypeVar
from urllib.parse import urlsplit

from octavo.config.settings import ConfigError

_MAX_HEAD = 1 << 16  # bytes
_PIECE = 1 << 16
T = TypeVar("T")


class UpstreamError(RuntimeError):
    """A server that cannot be reached, is silent for too long, or breaks off."""

    def __init__(self, message: str, *, was_sent: bool = True) -> None:
        """was_sent: the server may have seen the request."""
        super().__init__(message)
        self.was_sent = was_sent


@dataclasses.dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, over plain HTTP."""

    host: str
    port: int

    @staticmethod
    def of(field: str, url: str) -> Address:
        """`field`: the setting that names it. Raises ConfigError for what is no http://host:port."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:  # a port that is none
            parts, port = urlsplit(""), None
        extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None
        if parts.scheme != "http" or not parts.hostname or not port or extra or not url.isprintable():
            raise ConfigError(field, url, "must name a server that speaks plain HTTP: http://host:port")
        return Address(parts.hostname, port)

    def __str__(self) -> str:
        """As in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Lines:
    """The connections that are open to one server."""

    def __init__(self) -> None:
        """There is none."""
        self._open: set[Line] = set()

    def add(self, line: Line) -> None:
        """A connection was made."""
        self._open.add(line)

    def discard(self, line: Line) -> None:
        """It is closed."""
        self._open.discard(line)

    def cut(self, reason: str) -> None:
        """Whoever waits for the server hears at once that it is in vain."""
        for line in list(self._open):
            line.cut(reason)


class Line:
    """One connection to a server."""

    def __init__(
        self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, lines: Lines
    ) -> None:
        """It is there until it is closed."""
        self.address, self.reader = address, reader
        self._writer, self._lines, self._cut = writer, lines, ""
        lines.add(self)

    async def send(self, data: bytes, seconds: float) -> None:
        """Send all. Raises UpstreamError."""
        self._writer.write(data)
        await self.within(self._writer.drain(), seconds)

    async def within(self, waiting: Awaitable[T], seconds: float) -> T:
        """Wait for the server, and for so long. Raises UpstreamError."""
        try:
            async with asyncio.timeout(seconds):
                return await waiting
        except TimeoutError:
            raise UpstreamError(f"{self.address} was silent for {seconds:g} s") from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise self.broken(type(error).__name__) from None

    def broken(self, how: str) -> UpstreamError:
        """Why nothing more comes."""
        return UpstreamError(self._cut or f"{self.address} broke off: {how}")

    @property
    def is_cut(self) -> bool:
        """Whether it was ended from here."""
        return bool(self._cut)

    def cut(self, reason: str) -> None:
        """End every wait."""
        self._cut = reason
        self._writer.transport.abort()

    def close(self) -> None:
        """Nothing more is wanted. May be called twice."""
        self._lines.discard(self)
        self._writer.close()


class Response:
    """What a server answers: status and headers, then `pieces`."""

    def __init__(
        self, line: Line, status: int, headers: list[tuple[bytes, bytes]], timeout: float, *, has_body: bool = True
    ) -> None:
        """timeout: seconds that a piece may take. has_body: something follows the head."""
        self.status, self.headers = status, headers
        self._line, self._timeout = line, timeout
        known = dict(headers)
        self.is_stream = known.get(b"content-type", b"").lower().startswith(b"text/event-stream")
        self._chunked = known.get(b"transfer-encoding", b"").lower() == b"chunked"
        self._length = int(known[b"content-length"]) if b"content-length" in known else None
        if not has_body:  # whatever the head says of its length
            self._chunked, self._length, self.is_stream = False, 0, False

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises UpstreamError."""
        reader = self._line.reader
        if self._chunked:
            while size := await self._chunk_size():
                yield (await self._wait(reader.readexactly(size + 2)))[:-2]
            await self._wait(reader.readline())
            return
        left = self._length
        while left is None or left > 0:
            data = await self._wait(reader.read(_PIECE if left is None else min(left, _PIECE)))
            if not data and left is None and not self._line.is_cut:
                return
            if not data:
                raise self._line.broken("before its end")
            left = None if left is None else left - len(data)
            yield data

    async def _chunk_size(self) -> int:
        try:
            line = await self._wait(self._line.reader.readline())
            return int(line.split(b";")[0], 16)
        except ValueError:
            raise self._line.broken("before its end") from None

    async def _wait(self, reading: Awaitable[bytes]) -> bytes:
        return await self._line.within(reading, self._timeout)

    async def body(self) -> bytes:
        """All of it. Raises UpstreamError."""
        return b"".join([piece async for piece in self.pieces()])

    def close(self) -> None:
        """Nothing more is wanted."""
        self._line.close()


async def connect(address: Address, lines: Lines, seconds: float) -> Line:
    """A connection to a server. Raises UpstreamError."""
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(address.host, address.port, limit=_MAX_HEAD)
    except (OSError, TimeoutError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else f"no answer within {seconds:g} s"
        raise UpstreamError(f"{address} cannot be reached: {why}", was_sent=False) from None
    return Line(address, reader, writer, lines)


async def send(
    address: Address,
    method: str,
    path: str,
    headers: Iterable[tuple[bytes, bytes]] = (),
    body: bytes = b"",
    *,
    lines: Lines,
    connect_timeout: float,
    timeout: float,
) -> Response:
    """Send a request; gives the response when its head is there. Raises UpstreamError."""
    line = await connect(address, lines, connect_timeout)
    try:
        said = [f"{method} {path} HTTP/1.1\r\nhost: {address}\r\ncontent-length: {len(body)}\r\n".encode()]
        said += [name + b": " + value + b"\r\n" for name, value in headers]
        await line.send(b"".join([*said, b"connection: close\r\n\r\n", body]), timeout)
        head = await line.within(line.reader.readuntil(b"\r\n\r\n"), timeout)
        status, *rest = head[:-4].split(b"\r\n")
        pairs = [each.partition(b":")[::2] for each in rest]
        said_back = [(name.strip().lower(), value.strip()) for name, value in pairs]
        return Response(line, int(status.split()[1]), said_back, timeout, has_body=method != "HEAD")
    except BaseException as error:
        line.close()
        if isinstance(error, ValueError | IndexError | asyncio.LimitOverrunError):
            raise UpstreamError(f"{address} does not speak HTTP") from None
        raise
