"""The whole front end in this process, on an engine whose steps come when a random number generator says so."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from mock_engine import packed
from octavo.config.engine_config import EngineConfig
from octavo.frontend.messages import Add, EngineInfo, EngineStats, Updates
from octavo.plan import TokenLogprobs
from octavo.request.updates import RequestUpdate
from octavo.serve.app import create_app
from octavo.serve.engine.async_engine import AsyncEngine
from octavo.serve.engine.given_weights import GivenWeights
from octavo.serve.settings import ServeConfig
from octavo.startup.frontend import find_and_read, load_frontend

Script = Callable[[Add, int], tuple[Sequence[int], str]]  # of completion i: its tokens, and the reason of its end


class PacedClient:
    """What AsyncEngine talks to. `rng` decides which sequences a step serves and how many steps arrive at once."""

    num_restarts = 0

    script: Script
    rng: random.Random

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.stats, self.weights = EngineStats(), GivenWeights()
        self.tasks: list[asyncio.Task[None]] = []

    @property
    def last_heartbeat(self) -> float:
        return time.monotonic()

    def add(self, request: Add) -> None:
        self.tasks.append(asyncio.create_task(self._play(request)))

    def abort(self, sequence_ids: list[str]) -> None:
        """What is still told of them is told to nobody."""

    def take_untold(self, sequence_ids: Iterable[str]) -> list[RequestUpdate]:
        return []

    async def _play(self, add: Add) -> None:
        rng, ids, script = self.rng, add.sequence_ids, self.script
        left = {i: list(_updates(add, i, *script(add, i))) for i in range(len(ids))}
        while left:
            serves = [i for i in left if rng.random() < 0.7] or [next(iter(left))]
            self.engine.engine_updates(Updates(0, [left[i].pop(0) for i in serves]))
            left = {i: rest for i, rest in left.items() if rest}
            for _ in range(rng.choice([0, 0, 1, 3, 20])):
                await asyncio.sleep(0)


def _updates(add: Add, index: int, tokens: Sequence[int], reason: str) -> Iterable[RequestUpdate]:
    prompt, params, name = add.prompt_token_ids, add.params, add.sequence_ids[index]
    if params.prompt_logprobs is not None and index == 0:
        entries = [_entry(token, params.prompt_logprobs) for token in prompt[1:]]
        half = len(entries) // 2
        for part in (entries[:half], entries[half:]):
            yield RequestUpdate(name, prompt_logprobs=packed(part))
    for at, token in enumerate(tokens):
        logprobs = [] if params.logprobs is None else [_entry(token, params.logprobs)]
        ends = reason if at == len(tokens) - 1 and reason in ("stop", "length") else None
        yield RequestUpdate(name, [token], logprobs, finish_reason=ends)
    if reason not in ("stop", "length"):
        yield RequestUpdate(name, finish_reason="error", error=reason)


def _entry(token: int, num_top: int) -> TokenLogprobs:
    ids = [token, *range(300, 300 + num_top)]
    return TokenLogprobs(ids, [-0.5 * at for at, _ in enumerate(ids)], list(range(1, len(ids) + 1)))


class PacedApp:
    """One front end for all requests of a test, each at a pace of its own. Closed like a file."""

    def __init__(self, engine: EngineConfig | None = None, **config: Any) -> None:
        self._runner = asyncio.Runner()
        self._runner.run(self._start(engine or EngineConfig(), ServeConfig(access_log=False, **config)))

    async def _start(self, engine_config: EngineConfig, config: ServeConfig) -> None:
        folder, arch = find_and_read(engine_config)
        front = load_frontend(engine_config, folder, arch)
        engine = AsyncEngine(engine_config, arch, max_num_queued_reqs=1024, max_num_queued_tokens=None)
        engine.default_sampling = front.default_sampling
        self._client = PacedClient(engine)
        engine.connect(self._client, front.tokenizer)  # type: ignore[arg-type]
        engine.engine_up(
            EngineInfo(
                device="paced",
                dtype="none",
                attention_backend="none",
                vocab_size=arch.vocab_size,
                max_model_len=4096,
                max_logprobs=20,
                max_num_seqs=64,
                max_num_batched_tokens=2048,
                enable_prefix_caching=True,
                block_size=16,
                num_blocks=100,
            )
        )
        self._app = create_app(engine, config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._app.close())
        self._runner.close()

    def ask(self, path: str, body: Any, script: Script, seed: int = 0) -> tuple[int, bytes]:
        """Status and body of one request, whose reader is as slow as `seed` says."""
        return self._runner.run(self._ask(path, body, script, random.Random(seed)))

    async def _ask(self, path: str, body: Any, script: Script, rng: random.Random) -> tuple[int, bytes]:
        self._client.script, self._client.rng = script, rng
        status, received = 0, b""
        asked = False

        async def receive() -> Any:
            nonlocal asked
            if asked:
                await asyncio.Event().wait()
            asked = True
            return {"type": "http.request", "body": json.dumps(body).encode()}

        async def send(message: Any) -> None:
            nonlocal status, received
            status = message.get("status", status)
            received += message.get("body", b"")
            for _ in range(rng.choice([0, 0, 1, 2, 200])):
                await asyncio.sleep(0)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "client": ("127.0.0.1", 1)}
        await self._app(scope, receive, send)
        await asyncio.gather(*self._client.tasks)
        self._client.tasks.clear()
        return status, received

    def events(self, path: str, body: Any, script: Script, seed: int) -> list[Any]:
        """The events of a stream, without what names an answer or a time."""
        status, received = self.ask(path, body | {"stream": True}, script, seed)
        assert status == 200, received
        found = []
        for line in received.decode().split("\n\n"):
            data = line.rpartition("data: ")[2]
            if data and data != "[DONE]":
                event = json.loads(data)
                found.append({name: event[name] for name in event if name not in ("id", "created", "item_id")})
        return found
