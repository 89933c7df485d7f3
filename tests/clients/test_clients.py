"""Clients from PyPI against a running server, each in an environment of its own: `make test-clients`.

Each script prints one JSON line last; what it must say is checked here.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.clients

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TINY = ROOT / "src/octavo/assets/octavo-tiny"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none", "OMP_NUM_THREADS": "1"}
ENVIRONMENT |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}


def _run(client: str, *command: str, cwd: Path = HERE, timeout: float = 250) -> str:
    folder = ROOT / ".venv-clients" / client
    if not folder.exists():
        pytest.fail(f"no environment for {client}: run `python tools/client_envs.py {client}`")
    environ = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": os.environ["HOME"], **ENVIRONMENT}
    done = subprocess.run(
        [str(folder / "bin/python"), *command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


def _said(output: str) -> dict[str, Any]:
    line = output.strip().split("\n")[-1]
    print(line)
    said: dict[str, Any] = json.loads(line)
    return said


def test_langchain_openai(url: str) -> None:
    said = _said(_run("langchain", "langchain_client.py", url))
    assert said["answer"] and said["streamed"] == said["answer"] and said["num_chunks"] > 3
    assert said["usage"]["output_tokens"] > 0 and said["stream_usage"] == said["usage"]
    assert said["batch"] == [said["answer"]] * 3
    assert said["structured"]["city"] in ("Paris", "Rome")
    assert said["tool_calls"][0]["name"] == "get_weather" and said["tool_calls"][0]["args"]["city"] in ("Paris", "Rome")
    assert said["num_logprobs"] == said["usage"]["output_tokens"]
    assert said["completion"] and said["error"] == "NotFoundError"


def test_litellm(url: str) -> None:
    said = _said(_run("litellm", "litellm_client.py", url))
    for provider in ("hosted_vllm", "openai"):
        row = said[provider]
        assert row["answer"] and row["streamed"] == row["answer"] and row["usage"]["completion_tokens"] > 0
        assert row["unknown_model"] == "NotFoundError" and row["bad_parameter"] == "BadRequestError"
    assert said["asynchronous"] == said["hosted_vllm"]["answer"]
    assert said["text_completion"] and json.loads(said["structured"])["city"] in ("Paris", "Rome")
    assert said["tool_call"]["name"] == "get_weather"


@functools.cache
def _echo(url: str, text: str) -> tuple[list[float | None], list[dict[str, float]], list[int]]:
    """Log-probabilities of a text's tokens, the likeliest ones, and where the tokens begin."""
    body = {"model": "octavo-tiny", "prompt": text, "max_tokens": 1, "echo": True, "logprobs": 1}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        logprobs = json.load(response)["choices"][0]["logprobs"]
    return logprobs["token_logprobs"][:-1], logprobs["top_logprobs"][:-1], logprobs["text_offset"][:-1]


def _evaluate(url: str, folder: Path, model: str, arguments: str, tasks: str, *more: str) -> dict[str, Any]:
    _run(
        "lm-eval", "-m", "lm_eval", "run", "--model", model, "--model_args", arguments, "--tasks", tasks,
        "--include_path", str(HERE / "tasks"), "--output_path", str(folder), "--log_samples", *more,
    )  # fmt: skip
    (path,) = folder.rglob("results_*.json")
    results: dict[str, Any] = json.loads(path.read_text())["results"]
    print(json.dumps(results))
    return results


def _logged(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.rglob("samples_*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("backend", ["huggingface", "remote"])
def test_lm_eval_local_completions_log_likelihoods(url: str, tmp_path: Path, backend: str) -> None:
    tokenizer = f",tokenizer={TINY}" if backend == "huggingface" else ""
    arguments = (
        f"model=octavo-tiny,base_url={url}/v1/completions,tokenizer_backend={backend}{tokenizer},num_concurrent=4"
    )
    results = _evaluate(url, tmp_path, "local-completions", arguments, "octavo_python_choice")
    assert results["octavo_python_choice"]["acc,none"] >= 0.75  # the model was trained on such code
    for sample in _logged(tmp_path)[:3]:
        for request, response in zip(sample["arguments"].values(), sample["filtered_resps"], strict=True):
            context, continuation = request["arg_0"], request["arg_1"]
            values, _, offsets = _echo(url, context + continuation)
            first = offsets.index(len(context))
            expected = sum(value for value in values[first:] if value is not None)
            assert float(response[0]) == pytest.approx(expected, abs=2e-3), (context, continuation)


def test_lm_eval_local_completions_generates(url: str, tmp_path: Path) -> None:
    arguments = f"model=octavo-tiny,base_url={url}/v1/completions,tokenizer={TINY},num_concurrent=4"
    results = _evaluate(url, tmp_path, "local-completions", arguments, "octavo_python_generate")
    assert results["octavo_python_generate"]["exact_match,none"] >= 0.0
    assert any(sample["resps"][0][0] for sample in _logged(tmp_path))  # some stop at once


def test_lm_eval_local_chat_completions(url: str, tmp_path: Path) -> None:
    arguments = f"model=octavo-tiny,base_url={url}/v1/chat/completions,num_concurrent=4"
    _evaluate(url, tmp_path, "local-chat-completions", arguments, "octavo_python_generate", "--apply_chat_template")
    assert all(isinstance(sample["resps"][0][0], str) for sample in _logged(tmp_path))


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(url: str, tmp_path: Path, route: str) -> None:
    report = tmp_path / "report.json"
    _run(
        "guidellm", "-m", "guidellm", "run",
        "--backend", f"kind=openai_http,target={url},model=octavo-tiny,request_format={route}",
        "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=12",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--tokenizer", f"kind=hf_auto,model={TINY}",
        "--output", f"kind=json,path={report}", "--disable-console",
    )  # fmt: skip
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"]["successful"] == 12 and metrics["request_totals"]["errored"] == 0
    assert metrics["output_token_count"]["successful"]["mean"] == 8
    assert metrics["time_to_first_token_ms"]["successful"]["mean"] > 0
    print(json.dumps({"route": route, "tok_s": metrics["output_tokens_per_second"]["successful"]["mean"]}))
