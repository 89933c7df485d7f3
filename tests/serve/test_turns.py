"""Pipelined requests: each connection goes on by one at a time, and all of them by a few in a turn of the loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from octavo.serve.http.protocol import GuardedProtocol, guarded
from octavo.serve.http.turns import MAX_HELD_BYTES, PER_TURN
from octavo.serve.settings import ServeConfig

GET = b"GET /%d HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /%d HTTP/1.1\r\nHost: localhost\r\nContent-Length: 6\r\n\r\n\r\n\r\n\r\n"
CHUNKED = (
    b"POST /%d HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n\r\n\r\n\r\n0\r\nA: b\r\n\r\n"
)


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test whose body is a coroutine."""

    @functools.wraps(test)
    def run(*args: Any, **options: Any) -> None:
        asyncio.run(test(*args, **options))

    return run


class Pipe(asyncio.Transport):
    """What a connection is written to, and whether it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_read, self.is_closed = True, False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """It has none."""


class Recorder:
    """An application that answers each request with its path, once it may."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun.append(scope["path"])
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})


@pytest.fixture
def app() -> Recorder:
    return Recorder()


def connect(app: Recorder, count: int) -> list[tuple[GuardedProtocol, Pipe]]:
    config = uvicorn.Config(app, ws="none", lifespan="off", log_config=None)
    config.load()
    config.loaded_app = app
    kind, state = guarded(ServeConfig()), ServerState()
    connections = []
    for _ in range(count):
        protocol, pipe = kind(config=config, server_state=state, app_state={}), Pipe()
        protocol.connection_made(pipe)
        connections.append((protocol, pipe))
    return connections  # type: ignore[return-value]


async def until_quiet(app: Recorder) -> None:
    num_begun = -1
    while len(app.begun) > num_begun:
        num_begun = len(app.begun)
        for _ in range(10):
            await asyncio.sleep(0)


@on_a_loop
async def test_a_turn_takes_few_of_the_requests_that_wait(app: Recorder) -> None:
    connections = connect(app, 5 * PER_TURN)
    for protocol, _ in connections:
        protocol.data_received(b"".join(GET % i for i in range(10)))
    num_begun, grown = 0, []
    while num_begun < 10 * len(connections):
        await asyncio.sleep(0)
        grown.append(len(app.begun) - num_begun)
        num_begun = len(app.begun)
    first = next(i for i, count in enumerate(grown) if count)
    assert grown[first] == len(connections) and max(grown[first + 1 :]) <= PER_TURN
    assert app.begun[: 2 * len(connections)] == ["/0"] * len(connections) + ["/1"] * len(connections)


@pytest.mark.parametrize("form", [GET, POST, CHUNKED], ids=["get", "length", "chunks"])
@on_a_loop
async def test_a_request_is_taken_when_the_last_one_is_answered(app: Recorder, form: bytes) -> None:
    ((protocol, pipe),) = connect(app, 1)
    app.may_answer.clear()
    protocol.data_received(b"".join(form % i for i in range(20)))
    await until_quiet(app)
    assert app.begun == ["/0"] and not protocol.pipeline
    app.may_answer.set()
    await until_quiet(app)
    assert app.begun == [f"/{i}" for i in range(20)] and pipe.written.count(b"HTTP/1.1 200") == 20


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
@on_a_loop
async def test_pieces_of_any_size_are_the_same_requests(app: Recorder, size: int) -> None:
    ((protocol, pipe),) = connect(app, 1)
    data = b"".join(form % i for i, form in enumerate([GET, CHUNKED, POST, GET, POST, CHUNKED, CHUNKED, GET]))
    for at in range(0, len(data), size):
        protocol.data_received(data[at : at + size])
    await until_quiet(app)
    assert app.begun == [f"/{i}" for i in range(8)] and pipe.written.count(b"HTTP/1.1 200") == 8


@on_a_loop
async def test_a_request_is_not_taken_while_replies_are_not_read(app: Recorder) -> None:
    ((protocol, _),) = connect(app, 1)
    protocol.data_received(GET % 0 + GET % 1)
    protocol.pause_writing()
    await until_quiet(app)
    assert app.begun == ["/0"]
    protocol.resume_writing()
    await until_quiet(app)
    assert app.begun == ["/0", "/1"]


@on_a_loop
async def test_nothing_is_read_from_a_connection_that_holds_much(app: Recorder) -> None:
    ((protocol, pipe),) = connect(app, 1)
    app.may_answer.clear()
    num_requests = MAX_HELD_BYTES // len(GET % 0) + 10
    data = b"".join(GET % i for i in range(num_requests))
    protocol.data_received(data[:1000])
    assert pipe.is_read, "a client that leaves is noticed"
    protocol.data_received(data[1000:])
    assert not pipe.is_read
    protocol.flow.resume_reading()  # as whoever reads a body does
    assert not pipe.is_read
    app.may_answer.set()
    await until_quiet(app)
    assert len(app.begun) == num_requests and pipe.is_read


@on_a_loop
async def test_what_is_held_is_answered_although_the_client_says_no_more(app: Recorder) -> None:
    ((protocol, pipe),) = connect(app, 1)
    app.may_answer.clear()
    protocol.data_received(GET % 0 + GET % 1 + GET % 2 + b"\r\n")
    await until_quiet(app)
    assert protocol.eof_received()
    app.may_answer.set()
    await until_quiet(app)
    assert app.begun == ["/0", "/1", "/2"] and pipe.is_closed
    protocol.connection_lost(None)
