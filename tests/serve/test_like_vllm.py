"""Requests that vLLM takes, and what its clients expect of the answers."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import octavo
from octavo.serve.api import protocol
from octavo.serve.api.legacy import with_tools
from octavo.serve.api.protocol import ChatRequest, CompletionRequest
from octavo.serve.errors import ApiError
from server_rig import RunningServer, StartServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
SHORT = {"temperature": 0, "max_tokens": 3, "ignore_eos": True}
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"const": 1}}, "required": ["x"]}}


def ask(server: RunningServer, path: str, **fields: Any) -> Any:
    reply = server.post(path, fields)
    assert reply.status == 200, reply.body[:300]
    return reply.json()


def stream(server: RunningServer, path: str, **fields: Any) -> list[Any]:
    return server.post(path, {"stream": True, **fields}).events()[:-1]


def test_no_model_is_the_one_that_is_served(mock_server: RunningServer) -> None:
    for path, fields in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI}), ("/v1/responses", {"input": "hi"})):
        assert ask(mock_server, path, **fields)["model"] == "octavo-tiny"


NUMBERS = {"max_tokens": 2.0, "temperature": "0.5", "top_k": "5", "seed": "7", "n": "2", "top_p": "1", "priority": "0"}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_may_be_texts_and_integers_floats(mock_server: RunningServer, name: str) -> None:
    for path, fields in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})):
        reply = ask(mock_server, path, **fields, **{"max_tokens": 2, name: NUMBERS[name]})
        assert reply["usage"]["completion_tokens"] == (4 if name == "n" else 2) and "warnings" not in reply
    ask(mock_server, COMPLETIONS, prompt="a", max_tokens=1, logit_bias={"5": "300"}, logprobs="1", suffix="")
    ask(mock_server, CHAT, messages=HI, max_completion_tokens=2.0)


def test_flags_may_be_texts(mock_server: RunningServer) -> None:
    asked = {"messages": HI, "max_tokens": 1, "stream": "False", "ignore_eos": "true", "n": 1}
    assert "warnings" not in ask(mock_server, CHAT, **asked)
    assert mock_server.post(CHAT, asked | {"stream": "perhaps"}).status == 400


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_fields_that_ask_for_nothing_pass(mock_server: RunningServer, path: str) -> None:
    asked: dict[str, Any] = {"prompt": "a"} if path == COMPLETIONS else {"messages": HI}
    idle: dict[str, Any] = {
        "length_penalty": 1.0,
        "use_beam_search": False,
        "allowed_token_ids": None,
        "stop": [],
        "truncate_prompt_tokens": -1,
        "structured_outputs": {},
        "vllm_xargs": {"x": 1, "y": ["a", 2.5]},
    }
    assert "warnings" not in ask(mock_server, path, **asked, **idle, max_tokens=1)
    idle |= {"length_penalty": "1", "structured_outputs": {"json": None}, "truncate_prompt_tokens": None}
    form = {"response_format": {"type": "text"}}
    assert "warnings" not in ask(mock_server, path, **asked, **idle, **form, max_tokens=1)


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_vllm_xargs_are_extra_args(kind: Any) -> None:
    read = functools.partial(protocol.read, kind, strict=True)
    assert read({"vllm_xargs": {"a": 1}}).sampling == {"extra_args": {"a": 1}}
    for body in (
        {"vllm_xargs": {"a": 1}, "extra_args": {"b": "x"}},
        {"extra_args": {"b": "x"}, "vllm_xargs": {"a": 1}},
    ):
        assert read(body).sampling == {"extra_args": {"a": 1, "b": "x"}}
    with pytest.raises(ApiError, match=r"^vllm_xargs.a: is given in extra_args too"):
        read({"vllm_xargs": {"a": 1}, "extra_args": {"a": 1}})


@pytest.mark.parametrize(
    "path, ids", [("/inference/v1/generate", {"token_ids": [5, 6]}), ("/generate", {"input_ids": [5, 6]})]
)
def test_vllm_xargs_are_extra_args_where_sampling_parameters_are_an_object(
    mock_server: RunningServer, path: str, ids: dict[str, Any]
) -> None:
    """They were unknown there and told of as ignored, beside the extra_args that were taken."""
    inside: dict[str, Any] = {"extra_args": {"a": 1}, "vllm_xargs": {"b": [2]}}
    reply = mock_server.post(path, ids | {"sampling_params": inside, "vllm_xargs": {"c": 3}})
    assert reply.status == 200 and "unknown field" not in reply.body.decode()
    large = {"d": "x" * (1 << 20)}
    for body, param, code in (
        ({"sampling_params": {"vllm_xargs": 5}}, "sampling_params.vllm_xargs", "invalid_type"),
        ({"vllm_xargs": 5}, "vllm_xargs", "invalid_type"),
        ({"sampling_params": inside | {"vllm_xargs": {"a": 2}}}, "sampling_params.vllm_xargs.a", "conflicting"),
        ({"sampling_params": inside, "vllm_xargs": {"b": 2}}, "vllm_xargs.b", "conflicting"),
        ({"sampling_params": {"vllm_xargs": large}}, "extra_args", "out_of_range"),
        ({"vllm_xargs": large}, "extra_args", "out_of_range"),
    ):
        reply = mock_server.post(path, ids | body)
        error = reply.json()["error"]
        assert (reply.status, error["param"], error["code"]) == (400, param, code), error


def test_a_chat_may_ask_for_the_tokenizers_special_tokens(mock_server: RunningServer) -> None:
    """The bundled tokenizer has none to add; what is added, `tests/text/test_text_sandbox.py` says."""
    asked = {"messages": HI, "max_tokens": 1, "return_token_ids": True}
    plain = ask(mock_server, CHAT, **asked)
    added = ask(mock_server, CHAT, **asked, add_special_tokens=True)
    assert added["prompt_token_ids"] == plain["prompt_token_ids"] and "warnings" not in added


def test_tokenize_adds_special_tokens_as_the_routes_that_generate_do(start_server: StartServer, tmp_path: Path) -> None:
    """With messages it added none whatever was asked: a count of what a chat with them would see was one short."""
    tiny = Path(octavo.__file__).parent / "assets/octavo-tiny"
    folder = shutil.copytree(tiny, tmp_path / "model")
    config = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    start: dict[str, Any] = {"id": "<|endoftext|>", "type_id": 0}
    config["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": start}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(config), encoding="utf-8")
    server = start_server(str(folder))
    for path, asked, usual in ((CHAT, {"messages": HI}, False), (COMPLETIONS, {"prompt": "hi"}, True)):
        for given in (None, False, True, "true", "False"):
            special = {} if given is None else {"add_special_tokens": given}
            reply = ask(server, path, **asked, **special, max_tokens=1, return_token_ids=True)
            made = reply["prompt_token_ids"] if path == CHAT else reply["choices"][0]["prompt_token_ids"]
            tokens = ask(server, "/tokenize", **asked, **special)["tokens"]
            assert tokens == made, (path, given)
            assert (tokens[0] == 0) == (usual if given is None else given in (True, "true")), (path, given)


def test_tools_stay_in_the_prompt_where_none_may_be_called(start_server: StartServer, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{% if tools %}{{ tools[0]['function']['name'] }}{% endif %}{{ messages[0]['content'] }}")
    tools = [{"type": "function", "function": {"name": "lamp"}}]
    said = '<tool_call>\n{"name": "lamp", "arguments": {}}\n</tool_call>'
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": said}], "return_token_ids": True}
    options = ("--chat-template", str(path), "--tool-call-parser", "hermes")
    with start_server(*options) as server:
        shown = ask(server, CHAT, **asked, tools=tools)["prompt_token_ids"]
        bare = ask(server, CHAT, **asked)["prompt_token_ids"]
        none = ask(server, CHAT, **asked, tools=tools, tool_choice="none")
    assert none["prompt_token_ids"] == shown != bare
    assert "tool_calls" not in none["choices"][0]["message"] and none["choices"][0]["finish_reason"] != "tool_calls"
    with start_server(*options, "--exclude-tools-when-tool-choice-none") as server:
        assert ask(server, CHAT, **asked, tools=tools, tool_choice="none")["prompt_token_ids"] == bare
        assert ask(server, CHAT, **asked, tools=tools)["prompt_token_ids"] == shown


def test_max_tokens_beyond_the_context_is_told(mock_server: RunningServer) -> None:
    for path, name, fields in (
        (COMPLETIONS, "max_tokens", {"prompt": "a"}),
        (CHAT, "max_tokens", {"messages": HI}),
        (CHAT, "max_completion_tokens", {"messages": HI}),
        ("/v1/responses", "max_output_tokens", {"input": "hi"}),
    ):
        (warning,) = ask(mock_server, path, **fields, **{name: 100_000})["warnings"]
        assert warning.startswith(f"{name}: 100000 tokens, is cut to the ") and "of max_model_len " in warning
        assert "warnings" not in ask(mock_server, path, **fields, **{name: 2})
    assert "warnings" not in ask(mock_server, CHAT, messages=HI)


def test_an_answer_has_the_id_that_the_client_gave(mock_server: RunningServer) -> None:
    for path, prefix, fields in (
        (COMPLETIONS, "cmpl-", {"prompt": "a"}),
        (CHAT, "chatcmpl-", {"messages": HI}),
        ("/v1/responses", "resp_", {"input": "hi"}),
    ):
        ids = [ask(mock_server, path, **fields, request_id="my-1")["id"] for _ in range(2)]
        assert all(name.startswith(f"{prefix}my-1-") for name in ids) and ids[0] != ids[1]
        reply = mock_server.post(path, fields | {"request_id": "b"}, headers={"x-request-id": "a"})
        assert reply.json()["id"].startswith(f"{prefix}b-") and reply.headers["x-request-id"] == "a"
        for wrong in ("a b", "x" * 129, 5):
            (warning,) = ask(mock_server, path, **fields, request_id=wrong)["warnings"]
            assert warning.startswith("request_id: is ignored")


def test_a_chat_s_echo_begins_with_the_last_words(mock_server: RunningServer) -> None:
    messages = [*HI, {"role": "assistant", "content": "Well, "}]
    asked = {"messages": messages, "max_tokens": 2, "continue_final_message": True, "add_generation_prompt": False}
    plain = ask(mock_server, CHAT, **asked)["choices"][0]["message"]["content"]
    assert ask(mock_server, CHAT, **asked, echo=True)["choices"][0]["message"]["content"] == "Well, " + plain
    deltas = [event["choices"][0]["delta"] for event in stream(mock_server, CHAT, **asked, echo=True)]
    assert "".join(delta.get("content", "") for delta in deltas) == "Well, " + plain
    mine = ask(mock_server, CHAT, messages=HI, max_tokens=1)["choices"][0]["message"]["content"]
    assert ask(mock_server, CHAT, messages=HI, max_tokens=1, echo=True)["choices"][0]["message"]["content"] == mine


def test_tools_that_the_template_does_not_show_are_told(mock_server: RunningServer) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    reply = ask(mock_server, CHAT, messages=HI, tools=tools, max_tokens=1)
    assert any(line.startswith("tools: the chat template does not show them") for line in reply["warnings"])
    assert "warnings" not in ask(mock_server, CHAT, messages=HI, tools=tools, tool_choice="none", max_tokens=1)


def test_too_many_prompts_names_field_and_setting(mock_server: RunningServer) -> None:
    error = mock_server.post(COMPLETIONS, {"prompt": ["a"] * 1025}).json()["error"]
    assert error["message"] == "prompt: may hold at most 1024 prompts (--max-prompts), got 1025"


def test_messages_without_content_and_of_any_role(mock_server: RunningServer) -> None:
    messages = [{"role": "critic", "content": "no"}, {"role": "assistant", "content": None}, *HI]
    assert ask(mock_server, CHAT, messages=messages, max_tokens=1)["choices"]


def test_any_variable_of_the_template_may_be_set(mock_server: RunningServer) -> None:
    ask(mock_server, CHAT, messages=HI, max_tokens=1, chat_template_kwargs={"custom": {"a": [1]}, "thinking": True})


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("prompt", ["import os", [151, 20, 1], ["a b", "c"]])
def test_echo_streams_what_it_says_at_once(server: RunningServer, prompt: Any, logprobs: int | None) -> None:
    asked = {**SHORT, "prompt": prompt, "echo": True, "logprobs": logprobs, "n": 2, "temperature": 1, "seed": 3}
    whole = {choice["index"]: choice for choice in ask(server, COMPLETIONS, **asked)["choices"]}
    texts = dict.fromkeys(whole, "")
    lists: dict[int, dict[str, list[Any]]] = {index: {} for index in whole}
    for event in stream(server, COMPLETIONS, **asked):
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        for name, values in (choice["logprobs"] or {}).items():
            lists[choice["index"]].setdefault(name, []).extend(values)
    for index, choice in whole.items():
        assert texts[index] == choice["text"]
        assert (lists[index] or None) == choice["logprobs"]


@pytest.mark.parametrize("streams", [False, True])
def test_echo_alone_scores_the_prompt(server: RunningServer, streams: bool) -> None:
    ids = [151, 20, 1, 30]
    asked = {"prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 1}
    if streams:
        events = stream(server, COMPLETIONS, **asked, stream_options={"include_usage": True})
        (choice,), usage = events[0]["choices"], events[-1]["usage"]
        assert len(events) == 2
    else:
        reply = ask(server, COMPLETIONS, **asked)
        (choice,), usage = reply["choices"], reply["usage"]
    tokens = choice["logprobs"]["tokens"]
    assert choice["text"] == "".join(tokens) and len(tokens) == 4 and choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"][0] is None and len(choice["logprobs"]["top_logprobs"][1]) >= 1
    assert usage["completion_tokens"] == 0 and usage["total_tokens"] == 4


def test_a_prompt_is_cut_to_what_fits(server: RunningServer) -> None:
    """truncate_prompt_tokens -1: the whole context where nothing is to be answered, whatever the text's length was."""
    ids = [20 + number % 50 for number in range(3000)]
    asked = {"prompt": ids, "truncate_prompt_tokens": -1, "echo": True, "max_tokens": 0, "logprobs": 0}
    reply = ask(server, COMPLETIONS, **asked, return_token_ids=True)
    assert reply["choices"][0]["prompt_token_ids"] == ids[-2048:]
    whole = ask(server, COMPLETIONS, prompt=ids[-2048:], echo=True, max_tokens=0, logprobs=0)["choices"][0]["logprobs"]
    assert reply["choices"][0]["logprobs"] == whole and len(whole["tokens"]) == 2048
    assert ask(server, COMPLETIONS, **(asked | {"truncate_prompt_tokens": 2048}))["usage"]["prompt_tokens"] == 2048
    assert ask(server, COMPLETIONS, **(asked | {"max_tokens": 8}))["usage"]["prompt_tokens"] == 2040
    book = "x = 1\n" * 20_000
    assert ask(server, COMPLETIONS, **(asked | {"prompt": book}))["usage"]["prompt_tokens"] == 2048
    chat = {"messages": [{"role": "user", "content": book}], "max_tokens": 3, "truncate_prompt_tokens": 50}
    assert ask(server, CHAT, **chat)["usage"]["prompt_tokens"] == 50
    scored = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0}
    scored["sampling_params"] = {"max_new_tokens": 0, "truncate_prompt_tokens": -1}
    lines = ask(server, "/generate", **scored)["meta_info"]["input_token_logprobs"]
    assert [line[0] for line in lines] == whole["token_logprobs"]


