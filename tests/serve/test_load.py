"""Many streams at once, and many requests after another, through the real front end and a mock engine.

The small sizes run always and can fail; the large ones are slow and give the figures, which they print.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from octavo.bench.http_client import Client, HttpError
from octavo.bench.serve import Stream
from octavo.bench.serve_data import Sample
from octavo.bench.serve_result import percentile
from patience import patient
from server_rig import SRC, RunningServer

HERE = Path(__file__).resolve().parent
_PROBE = """
import http.client, json, select, sys, time
connection, times = http.client.HTTPConnection(sys.argv[1], timeout=300), []
while not select.select([sys.stdin], [], [], 0.02)[0]:
    began = time.perf_counter()
    connection.request("GET", "/health")
    answer = connection.getresponse()
    answer.read()
    times.append((time.perf_counter() - began) * 1000 if answer.status == 200 else 1e9)
print(json.dumps(times))
"""


@contextmanager
def _health_times(server: RunningServer) -> Iterator[list[float]]:
    """Milliseconds of /health, asked all the time by another process; filled when the block ends."""
    command = [sys.executable, "-c", _PROBE, f"{server.host}:{server.port}"]
    times: list[float] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield times
        finally:
            times += json.loads(process.communicate("")[0])


@dataclasses.dataclass
class State:
    """What a server holds at one moment."""

    front_bytes: int
    engine_bytes: int
    num_fds: int
    num_tasks: float
    num_open: float
    num_free_blocks: float


def _state(server: RunningServer) -> State:
    front = psutil.Process(server.process.pid)
    lines = dict(line.rpartition(" ")[::2] for line in server.get("/metrics").body.decode().splitlines())
    figures = {name.partition("{")[0]: float(value) for name, value in lines.items() if name.startswith("octavo:")}
    return State(
        front.memory_info().rss,
        sum(child.memory_info().rss for child in front.children(recursive=True)),
        front.num_fds(),
        figures["octavo:num_tasks"],
        figures["octavo:num_requests_open"],
        figures["octavo:num_free_blocks"],
    )


def _settled(server: RunningServer, base: State, seconds: float = 10) -> State:
    """The state once what belongs to requests is gone; it fails if that does not happen."""
    began = time.monotonic()
    while True:
        state = _state(server)
        clean = state.num_open == 0 and state.num_free_blocks == base.num_free_blocks
        if clean and state.num_fds <= base.num_fds and state.num_tasks <= base.num_tasks:
            return state
        assert time.monotonic() - began < patient(seconds), f"left over: {state}; it began with {base}"
        time.sleep(0.3)


def _paced(step_seconds: float, gate: Path) -> RunningServer:
    environment = {"PYTHONPATH": os.pathsep.join((str(SRC), str(HERE))), "PACE": str(step_seconds), "GATE": str(gate)}
    return RunningServer(mock="paced_engine", env=environment).wait_ready()


class Held:
    """Streams that are open at the same time; each is to say its prompt again."""

    def __init__(self, client: Client, num_tokens: int) -> None:
        self.client, self.num_tokens, self.num_started = client, num_tokens, 0
        self.errors: list[str] = []

    async def one(self, index: int) -> None:
        prompt = [100 + index % 3000, 200 + index % 1000]
        body = {
            "model": "octavo-tiny",
            "prompt": prompt,
            "max_tokens": self.num_tokens,
            "stream": True,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True},
        }
        stream, pieces = Stream(Sample(prompt, 2, self.num_tokens)), list[bytes]()

        def take(data: bytes, now: float) -> bool:
            self.num_started += not pieces
            pieces.append(data)
            return stream.feed(data, now)

        try:
            response = await self.client.request("POST", "/v1/completions", json.dumps(body).encode(), on_body=take)
        except HttpError as error:
            self.errors.append(str(error))
            return
        error = stream.finish(response.status).error
        events = [each[6:] for each in b"".join(pieces).split(b"\n\n") if each.startswith(b"data: {")]
        ids = [token for each in events for choice in json.loads(each)["choices"] for token in choice["token_ids"]]
        if error or ids != (prompt * self.num_tokens)[: self.num_tokens]:
            self.errors.append(error or f"{len(ids)} tokens, or not the right ones")


async def _hold(
    server: RunningServer, num_streams: int, num_tokens: int, held_open: Callable[[], object] = int
) -> tuple[State, list[str], float]:
    """Open streams together; then `held_open`.

    Returns the server's state while all are open, the errors, and the seconds it took.
    """
    client = Client(server.url)
    held = Held(client, num_tokens)
    began = time.perf_counter()
    tasks = [asyncio.create_task(held.one(index)) for index in range(num_streams)]
    while held.num_started < num_streams and not held.errors:
        await asyncio.sleep(0.05)
        assert time.perf_counter() - began < patient(120), f"{held.num_started} of {num_streams} streams began"
    state = await asyncio.to_thread(_state, server)
    held_open()
    await asyncio.gather(*tasks)
    await client.close()
    return state, held.errors, time.perf_counter() - began


def _streams(num_streams: int, num_tokens: int, step_seconds: float, gate: Path) -> dict[str, float]:
    """gate: a path; where it may be written to, streams end soon once all are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < num_streams + 100:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, num_streams + 1000), hard))
    with _paced(step_seconds, gate) as server:
        asyncio.run(_hold(server, 20, 4))  # first use of everything
        base = _state(server)
        opens = gate.touch if gate.parent.exists() else int
        with _health_times(server) as times:
            full, errors, seconds = asyncio.run(_hold(server, num_streams, num_tokens, opens))
        assert not errors, f"{len(errors)} of {num_streams} failed: {errors[:3]}"
        assert full.num_open == num_streams
        after = _settled(server, base)
    return {
        "streams": num_streams,
        "seconds": seconds,
        "chunks_s": num_streams * num_tokens / seconds,
        "front_kb_per_stream": (full.front_bytes - base.front_bytes) / num_streams / 1024,
        "engine_kb_per_stream": (full.engine_bytes - base.engine_bytes) / num_streams / 1024,
        "health_p50_ms": percentile(times, 50),
        "health_p99_ms": percentile(times, 99),
        "health_asked": len(times),
        "front_mb_after": after.front_bytes / 2**20,
    }


