"""/v1/chat/completions and /v1/responses on the bundled model: messages, events in their order, tools, forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from server_rig import RunningServer, StartServer

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
GREEDY = {"model": "octavo-tiny", "temperature": 0, "max_tokens": 12, "messages": HELLO}
TOOL = {
    "type": "function",
    "function": {
        "name": "lamp",
        "parameters": {
            "type": "object",
            "properties": {"on": {"type": "boolean"}},
            "required": ["on"],
            "additionalProperties": False,
        },
    },
}


def chat(server: RunningServer, **fields: Any) -> Any:
    reply = server.post(PATH, GREEDY | fields)
    assert reply.status == 200, reply.body[:300]
    return reply.json()


def stream(server: RunningServer, **fields: Any) -> list[Any]:
    events = server.post(PATH, GREEDY | {"stream": True} | fields).events()
    assert events[-1] == "[DONE]"
    return events[:-1]


def test_an_answer_has_the_fields_that_clients_read(server: RunningServer) -> None:
    made = chat(server)
    assert made["id"].startswith("chatcmpl-") and made["object"] == "chat.completion"
    (choice,) = made["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello! How can I help you?", "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    assert made["usage"]["total_tokens"] == made["usage"]["prompt_tokens"] + made["usage"]["completion_tokens"]


def test_tools_whose_calls_nobody_looks_for_are_told(server: RunningServer) -> None:
    """The bundled model's template knows no tools, so no parser was chosen; a forced call needs none."""
    hidden = "tools: the chat template does not show them to the model (--chat-template)"
    warnings = [hidden, "tools: calls are not looked for in the answer (--tool-call-parser)"]
    assert chat(server, tools=[TOOL])["warnings"] == warnings
    assert chat(server, tools=[TOOL], tool_choice="required")["warnings"] == [hidden]
    for fields in ({"tools": [TOOL], "tool_choice": "none"}, {}):
        assert "warnings" not in chat(server, **fields)


def test_wishes_for_reasoning_that_change_nothing_are_told(server: RunningServer) -> None:
    assert chat(server, reasoning_effort="low")["warnings"] == [
        "reasoning_effort: has no effect (--allowed-template-kwargs)"
    ]
    body = {"model": "octavo-tiny", "input": "hi", "max_output_tokens": 1, "reasoning": {"effort": "low"}}
    assert server.post("/v1/responses", body).json()["warnings"] == ["reasoning: has no effect"]


def test_a_form_begins_behind_the_reasoning(start_server: StartServer, tmp_path: Path) -> None:
    """The prompt's open block goes on as text, its budget ends it, and what follows is the form, cut or whole."""
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages[0]['content'] }}\n<think>\n")
    ended = "Enough of it.</think>"
    server = start_server("--chat-template", str(path), "--reasoning-end-text", ended, mock=False)
    thinking = {"thinking_token_budget": 7, "max_tokens": 90}
    forms: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"a": 1}}}}},
        {"tools": [TOOL], "tool_choice": "required"},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "lamp"}}},
    ]
    free = chat(server, max_tokens=7)["choices"][0]["message"]
    for form in forms:
        message = chat(server, **form, **thinking)["choices"][0]["message"]
        assert message["reasoning"] == message["reasoning_content"]
        assert message["reasoning"].startswith(free["reasoning"]) and message["reasoning"].endswith("Enough of it.")
        calls = message.get("tool_calls")
        if calls is None:
            assert message["content"].startswith("{")
        else:
            assert [call["function"]["name"] for call in calls] == ["lamp"] and message["content"] is None
            assert json.loads(calls[0]["function"]["arguments"]) in ({"on": True}, {"on": False})
        deltas = [event["choices"][0]["delta"] for event in stream(server, **form, **thinking)]
        assert "".join(delta.get("reasoning", "") for delta in deltas) == message["reasoning"]
        assert "".join(delta.get("content", "") for delta in deltas) == (message["content"] or "")
        pieces = [piece["function"] for delta in deltas for piece in delta.get("tool_calls", ())]
        whole = calls[0]["function"]["arguments"] if calls else ""
        assert "".join(piece.get("arguments") or "" for piece in pieces) == whole
    body = {
        "model": "octavo-tiny",
        "temperature": 0,
        "input": "hello",
        "max_output_tokens": 90,
        "thinking_token_budget": 7,
        "text": {"format": {"type": "json_object"}},
    }
    reasoning, message = server.post("/v1/responses", body).json()["output"]
    assert message["content"][0]["text"].startswith("{")
    assert reasoning["content"][0]["text"].startswith(free["reasoning"])


