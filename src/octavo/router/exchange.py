"""A client's request to the router, and the reply to it.

Owns what is sent, and when an answer has begun. Knows no server. Invariants: an answer begins with its first word, and
until then it may come from another server; a stream that has begun ends in order or with an error event; a client that
leaves, or takes nothing for too long, is let go.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from octavo.router.http import Response

_MAX_BODY = 64 << 20
_DROPPED = {b"host", b"content-length", b"connection", b"transfer-encoding", b"keep-alive", b"accept-encoding"}
_OWN = _DROPPED | {b"date", b"server"}  # of a reply: uvicorn says them
_SERVERS_FAULTS = ("server_error", "unavailable_error", "timeout_error")  # types of errors
_END = b"\n\n"
_FAILED = b"event: response.failed"  # the first of two events by which a response fails
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Refused(RuntimeError):
    """What a client is told instead of an answer, or at the end of one that breaks off."""

    def __init__(self, status: int, code: str, message: str) -> None:
        """As OpenAI's errors."""
        super().__init__(message)
        self.status, self.code = status, code


class ClientLeftError(Exception):
    """There is nobody to answer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, or the only event of a stream that failed before its first word."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    is_stream: bool = False

    @property
    def is_final(self) -> bool:
        """Whether its server says that another try would be in vain."""
        return dict(self.headers).get(b"x-should-retry") == b"false"


class Exchange:
    """See the module."""

    def __init__(self, scope: Scope, receive: Receive, send_event: Send, patience: float) -> None:
        """patience: seconds that the client may take for anything."""
        self._receive, self._send_event, self._patience = receive, send_event, patience
        self.method, self.path = str(scope["method"]), str(scope["path"])
        query = scope.get("query_string", b"").decode("latin-1")
        self.target = self.path + (f"?{query}" if query else "")
        self.headers = [(name, value) for name, value in scope["headers"] if name not in _DROPPED]
        self.has_spoken = False  # a word of the answer was passed on
        self._has_begun = False  # its head was
        self._has_ended = False

    async def body(self) -> bytes:
        """All of it. Raises Refused for one that is too long or too slow, ClientLeftError."""
        data = bytearray()
        while True:
            try:
                async with asyncio.timeout(self._patience):
                    event = await self._receive()
            except TimeoutError:
                raise Refused(408, "body_timeout", f"the body did not go on for {self._patience:g} s") from None
            if event["type"] == "http.disconnect":
                raise ClientLeftError
            data += event.get("body", b"")
            if len(data) > _MAX_BODY:
                raise Refused(413, "too_large", f"the body is longer than {_MAX_BODY} bytes")
            if not event.get("more_body"):
                return bytes(data)

    async def gone(self) -> None:
        """Until the client goes away."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def forward(self, response: Response) -> Answer | None:
        """Pass a response on: a whole one when it is whole, a stream as it comes. Raises UpstreamError.

        Gives the answer of a server that failed before the first word, which is not passed on.
        """
        headers = [(name, value) for name, value in response.headers if name not in _OWN]
        if not response.is_stream:
            answer = Answer(response.status, headers, await response.body())
            if answer.status >= 500:
                return answer
            await self.give(answer)
            return None
        held = bytearray()
        async for piece in response.pieces():
            held += piece
            if self.has_spoken:
                await self._say_whole(held)
                continue
            while held.startswith(b":") and _END in held:  # signs of life are no words
                await self._begin(response.status, headers)
                comment, _, held = held.partition(_END)
                await self._say(bytes(comment) + _END)
            if _END not in held:
                continue
            first, _, rest = bytes(held).partition(_END)
            if first.startswith(_FAILED):  # the event behind it says whose fault that is
                if _END not in rest:
                    continue
                first = rest.partition(_END)[0]
            if _is_failure(first):
                return Answer(response.status, headers, bytes(held), is_stream=True)
            await self._begin(response.status, headers)
            self.has_spoken = True
            await self._say_whole(held)
        await self._begin(response.status, headers)
        await self._end(bytes(held))
        return None

    async def give(self, answer: Answer) -> None:
        """Pass a whole answer on; as the last event, where a stream has begun."""
        if self._has_begun:
            await self._end(answer.body if answer.is_stream else b"data: " + answer.body + _END)
            return
        length = [] if answer.is_stream else [(b"content-length", b"%d" % len(answer.body))]
        await self._begin(answer.status, [*answer.headers, *length])
        await self._end(answer.body)

    async def reply(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
        """A reply of the router's own."""
        await self.give(Answer(status, [(b"content-type", content_type)], body))

    async def refuse(self, error: Refused) -> None:
        """Say why not, or why not more."""
        if self._has_ended:
            return
        said = {"message": str(error), "type": "router_error", "param": None, "code": error.code}
        again = [(b"retry-after", b"1")] if error.status == 503 else []
        headers = [(b"content-type", b"application/json"), *again]
        await self.give(Answer(error.status, headers, json.dumps({"error": said}).encode()))

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if not self._has_begun:
            self._has_begun = True
            await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _say(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        await asyncio.sleep(0)  # a client that has left is noticed between two pieces

    async def _say_whole(self, held: bytearray) -> None:
        """Say the events that are whole: behind half of one nobody would understand that its server is gone."""
        size = held.rfind(_END) + len(_END)
        if size >= len(_END):
            data = bytes(held[:size])
            del held[:size]
            await self._say(data)

    async def _end(self, data: bytes = b"") -> None:
        self._has_ended = True
        await self._send({"type": "http.response.body", "body": data})

    async def _send(self, event: MutableMapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await self._send_event(event)
        except (TimeoutError, OSError):
            raise ClientLeftError from None


def _is_failure(event: bytes) -> bool:
    """Whether an event tells that the server failed."""
    if not event.startswith(b'data: {"error"'):
        return False
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return json.loads(event[len(b"data: ") :])["error"]["type"] in _SERVERS_FAULTS
    return False
