"""What every open connection has, in fewer bytes than the standard library's.

Owns SmallEvent and ShortQueue, which stand in for asyncio.Event and collections.deque where uvicorn has one a
connection: a deque takes 760 bytes, empty or not, and nearly all of these stay empty. Knows no HTTP. Invariant: who
uses them sees no difference.
"""

from __future__ import annotations

import asyncio
from typing import Generic, Literal, TypeVar

_T = TypeVar("_T")


class SmallEvent:
    """asyncio.Event, for a waiter or two."""

    __slots__ = ("_is_set", "_waiters")

    def __init__(self, is_set: bool = False) -> None:
        """`is_set`: whether it has happened."""
        self._is_set = is_set
        self._waiters: list[asyncio.Future[None]] | None = None

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._is_set

    def set(self) -> None:
        """Let it have happened: whoever waits goes on."""
        self._is_set = True
        for waiter in self._waiters or ():
            if not waiter.done():
                waiter.set_result(None)

    def clear(self) -> None:
        """Let it not have happened."""
        self._is_set = False

    async def wait(self) -> Literal[True]:
        """Until it has happened."""
        if self._is_set:
            return True
        waiter = asyncio.get_running_loop().create_future()
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            self._waiters.remove(waiter)
            if not self._waiters:
                self._waiters = None
        return True


class ShortQueue(list[_T], Generic[_T]):
    """What of a deque uvicorn uses, for an entry or two."""

    __slots__ = ()

    def appendleft(self, entry: _T) -> None:
        """Add an entry in front."""
        self.insert(0, entry)
