"""Leaving: what becomes of a move whose client has left.

Owns which calls of the core each task has made. Knows no HTTP. Invariants: a move of which the core has not begun the
first call is dropped, and changes nothing; a meeting or a receive that waits for a trainer is cut short; whatever else
has begun is carried out to its end, as if its client were there.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from concurrent.futures import Future

_WAITING = frozenset({"init_weight_transfer_engine", "update_weights"})  # calls that may wait for a trainer


class Leaving:
    """One engine's. All of it is used on one event loop."""

    def __init__(self, withdraw: Callable[[Future[bytes]], None]) -> None:
        """`withdraw`: see EngineClient.withdraw."""
        self._withdraw = withdraw
        self._calls: weakref.WeakKeyDictionary[asyncio.Task[object], list[tuple[str, Future[bytes]]]]
        self._calls = weakref.WeakKeyDictionary()
        self._left: set[asyncio.Task[object]] = set()  # whose moves go on

    async def answered(self, name: str, answer: Future[bytes]) -> bytes:
        """What a call of the running task is answered with."""
        task = asyncio.current_task()
        assert task is not None, "a call is awaited by a task"
        calls = self._calls.setdefault(task, [])
        calls.append((name, answer))
        if task in self._left and name in _WAITING:
            self._withdraw(answer)
        return await asyncio.wrap_future(answer)

    def leave(self, task: asyncio.Task[object]) -> None:
        """The client has left whose move the task makes."""
        if task.done():
            return
        self._left.add(task)
        task.add_done_callback(self._left.discard)
        calls = self._calls.get(task, [])
        if calls and (len(calls) == 1 or calls[-1][0] in _WAITING):
            self._withdraw(calls[-1][1])
