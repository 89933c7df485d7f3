"""Bodies that are no JSON, or the wrong JSON, on every route that takes one: the answer that each must get."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.serve.api.protocol import IGNORED
from octavo.serve.app import ROUTES
from octavo.serve.routes.rl import RL_ROUTES
from server_rig import RunningServer, StartServer

MODEL = "octavo-tiny"
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "hi", "max_tokens": 1},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    "/v1/responses": {"model": MODEL, "input": "hi", "max_output_tokens": 1},
    "/tokenize": {"model": MODEL, "prompt": "hi"},
    "/detokenize": {"model": MODEL, "tokens": [1]},
}
BODIES = {**GOOD, "/kv_transfer/release": {"transfer_ids": ["none"]}}  # which names no model and gives none a task
GENERATE = ("/v1/completions", "/v1/chat/completions")
COMPLETIONS, CHAT, RESPONSES = list(GOOD)[:3]


def refused(
    server: RunningServer, path: str, body: Any, code: str, param: str | None = None, status: int = 400
) -> None:
    """The server refuses `body` with `code`, in the envelope, without repeating much."""
    reply = server.post(path, body)
    assert reply.status == status, reply.body[:300]
    error = reply.json()["error"]
    assert error["code"] == code, error
    assert set(error) == {"message", "type", "param", "code"} and 0 < len(error["message"]) <= 300
    assert "\n" not in error["message"]
    if param is not None:
        assert error["param"] == param, error


def test_every_route_with_a_body_is_here() -> None:
    others = {route.path for route in RL_ROUTES}  # whose bodies may be left out: test_routes_control
    assert {route.path for route in ROUTES if route.method == "POST"} == {*BODIES, "/ping"} | (
        others & {route.path for route in ROUTES if route.method == "POST"}
    )


@pytest.mark.parametrize("path", BODIES)
def test_the_good_bodies_are_good(mock_server: RunningServer, path: str) -> None:
    assert mock_server.post(path, BODIES[path]).status == 200


MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "invalid_json"),
    "null": (b"null", "invalid_json"),
    "list": (b"[]", "invalid_json"),
    "text": (b'"x"', "invalid_json"),
    "number": (b"1", "invalid_json"),
    "cut off": (b'{"model": "octavo-tiny", "prompt": "h', "invalid_json"),
    "more behind": (b"{} {}", "invalid_json"),
    "comma at the end": (b'{"a": 1,}', "invalid_json"),
    "control character": (b'{"a": "\n"}', "invalid_json"),
    "byte order mark": (b"\xef\xbb\xbf{}", "invalid_json"),
    "no UTF-8": (b'{"model": "\xff"}', "invalid_unicode"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "invalid_unicode"),
    "lone surrogate": (rb'{"user": "\ud800"}', "invalid_unicode"),
    "lone surrogate in a key": (rb'{"\udc00": 1}', "invalid_unicode"),
    "NaN": (b'{"a": NaN}', "number_not_finite"),
    "Infinity": (b'{"a": [-Infinity]}', "number_not_finite"),
    "1e999": (b'{"a": 1e999}', "number_not_finite"),
    "-1e999": (b'{"a": {"b": -1e999}}', "number_not_finite"),
    "5,000 digits": (b'{"a": ' + b"1" * 5000 + b"}", "out_of_range"),
    "5,000 digits and no exponent": (b'{"a": ' + b"1" * 5000 + b"e}", "out_of_range"),
    "5,000 digits and no fraction": (b'{"a": [-' + b"1" * 5000 + b".]}", "out_of_range"),
    "text of a million quotes, without an end": (b'{"a": "' + rb"\"" * 1_000_000, "invalid_json"),
    "10**30": (b'{"a": 1' + b"0" * 30 + b"}", "out_of_range"),
    "65 deep": (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "too_deep"),
    "100,000 deep": (b'{"a": ' + b'{"a":' * 100_000, "too_deep"),
    "key twice": (b'{"model": "a", "model": "b"}', "duplicate_key"),
    "key twice, deep": (b'{"a": [{"b": {"c": 1, "c": 1}}]}', "duplicate_key"),
    "600,000 values": (b'{"a": [' + b"1," * 600_000 + b"1]}", "too_many_items"),
    "600,000 keys": (b"{" + b",".join(b'"%d":1' % i for i in range(600_000)) + b"}", "too_many_items"),
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("path", BODIES)
def test_malformed_bodies(mock_server: RunningServer, path: str, name: str) -> None:
    body, code = MALFORMED[name]
    refused(mock_server, path, body, code)


def test_the_place_of_a_mistake_is_told(mock_server: RunningServer) -> None:
    error = mock_server.post(COMPLETIONS, '{"a": "é", b}'.encode()).json()["error"]
    assert "at byte 12" in error["message"]  # é has two


@pytest.mark.parametrize("path", GOOD)
def test_unknown_fields_are_reported_and_refused_when_strict(
    mock_server: RunningServer, strict_server: RunningServer, path: str
) -> None:
    body = GOOD[path] | {"modle": 1}
    refused(strict_server, path, body, "unknown_field", "modle")
    assert "did you mean model?" in strict_server.post(path, body).json()["error"]["message"]
    reply = mock_server.post(path, body)
    assert reply.status == 200
    if "tokenize" not in path:
        assert reply.json()["warnings"] == ["modle: unknown field, ignored; did you mean model?"]


def test_many_unknown_fields_are_counted(mock_server: RunningServer) -> None:
    """Without a search for the name that each may have meant, which would hold up all others for minutes."""
    body = GOOD[COMPLETIONS] | {f"tempe{i}": 1 for i in range(400_000)}
    warnings = mock_server.post(COMPLETIONS, body).json()["warnings"]
    assert len(warnings) == 17 and warnings[-1] == "and 399984 more"


def test_strict_finds_an_unknown_field_behind_many_others(strict_server: RunningServer) -> None:
    body = GOOD[COMPLETIONS] | dict.fromkeys(sorted(IGNORED), 1) | {"modle": 1}
    refused(strict_server, COMPLETIONS, body, "unknown_field", "modle")


def test_fields_without_effect_are_accepted_and_told(strict_server: RunningServer) -> None:
    body = GOOD[CHAT] | {"user": "me", "store": True, "service_tier": "auto", "seed": None}
    reply = strict_server.post(CHAT, body)
    assert reply.status == 200
    assert reply.json()["warnings"] == [f"{name}: has no effect" for name in ("user", "store", "service_tier")]
    assert "warnings" not in strict_server.post(CHAT, GOOD[CHAT]).json()
    reply = strict_server.post(CHAT, GOOD[CHAT] | {"modalities": ["text"]})
    assert reply.json()["warnings"] == ["modalities: has no effect"]
    reply = strict_server.post(RESPONSES, GOOD[RESPONSES] | {"stream_options": {"include_obfuscation": False}})
    assert reply.json()["warnings"] == ["stream_options: has no effect"]


def test_warnings_of_a_stream_come_once(mock_server: RunningServer) -> None:
    for path in GENERATE:
        events = mock_server.post(path, GOOD[path] | {"stream": True, "max_tokens": 4, "usr": 1}).events()
        assert ["warnings" in event for event in events[:-1]] == [True] + [False] * (len(events) - 2)


# field -> (values, code); for completions and chat alike
BAD_FIELDS: dict[str, tuple[list[Any], str]] = {
    "model": ([1, True, []], "invalid_type"),
    "stream": ([1, "yes", []], "invalid_type"),
    "stream_options": ([1, "x", []], "invalid_type"),
    "return_token_ids": ([1, "yes"], "invalid_type"),
    "temperature": ([-1, 1e31], "out_of_range"),
    "top_p": ([0, 1.1, -0.1], "out_of_range"),
    "top_k": ([-2], "out_of_range"),
    "min_p": ([2, -0.1], "out_of_range"),
    "n": ([0, -1, 1025, 10**6], "out_of_range"),
    "max_tokens": ([0, -1, 2**31], "out_of_range"),
    "min_tokens": ([-1, 2**31, 5], "out_of_range"),
    "presence_penalty": ([3, -3], "out_of_range"),
    "frequency_penalty": ([3, -3], "out_of_range"),
    "repetition_penalty": ([0, -1, 1e30], "out_of_range"),
    "seed": ([2**64, -(2**63) - 1], "out_of_range"),
    "prompt_logprobs": ([21, -1, -2], "out_of_range"),
    "priority": ([2**31, -(2**31) - 1], "out_of_range"),
    "stop": ([["a"] * 257], "too_many_items"),
    "bad_words": ([["a"] * 129], "too_many_items"),
    "cache_salt": (["x" * 1025, "a\nb"], "out_of_range"),
    "truncate_prompt_tokens": ([0, -2], "out_of_range"),
    "suffix": (["x"], "unsupported_parameter"),
    "use_beam_search": ([True], "unsupported_parameter"),
    "guided_json": ([{}], "unsupported_parameter"),
    "n_discard": ([1], "unsupported_parameter"),
    "kv_transfer_params": ([{}], "not_allowed"),  # of a server without a connector
    "chat_template": (["{{ x }}"], "not_allowed"),
}
_FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty")
_INTS = ("top_k", "n", "max_tokens", "min_tokens", "seed", "prompt_logprobs")
BAD_TYPES: dict[str, list[Any]] = {
    **{name: ["x", "1.5.2", True, [], {}] for name in _FLOATS},
    **{name: ["x", "1.5", 1.5, True, [], {}] for name in _INTS},
    "stop": [3, {}, [3], [[]]],
    "stop_token_ids": ["x", 3, ["a"], [1.0], [True]],
    "logit_bias": [[], "x", {"abc": 1}, {"-1": 1}, {"1": "x"}],
    "ignore_eos": [1, "x"],
    "cache_salt": [1, []],
    "priority": ["x", 1.5, True],
    "response_format": [1, "json_object", []],
    "structured_outputs": [1, "x", []],
}


@pytest.mark.parametrize("path", GENERATE)
@pytest.mark.parametrize("field", BAD_FIELDS)
def test_values_out_of_range(mock_server: RunningServer, path: str, field: str) -> None:
    values, code = BAD_FIELDS[field]
    for value in values:
        refused(mock_server, path, GOOD[path] | {field: value}, code)


@pytest.mark.parametrize("path", GENERATE)
@pytest.mark.parametrize("field", BAD_TYPES)
def test_values_of_the_wrong_type(mock_server: RunningServer, path: str, field: str) -> None:
    for value in BAD_TYPES[field]:
        refused(mock_server, path, GOOD[path] | {field: value}, "invalid_type")


@pytest.mark.parametrize(
    "fields, code",
    [
        ({"stop": ""}, "out_of_range"),
        ({"stop": "x" * 257}, "out_of_range"),
        ({"stop_token_ids": [10**6]}, "invalid_token_id"),
        ({"allowed_token_ids": []}, "out_of_range"),
        ({"allowed_token_ids": [10**6]}, "invalid_token_id"),
        ({"logit_bias": {"1000000": 1}}, "invalid_token_id"),
        ({"stream_options": {"include_usage": True}}, "unsupported_parameter"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "invalid_type"),
        ({"n": 1024, "max_tokens": 2**31 - 1, "min_tokens": 2**31 - 1}, "out_of_range"),
        ({"response_format": {"type": "xml"}}, "invalid_value"),
        ({"response_format": {"type": "structural_tag", "format": {"type": "token"}}}, "unsupported"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "conflicting"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "conflicting"),
        ({"length_penalty": 1.2}, "unsupported_parameter"),
        ({"length_penalty": True}, "unsupported_parameter"),
        ({"truncate_prompt_tokens": 0}, "out_of_range"),
        ({"vllm_xargs": 5}, "invalid_type"),
        ({"vllm_xargs": {"a": 1}, "extra_args": {"a": 1}}, "conflicting"),
    ],
)
@pytest.mark.parametrize("path", GENERATE)
def test_other_mistakes(mock_server: RunningServer, path: str, fields: dict[str, Any], code: str) -> None:
    refused(mock_server, path, GOOD[path] | fields, code)


@pytest.mark.parametrize("name", ["gpt-4", "../../x", "octavo-tiny/", "x" * 10_000, "\n", ""])
@pytest.mark.parametrize("path", GOOD)
def test_unknown_models(mock_server: RunningServer, path: str, name: str) -> None:
    refused(mock_server, path, GOOD[path] | {"model": name}, "model_not_found", "model", status=404)


@pytest.mark.parametrize(
    "prompt, code",
    [
        ("", "empty_prompt"),
        ([], "empty_prompt"),
        ([[]], "empty_prompt"),
        ([""], "empty_prompt"),
        (1, "invalid_type"),
        ({}, "invalid_type"),
        ([{}], "invalid_token_id"),
        ([1, "a"], "invalid_token_id"),
        (["a", 1], "invalid_type"),
        ([True], "invalid_token_id"),
        ([1.0], "invalid_token_id"),
        ([-1], "invalid_token_id"),
        ([4096], "invalid_token_id"),
        ([2**63], "invalid_token_id"),
        ([[1, 2], [1, 10**6]], "invalid_token_id"),
        ([1] * 2048, "context_length_exceeded"),
        ("word " * 4000, "context_length_exceeded"),
        ("x" * 1_000_000, "context_length_exceeded"),
        (["a"] * 1025, "too_many_prompts"),
        (None, "missing_field"),
    ],
)
def test_bad_prompts(mock_server: RunningServer, prompt: Any, code: str) -> None:
    refused(mock_server, COMPLETIONS, GOOD[COMPLETIONS] | {"prompt": prompt}, code)


@pytest.mark.parametrize(
    "fields, code",
    [
        ({"best_of": 2}, "unsupported_parameter"),
        ({"best_of": True}, "unsupported_parameter"),
        ({"echo": 1}, "invalid_type"),
        ({"logprobs": True}, "invalid_type"),
        ({"logprobs": 21}, "out_of_range"),
        ({"logprobs": -1}, "out_of_range"),
    ],
)
def test_mistakes_of_completions(mock_server: RunningServer, fields: dict[str, Any], code: str) -> None:
    refused(mock_server, COMPLETIONS, GOOD[COMPLETIONS] | fields, code)


def _tool(**changes: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}} | changes}


@pytest.mark.parametrize(
    "fields, code",
    [
        ({"messages": None}, "missing_field"),
        ({"messages": []}, "empty_prompt"),
        ({"messages": "hi"}, "invalid_type"),
        ({"messages": ["hi"]}, "invalid_message"),
        ({"messages": [{"role": "<|im_start|>", "content": "x"}]}, "invalid_message"),
        ({"messages": [{"role": 1, "content": "x"}]}, "invalid_message"),
        ({"messages": [{"role": "user"}]}, "invalid_message"),
        ({"messages": [{"role": "user", "content": 1}]}, "invalid_message"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "invalid_message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "invalid_message"),
        ({"messages": [{"role": "user", "content": "x"}] * 5000}, "too_many_items"),
        ({"messages": [{"role": "user", "content": "word " * 4000}]}, "context_length_exceeded"),
        ({"logprobs": 1}, "invalid_type"),
        ({"top_logprobs": 2}, "unsupported_parameter"),
        ({"logprobs": True, "top_logprobs": 21}, "out_of_range"),
        ({"logprobs": True, "top_logprobs": -1}, "out_of_range"),
        ({"max_completion_tokens": 0}, "out_of_range"),
        ({"chat_template_kwargs": {"messages": []}}, "not_allowed"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "not_allowed"),
        ({"chat_template_kwargs": 1}, "invalid_type"),
        ({"tools": "x"}, "invalid_type"),
        ({"tools": [1]}, "invalid_tool"),
        ({"tools": [{"type": "function"}]}, "invalid_tool"),
        ({"tools": [_tool(name="a b")]}, "invalid_tool"),
        ({"tools": [_tool(name="")]}, "invalid_tool"),
        ({"tools": [_tool(parameters="x")]}, "invalid_tool"),
        ({"tools": [_tool(), _tool()]}, "duplicate_tool"),
        ({"tools": [_tool(name=f"f{i}") for i in range(1000)]}, "too_many_tools"),
        ({"tools": [_tool()], "tool_choice": "maybe"}, "invalid_value"),
        ({"tools": [_tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "invalid_value"),
        ({"tool_choice": "required"}, "invalid_value"),
        ({"tools": [_tool()], "tool_choice": "required", "response_format": {"type": "json_object"}}, "conflicting"),
        ({"functions": [{}]}, "invalid_tool"),
        ({"functions": 1}, "invalid_type"),
        ({"functions": [_tool()["function"]], "tools": [_tool()]}, "conflicting"),
        ({"audio": {}}, "unsupported_parameter"),
    ],
)
def test_mistakes_of_chat(mock_server: RunningServer, fields: dict[str, Any], code: str) -> None:
    refused(mock_server, CHAT, GOOD[CHAT] | fields, code)


def test_errors_name_the_clients_fields(mock_server: RunningServer) -> None:
    refused(mock_server, CHAT, GOOD[CHAT] | {"max_completion_tokens": 0}, "out_of_range", "max_completion_tokens")
    body = GOOD[CHAT] | {"logprobs": True, "top_logprobs": 21}
    refused(mock_server, CHAT, body, "out_of_range", "top_logprobs")
    refused(mock_server, RESPONSES, GOOD[RESPONSES] | {"max_output_tokens": 0}, "out_of_range", "max_output_tokens")
    body = GOOD[COMPLETIONS] | {"stream": True, "stream_options": {"include_usage": 1}}
    refused(mock_server, COMPLETIONS, body, "invalid_type", "stream_options.include_usage")


@pytest.mark.parametrize("reference, code", [("#/$defs/no", "schema_invalid"), ("https://a.b/c", "unsupported")])
def test_errors_of_a_schema_name_where_it_stands(mock_server: RunningServer, reference: str, code: str) -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": reference}}}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    for path in GENERATE:
        refused(mock_server, path, GOOD[path] | asked, code, "response_format.json_schema.schema")
        body = GOOD[path] | {"structured_outputs": {"json": schema}}
        refused(mock_server, path, body, code, "structured_outputs.json")
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        body = GOOD[CHAT] | {"tools": [_tool(parameters=schema)], "tool_choice": choice}
        refused(mock_server, CHAT, body, code, "tools")
    text = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    refused(mock_server, RESPONSES, GOOD[RESPONSES] | {"text": text}, code, "text.format.schema")


@pytest.mark.parametrize(
    "fields, code",
    [
        ({"input": None}, "missing_field"),
        ({"input": ""}, "empty_prompt"),
        ({"input": []}, "empty_prompt"),
        ({"input": 1}, "invalid_type"),
        ({"input": [1]}, "invalid_message"),
        ({"input": [{"role": "robot", "content": "x"}]}, "invalid_message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "invalid_message"),
        ({"input": [{"type": "function_call_output"}]}, "unsupported_parameter"),
        ({"previous_response_id": "resp_1"}, "unsupported_parameter"),
        ({"tools": [_tool()]}, "unsupported_parameter"),
        ({"temperature": -3}, "out_of_range"),
        ({"text": {"format": {"type": "xml"}}}, "invalid_value"),
    ],
)
def test_mistakes_of_responses(mock_server: RunningServer, fields: dict[str, Any], code: str) -> None:
    refused(mock_server, RESPONSES, GOOD[RESPONSES] | fields, code)


def test_mistakes_of_the_tokenizer_routes(mock_server: RunningServer) -> None:
    for fields, code in (
        ({"prompt": None}, "missing_field"),
        ({"messages": []}, "missing_field"),
        ({"prompt": 1}, "invalid_type"),
    ):
        refused(mock_server, "/tokenize", GOOD["/tokenize"] | fields, code)
    for tokens, code in (
        (None, "missing_field"),
        ("x", "invalid_type"),
        ([4096], "invalid_token_id"),
        ([True], "invalid_token_id"),
    ):
        refused(mock_server, "/detokenize", GOOD["/detokenize"] | {"tokens": tokens}, code)


def test_odd_text_is_text(mock_server: RunningServer) -> None:
    texts = ["\0", "\u202e abc", "\u200b", "🙂" * 200, "e" + "\u0301" * 500, "<|im_start|>", "<|endoftext|>"]
    for text in texts:
        for path, field in ((COMPLETIONS, {"prompt": text}), (CHAT, {"messages": [{"role": "user", "content": text}]})):
            assert mock_server.post(path, GOOD[path] | field).status == 200


def test_content_is_not_repeated(mock_server: RunningServer) -> None:
    canary = "canary-8d1f"
    for path in GENERATE:
        for fields in ({"stop": [canary, 1]}, {canary: 1, "temperature": 3}, {"logit_bias": {canary: 1}}):
            assert canary not in mock_server.post(path, GOOD[path] | fields).body.decode()
    assert canary not in mock_server.stderr()


def test_minus_zero_is_zero(mock_server: RunningServer) -> None:
    body = json.dumps(GOOD[COMPLETIONS])[:-1] + ', "temperature": -0, "top_k": -0}'
    assert mock_server.post(COMPLETIONS, body.encode()).status == 200


@pytest.fixture(scope="module")
def strict_server() -> Any:
    with RunningServer("--strict", mock=True) as running:
        yield running.wait_ready()


def test_limits_are_settings(start_server: StartServer) -> None:
    server = start_server("--max-prompts", "2", "--max-tools", "1")
    assert server.post(COMPLETIONS, GOOD[COMPLETIONS] | {"prompt": ["a", "b"]}).status == 200
    refused(server, COMPLETIONS, GOOD[COMPLETIONS] | {"prompt": ["a", "b", "c"]}, "too_many_prompts")
    refused(server, CHAT, GOOD[CHAT] | {"tools": [_tool(), _tool(name="g")]}, "too_many_tools")
