"""An `octavo serve` of a trainer's own, and its calls: what the adapters of this folder have in common.

`OctavoServer` starts a server, draws from it by token ids, brings it weights and stops it. Its calls wait; a trainer
that is asynchronous makes them in threads.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from octavo import rl

START_SECONDS = 600.0


def one_by_one(weights: Any, loop: asyncio.AbstractEventLoop) -> Iterator[tuple[str, torch.Tensor]]:
    """What a trainer gathers, for a thread beside `loop`: by an iterator of that loop, or by a plain one."""

    async def take() -> Any:
        return await anext(weights, last)

    last = object()
    if not hasattr(weights, "__aiter__"):
        yield from weights
        return
    while (item := asyncio.run_coroutine_threadsafe(take(), loop).result()) is not last:
        yield item


class OctavoServer:
    """A server in a process of its own, on a port that the system chose."""

    def __init__(self, model: str, *arguments: str, backend: str = "gloo") -> None:
        """`arguments`: further ones of `octavo serve`; backend: how weights come, see docs/rl.md."""
        config = json.dumps({"backend": backend})
        command = [sys.executable, "-m", "octavo", "serve", model, "--port", "0", "--weight-transfer-config", config]
        command += ["--logprobs-mode", "processed_logprobs", "--skip-tokenizer-init"]
        command += ["--generation-config", "vllm", *arguments]  # a checkpoint's own would cut draws unseen
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        found = re.search(r"http://[^ ]+:\d+", self.process.stdout.readline())
        if found is None:
            raise RuntimeError(f"octavo serve did not start: {' '.join(command)}")
        self.url = found[0]
        self.sender = rl.Sender(self.url, backend)
        self._wait()

    def generate(self, token_ids: list[int], sampling_params: dict[str, Any]) -> dict[str, Any]:
        """{"token_ids", "logprobs", "finish_reason", "weight_versions"} of one completion of a prompt."""
        reply = self.post("/inference/v1/generate", {"token_ids": token_ids, "sampling_params": sampling_params})
        (choice,) = reply["choices"]
        scores = [entry["logprob"] for entry in (choice["logprobs"] or {"content": []})["content"]]
        kept = ("token_ids", "finish_reason", "weight_versions")
        return {name: choice[name] for name in kept} | {"logprobs": scores}

    def send(self, named: torch.nn.Module | Iterable[tuple[str, torch.Tensor]], version: str | None = None) -> None:
        """A module's weights, or ones with a checkpoint's names. No cache is to be reset: blocks know their weights."""
        self.sender.send(named, version)

    def post(self, path: str, body: Any = None) -> Any:
        """The answer of a route. Raises urllib.error.HTTPError for a refusal."""
        data = json.dumps({} if body is None else body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            return json.loads(reply.read() or b"null")

    def close(self) -> None:
        """Stop it. May be called twice."""
        self.sender.close()
        self.process.terminate()
        self.process.wait()

    def _wait(self) -> None:
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/ready").close()
                return
            except (urllib.error.URLError, ConnectionError):
                if self.process.poll() is not None or time.monotonic() > until:
                    raise
                time.sleep(0.1)
