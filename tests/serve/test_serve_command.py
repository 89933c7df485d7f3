"""`octavo serve`: what it refuses to start with, in one line and with exit code 2, and what it starts with."""

from __future__ import annotations

import http.client
import os
import resource
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.config.settings import ConfigError
from octavo.serve.server import with_open_files
from octavo.serve.settings import ServeConfig, load_both
from patience import patient
from server_rig import PATHS, SRC, RunningServer, StartServer

_SERVE = """import sys; from octavo.serve.server import main
sys.exit(main(sys.argv[1:], engine_module="mock_engine"))"""


def refuse(*argv: str) -> str:
    """The one line of a start that is refused."""
    result = subprocess.run(
        [sys.executable, "-m", "octavo", "serve", *argv],
        capture_output=True,
        text=True,
        timeout=patient(30),
        env={"PYTHONPATH": str(SRC), "PATH": os.environ["PATH"]},
    )
    assert result.returncode == 2, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("octavo: error: "), result.stderr
    return lines[0]


@pytest.mark.parametrize(
    "argv, wanted",
    [
        (["--prot", "1"], "did you mean --port"),
        (["--port", "1", "--port", "x"], "port='x'"),
        (["--ssl-keyfil", "x"], "did you mean --ssl-keyfile?"),
        (["--ssl-keyfile", "x"], "give both --ssl-certfile and --ssl-keyfile"),
        (["--ssl-keyfile", "/no/key", "--ssl-certfile", "/no/cert"], "cannot be used with ssl_keyfile"),
        (["--tensor-parallel-size", "2"], "an engine of Octavo uses one device; leave it out, or give 1"),
        (["--lora-modules", "a=b", "c=d"], "there are no LoRA adapters"),
        (["--speculative-config.method", "ngrams"], "did you mean ngram?"),
        (["--kv-transfer-config", '{"kv_connector": "p2p", "kv_role": "both"}'], "kv_role='both': must be one of"),
        (["--kv-transfer-config", '{"kv_connector": "p2", "kv_role": "kv_both"}'], "unknown: known are"),
        (["--reasoning-parser", "no-such"], "reasoning_parser='no-such'"),
        (["--reasoning-end-text", "so</think>"], "has no reasoning"),
        (["--reasoning-parser", "qwen3", "--reasoning-end-text", "so"], "must end with </think>"),
        (["--root-path", "api/"], "must begin with a slash"),
        (["--port", "65536"], "from 0 to 65535"),
        (["--port", "x"], "whole number"),
        (["--drain-seconds", "0"], "greater than 0"),
        (["--log-format", "xml"], "text, json"),
        (["octavo-tiny", "octavo-tiny"], "one model"),
        (["octavo-tiny", "--model", "octavo-tiny"], "one model"),
        (["--port", "0", "--max-model-len", "1000000"], "positions"),
        (["--block-size", "24"], "8 or a multiple of 16"),
        (["--tool-call-parser", "no-such"], "tool_call_parser"),
        (["--chat-template", "/no/such/file"], "cannot be read"),
        (["--served-model-name", "name", "no-such-model-anywhere/y"], "no-such-model-anywhere/y"),
        (
            ["--served-model-name", "a", "--cors-origins", "http://b", "no-such-model-anywhere/z"],
            "no-such-model-anywhere/z",
        ),
        (["no-such-model-anywhere/x"], "no-such-model-anywhere"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
    ],
)
def test_refused_starts(argv: list[str], wanted: str) -> None:
    assert wanted in refuse(*argv)


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "Address already in use" in refuse("--port", str(taken.getsockname()[1]))


def test_yaml_holds_settings_of_both(tmp_path: Path, start_server: StartServer) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("max-model-len: 512\nserved-model-name: tiny\nmax_prompts: 1\n")
    server = start_server("--config", str(path), "--max-prompts", "3")
    card = server.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"]) == ("tiny", 512)
    assert server.post("/v1/completions", {"model": "tiny", "prompt": ["a"] * 3, "max_tokens": 1}).status == 200
    path.write_text("max_prompt: 1\n")
    assert "did you mean max_prompts" in refuse("--config", str(path))
    path.write_text("port: !!python/object:os.system 1\n")
    assert "tags" in refuse("--config", str(path))


def test_settings_come_in_layers(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("port: 1\ndrain_seconds: 2\n")
    environ = {"OCTAVO_API_KEY": "k" * 16}
    _, serve = load_both({}, {"port": "3"}, path, environ)
    assert (serve.port, serve.drain_seconds, serve.has_key) == (3, 2.0, True)
    assert "kkk" not in repr(serve)
    with pytest.raises(ConfigError, match="hidden") as refusal:
        load_both({}, {}, None, {"OCTAVO_API_KEY": "a secret in words"})
    assert "secret in" not in str(refusal.value)


@pytest.mark.parametrize("host, fine", [("127.0.0.1", True), ("::1", True), ("localhost", True), ("192.0.2.1", False)])
def test_only_loopback_needs_no_key(host: str, fine: bool) -> None:
    ServeConfig(host=host, insecure_no_auth=True)
    ServeConfig(host=host, api_key="k" * 16)
    if fine:
        ServeConfig(host=host)
    else:
        with pytest.raises(ConfigError, match="insecure"):
            ServeConfig(host=host)


def test_unknown_variables_of_the_environment_are_told() -> None:
    with RunningServer(mock=True, env={"OCTAVO_PROT": "1"}) as server:
        assert "unknown setting OCTAVO_PROT" in server.stderr()


def test_a_start_line_of_vllm_starts(start_server: StartServer, tmp_path: Path) -> None:
    """The flags that its scripts use most beside the common ones, in one line."""
    template = tmp_path / "template.jinja"
    template.write_text("{{ greeting }} {{ messages[0]['content'] }}")
    server = start_server(
        "octavo-tiny", "--tensor-parallel-size", "1", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--disable-log-stats", "--disable-log-requests", "--swap-space", "4", "--tokenizer-mode", "auto",
        "--chat-template-content-format", "auto", "--default-chat-template-kwargs", '{"greeting": "Dear"}',
        "--allowed-origins", '["https://a.example"]', "--root-path", "/api", "--uvicorn-log-level", "info",
        "--compilation-config", "3", "--enable-prompt-tokens-details", "--max-logprobs", "100000",
        "--enable-force-include-usage", "--return-tokens-as-token-ids", "--disable-access-log-for-endpoints", "/health",
        "--stream-interval", "3", "--log-level", "info", "--trust-remote-code",
        "--served-model-name", "one", "two", "--chat-template", str(template),
    )  # fmt: skip
    assert [card["id"] for card in server.get("/api/v1/models").json()["data"]] == ["one", "two"]
    assert server.get("/apiv1/models").status == 404
    body = {"model": "two", "messages": [{"role": "user", "content": "you"}]}
    asked = server.post("/tokenize", body).json()["tokens"]
    assert asked == server.post("/tokenize", {"model": "one", "prompt": "Dear you"}).json()["tokens"]
    reply = server.get("/v1/models", headers={"Origin": "https://a.example"})
    assert reply.headers["access-control-allow-origin"] == "https://a.example"
    said = {"model": "one", "prompt": [300 + at for at in range(8)], "max_tokens": 7, "stream": True, "logprobs": 0}
    events = server.post("/v1/completions", said).events()[:-1]
    assert events[-1]["usage"]["completion_tokens"] == 7
    tokens = [event["choices"][0]["logprobs"]["tokens"] for event in events if event["choices"]]
    assert tokens == [
        ["token_id:300"],
        *([f"token_id:{at}" for at in each] for each in ((301, 302, 303), (304, 305, 306))),
    ]
    server.get("/health")
    log = server.stderr()
    assert "route=/v1/completions" in log and "route=/health" not in log
    assert "swap_space=4 changes nothing" in log and "trust_remote_code=true changes nothing" in log


def test_https() -> None:
    tls = Path(__file__).parent / "tls"
    trusted = ssl.create_default_context(cafile=str(tls / "cert.pem"))
    argv = [
        sys.executable,
        "-c",
        _SERVE,
        "--port",
        "0",
        "--ssl-certfile",
        str(tls / "cert.pem"),
        "--ssl-keyfile",
        str(tls / "key.pem"),
    ]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": PATHS}) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            assert address.startswith("https://127.0.0.1:")
            connection = http.client.HTTPSConnection(address.removeprefix("https://"), context=trusted, timeout=60)
            connection.request("GET", "/version")
            assert connection.getresponse().status == 200
            connection.close()
            plain = http.client.HTTPConnection(address.removeprefix("https://"), timeout=60)
            with pytest.raises((http.client.HTTPException, OSError)):
                plain.request("GET", "/version")
                plain.getresponse()
            plain.close()
        finally:
            process.terminate()


def test_an_end_that_does_not_come_is_forced_and_says_where_it_stood() -> None:
    """Whatever holds the server up after a signal, it ends some time after its grace time."""
    code = "import threading; from octavo.serve import server; server._SURELY_SECONDS = 0.1\n"
    code += "server._end_surely(0.1); threading.Event().wait()"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=patient(30),
        env={"PYTHONPATH": str(SRC), "PATH": os.environ["PATH"]},
    )
    assert result.returncode == 1 and "Timeout" in result.stderr and "line 2 in <module>" in result.stderr


def test_too_few_open_files_are_told_with_the_remedy() -> None:
    command = [sys.executable, "-m", "octavo", "serve", "--port", "0"]
    result = subprocess.run(
        ["sh", "-c", 'ulimit -n 16; exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        timeout=patient(30),
        env={"PYTHONPATH": str(SRC), "PATH": os.environ["PATH"]},
    )
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.strip().splitlines()
    assert "a process may have 16 open files here (ulimit -n)" in line and "raise that limit" in line


def test_connections_are_as_many_as_files_may_be_open(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (100, 300)
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda _: limits)
    monkeypatch.setattr("resource.setrlimit", lambda _, given: raised.append(given))
    assert with_open_files(ServeConfig(max_connections=20)).max_connections == 20 and not raised
    assert with_open_files(ServeConfig(max_connections=200)).max_connections == 200 and raised == [(264, 300)]
    assert with_open_files(ServeConfig()).max_connections == 300 - 64 and raised[1:] == [(300, 300)]
    limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert with_open_files(ServeConfig()) == ServeConfig() and len(raised) == 2


def test_a_server_starts_with_its_address_and_serves_when_the_engine_is_ready(start_server: StartServer) -> None:
    running = start_server("--served-model-name", "tiny")
    assert running.first_line == f"octavo: starting tiny; it will answer on {running.url}\n"
    assert running.process.stdout is not None
    assert running.process.stdout.readline() == f"octavo: serving tiny on {running.url}\n"


def test_who_reads_the_first_line_only_ends_nothing() -> None:
    running = RunningServer(mock=True)
    assert running.process.stdout is not None
    running.process.stdout.close()
    try:
        running.wait_ready()
        assert running.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status == 200
    finally:
        assert running.close() == 0


def test_a_key_of_vllm_s_is_not_taken_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    _, serve = load_both({}, {}, environ={"VLLM_API_KEY": "sk-1234567890123456"})
    assert not serve.has_key and "VLLM_API_KEY is not read; OCTAVO_API_KEY is" in caplog.text
