"""Two prefill servers, two decode servers and a router, killed and stopped at random places under load (D.4).

`python -m pytest -m slow -s tests/serve/test_router_kills.py` makes 200 kills; KILLS=40 in the environment, 40.
"""

from __future__ import annotations

import collections
import http.client
import json
import math
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from patience import patient
from ports import free_port
from router_rig import Process, server, settled, until, until_at_least

NUM_KILLS, NUM_CLIENTS = int(os.environ.get("KILLS", "200")), 4
WAYS = ("SIGKILL", "SIGSTOP")
LONGEST_STOP = 4.0  # seconds; more than --health-timeout
HEALTH = ("--health-interval", "0.2", "--health-timeout", "1.5", "--connect-timeout", "1.5")
# Three tries of each phase, each as long as it takes to see that a server is down, and waits for blocks; and a router
# that stands still meanwhile.
DEADLINE = 6 * (0.2 + 1.5 + 1.5) + 3 * 2.0 + 2 * LONGEST_STOP
PROMPTS = [f"def number_{index}(a, b):\n    return " * 9 for index in range(6)]
BASE = {"max_tokens": 24, "temperature": 0.8, "seed": 7, "logprobs": 1}
WORDS = {"temperature": 0.8, "seed": 7, "max_output_tokens": 60, "ignore_eos": True}
IDS = [3 + (7 * index) % 200 for index in range(90)]
THEIRS = {"temperature": 0.8, "sampling_seed": 7, "max_new_tokens": 24, "ignore_eos": True}
ASKED: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/completions", {**BASE, "prompt": prompt}) for prompt in PROMPTS),
    *(("/v1/completions", {**BASE, "prompt": prompt, "stream": True, "max_tokens": 60}) for prompt in PROMPTS),
    ("/v1/completions", {**BASE, "prompt": PROMPTS[:3]}),
    ("/v1/completions", {**BASE, "prompt": "x", "temperature": 0.0}),
    ("/v1/responses", {**WORDS, "input": PROMPTS[0]}),
    *(("/v1/responses", {**WORDS, "input": prompt, "stream": True}) for prompt in PROMPTS[1:4]),
    ("/inference/v1/generate", {"token_ids": IDS, "sampling_params": BASE}),
    ("/inference/v1/generate", {"token_ids": IDS[1:], "sampling_params": {**BASE, "max_tokens": 60}, "stream": True}),
    ("/generate", {"text": PROMPTS[2:4], "sampling_params": THEIRS}),
]


