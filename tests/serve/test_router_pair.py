"""`octavo router --start-pair`: two servers that live with the router, whatever ends one of the three (D)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from patience import patient
from ports import free_port
from router_rig import SERVE, Process, until

ROLES = ("kv_producer", "kv_consumer")


def servers(router: Process) -> dict[str, int]:
    """The processes that serve, by their role."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_text().split("\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if parent == router.child.pid and "serve" in words:
            found |= {role: int(entry.name) for role in ROLES if any(role in word for word in words)}
    return found


def wait_for(fact: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + patient(60)
    while not fact():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def is_there(pid: int) -> bool:
    """Whether a process runs: a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids: dict[str, int]) -> bool:
    return not any(is_there(pid) for pid in pids.values())


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    made: list[tuple[Process, dict[str, int]]] = []

    def begin(*flags: str) -> Process:
        router = Process(tmp_path / "log", free_port(), "router", "--start-pair", *flags)
        made.append((router, {}))
        return router

    Process.command_tail = ("--", *SERVE)
    yield begin
    Process.command_tail = ()
    for router, _ in made:
        left = servers(router)
        router.kill()
        for pid in left.values():
            if is_there(pid):
                os.kill(pid, signal.SIGKILL)


def test_D_4_servers_of_the_pair_that_end_are_started_again_so_often_and_none_outlives_the_router(start):
    router = start("--health-interval", "0.1", "--max-restarts", "1")
    wait_for(lambda: "octavo router: ready" in router.log.read_text(), "both are up")
    router.wait("/ready")
    until(router, "octavo_router_server_up", 2)
    body = {"prompt": "def add(a, b):", "max_tokens": 4, "temperature": 0}
    expected = router.ask("POST", "/v1/completions", body)[1]["choices"]
    first = servers(router)
    assert sorted(first) == sorted(ROLES)
    for pid in first.values():
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: gone(first), "they are reaped")
    wait_for(lambda: len(servers(router)) == 2, "the next ones")
    until(router, "octavo_router_server_up", 2)
    assert router.ask("POST", "/v1/completions", body)[1]["choices"] == expected
    assert router.metric("octavo_router_server_restarts_total") == 2
    second = servers(router)
    os.kill(second["kv_consumer"], signal.SIGKILL)
    assert router.child.wait(patient(30)) == 1
    assert "is not started again: it failed 2 times" in router.log.read_text()
    wait_for(lambda: gone(second), "they end with the router")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT", "SIGKILL"])
def test_D_4_a_signal_to_the_router_ends_the_pair_also_while_it_starts(start, name):
    router = start()
    wait_for(lambda: len(servers(router)) == 2, "both are started")
    both = servers(router)
    wait_for(lambda: "octavo router: http" in router.log.read_text(), "it listens")
    router.child.send_signal(signal.Signals[name])
    assert router.child.wait(patient(30)) == (-signal.SIGKILL if name == "SIGKILL" else 0)
    wait_for(lambda: gone(both), "they end with the router")


def test_D_1_a_pair_that_cannot_start_ends_the_router_with_its_error_and_exit_code():
    command = [sys.executable, "-m", "octavo", "router", "--start-pair", "--port", "0", "--", "--model", "/nope"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=False)
    assert ended.returncode == 2 and "model '/nope': no such folder" in ended.stderr
    assert "server could not start (exit code 2)" in ended.stderr and "ready" not in ended.stdout


def test_C_7_a_load_that_fails_by_the_policy_is_told_as_such(tmp_path):
    ask = {"prompt": "def add(a, b):\n" * 9, "max_tokens": 12}
    transfer = {"kv_connector": "p2p", "kv_role": "kv_consumer", "kv_port": 0}
    port = free_port()
    one = Process(tmp_path / "log", port, "serve", *SERVE, "--kv-transfer-config", json.dumps(transfer))
    try:
        one.wait()
        gone = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": free_port(), "transfer_id": "x"}
        asked = {**ask, "kv_transfer_params": {**gone, "remote_num_tokens": 32}}
        status, body = one.ask("POST", "/v1/completions", asked)
        assert status == 500 and body["error"]["code"] == "kv_load_failed", body
        until(one, "octavo:kv_load_failures_total", 1)
        assert one.metric("vllm:corrupted_requests_total") == 0
        for name, value in (("remote_port", 65536), ("do_remote_prefill", "yes"), ("remote_host", ["127.0.0.1"])):
            status, body = one.ask("POST", "/v1/completions", {**ask, "kv_transfer_params": {name: value}})
            assert status == 400 and body["error"]["param"] == f"kv_transfer_params.{name}"
    finally:
        one.stop()