def test_echoed_ids_show_their_special_tokens(server: RunningServer) -> None:
    ids = server.post("/tokenize", {"prompt": "<|im_start|>a<|im_end|>"}).json()["tokens"]
    for logprobs in (None, 0):
        choice = ask(server, COMPLETIONS, prompt=ids, echo=True, max_tokens=1, logprobs=logprobs)["choices"][0]
        assert choice["text"].startswith("<|im_start|>a<|im_end|>")
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


def test_paths_without_v1_and_with_a_slash(mock_server: RunningServer) -> None:
    for path in ("/chat/completions", "/v1/chat/completions/", "/chat/completions/"):
        assert ask(mock_server, path, messages=HI, max_tokens=1)["object"] == "chat.completion"
    assert ask(mock_server, "/completions", prompt="a", max_tokens=1)["object"] == "text_completion"
    for path in ("/models", "/v1/models/", "/models/octavo-tiny", "/ping", "/health/"):
        mock_server.wait_ready(path=path)
    assert mock_server.post("/ping", {}).status == 200
    for path in ("//", "/v1/models//", "/v1/health", "/v1"):
        assert mock_server.get(path).status == 404, path


def test_answers_name_what_made_them(mock_server: RunningServer) -> None:
    for path, fields in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})):
        found = {ask(mock_server, path, **fields, max_tokens=1)["system_fingerprint"]}
        found |= {event["system_fingerprint"] for event in stream(mock_server, path, **fields, max_tokens=2)}
        assert len(found) == 1 and next(iter(found)).startswith("fp_")


