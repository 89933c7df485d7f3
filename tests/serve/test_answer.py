"""What of an answer is reasoning, content and a call, as the events of a stream and the whole reply tell it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

import openai
import pytest

from octavo.config.engine_config import EngineConfig
from octavo.request.outputs import CompletionOutput
from octavo.serve.api.answer import Answer
from octavo.serve.parsers.output import ParserChoice
from octavo.text.tokenizer import Tokenizer
from paced_app import PacedApp, Script
from test_parsers import CALLS as JSON_CALLS
from test_parsers import TOOLS as JSON_TOOLS
from test_tool_formats import CALLS as TAGGED_CALLS
from test_tool_formats import TOOLS as TAGGED_TOOLS

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
FORCED = [
    ("required", "", '[{"name": "f", "parameters": {"a": 1}}, {"name": "get_weather", "parameters": {}}]'),
    ("=f", "", '{"a": {"b": [1, 2]}}'),
]


def _parsers(name: str, tools: Any, forced: str = "") -> Any:
    return ParserChoice.of(None, name, "none").parser("", tools=tools, forced=forced)


@pytest.mark.parametrize(
    ("name", "tools", "text", "forced"),
    [(name, JSON_TOOLS, text, "") for name, text, _, calls in JSON_CALLS if calls]
    + [(name, TAGGED_TOOLS, text, "") for name, text, _, calls in TAGGED_CALLS if calls]
    + [("none", JSON_TOOLS, text, forced) for forced, _, text in FORCED],
)
def test_an_event_has_one_entry_a_call(name: str, tools: Any, text: str, forced: str) -> None:
    """Clients read the first entry of each event: a call's name and its arguments' beginning are one entry."""
    for size in (1, 3, 7, len(text)):
        answer = Answer(_parsers(name, tools, forced), reasons=False, max_calls=None)
        calls: dict[Any, str] = {}
        for at in range(0, len(text), size):
            ends = "stop" if at + size >= len(text) else None
            parts = answer.feed(_piece(text[at : at + size], ends))
            indices = [call.index for call in parts.tool_calls]
            assert len(indices) == len(set(indices)), f"{indices} in one event of {text!r}"
            for call in parts.tool_calls:
                calls[call.index] = calls.get(call.index, "") + str(call.function.arguments)
        whole = Answer(_parsers(name, tools, forced), reasons=False, max_calls=None)
        said = [call.function.arguments for call in whole.whole(_piece(text, "stop")).tool_calls]
        assert list(calls.values()) == said


def _piece(text: str, finish_reason: str | None) -> CompletionOutput:
    return CompletionOutput(0, text, [1], None, None, finish_reason=finish_reason)


def says(text: str) -> Script:
    with resources.as_file(resources.files("octavo").joinpath("assets/octavo-tiny")) as folder:
        token_ids = Tokenizer.load(folder).encode(text, add_special_tokens=False)
    return lambda add, index: ([*token_ids, token_ids[0]], "stop")  # the token that stops is no text


@pytest.fixture(scope="module")
def reasoning() -> Iterator[PacedApp]:
    with PacedApp(EngineConfig(reasoning_parser="qwen3")) as app:
        yield app


RESPONSES_SAID = {
    "<think>Hm, well.</think>\nYes and no.": [("reasoning", "Hm, well."), ("message", "Yes and no.")],
    "<think>Hm, well.</think>": [("reasoning", "Hm, well.")],
    "<think>Hm, we": [("reasoning", "Hm, we")],
    "Yes and no.": [("message", "Yes and no.")],
}


@pytest.mark.parametrize("text", RESPONSES_SAID)
def test_a_response_has_its_items_in_order_and_streams_them(reasoning: PacedApp, text: str) -> None:
    wanted = RESPONSES_SAID[text]
    reply = json.loads(reasoning.ask(RESPONSES, {"input": "hi"}, says(text))[1])
    assert [(item["type"], item["content"][0]["text"]) for item in reply["output"]] == wanted
    events = reasoning.events(RESPONSES, {"input": "hi"}, says(text), seed=1)
    final = events[-1]["response"]
    assert _nameless(final["output"]) == _nameless(reply["output"])
    pieces = ["" for _ in wanted]
    for event in events:
        kind = event["type"]
        if kind.endswith(".delta"):
            of_reasoning = wanted[event["output_index"]][0] == "reasoning"
            assert kind == f"response.{'reasoning' if of_reasoning else 'output'}_text.delta"
            pieces[event["output_index"]] += event["delta"]
    assert pieces == [said for _, said in wanted]
    done = [event["item"]["type"] for event in events if event["type"] == "response.output_item.done"]
    assert done == [kind for kind, _ in wanted]
    assert [e["sequence_number"] for e in events] == list(range(len(events)))


def _nameless(items: list[Any]) -> list[Any]:
    return [{key: value for key, value in item.items() if key != "id"} for item in items]


def test_a_response_without_a_word_is_an_empty_message(reasoning: PacedApp) -> None:
    empty: Script = lambda add, index: ([add.prompt_token_ids[0]], "stop")  # noqa: E731 - a special token
    reply = json.loads(reasoning.ask(RESPONSES, {"input": "hi"}, empty)[1])
    assert [(item["type"], item["content"][0]["text"]) for item in reply["output"]] == [("message", "")]


def test_a_chat_that_has_only_reasoned_has_no_content(reasoning: PacedApp) -> None:
    for text, content in (("<think>Hm, we", None), ("<think>Hm.</think>Yes.", "Yes."), ("Yes.", "Yes.")):
        (choice,) = json.loads(reasoning.ask(CHAT, {"messages": HI}, says(text))[1])["choices"]
        assert choice["message"]["content"] == content


def test_openai_s_client_follows_the_items(reasoning: PacedApp) -> None:
    from openai._models import construct_type
    from openai.lib.streaming.responses._responses import ResponseStreamState
    from openai.types.responses import ResponseStreamEvent

    state: Any = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    _, received = reasoning.ask(RESPONSES, {"input": "hi", "stream": True}, says("<think>Hm.</think>Yes."))
    last: Any = None
    for line in received.decode().split("\n\n"):
        if line:
            event = construct_type(type_=ResponseStreamEvent, value=json.loads(line.rpartition("data: ")[2]))
            last = state.handle_event(event)[-1]
    assert last.type == "response.completed" and last.response.output_text == "Yes."
    assert [item.type for item in last.response.output] == ["reasoning", "message"]