def _show(name: str, figures: dict[str, float]) -> None:
    print(f"\n{name}: " + ", ".join(f"{key} {value:.1f}" for key, value in figures.items()))


def test_a_hundred_streams_at_once(tmp_path: Path) -> None:
    figures = _streams(100, 80, 0.1, tmp_path / "all are open")
    _show("streams", figures)
    assert figures["health_p99_ms"] < patient(1000)  # the slow test is the strict one


@pytest.mark.slow
def test_two_thousand_streams_at_once() -> None:
    figures = _streams(2000, 24, 1.0, Path("/nowhere/gate"))
    _show("streams", figures)
    assert figures["front_kb_per_stream"] < 25 and figures["engine_kb_per_stream"] < 5
    assert figures["health_p99_ms"] < 100


class Mixed:
    """Requests of all kinds, a share of them dropped at a random moment."""

    MODEL = "octavo-tiny"

    def __init__(self, client: Client, seed: int) -> None:
        self.client, self.rng = client, random.Random(seed)
        self.num_aborted = 0
        self.statuses: dict[int, int] = {}

    def _body(self) -> tuple[str, dict[str, Any], int]:
        """(path, body, expected status)."""
        rng = self.rng
        prompt = [rng.randrange(10, 4000) for _ in range(rng.choice((1, 3, 20, 200)))]
        length = rng.choice((1, 4, 16, 60))
        messages = [{"role": "user", "content": "word " * rng.choice((1, 10, 50))}]
        kinds: list[tuple[str, dict[str, Any], int]] = [
            ("/v1/completions", {"prompt": prompt, "max_tokens": length}, 200),
            ("/v1/completions", {"prompt": prompt, "max_tokens": length, "logprobs": 2, "echo": True}, 200),
            ("/v1/completions", {"prompt": [prompt, prompt[:1]], "max_tokens": length, "n": 2}, 200),
            ("/v1/completions", {"prompt": "a text", "max_tokens": length, "stop": ["text"]}, 200),
            ("/v1/chat/completions", {"messages": messages, "max_tokens": length}, 200),
            ("/v1/chat/completions", {"messages": messages, "max_tokens": length, "logprobs": True}, 200),
            ("/v1/completions", {"prompt": prompt, "max_tokens": length, "temperature": -1}, 400),
            ("/v1/chat/completions", {"messages": [], "max_tokens": 1}, 400),
            ("/v1/completions", {"prompt": [5000], "max_tokens": 1}, 400),
            ("/tokenize", {"prompt": "some text"}, 200),
        ]
        path, body, status = rng.choice(kinds)
        if path != "/tokenize" and rng.random() < 0.5:
            body["stream"] = not body.get("echo", False)
        return path, {"model": self.MODEL, **body}, status

    async def one(self) -> None:
        rng = self.rng
        path, body, expected = self._body()
        aborted = rng.random() < 0.2
        num_pieces = rng.randrange(4)
        count = 0

        def take(data: bytes, now: float) -> bool:
            nonlocal count
            count += 1
            assert b'"error":{' not in data
            return not aborted or count <= num_pieces

        encoded = json.dumps(body).encode()
        asked = asyncio.ensure_future(self.client.request("POST", path, encoded, on_body=take))
        if aborted:
            self.num_aborted += 1
            await asyncio.wait([asked], timeout=rng.random() * 0.02)
            if not asked.done():
                asked.cancel()
                await asyncio.gather(asked, return_exceptions=True)
                return
        status = (await asked).status
        self.statuses[status] = self.statuses.get(status, 0) + 1
        assert status == expected, (status, path, body)

    async def run(self, count: int, at_once: int) -> None:
        left = iter(range(count))

        async def worker() -> None:
            for _ in left:
                await self.one()

        await asyncio.gather(*(worker() for _ in range(at_once)))


