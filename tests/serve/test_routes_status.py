"""The routes that generate nothing, and what surrounds those that do: health, drain, clients that leave, logs."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import octavo
from octavo.config.settings import ConfigError
from octavo.serve.settings import ServeConfig
from octavo.serve.state import HEALTH_STEP_SECONDS, ServeState
from patience import patient
from server_rig import SRC, RunningServer, StartServer

LONG = {"model": "octavo-tiny", "prompt": "say it again", "max_tokens": 2000, "ignore_eos": True}


def paced(start_server: StartServer, *argv: str, seconds: float = 0.05, **more: str) -> RunningServer:
    """The mock engine with steps that take some time. `more`: of its environment."""
    path = os.pathsep.join([str(SRC), str(Path(__file__).parent)])
    return start_server(*argv, mock="paced_engine", env={"PACE": str(seconds), "PYTHONPATH": path, **more})


def wait_for(condition: Any, seconds: float = 5) -> float:
    """Seconds until `condition()` holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < patient(seconds)
        time.sleep(0.01)
    return time.monotonic() - began


def metric(server: RunningServer, name: str) -> float:
    """A value of /metrics without labels but the usual."""
    for line in server.get("/metrics").body.decode().splitlines():
        if line.startswith((f"{name}{{", f"{name} ")):
            return float(line.split()[-1])
    raise AssertionError(f"no {name}")


def test_models(server: RunningServer) -> None:
    (card,) = server.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("octavo-tiny", "model", 2048)
    assert server.get("/v1/models/octavo-tiny").json() == card
    reply = server.get("/v1/models/gpt-4")
    assert (reply.status, reply.json()["error"]["code"]) == (404, "model_not_found")


def test_small_routes(server: RunningServer) -> None:
    wait_for(lambda: (server.get("/health").status, server.get("/health").body) == (200, b""))
    wait_for(lambda: server.get("/ready").json() == {"status": "ready"})
    assert server.get("/version").json() == {"version": octavo.__version__}
    assert server.get("/load").json() == {"server_load": 0}
    assert server.get("/metrics").headers["content-type"].startswith("text/plain")
    assert metric(server, "vllm:num_requests_running") == 0


def test_metrics_count_every_request_once(start_server: StartServer) -> None:
    server = start_server("--dtype", "float32", mock=False)
    body = {"model": "octavo-tiny", "prompt": [[5, 6, 7], [8]], "n": 2, "max_tokens": 3, "ignore_eos": True}
    usage = server.post("/v1/completions", body).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 12)
    forbidden = {"structured_outputs": {"regex": "abc"}, "allowed_token_ids": [5], "prompt": [5], "n": 1}
    assert server.post("/v1/completions", body | forbidden).status == 400
    for name, value in (
        ("prompt_tokens_total", 4),
        ("generation_tokens_total", 12),
        ("request_prompt_tokens_count", 3),
        ("request_params_n_sum", 5),
        ("time_to_first_token_seconds_count", 2),
        ("corrupted_requests_total", 0),
    ):
        assert metric(server, f"vllm:{name}") == value, name


def test_S_12_metrics_tell_drafts_and_each_of_their_places(start_server: StartServer) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3}
    server = start_server("--dtype", "float32", "--speculative-config", json.dumps(config), mock=False)
    body = {"model": "octavo-tiny", "prompt": [5, 6, 7] * 8, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    assert server.post("/v1/completions", body).status == 200
    wait_for(lambda: metric(server, "vllm:spec_decode_num_drafts_total") > 0)
    lines = server.get("/metrics").body.decode().splitlines()
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total{"
    found = [line.partition('position="')[2].partition('"')[0] for line in lines if line.startswith(name)]
    assert found == ["0", "1", "2"]
    told = server.get("/server_info?config_format=json").json()["vllm_config"]["speculative_config"]
    assert told["method"] == "ngram" and told["num_speculative_tokens"] == 3 and told["model"] is None


def test_tokenizer_routes(server: RunningServer) -> None:
    made = server.post("/tokenize", {"prompt": "hello world", "return_token_strs": True}).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"]) and made["max_model_len"] == 2048
    assert "".join(made["token_strs"]) == "hello world"
    assert server.post("/detokenize", {"tokens": made["tokens"]}).json() == {"prompt": "hello world"}
    info = server.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|endoftext|>" and {"bos_token", "pad_token", "chat_template"} <= set(info)


def test_the_page_may_be_left_out(mock_server: RunningServer, start_server: StartServer) -> None:
    reply = mock_server.get("/")
    assert reply.status == 200 and reply.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert start_server("--disable-page").get("/").status == 404


def test_the_prefix_cache_is_reset_when_nothing_runs(start_server: StartServer) -> None:
    server = paced(start_server)
    assert server.post("/reset_prefix_cache", {}).status == 200
    with Client(server, LONG | {"stream": True}) as client:
        client.read_event()
        reply = server.post("/reset_prefix_cache", {})
        assert (reply.status, reply.json()["error"]["code"]) == (409, "busy")


class Client:
    """A request whose answer is read bit by bit, or not at all."""

    def __init__(self, server: RunningServer, body: Any, path: str = "/v1/completions") -> None:
        self.connection = http.client.HTTPConnection(server.host, server.port, timeout=patient(30))
        self.connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        self.response: http.client.HTTPResponse | None = None

    def read_event(self) -> str:
        if self.response is None:
            self.response = self.connection.getresponse()
        line = self.response.readline().decode().strip()
        while line == "" and not self.response.isclosed():
            line = self.response.readline().decode().strip()
        return line

    def leave(self) -> None:
        """With a reset, as a process that dies."""
        if self.connection.sock is not None:
            self.connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if self.response is not None:
            self.response.close()
        self.connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(start_server: StartServer, stream: bool) -> None:
    server = paced(start_server, "--log-level", "info")
    with Client(server, LONG | {"stream": stream, "n": 2, "prompt": ["a", "b"]}) as client:
        if stream:
            client.read_event()
        wait_for(lambda: server.get("/load").json() == {"server_load": 1})
        wait_for(lambda: metric(server, "vllm:num_requests_running") == 4)
    wait_for(lambda: server.get("/load").json() == {"server_load": 0})
    wait_for(lambda: metric(server, "vllm:num_requests_running") == 0, 2)
    assert metric(server, "vllm:kv_cache_usage_perc") == 0
    assert "status=499" in server.stderr()


def test_a_client_that_leaves_with_a_second_request_in_the_pipe(start_server: StartServer) -> None:
    server = paced(start_server)
    body = json.dumps(LONG).encode()
    one = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body)
    )
    with socket.create_connection((server.host, server.port)) as connection:
        connection.sendall((one + body) * 2)
        wait_for(lambda: server.get("/load").json() == {"server_load": 1})
    wait_for(lambda: server.get("/load").json() == {"server_load": 0}, 2)
    wait_for(lambda: metric(server, "vllm:num_requests_running") == 0, 2)