class Cluster:
    """The servers and the router, and who is down at the moment."""

    def __init__(self, folder: Path) -> None:
        self.prefill = [self._server(folder, "kv_producer", index) for index in range(2)]
        self.decode = [self._server(folder, "kv_consumer", index) for index in range(2)]
        urls = [part for each in self.prefill for part in ("--prefill", f"http://127.0.0.1:{each.port}")]
        urls += [part for each in self.decode for part in ("--decode", f"http://127.0.0.1:{each.port}")]
        self.router = Process(folder / "router.log", free_port(), "router", *urls, *HEALTH)
        self.kinds = {"prefill": self.prefill, "decode": self.decode, "router": [self.router]}
        self.everybody = [*self.prefill, *self.decode, self.router]
        self.at_work: set[Process] = set()  # that nobody kills at the moment
        self.num_router_kills = 0
        self.done = collections.Counter[str]()
        self._mending: list[threading.Thread] = []
        self._is_closed = False
        self._broken: str | None = None  # why one that was killed has not come back

    @staticmethod
    def _server(folder: Path, role: str, index: int) -> Process:
        own = folder / str(index)
        own.mkdir(exist_ok=True)
        return server(own, role, free_port())

    def wait(self) -> None:
        """Until all serve."""
        for thread in self._mending:
            thread.join()
        for each in self.everybody:
            each.wait("/health" if each is self.router else "/ready", timeout=120)
        until(self.router, "octavo_router_server_up", 4)
        self.at_work = set(self.everybody)

    def hurt(self, dice: random.Random) -> None:
        """Kill one of a kind that is drawn first, or let it stand still; it comes back by itself.

        Until one of the kind is at work nobody else is hurt: the router comes back soonest, and would be hit most.
        """
        role = dice.choice(list(self.kinds))
        both = dice.random() < 0.1  # else one of a kind goes on
        while not (likely := [each for each in self.kinds[role] if self._may_hurt(each, both)]):
            assert self._broken is None, self._broken
            time.sleep(0.01)
        victim = dice.choice(likely)
        self.at_work.discard(victim)
        kills = dice.random() < 0.5
        seconds, whole = dice.uniform(0.05, LONGEST_STOP), dice.random() < 0.7
        self.done[f"{WAYS[not kills]} {role}"] += 1
        if kills:
            self.num_router_kills += victim is self.router
            victim.kill()
            mend = threading.Thread(target=self._start_again, args=(victim,))
        else:
            stopped = [victim.child.pid, *(children(victim.child.pid) if whole else ())]
            signal_all(stopped, signal.SIGSTOP)
            mend = threading.Thread(target=self._go_on, args=(victim, stopped, seconds))
        mend.start()
        self._mending.append(mend)

    def _may_hurt(self, victim: Process, both: bool) -> bool:
        alike = next(kind for kind in self.kinds.values() if victim in kind)
        return victim in self.at_work and (both or self.at_work.issuperset(alike))

    def _start_again(self, victim: Process) -> None:
        if self._is_closed:
            return
        try:
            victim.start()
            victim.wait("/health" if victim is self.router else "/ready", timeout=120)
        except Exception as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise
        self.at_work.add(victim)

    def _go_on(self, victim: Process, stopped: list[int], seconds: float) -> None:
        time.sleep(seconds)
        signal_all(stopped, signal.SIGCONT)
        self.at_work.add(victim)

    def close(self) -> None:
        self._is_closed = True
        for each in self.everybody:
            each.kill()


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def children(pid: int) -> list[int]:
    """The processes that it has started."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        made.wait()
        yield made
    finally:
        made.close()


class Client:
    """Asks one thing after the other, each until it is answered, and notes what it hears."""

    def __init__(self, cluster: Cluster, expected: list[Any], seed: int) -> None:
        self.cluster, self.expected = cluster, expected
        self.dice = random.Random(seed)
        self.heard = collections.Counter[str]()
        self.wrong: list[str] = []
        self.longest = 0.0

    def run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            index = self.dice.randrange(len(ASKED))
            for _ in range(1000):
                began, kills, was_there = time.monotonic(), self.cluster.num_router_kills, self._router_is_there
                try:
                    outcome = self._try(index)
                except (OSError, http.client.HTTPException) as error:
                    seconds = time.monotonic() - began
                    by_router = self.cluster.num_router_kills != kills or not (was_there and self._router_is_there)
                    outcome = "cut by the router's end" if by_router and seconds < patient(DEADLINE) else "lost"
                    if outcome == "lost":
                        self.wrong.append(f"{index} after {seconds:.1f} s: {type(error).__name__} {error}")
                self.longest = max(self.longest, time.monotonic() - began)
                self.heard[outcome] += 1
                if outcome == "answered":
                    break
                time.sleep(0.1)
            else:
                self.wrong.append(f"{index} was never answered")

    @property
    def _router_is_there(self) -> bool:
        return self.cluster.router in self.cluster.at_work

    def _try(self, index: int) -> str:
        path, asked = ASKED[index]
        status, body = self.cluster.router.ask("POST", path, asked, timeout=DEADLINE)
        if status == 503:
            return "503"
        if status != 200:
            self.wrong.append(f"{index}: {status} {body}")
            return "another status"
        if not asked.get("stream"):
            if content(body) != self.expected[index]:
                self.wrong.append(f"{index}: {body}")
            return "answered"
        text, end = read_events(body)
        want = self.expected[index]
        if (end == "done" and text == want) or (end == "error" and want.startswith(text)):
            return "answered" if end == "done" else "error event"
        self.wrong.append(f"{index}: {end} {text!r} for {want!r}")
        return "another stream"


def read_events(body: str) -> tuple[str, str]:
    """The text, or the ids, of a stream, and how it ended."""
    text, end = "", "cut"
    for line in body.splitlines():
        if line == "data: [DONE]":
            end = "done"
        elif line.startswith("data: "):
            event = json.loads(line[6:])
            end = "error" if event.get("error") else end
            end = "done" if event.get("type") in ("response.completed", "response.incomplete") else end
            text += event["delta"] if event.get("type") == "response.output_text.delta" else ""
            for choice in event.get("choices", ()):
                text += choice["text"] if "text" in choice else "".join(f"{token} " for token in choice["token_ids"])
    return text, end


def content(body: Any) -> Any:
    """What of a whole answer does not depend on who gave it, and when."""
    if isinstance(body, list):
        return [(each["text"], each["output_ids"]) for each in body]
    return body["choices"] if "choices" in body else [part["text"] for part in body["output"][-1]["content"]]


def plain(process: Process, asked: dict[str, Any], path: str = "/v1/completions") -> Any:
    """What one engine alone answers."""
    status, body = process.ask("POST", path, asked)
    assert status == 200, body
    return read_events(body)[0] if asked.get("stream") else content(body)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_D_4_D_8_kills_at_random_places_lose_no_request_and_all_comes_back(cluster: Cluster) -> None:
    expected = [plain(cluster.decode[0], asked, path) for path, asked in ASKED]
    clients = [Client(cluster, expected, seed) for seed in range(NUM_CLIENTS)]
    stop, dice, began = threading.Event(), random.Random(NUM_KILLS), time.monotonic()
    threads = [threading.Thread(target=client.run, args=(stop,)) for client in clients]
    for thread in threads:
        thread.start()
    try:
        for _ in range(NUM_KILLS):
            cluster.hurt(dice)
            time.sleep(dice.uniform(0.0, 1.0))
    finally:
        cluster.wait()
        stop.set()
        for thread in threads:
            thread.join()
    heard = sum((client.heard for client in clients), collections.Counter[str]())
    longest = max(client.longest for client in clients)
    print(f"\n{dict(cluster.done)} in {time.monotonic() - began:.0f} s; {dict(heard)}; longest {longest:.1f} s")
    wrong = [each for client in clients for each in client.wrong]
    assert not wrong, wrong[:5]
    third, deviation = NUM_KILLS / 3, math.sqrt(NUM_KILLS * 2 / 9)
    for kind in cluster.kinds:
        assert abs(sum(cluster.done[f"{way} {kind}"] for way in WAYS) - third) < 4 * deviation, cluster.done
    assert heard["answered"] > NUM_KILLS
    settled(*cluster.prefill, *cluster.decode)
    for first in cluster.prefill:  # both sides have met again
        for second in cluster.decode:
            asked = {**BASE, "prompt": f"of {first.port} and {second.port}: " + PROMPTS[0]}
            hits = second.metric("vllm:external_prefix_cache_hits_total")
            given = {**asked, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
            told = first.ask("POST", "/v1/completions", given)[1]["kv_transfer_params"]
            assert plain(second, {**asked, "kv_transfer_params": told}) == plain(first, asked)
            until_at_least(second, "vllm:external_prefix_cache_hits_total", hits + 65)
    settled(*cluster.prefill, *cluster.decode)
