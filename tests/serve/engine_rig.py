"""Engines for the tests of the front end: real, mock and broken ones, each closed when its block ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

import mock_engine
from octavo.config.engine_config import EngineConfig
from octavo.frontend.messages import FrameReader, FromEngine, Ready, Start, decode_from_engine, encode
from octavo.request.outputs import RequestOutput
from octavo.request.sampling_params import RequestOutputKind, SamplingParams
from octavo.serve.engine.async_engine import AsyncEngine
from octavo.serve.engine.client import Supervision, child_environment
from octavo.serve.engine.stream import OutputStream
from patience import patient

HERE = Path(__file__).resolve().parent
PROMPT = [20, 21, 22, 23, 24]
# An engine that is only given no processor for a while is not taken for one that hangs, but where a test is about that.
QUICK = Supervision(first_delay=0.05, max_delay=0.05, max_failures=1000, heartbeat_deadline=120, step_deadline=120)
STRICT = dataclasses.replace(QUICK, heartbeat_deadline=patient(1.5), step_deadline=patient(1.5))  # for one that hangs


def script(*options: str) -> list[str]:
    """The command of a mock engine."""
    return [*mock_engine.COMMAND, *options]


def helper(name: str, *options: str) -> list[str]:
    """The command of an engine of tests/serve."""
    return [sys.executable, str(HERE / name), *options]


@contextlib.asynccontextmanager
async def running(
    command: list[str] | None = None,
    *,
    supervision: Supervision = QUICK,
    options: dict[str, Any] | None = None,
    **config: Any,
) -> AsyncIterator[AsyncEngine]:
    """A ready engine: with `command`, else octavo-tiny. `config` is EngineConfig's, `options` are AsyncEngine's."""
    engine = await AsyncEngine.start(
        EngineConfig(**config), command=command, supervision=supervision, **(options or {})
    )
    try:
        await engine.wait_ready(patient(60))
        yield engine
    finally:
        await engine.close()


def params(max_tokens: int = 8, **fields: Any) -> SamplingParams:
    """Greedy deltas that do not end early."""
    fields = {"temperature": 0.0, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA, **fields}
    return SamplingParams(max_tokens=max_tokens, **fields)


async def read(stream: OutputStream) -> tuple[list[int], RequestOutput]:
    """All tokens of the first completion of a DELTA stream, and the last output."""
    tokens: list[int] = []
    async for output in stream:
        tokens += [token for part in output.outputs if part.index == 0 for token in part.token_ids]
    return tokens, output


def said(prompt: list[int], num_tokens: int) -> list[int]:
    """What a mock engine answers."""
    return [prompt[i % len(prompt)] for i in range(num_tokens)]


def pid_of(engine: AsyncEngine) -> int | None:
    """The engine's process, while there is one."""
    life = engine._client._life
    return None if life is None else life.process.pid


async def until(condition: Callable[[], bool], seconds: float) -> float:
    """How long it took until `condition()`. Fails if it takes longer than so many seconds of a quiet machine."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < patient(seconds), f"not within {seconds} s"
        await asyncio.sleep(0.002)
    return time.monotonic() - began


async def closes_all(num_fds: int, num_times: int) -> None:
    """Nothing is left open by what was done so often since `num_fds` were open: it would be one each time, or more.

    A library, or a thread of another test, may have opened a file meanwhile.
    """
    own = psutil.Process()
    with contextlib.suppress(AssertionError):
        await until(lambda: own.num_fds() < num_fds + num_times, 5)
    assert own.num_fds() < num_fds + num_times, _open_files()


def _open_files() -> list[str]:
    names = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own
            names.append(os.readlink(each))
    return names


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until_gone(pid: int, seconds: float) -> float:
    """How long it took. Fails if it takes longer than so many seconds of a quiet machine."""
    began = time.monotonic()
    while not is_gone(pid):
        assert time.monotonic() - began < patient(seconds), f"process {pid} is still there after {seconds} s"
        time.sleep(0.01)
    return time.monotonic() - began


class RawEngine:
    """An engine process and the bare socket to it."""

    def __init__(self, command: list[str], **config: Any) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(patient(30))
        with theirs:
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())], pass_fds=[theirs.fileno()], env=child_environment()
            )
        self._frames = FrameReader()
        self._received: list[FromEngine] = []
        self.send(Start(config))

    def send(self, *messages: Any) -> None:
        """Messages as they are, bytes as whole frames."""
        for message in messages:
            if isinstance(message, bytes):
                self.socket.sendall(len(message).to_bytes(4, "little") + message)
            else:
                self.socket.sendall(encode(message))

    def receive(self) -> FromEngine:
        """The next message."""
        while not self._received:
            data = self.socket.recv(1 << 18)
            assert data, "the engine has gone"
            self._received += [decode_from_engine(frame) for frame in self._frames.feed(data)]
        return self._received.pop(0)

    def until(self, kind: type, **fields: Any) -> Any:
        """The next message of a kind whose fields are as given."""
        while True:
            message = self.receive()
            if isinstance(message, kind) and all(getattr(message, k) == v for k, v in fields.items()):
                return message


@contextlib.contextmanager
def raw_engine(command: list[str], **config: Any) -> Iterator[RawEngine]:
    """A RawEngine that is ready."""
    raw = RawEngine(command, **config)
    try:
        raw.until(Ready)
        yield raw
    finally:
        raw.socket.close()
        raw.process.kill()
        raw.process.wait()