def _soak(count: int, rounds: int, at_once: int, show: Callable[[str, dict[str, float]], None]) -> list[State]:
    """Rounds of mixed requests; the state of the idle server before the first and after each."""
    # few blocks, so that the prefix cache is full, and no longer grows, after the first round
    with RunningServer("--num-gpu-blocks-override", "4096", mock=True).wait_ready() as server:

        async def run(seed: int, number: int) -> Mixed:
            client = Client(server.url)
            mixed = Mixed(client, seed)
            await mixed.run(number, at_once)
            await client.close()
            return mixed

        asyncio.run(run(0, 200))
        time.sleep(0.5)
        states = [_state(server)]
        for index in range(rounds):
            began = time.perf_counter()
            mixed = asyncio.run(run(index + 1, count // rounds))
            seconds = time.perf_counter() - began
            states.append(_settled(server, states[0]))
            figures = {"requests": count // rounds, "aborted": mixed.num_aborted, "per_s": count / rounds / seconds}
            memory = {"front_mb": states[-1].front_bytes / 2**20, "engine_mb": states[-1].engine_bytes / 2**20}
            show(f"round {index + 1}", figures | memory | {"fds": states[-1].num_fds, "tasks": states[-1].num_tasks})
            assert set(mixed.statuses) == {200, 400} and mixed.num_aborted > count / rounds / 10
        assert server.process.poll() is None
    return states


def test_some_mixed_requests_leave_nothing_behind() -> None:
    _soak(400, 1, 16, _show)


@pytest.mark.slow
def test_twenty_thousand_mixed_requests_leave_nothing_behind() -> None:
    states = _soak(20_000, 5, 32, _show)
    early, late = states[2], states[-1]  # the first rounds are warm-up
    assert late.front_bytes - early.front_bytes < 4 << 20
    assert late.engine_bytes - early.engine_bytes < 4 << 20