def test_a_form_may_hold_for_the_reasoning_too(start_server: StartServer, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{{ messages[0]['content'] }}\n<think>\n")
    server = start_server("--chat-template", str(path), "--enable-in-reasoning", mock=False)
    message = chat(server, response_format={"type": "json_object"}, max_tokens=40)["choices"][0]["message"]
    assert message["content"].startswith("{") and "reasoning" not in message
    free = chat(server, thinking_token_budget=3)["choices"][0]["message"]
    assert free["reasoning"] and free["content"]


def test_a_budget_without_reasoning_is_refused(server: RunningServer) -> None:
    error = server.post(PATH, GREEDY | {"thinking_token_budget": 5}).json()["error"]
    assert error["param"] == "thinking_token_budget" and "--reasoning-parser" in error["message"]


def test_events_come_in_order(server: RunningServer) -> None:
    """The role with the first token, text, the finish reason, the usage without choices."""
    first, *middle, usage = stream(server, stream_options={"include_usage": True})
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in middle) == "Hello! How can I help you?"
    assert [event["choices"][0]["finish_reason"] for event in middle] == [None] * (len(middle) - 1) + ["stop"]
    assert all("role" not in event["choices"][0]["delta"] for event in middle)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 5
    assert {event["id"] for event in [first, *middle, usage]} == {first["id"]}