def test_an_idle_stream_shows_life(start_server: StartServer) -> None:
    server = paced(start_server, "--keep-alive-interval", "0.1", seconds=1.0)
    with Client(server, LONG | {"stream": True}) as client:
        lines = [client.read_event() for _ in range(3)]
        assert ": keep-alive" in lines
        while not lines[-1].startswith("data: "):
            lines.append(client.read_event())
        assert json.loads(lines[-1][6:])["choices"][0]["text"]


def test_a_request_may_live_so_long(start_server: StartServer) -> None:
    server = paced(start_server, "--request-timeout", "0.4", seconds=0.005)
    reply = server.post("/v1/completions", LONG)
    assert (reply.status, reply.json()["error"]["code"]) == (504, "timeout")
    events: list[Any] = []
    while len(events) <= 2:  # a machine that is slow may give it no step in that time
        events = server.post("/v1/completions", LONG | {"stream": True}).events()
        assert events[-1]["error"]["code"] == "timeout" and "[DONE]" not in events


def test_a_full_queue_says_when_to_come_back(start_server: StartServer) -> None:
    server = paced(start_server, "--max-num-seqs", "1", "--max-num-queued-reqs", "2")
    clients = [Client(server, LONG) for _ in range(3)]
    try:
        wait_for(lambda: server.get("/load").json() == {"server_load": 3})
        reply = server.post("/v1/completions", LONG)
        assert (reply.status, reply.json()["error"]["code"]) == (503, "overloaded")
        assert int(reply.headers["retry-after"]) >= 1
        server.wait_ready(path="/health")
        some = server.post("/v1/completions", LONG | {"prompt": ["a", "b"]})
        assert some.status == 503 and server.get("/load").json() == {"server_load": 3}
    finally:
        for client in clients:
            client.leave()
    wait_for(lambda: metric(server, "vllm:num_requests_running") == 0)
    assert server.post("/v1/completions", LONG | {"max_tokens": 1}).status == 200


def test_what_no_queue_could_take_is_a_mistake_and_not_to_be_sent_again(start_server: StartServer) -> None:
    server = paced(start_server, "--max-num-seqs", "1", "--max-num-queued-reqs", "2", "--max-num-queued-tokens", "8")
    body = LONG | {"max_tokens": 1}
    for fields, setting in (
        ({"prompt": ["a", "b"], "n": 2}, "max_num_queued_reqs 2"),
        ({"prompt": [[1] * 5, [2] * 4]}, "max_num_queued_tokens"),
    ):
        reply = server.post("/v1/completions", body | fields)
        error = reply.json()["error"]
        assert (reply.status, error["code"], error["param"]) == (400, "too_many_prompts", "prompt")
        assert setting in error["message"]
    for fields in ({"n": 4}, {"prompt": [1] * 9}, {"prompt": [[1] * 5, [2] * 3]}):
        assert server.post("/v1/completions", body | fields).status == 200


