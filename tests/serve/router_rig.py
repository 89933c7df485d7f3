"""Commands of octavo's as processes, for tests of the router: started, asked, killed, and started again."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from patience import patient

SERVE = ["--model", "octavo-tiny", "--dtype", "float32", "--max-model-len", "512"]


class Process:
    """A command of octavo's that listens on a port."""

    command_tail: tuple[str, ...] = ()  # what stands behind the port

    def __init__(self, log: Path, port: int, *argv: str) -> None:
        self.port, self.log = port, log
        self._command = [sys.executable, "-m", "octavo", *argv, "--port", str(port), *self.command_tail]
        self.start()

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.child = subprocess.Popen(self._command, stdout=log, stderr=log, env=dict(os.environ))

    def ask(self, method: str, path: str, body: Any = None, timeout: float = 60.0) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=patient(timeout))
        with contextlib.closing(connection):
            given = body if body is None or isinstance(body, bytes) else json.dumps(body)
            connection.request(method, path, given, {"content-type": "application/json"})
            response = connection.getresponse()
            data = response.read()
            is_json = response.getheader("content-type", "").startswith("application/json")
            return response.status, json.loads(data) if is_json and data else data.decode()

    def wait(self, path: str = "/ready", timeout: float = 60.0) -> None:
        deadline = time.monotonic() + patient(timeout)
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if self.ask("GET", path)[0] == 200:
                    return
            assert self.child.poll() is None, self.log.read_text()
            time.sleep(0.05)
        raise AssertionError(self.log.read_text())

    def kill(self) -> None:
        """At once, and with it the engine, which ends with whom it serves."""
        self.child.kill()
        self.child.wait()

    def stop(self) -> None:
        self.child.send_signal(signal.SIGTERM)
        self.child.wait(patient(30))

    def metric(self, name: str) -> float:
        text = self.ask("GET", "/metrics")[1]
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith((name + "{", name + " ")))


def server(folder: Path, role: str, port: int, *flags: str, **more: Any) -> Process:
    transfer = {"kv_connector": "p2p", "kv_role": role, "kv_port": 0, "kv_transfer_timeout": 2}
    transfer |= {"kv_load_failure_policy": "recompute", **more}
    own = ["--kv-transfer-config", json.dumps(transfer)]
    return Process(folder / f"{role}.log", port, "serve", *SERVE, *own, *flags)


def until(process: Process, name: str, value: float) -> None:
    deadline = time.monotonic() + patient(20)
    while process.metric(name) != value:
        assert time.monotonic() < deadline, f"{name} is {process.metric(name)}"
        time.sleep(0.05)


def until_at_least(process: Process, name: str, value: float) -> None:
    """An engine's figures come with its next heartbeat, which may be behind an answer."""
    deadline = time.monotonic() + patient(20)
    while process.metric(name) < value:
        assert time.monotonic() < deadline, f"{name} is {process.metric(name)}"
        time.sleep(0.02)


def until_held(process: Process) -> None:
    """Blocks are held, as its last heartbeat says."""
    deadline = time.monotonic() + patient(20)
    while process.metric("vllm:kv_cache_usage_perc") == 0.0:
        assert time.monotonic() < deadline, "no blocks are held"
        time.sleep(0.05)


def settled(*servers: Process) -> None:
    """All blocks are back."""
    for process in servers:
        until(process, "vllm:kv_cache_usage_perc", 0.0)