def test_usage_comes_where_it_is_asked_for(mock_server: RunningServer) -> None:
    def usages(**options: Any) -> list[Any]:
        asked = {"messages": HI, "max_tokens": 2, "stream_options": options}
        return [event.get("usage") for event in stream(mock_server, CHAT, **asked)]

    for options in ({}, {"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}):
        assert not any(usages(**options))
    *others, last = usages(include_usage=True)
    assert last["completion_tokens"] == 2 and not any(others)
    counts = [usage["completion_tokens"] for usage in usages(include_usage=True, continuous_usage_stats=True)]
    assert counts == [0, 1, 2, 2]  # the first event names the role


def test_functions_are_tools_by_an_older_name(server: RunningServer) -> None:
    asked = {"messages": HI, "functions": [FUNCTION], "function_call": {"name": "f"}, "temperature": 0}
    (choice,) = ask(server, CHAT, **asked)["choices"]
    assert choice["message"]["function_call"] == {"name": "f", "arguments": '{"x":1}'}
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "function_call"
    deltas = [event["choices"][0] for event in stream(server, CHAT, **asked)]
    calls = [delta["delta"]["function_call"] for delta in deltas if "function_call" in delta["delta"]]
    assert "".join(call.get("arguments", "") for call in calls) == '{"x":1}'
    assert [call["name"] for call in calls if "name" in call] == ["f"]
    assert deltas[-1]["finish_reason"] == "function_call"


def test_calls_in_older_messages_become_tool_calls() -> None:
    message = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    body, legacy = with_tools({"messages": [*HI, message]})
    (call,) = body["messages"][1]["tool_calls"]
    assert call["function"] == message["function_call"] and "function_call" not in body["messages"][1] and not legacy
    plain = {"messages": HI, "tools": []}
    assert with_tools(plain) == (plain, False) and with_tools(plain)[0] is plain


def test_forced_json_is_compact(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}}, "required": ["a", "b"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    (choice,) = ask(server, CHAT, messages=HI, response_format=form, temperature=1, seed=1)["choices"]
    assert not set(" \t\r\n") & set(choice["message"]["content"])