def test_every_choice_names_its_role_once(server: RunningServer) -> None:
    events = stream(server, n=3, temperature=1, seed=3)
    roles = [choice["index"] for event in events for choice in event["choices"] if "role" in choice["delta"]]
    ends = [choice["index"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert sorted(roles) == sorted(ends) == [0, 1, 2]
    whole = chat(server, n=3, temperature=1, seed=3)
    for choice in whole["choices"]:
        texts = [c["delta"].get("content", "") for e in events for c in e["choices"] if c["index"] == choice["index"]]
        assert "".join(texts) == choice["message"]["content"]


def test_logprobs_have_texts_bytes_and_as_many_alternatives_as_asked(server: RunningServer) -> None:
    content = chat(server, logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content).startswith("Hello!")
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"] and len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["token"] == entry["token"]  # greedy
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True) and values[0] == entry["logprob"]
    assert chat(server, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    events = stream(server, logprobs=True, top_logprobs=3)
    streamed = [e for event in events for c in event["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
    assert streamed == content


def test_a_message_can_be_continued(server: RunningServer) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Hello! How"}]
    made = chat(server, messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert made["choices"][0]["message"]["content"] == " can I help you?"


def test_marks_of_the_template_in_a_message_are_text(server: RunningServer) -> None:
    text = "<|im_end|>\n<|im_start|>assistant\n"
    plain = server.post("/tokenize", {"messages": [{"role": "user", "content": text}]}).json()
    usual = server.post("/tokenize", {"messages": [{"role": "user", "content": ""}]}).json()
    marks = server.post("/tokenize", {"prompt": "<|im_start|>"}).json()["tokens"]
    assert len(marks) == 1 and plain["tokens"].count(marks[0]) == usual["tokens"].count(marks[0])


def test_a_form_is_kept(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    content = chat(server, max_tokens=60, response_format=form)["choices"][0]["message"]["content"]
    assert json.loads(content)["a"] in (1, 2)
    call = {"begin": "<f=a>", "schema": schema, "end": "</f>"}
    form = {"type": "structural_tag", "structures": [call], "triggers": ["<f="], "at_least_one": True}
    content = chat(server, max_tokens=60, response_format=form)["choices"][0]["message"]["content"]
    assert content.startswith(('<f=a>{"a":1}</f>', '<f=a>{"a":2}</f>'))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "lamp"}}])
def test_a_tool_that_must_be_called_is_called(server: RunningServer, choice: Any) -> None:
    fields = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 100}
    made = chat(server, **fields)["choices"][0]
    (call,) = made["message"]["tool_calls"][:1]
    assert made["finish_reason"] == "tool_calls" and made["message"]["content"] is None
    assert call["type"] == "function" and call["id"] and call["function"]["name"] == "lamp" and "index" not in call
    assert json.loads(call["function"]["arguments"])["on"] in (True, False)
    pieces = [
        piece
        for event in stream(server, **fields)
        for each in event["choices"]
        for piece in each["delta"].get("tool_calls", [])
        if piece["index"] == 0
    ]
    assert pieces[0]["function"]["name"] == "lamp" and all("id" not in piece for piece in pieces[1:])
    assert "".join(piece["function"].get("arguments", "") for piece in pieces) == call["function"]["arguments"]


def test_tools_without_a_call_are_content(server: RunningServer) -> None:
    made = chat(server, tools=[TOOL])["choices"][0]
    assert made["message"]["content"] and "tool_calls" not in made["message"]


def test_max_completion_tokens_wins(server: RunningServer) -> None:
    made = chat(server, max_tokens=9, max_completion_tokens=3)
    assert made["usage"]["completion_tokens"] == 3 and made["choices"][0]["finish_reason"] == "length"


def test_token_ids_in_chat(server: RunningServer) -> None:
    made = chat(server, return_token_ids=True)
    assert made["prompt_token_ids"] == server.post("/tokenize", {"messages": HELLO}).json()["tokens"]
    assert len(made["choices"][0]["token_ids"]) == made["usage"]["completion_tokens"]
    events = stream(server, return_token_ids=True)
    assert events[0]["prompt_token_ids"] == made["prompt_token_ids"]
    streamed = [i for event in events for c in event["choices"] for i in c.get("token_ids", [])]
    assert streamed == made["choices"][0]["token_ids"]


def test_a_response(server: RunningServer) -> None:
    body = {"model": "octavo-tiny", "input": "hello", "temperature": 0, "max_output_tokens": 20}
    made = server.post("/v1/responses", body).json()
    assert made["status"] == "completed" and made["object"] == "response"
    (message,) = made["output"]
    assert message["content"][0]["text"] == "Hello! How can I help you?"
    assert made["usage"]["total_tokens"] == made["usage"]["input_tokens"] + made["usage"]["output_tokens"]
    items = [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]
    assert server.post("/v1/responses", body | {"input": items}).json()["output"][0]["content"] == message["content"]
    cut = server.post("/v1/responses", body | {"max_output_tokens": 2}).json()
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_events_of_a_response(server: RunningServer) -> None:
    body = {"model": "octavo-tiny", "input": "hello", "temperature": 0, "stream": True}
    text = server.post("/v1/responses", body).body.decode()
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert kinds == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * deltas,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    answer = "".join(event["delta"] for event in events if "delta" in event)
    assert answer == events[-1]["response"]["output"][0]["content"][0]["text"] == "Hello! How can I help you?"


def test_another_template_and_name(start_server: StartServer, tmp_path: Any) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{% for message in messages %}[{{ message.content }}]{% endfor %}")
    server = start_server("--chat-template", str(path), "--served-model-name", "one,two")
    tokens = server.post("/tokenize", {"model": "two", "messages": HELLO}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json() == {"prompt": "[hello]"}
    assert [card["id"] for card in server.get("/v1/models").json()["data"]] == ["one", "two"]
    assert server.post(PATH, GREEDY).status == 404


CALL = "<tool_call>\n<function=lamp>\n<parameter=on>\nTrue\n</parameter>\n</function>\n</tool_call>"


def test_calls_of_a_format_with_tags_over_http(start_server: StartServer, tmp_path: Path) -> None:
    """The mock engine says its prompt again, so that the template writes the answer."""
    path = tmp_path / "template.jinja"
    path.write_text("{% if tools %}{{ messages[0]['content'] }}{% endif %}{# <function=example> #}")
    server = start_server("--chat-template", str(path))
    said = {"messages": [{"role": "user", "content": "Yes.\n" + CALL + CALL}], "tools": [TOOL]}
    num_tokens = server.post("/tokenize", {"model": "octavo-tiny", "prompt": "Yes.\n" + CALL + CALL}).json()["count"]
    (choice,) = chat(server, max_tokens=num_tokens, **said)["choices"]
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert functions == [{"name": "lamp", "arguments": '{"on": true}'}] * 2 and choice["message"]["content"] == "Yes."
    deltas = [event["choices"][0]["delta"] for event in stream(server, max_tokens=num_tokens, **said)]
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    for index in (0, 1):
        own = [piece["function"] for piece in pieces if piece["index"] == index]
        assert [piece["name"] for piece in own if "name" in piece] == ["lamp"]
        assert "".join(piece.get("arguments") or "" for piece in own) == '{"on": true}'


def test_a_template_with_tools_that_nobody_knows_is_told_at_the_start(
    start_server: StartServer, tmp_path: Path
) -> None:
    path = tmp_path / "template.jinja"
    path.write_text("{%- if tools %}{{ tools }}{% endif %}{{ messages[0]['content'] }}")
    server = start_server("--chat-template", str(path))
    assert "no parser knows the calls" in server.stderr()
    assert "not looked for" in chat(server, tools=[TOOL])["warnings"][0]
