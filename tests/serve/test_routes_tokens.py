"""Tokens in, tokens out: vLLM's /inference/v1/generate and SGLang's /generate, whole and as streams."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.serve.routes.tokens import sampling_of
from server_rig import RunningServer

PROMPT = [5, 6, 7]
PARAMS = {"max_tokens": 12, "temperature": 1.0, "seed": 4, "logprobs": 0, "ignore_eos": True}
THEIRS = {"max_new_tokens": 12, "temperature": 1.0, "sampling_seed": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def drawn(server: RunningServer) -> dict[str, Any]:
    """What the ordinary route draws."""
    body = {"prompt": PROMPT, "return_token_ids": True, **PARAMS}
    found: dict[str, Any] = server.post("/v1/completions", body).json()["choices"][0]
    return found


def test_rl_g1_ids_in_are_computed_and_ids_out_were_drawn(server: RunningServer, drawn: dict[str, Any]) -> None:
    """RL.G1: whole and streamed, with the log-probabilities of the ordinary route, digit for digit."""
    body = {"token_ids": PROMPT, "sampling_params": PARAMS, "model": "octavo-tiny", "request_id": "mine"}
    reply = server.post("/inference/v1/generate", body).json()
    (choice,) = reply["choices"]
    assert reply["request_id"].startswith("mine-") and "warnings" not in reply
    assert choice["token_ids"] == drawn["token_ids"] and choice["finish_reason"] == "length"
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == drawn["logprobs"]["token_logprobs"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in drawn["token_ids"]]
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 12}]
    events = server.post("/inference/v1/generate", body | {"stream": True}).events()
    assert events[-1] == "[DONE]"
    parts = [event["choices"][0] for event in events[:-1]]
    assert [token for part in parts for token in part["token_ids"]] == drawn["token_ids"]
    spans = [span for part in parts for span in part["weight_versions"]]
    assert spans[0]["start"] == 0 and spans[-1]["end"] == 12
    assert [part["finish_reason"] for part in parts][-1] == "length"


def test_rl_g1_the_stop_token_is_among_the_ids(server: RunningServer, drawn: dict[str, Any]) -> None:
    """RL.G1: and the reply says which it was."""
    stop = drawn["token_ids"][3]
    params = PARAMS | {"stop_token_ids": [stop], "n": 2}
    reply = server.post("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": params}).json()
    first = reply["choices"][0]
    assert (first["token_ids"], first["stop_reason"]) == (
        drawn["token_ids"][: drawn["token_ids"].index(stop) + 1],
        stop,
    )
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]


def test_sglangs_generate(server: RunningServer, drawn: dict[str, Any]) -> None:
    body = {"input_ids": PROMPT, "sampling_params": THEIRS, "return_logprob": True, "rid": "r1"}
    reply = server.post("/generate", body).json()
    meta = reply["meta_info"]
    assert reply["output_ids"] == drawn["token_ids"] and reply["text"] == drawn["text"]
    assert [line[:2] for line in meta["output_token_logprobs"]] == [
        [logprob, token] for logprob, token in zip(drawn["logprobs"]["token_logprobs"], drawn["token_ids"], strict=True)
    ]
    assert meta["finish_reason"] == {"type": "length", "length": 12} and meta["id"].startswith("r1-")
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["weight_version"]) == (3, 12, "default")
    events = server.post("/generate", body | {"stream": True}).events()
    assert events[-1] == "[DONE]" and events[-2]["output_ids"] == drawn["token_ids"]
    assert events[-2]["meta_info"]["output_token_logprobs"] == meta["output_token_logprobs"]
    prompt_alone = {**body, "sampling_params": {"max_new_tokens": 0, "temperature": 0}, "logprob_start_len": 0}
    scored = server.post("/generate", prompt_alone).json()
    assert (scored["output_ids"], scored["text"], scored["meta_info"]["completion_tokens"]) == ([], "", 0)
    assert scored["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert [line[1] for line in scored["meta_info"]["input_token_logprobs"]] == PROMPT
    wrong = server.post("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": -1}}).json()["error"]
    assert wrong["param"] == "max_new_tokens" and wrong["message"].startswith("max_new_tokens")
    many = server.post("/generate", {"input_ids": [PROMPT, [9, 9]], "sampling_params": THEIRS}).json()
    assert [len(each["output_ids"]) for each in many] == [12, 12] and many[0]["output_ids"] == drawn["token_ids"]
    scored = body | {"logprob_start_len": 0, "return_text_in_logprobs": True, "text": None}
    lines = server.post("/generate", scored).json()["meta_info"]["input_token_logprobs"]
    assert [line[1] for line in lines] == PROMPT and lines[0][0] is None and lines[1][0] < 0
    form = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8, "regex": "[ab]{3}"}}
    assert len(server.post("/generate", form).json()["text"]) == 3
    tag = {
        "structures": [{"begin": "<a>", "schema": {"const": 1}, "end": "</a>"}],
        "triggers": ["<"],
        "at_least_one": True,
    }
    form["sampling_params"] = {"max_new_tokens": 20, "structural_tag": json.dumps(tag)}
    assert server.post("/generate", form).json()["text"].startswith("<a>1</a>")
    text = server.post("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 2, "min_p": 0.1}}).json()
    assert text["meta_info"]["completion_tokens"] <= 2


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/inference/v1/generate", {"token_ids": PROMPT, "features": {"a": 1}}, "features"),
        ("/inference/v1/generate", {"token_ids": PROMPT, "return_routed_experts": True}, "return_routed_experts"),
        (
            "/inference/v1/generate",
            {"token_ids": PROMPT, "sampling_params": {"routed_experts_prompt_start": 9}},
            "routed_experts_prompt_start",
        ),
        ("/generate", {"input_ids": PROMPT, "return_routed_experts": True}, "return_routed_experts"),
        ("/inference/v1/generate", {"token_ids": []}, "prompt"),
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"temperature": -1}}, "temperature"),
        ("/generate", {"sampling_params": {}}, "input_ids"),
        ("/generate", {"input_ids": PROMPT, "return_hidden_states": True}, "return_hidden_states"),
        ("/generate", {"input_ids": PROMPT, "lora_path": "x"}, "lora_path"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": 3}, "sampling_params"),
        ("/generate", {"input_ids": PROMPT, "sampling_params": {"json_schema": "{"}}, None),
    ],
)
def test_what_is_not_kept_is_refused_by_name(
    mock_server: RunningServer, path: str, body: dict[str, Any], param: str | None
) -> None:
    reply = mock_server.post(path, body)
    assert reply.status == 400, reply.body
    assert param is None or reply.json()["error"]["param"] == param


def test_unknown_parameters_are_named(mock_server: RunningServer) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2, "colour": 1, "detokenize": True}}
    reply = mock_server.post("/inference/v1/generate", body).json()
    assert reply["warnings"] == ["sampling_params.colour: unknown field, ignored"]
    assert json.dumps(reply["choices"][0]["token_ids"])


@pytest.mark.parametrize(
    ("path", "body"), [("/inference/v1/generate", {"token_ids": PROMPT}), ("/generate", {"input_ids": PROMPT})]
)
def test_many_unknown_parameters_hold_up_nobody(mock_server: RunningServer, path: str, body: dict[str, Any]) -> None:
    """Each was once sought among all others."""
    params = {f"colour{i}": 1 for i in range(400_000)}
    assert mock_server.post(path, body | {"sampling_params": params}).status == 200


def test_a_parameter_is_not_compared_with_the_others() -> None:
    num_compared = 0

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return str.__eq__(self, other)

    warnings = list[str]()
    config: Any = SimpleNamespace(config=SimpleNamespace(strict=False))
    assert sampling_of(config, {Name(f"colour{i}"): 1 for i in range(1000)} | {"seed": 3}, warnings) == {"seed": 3}
    assert warnings == ["sampling_params.colour0: unknown field, ignored"] and num_compared < 10_000
