"""What open connections and streams take of memory, and that what is small does as what is not."""

from __future__ import annotations

import asyncio
import gc
import json
import tracemalloc
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from octavo.frontend.messages import Add, Updates
from octavo.request.updates import RequestUpdate
from octavo.serve.http.small import ShortQueue, SmallEvent
from paced_app import PacedApp, PacedClient
from test_turns import POST, Recorder, connect, on_a_loop, until_quiet

BODY = {"model": "octavo-tiny", "prompt": [5, 6], "max_tokens": 4, "stream": True, "return_token_ids": True}


async def kb_of_each(count: int, open_so_many: Callable[[int], Awaitable[object]]) -> float:
    """KB that each of `count` takes, by Python's own count."""
    kept = [await open_so_many(3)]  # first use of everything
    gc.collect()
    tracemalloc.start()
    try:
        kept.append(await open_so_many(count))
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / count / 1024
    finally:
        tracemalloc.stop()
        kept.clear()


@on_a_loop
async def test_a_connection_that_is_answered_takes_little_memory() -> None:
    """Its attributes were so many that each object had a dict of its own, beside three deques that stayed empty."""
    app = Recorder()
    app.may_answer.clear()

    async def open_so_many(count: int) -> object:
        connections = connect(app, count)
        for protocol, _ in connections:
            protocol.data_received(POST % 1)
        await until_quiet(app)
        return connections

    assert await kb_of_each(200, open_so_many) < 7
    app.may_answer.set()
    await until_quiet(app)


def test_a_stream_that_waits_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators for each `with`, and the last output, were kept as long as the stream was open."""
    names: list[str] = []

    def add(self: PacedClient, request: Add) -> None:
        names.extend(request.sequence_ids)
        asyncio.get_running_loop().call_soon(self.engine.engine_updates, Updates(0, [RequestUpdate(names[-1], [7])]))

    monkeypatch.setattr(PacedClient, "add", add)
    with PacedApp() as paced:
        paced._runner.run(_hold(paced, names))


async def _hold(paced: PacedApp, names: list[str]) -> None:
    events: list[bytes] = []
    tasks: list[asyncio.Task[None]] = []
    body, forever = json.dumps(BODY).encode(), asyncio.Event()

    async def send(message: Any) -> None:
        if b"token_ids" in message.get("body", b""):
            events.append(b"")

    async def one() -> None:
        asked = False

        async def receive() -> Any:
            nonlocal asked
            if asked:
                await forever.wait()
            asked = True
            return {"type": "http.request", "body": body}

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        await paced._app(scope, receive, send)

    async def open_so_many(count: int) -> object:
        wanted = len(events) + count
        tasks.extend(asyncio.create_task(one()) for _ in range(count))
        while len(events) < wanted:
            await asyncio.sleep(0)
        return None

    assert await kb_of_each(50, open_so_many) < 14.5
    paced._client.engine.engine_updates(Updates(1, [RequestUpdate(name, [8], finish_reason="stop") for name in names]))
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("kind", [SmallEvent, asyncio.Event])
@on_a_loop
async def test_a_small_event_is_an_event(kind: Callable[[], asyncio.Event]) -> None:
    event, told = kind(), list[int]()

    async def wait(index: int) -> None:
        assert await event.wait() is True
        told.append(index)

    waiters = [asyncio.create_task(wait(index)) for index in range(3)]
    await asyncio.sleep(0)
    assert not event.is_set() and not told
    waiters[1].cancel()
    event.set()
    event.clear()
    await asyncio.wait(waiters)
    assert told == [0, 2] and waiters[1].cancelled() and not event.is_set()
    late = asyncio.create_task(wait(4))
    await asyncio.sleep(0)
    assert not late.done()
    event.set()
    event.set()
    await late
    assert event.is_set() and await event.wait() is True and told == [0, 2, 4]


def test_a_short_queue_is_a_queue() -> None:
    short, long = ShortQueue[int](), deque[int]()
    for queue in (short, long):
        assert not queue
        queue.appendleft(1)
        queue.appendleft(2)
        queue.appendleft(3)
        assert (queue.pop(), queue.pop(), len(queue)) == (1, 2, 1)
        queue.clear()
    assert not short and not long
