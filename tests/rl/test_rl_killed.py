"""RL.W8: a trainer that is killed at any point of an update: the server serves the weights that it says, in time."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.rl import Sender, WeightSource
from patience import patient
from rl_rig import TINY
from weights_rig import answers, give, other_weights, prompts

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serve"))

from server_rig import RunningServer

TIMEOUT = 3.0  # seconds that a meeting and a receive may take
SCRIPT = Path(__file__).with_name("loop_sender.py")
ASKED = prompts(40)
BODY: dict[str, Any] = {
    "token_ids": ASKED[0]["prompt_token_ids"],
    "sampling_params": {"max_tokens": 6, "seed": 5, "logprobs": 0, "ignore_eos": True},
}


class Trainer:
    """A process of loop_sender.py."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, str(SCRIPT), url, str(TIMEOUT)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)

    def expect(self, word: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == word

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="module")
def right() -> dict[str, tuple[list[int], list[float]]]:
    """What each set of weights answers."""
    found = {}
    with LLM(TINY, dtype="bfloat16", max_model_len=256, weight_transfer_config={"backend": "disk"}) as llm:
        found["default"] = answers(llm, ASKED)[0]
        for seed in (1, 2):
            give(llm, other_weights(seed))
            found[str(seed)] = answers(llm, ASKED)[0]
    return found


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = f'{{"backend": "gloo", "timeout": {TIMEOUT}}}'
    with RunningServer("--dtype", "bfloat16", "--max-model-len", "256", "--weight-transfer-config", config) as made:
        yield made.wait_ready()


def _check(server: RunningServer, right: dict[str, tuple[list[int], list[float]]]) -> str:
    """The version that answered, in its own bits."""
    choice = server.post("/inference/v1/generate", BODY).json()["choices"][0]
    (span,) = choice["weight_versions"]
    told = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert (choice["token_ids"], told) == right[span["version"]], span
    return str(span["version"])


@pytest.mark.slow
@pytest.mark.parametrize("num_times", [20])
def test_rl_w8_a_trainer_killed_at_any_moment(
    server: RunningServer, right: dict[str, tuple[list[int], list[float]]], num_times: int
) -> None:
    """While it meets, starts, sends or finishes; nobody's answer is of two sets of weights, and the next one comes."""
    rng, longest, before = random.Random(num_times), 0.0, _check(server, right)
    seen: list[str] = []
    for turn in range(num_times):
        trainer = Trainer(server.url)
        try:
            trainer.expect("ready")
            trainer.go()
            if turn % 2:  # killed in an update that is not the first: they have met
                trainer.expect("sent")
                before = "1"
                trainer.go()
            time.sleep(rng.random() * (0.03 if turn % 2 else 0.08))  # as long as an update takes, or a meeting and one
        finally:
            trainer.kill()
        began = time.monotonic()
        found = _check(server, right)
        took = time.monotonic() - began
        longest = max(longest, took)
        state = server.get("/weight_info").json()["state"]
        assert found in (before, "2" if turn % 2 else "1")
        seen.append(f"{before}->{found} {state} {took:.2f} s")
        if state != "ready":
            ended = server.post("/abort_weight_update", {})  # 409: by itself meanwhile, with the trainer's connection
            assert ended.status in (200, 409) and server.get("/weight_info").json()["state"] == "ready", ended.body
        before = _check(server, right)
    print(f"longest answer behind a kill: {longest:.2f} s; {', '.join(seen)}")
    assert longest < patient(TIMEOUT + 2)
    sender = Sender(server.url, "gloo", timeout=TIMEOUT)
    for seed in (2, 1):
        sender.send(WeightSource(other_weights(seed)), str(seed))
        assert _check(server, right) == str(seed)
    sender.close()
