"""Turns: of the requests that wait on their connections, which are taken next.

Owns what was received and not yet taken, per connection, and the line of the connections that may go on. Knows no
HTTP beyond where a request may end. Invariants: in one turn of the event loop a connection goes on by one request, and
all of them by `PER_TURN`; what a connection holds is bounded, since nothing is read from one that holds too much.
"""

from __future__ import annotations

import asyncio
import collections
import re
from collections.abc import Callable
from typing import cast

from uvicorn.protocols.http.flow_control import FlowControl

from octavo.serve.http.small import SmallEvent

PER_TURN = 8  # requests that had to wait: others' turn comes after some ms
MAX_HELD_BYTES = 64 << 10  # and what one more reading brings
_BLANK_LINE = re.compile(rb"\n\r?\n")  # ends every head and every chunked body


class Turns:
    """The line of one server's connections."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._line: collections.deque[Callable[[], None]] = collections.deque()

    def ask(self, go_on: Callable[[], None]) -> None:
        """Have `go_on` called in a later turn of the loop, behind those who asked before."""
        if not self._line:
            asyncio.get_running_loop().call_soon(self._turn)
        self._line.append(go_on)

    def _turn(self) -> None:
        due = [self._line.popleft() for _ in range(min(PER_TURN, len(self._line)))]
        if self._line:
            asyncio.get_running_loop().call_soon(self._turn)
        for go_on in due:
            go_on()


class Held:
    """Bytes of one connection that were received and not yet taken."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        """None are there."""
        self._bytes = bytearray()

    def __len__(self) -> int:
        """Number of bytes."""
        return len(self._bytes)

    @property
    def is_full(self) -> bool:
        """Whether nothing more is to be read."""
        return len(self._bytes) > MAX_HELD_BYTES

    def add(self, data: bytes) -> None:
        """Bytes were received."""
        self._bytes += data

    def piece(self, num_left: int | None) -> bytes:
        """Take bytes that end where a request ends, if not before.

        `num_left`: of a body with a length; None where a blank line tells the end.
        """
        end = len(self._bytes)
        if num_left is not None:
            end = min(max(num_left, 1), end)
        elif blank := _BLANK_LINE.search(self._bytes):
            end = blank.end()
        data = bytes(self._bytes[:end])
        del self._bytes[:end]
        return data

    def clear(self) -> None:
        """Forget all."""
        self._bytes.clear()


class Flow(FlowControl):
    """uvicorn's flow control of a connection that holds bytes: full, it is not read, whoever would like to."""

    def __init__(self, transport: asyncio.Transport, held: Held) -> None:
        """`held`: what the connection holds."""
        super().__init__(transport)
        self._is_writable_event = cast(asyncio.Event, SmallEvent(is_set=True))
        self._held = held

    def resume_reading(self) -> None:
        """Read on, unless too much is held."""
        if not self._held.is_full:
            super().resume_reading()