def test_sigterm_lets_requests_end(start_server: StartServer, tmp_path: Path) -> None:
    """The running one ends by itself, a new one is refused, the exit code is 0."""
    gate = tmp_path / "gate"  # it runs until the new one was refused
    server = paced(start_server, seconds=0.2, GATE=str(gate))
    replies = []
    body = LONG | {"max_tokens": 200}
    thread = threading.Thread(target=lambda: replies.append(server.post("/v1/completions", body)))
    thread.start()
    wait_for(lambda: server.get("/load").json() == {"server_load": 1})
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: server.get("/ready").status == 503)
    refused = server.post("/v1/completions", body)
    assert (refused.status, refused.json()["error"]["code"]) == (503, "draining")
    assert refused.headers["connection"] == "close"
    gate.touch()
    thread.join()
    assert replies[0].status == 200 and replies[0].json()["usage"]["completion_tokens"] == 200
    assert server.process.wait(patient(10)) == 0


def test_a_drain_has_an_end_and_a_second_signal_is_at_once(start_server: StartServer) -> None:
    server = paced(start_server, "--drain-seconds", "0.3")
    with Client(server, LONG | {"stream": True}) as client:
        client.read_event()
        server.process.send_signal(signal.SIGTERM)
        lines = [client.read_event()]
        while "error" not in lines[-1]:
            lines.append(client.read_event())
        assert json.loads(lines[-1][6:])["error"]["code"] == "draining"
        assert server.process.wait(patient(10)) == 0
    impatient = paced(start_server, "--drain-seconds", "60")
    with Client(impatient, LONG | {"stream": True}) as client:
        client.read_event()
        impatient.process.send_signal(signal.SIGINT)
        wait_for(lambda: impatient.get("/ready").status == 503)
        began = time.monotonic()
        impatient.process.send_signal(signal.SIGINT)
        lines = [client.read_event()]
        while "error" not in lines[-1]:
            lines.append(client.read_event())
        assert json.loads(lines[-1][6:])["error"]["code"] == "draining"
        assert impatient.process.wait(patient(10)) == 0 and time.monotonic() - began < 60
    assert "1 open requests have 60 s to end; a second Ctrl-C or SIGTERM ends them at once" in impatient.stderr()


def test_at_the_end_who_is_slow_is_told_or_cut(start_server: StartServer) -> None:
    """A body that does not come, and a stream that nobody reads, hold up no stop, and are no errors of ours."""
    server = start_server("--drain-seconds", "0.2")
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    body = json.dumps(LONG | {"stream": True, "n": 8, "logprobs": 20}).encode()
    with socket.create_connection((server.host, server.port)) as half, socket.socket() as deaf:
        half.sendall(head + b"100\r\n\r\n{")
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect((server.host, server.port))
        deaf.sendall(head + b"%d\r\n\r\n" % len(body) + body)
        wait_for(lambda: metric(server, "vllm:generation_tokens_total") > 1000)
        server.process.send_signal(signal.SIGTERM)
        half.settimeout(patient(10))
        reply = b"".join(iter(lambda: half.recv(65536), b""))
        assert reply.startswith(b"HTTP/1.1 503") and b'"draining"' in reply
        assert server.process.wait(patient(10)) == 0
    assert "Traceback" not in server.stderr()


def test_health_is_progress() -> None:
    """A busy engine whose steps do not follow each other is not healthy, an idle one is; silence is not."""
    state = object.__new__(ServeState)
    engine = SimpleNamespace(state="ready", last_heartbeat_age=0.1, step_age=0.1)
    state.engine = engine  # type: ignore[assignment]
    assert state.healthy
    engine.step_age = HEALTH_STEP_SECONDS + 1
    assert not state.healthy
    engine.step_age = HEALTH_STEP_SECONDS - 1
    assert state.healthy
    engine.last_heartbeat_age = 3.0
    assert not state.healthy
    engine.last_heartbeat_age, engine.state = 0.1, "restarting"
    assert not state.healthy


def test_logs_are_json_lines_without_prompts(start_server: StartServer) -> None:
    server = start_server("--log-format", "json", "--log-level", "debug")
    canary = "canary-7f3a"
    body = {"model": "octavo-tiny", "prompt": canary, "max_tokens": 2, "stop": [canary], "cache_salt": canary}
    server.post("/v1/completions", body, headers={"X-Request-Id": "mine-1"})
    server.post("/v1/completions", body | {"temperature": 9, canary: 1})
    server.post(f"/{canary}", {})
    wait_for(lambda: server.stderr().count("status") >= 3)
    entries = [json.loads(line) for line in server.stderr().splitlines()]
    (entry,) = [entry for entry in entries if entry.get("request_id") == "mine-1"]
    assert entry["status"] == 200 and entry["route"] == "/v1/completions" and entry["output_tokens"] == 2
    assert {"time", "level", "ms", "client", "method"} <= set(entry)
    assert canary not in server.stderr()


def test_a_unix_socket_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    config = ServeConfig(uds=str(path))
    from octavo.serve.server import listen

    with listen(config):
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match="Address already in use"):
            listen(config)
    assert path.is_socket(), "as a server that was killed leaves it"
    with listen(config), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    path.unlink()
    path.write_text("a file of the user's")
    with pytest.raises(ConfigError, match="Address already in use"):
        listen(config)
    assert path.read_text()
