"""Parsers of outputs: what they find, and that no cut of a text changes it."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.serve.parsers.base import Tape
from octavo.serve.parsers.json_scan import JsonScanner
from octavo.serve.parsers.output import REASONING_PARSERS, TOOL_PARSERS, OutputParser, Parsed, ParserChoice, parse
from octavo.serve.sandbox.grammar import from_tool_choice

TOOLS = {"get_weather", "f", "a.b-c"}
PARIS = '{"city": "Paris"}'

# parser, output, content, calls
CALLS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "Hello.", "Hello.", []),
    ("hermes", " spaces \n", " spaces \n", []),
    ("hermes", f'<tool_call>\n{{"name": "f", "arguments": {PARIS}}}\n</tool_call>', "", [("f", PARIS)]),
    ("hermes", f'Let me see.\n\n<tool_call>{{"name":"f","arguments":{PARIS}}}</tool_call>\n', "Let me see.",
     [("f", PARIS)]),
    ("hermes", '<tool_call>{"name":"f","arguments":{}}</tool_call>\n<tool_call>\n{"name":"get_weather",'
     '"arguments":{"a":[1,{"b":null}]}}\n</tool_call> Done. ', "Done. ",
     [("f", "{}"), ("get_weather", '{"a":[1,{"b":null}]}')]),
    ("hermes", '<tool_call>{"arguments": {"x": 1.5e3}, "name": "f"}</tool_call>', "", [("f", '{"x": 1500.0}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"é": "ü"}}}</tool_call>', "",
     [("f", '{"é": "ü"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "a\nb\t</tool_call> \\u00e9"}}</tool_call>', "",
     [("f", '{"s": "a\\u000ab\\u0009</tool_call> \\u00e9"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": 7, "more": [2]}</tool_call>', "",
     [("f", '{"a": 1}')]),
    # cut off
    ("hermes", '<tool_call>{"name": "f", "arguments": {"city": "Pa', "", [("f", '{"city": "Pa')]),
    ("hermes", '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_c', "", [("f", "{}")]),
    ("hermes", "text <tool_c", "text <tool_c", []),
    # no calls
    ("hermes", "<tool_call>print(1)</tool_call>", "<tool_call>print(1)</tool_call>", []),
    ("hermes", '<tool_call>{"name": f}</tool_call>', '<tool_call>{"name": f}</tool_call>', []),
    ("hermes", '<tool_call> {"name": "__import__(\'os\')", "arguments": {}} </tool_call>',
     '<tool_call> {"name": "__import__(\'os\')", "arguments": {}} </tool_call>', []),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
     '<tool_call>{"name": 5, "arguments": {}}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
     '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', []),
    ("hermes", "<tool_call>" + "[" * 99, "<tool_call>" + "[" * 99, []),
    # broken within the arguments: they go on as they are
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": __import__("os")}}</tool_call> x', "x",
     [("f", '{"a": __import__("os")}}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}} junk </tool_call>', "junk </tool_call>",
     [("f", '{"a": 1}')]),
    ("llama3_json", "Hello.", "Hello.", []),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("llama3_json", '\n <|python_tag|>{"name": "f", "parameters": {"a": 1}}\n', "", [("f", '{"a": 1}')]),
    ("llama3_json", '{"name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {"b": true}}', "",
     [("f", "{}"), ("get_weather", '{"b": true}')]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {"a": "x"}}', "", [("f", '{"a": "x"}')]),
    ("llama3_json", '{"answer": [1, 2]}', '{"answer": [1, 2]}', []),
    ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("llama3_json", 'Sure: {"name": "f", "parameters": {}}', 'Sure: {"name": "f", "parameters": {}}', []),
    ("llama3_json", '<|python_tag|>import os; os.system("x")', '<|python_tag|>import os; os.system("x")', []),
    ("llama3_json", '{"name": "f", "parameters": {}}; and so on', "; and so on", [("f", "{}")]),
    ("llama3_json", "{", "{", []),
    ("mistral", "Hello [TOOL_ and [TOOL_CALLS", "Hello [TOOL_ and [TOOL_CALLS", []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
    ("mistral", 'Wait. [TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "get_weather", "arguments": {"b": 2}, '
     '"id": "x"}] ok', "Wait.ok", [("f", "{}"), ("get_weather", '{"b": 2}')]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]get_weather[ARGS]{"b": [2]}', "",
     [("f", '{"a": 1}'), ("get_weather", '{"b": [2]}')]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]abc", "[TOOL_CALLS]f[CALL_ID]abc", []),
    ("mistral", '[TOOL_CALLS]rm -rf{"a": 1}', '[TOOL_CALLS]rm -rf{"a": 1}', []),
    ("mistral", "[TOOL_CALLS][1, 2]", "[TOOL_CALLS][1, 2]", []),
    ("mistral", '[TOOL_CALLS]f{"a": oops [TOOL_CALLS]f{}', "", [("f", '{"a": oops '), ("f", "{}")]),
]  # fmt: skip

# output, whether the prompt ends within reasoning, reasoning, content
REASONING = [
    ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes."),
    ("\n<think>a < b</think>c", False, "a < b", "c"),
    ("Hm.\n\nSo.\n</think>\n\nYes.", True, "Hm.\n\nSo.", "Yes."),
    ("<think>\n\n</think>\n\nYes.\n", False, "", "Yes.\n"),
    ("No thought. <think>late</think>", False, "", "No thought. <think>late</think>"),
    ("<think>cut off </thi", False, "cut off </thi", ""),
    ("<think>cut off \n", False, "cut off", ""),
    ("  <thi", False, "", "  <thi"),
    ("<think>a</think><think>b</think>", False, "a", "<think>b</think>"),
    ("", False, "", ""),
]


def _ids() -> Any:
    numbers = itertools.count()
    return lambda: f"id{next(numbers)}"


def _parser(tools: str = "none", reasoning: str = "none", prompt: str = "") -> OutputParser:
    return ParserChoice.of(None, tools, reasoning).parser(prompt, tools=TOOLS, new_id=_ids())


def _fed(parser: OutputParser, pieces: Sequence[str]) -> Parsed:
    parsed = Parsed()
    for piece in pieces:
        for delta in parser.feed(piece):
            parsed.add(delta)
    for delta in parser.finish():
        parsed.add(delta)
    return parsed


def _cuts(text: str) -> list[list[str]]:
    """Characters one by one, every cut in two, and 200 cuts in more."""
    rng = random.Random(len(text))
    truncation = [list(text)] + [[text[:at], text[at:]] for at in range(len(text) + 1)]
    for _ in range(200):
        marks = sorted(rng.choices(range(len(text) + 1), k=rng.randint(2, 9)))
        truncation.append([text[a:b] for a, b in itertools.pairwise([0, *marks, len(text)])])
    return truncation


@pytest.mark.parametrize(("name", "text", "content", "calls"), CALLS)
def test_calls_and_every_cut_of_them(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    whole = parse(_parser(name), text)
    assert whole.content == content
    assert [(call.name, call.arguments) for call in whole.calls] == calls
    assert [call.id for call in whole.calls] == [f"id{index}" for index in range(len(calls))]
    for pieces in _cuts(text):
        assert _fed(_parser(name), pieces) == whole, pieces


@pytest.mark.parametrize(("text", "is_open", "reasoning", "content"), REASONING)
def test_reasoning_and_every_cut_of_it(text: str, is_open: bool, reasoning: str, content: str) -> None:
    prompt = "<|im_start|>assistant\n<think>\n" if is_open else "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    whole = parse(_parser(reasoning="qwen3", prompt=prompt), text)
    assert (whole.reasoning, whole.content) == (reasoning, content)
    for pieces in _cuts(text):
        assert _fed(_parser(reasoning="qwen3", prompt=prompt), pieces) == whole, pieces


def test_reasoning_then_calls() -> None:
    text = f'<think>Use f.</think>\n\nOne moment.\n<tool_call>\n{{"name": "f", "arguments": {PARIS}}}\n</tool_call>'
    whole = parse(_parser("qwen3", "qwen3"), text)
    assert (whole.reasoning, whole.content, len(whole.calls)) == ("Use f.", "One moment.", 1)
    for pieces in _cuts(text):
        assert _fed(_parser("qwen3", "qwen3"), pieces) == whole


_TOKENS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>",
    '{"name": "f", "arguments": ', '{"name": "f", "parameters": {', '"name"', '"f"', "{", "}", "[", "]", ",",
    ":", ";", '"', "\\", "\n", " ", "1", "-", "true", "e", "f", "é", "\x01", '{"a": 1}', '"arguments"', "<", "[",
]  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(
    st.lists(st.sampled_from(_TOKENS), max_size=25),
    st.sampled_from(["hermes", "llama3_json", "mistral"]),
    st.sampled_from(["none", "qwen3", "mistral"]),
    st.randoms(use_true_random=False),
)
def test_no_text_and_no_cut_makes_a_difference(tokens: list[str], tools: str, reasoning: str, rng: Any) -> None:
    text = "".join(tokens)
    whole = parse(_parser(tools, reasoning), text)
    assert _fed(_parser(tools, reasoning), tokens) == whole
    assert _fed(_parser(tools, reasoning), list(text)) == whole
    marks = sorted(rng.choices(range(len(text) + 1), k=3))
    assert _fed(_parser(tools, reasoning), [text[a:b] for a, b in itertools.pairwise([0, *marks, len(text)])]) == whole
    if not whole.calls and reasoning == "none":
        assert whole.content == text


def test_arguments_come_as_they_are_written() -> None:
    parser = _parser("hermes")
    parser.feed('<tool_call>\n{"name": "f", "arguments": {"ci')
    assert [delta.arguments for delta in parser.feed('ty": "Par')] == ['ty": "Par']
    assert parser.num_calls == 1


def test_text_is_not_held_back_longer_than_needed() -> None:
    parser = _parser("hermes", "qwen3")
    assert [delta.content for delta in parser.feed("Hello")] == ["Hello"]
    assert [delta.content for delta in parser.feed(" wor")] == [" wor"]
    assert [delta.content for delta in parser.feed("ld <")] == ["ld"]
    assert [delta.content for delta in parser.feed("b>")] == [" <b>"]


def test_required_and_named_tool_choices() -> None:
    choice = ParserChoice()
    text = '[{"name": "f", "arguments": {"a": 1}}, {"name": "get_weather", "arguments": {}}]'
    for pieces in _cuts(text):
        calls = _fed(choice.parser("", tools=TOOLS, forced="required"), pieces).calls
        assert [(call.name, call.arguments) for call in calls] == [("f", '{"a": 1}'), ("get_weather", "{}")]
    for pieces in _cuts(PARIS):
        calls = _fed(choice.parser("", tools=TOOLS, forced="=f"), pieces).calls
        assert [(call.name, call.arguments) for call in calls] == [("f", PARIS)]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    assert from_tool_choice(tools, "f").json == '{"type":"object"}'
    assert json.loads(from_tool_choice(tools).json or "")["items"]["anyOf"][0]["properties"]["name"] == {"const": "f"}


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{% if tools %}<tool_call>{% endif %}<think>", "Hermes", "Reasoning"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "Mistral", None),
        ("<|start_header_id|> <|python_tag|>", "Llama3", None),
        ("[TOOL_CALLS] [THINK]", "Mistral", "MistralReasoning"),
        ("<|im_start|>", None, None),
        (None, None, None),
    ],
)
def test_auto_looks_at_the_template(template: str | None, tools: str | None, reasoning: str | None) -> None:
    choice = ParserChoice.of(template)
    assert (choice.tools and choice.tools.__name__, choice.reasoning and choice.reasoning.__name__) == (
        tools,
        reasoning,
    )


def test_the_docs_list_every_name() -> None:
    text = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    missing = [name for table in (TOOL_PARSERS, REASONING_PARSERS) for name in table if f"`{name}`" not in text]
    assert not missing


def test_names_choose_and_unknown_ones_are_refused() -> None:
    for name in TOOL_PARSERS:
        assert ParserChoice.of(None, name).tools is not None
    for name in REASONING_PARSERS:
        assert ParserChoice.of(None, "none", name).reasoning is not None
    assert ParserChoice.of("<tool_call><think>", "none", "none") == ParserChoice()
    with pytest.raises(ValueError, match="hermes"):
        ParserChoice.of(None, "hermess")


def test_who_needs_special_tokens() -> None:
    assert ParserChoice.of("[TOOL_CALLS]").needs_special_tokens(tools=True)
    assert not ParserChoice.of("[TOOL_CALLS]").needs_special_tokens(tools=False)
    assert not ParserChoice.of("<tool_call><think>").needs_special_tokens(tools=True)
    for mark in ("<tool_call>", "</think>"):  # where a vocabulary has it as a special token
        choice = ParserChoice.of("<tool_call><think>", special_tokens=["<s>", mark])
        assert choice.needs_special_tokens(tools=True)
        assert choice.needs_special_tokens(tools=False) is (mark == "</think>")


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 300_000,
        '<tool_call>{"id": "' * 15_000,
        "<tool_call>" * 30_000,
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 6_000,
        "[TOOL_CALLS][{" * 20_000,
        "<" * 300_000,
        " " * 300_000,
    ],
    ids=["long string", "calls within calls", "marks", "many calls", "arrays", "beginnings", "spaces"],
)
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral"])
def test_hostile_outputs_take_linear_time(name: str, text: str) -> None:
    for size in (len(text), 7):
        began = time.process_time()
        _fed(_parser(name), [text[at : at + size] for at in range(0, len(text), size)])
        assert time.process_time() - began < 3


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(_JSON, max_size=3) | st.dictionaries(st.text(), _JSON, max_size=3), st.booleans(), st.integers(0, 4))
def test_the_scanner_takes_what_json_is(value: Any, ascii_only: bool, indent: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent or None)
    scanner = JsonScanner()
    assert scanner.scan(text + "}rest", 0) == (len(text), text)
    assert scanner.done and not scanner.broken


@settings(max_examples=400, deadline=None)
@given(st.text(alphabet='{}[],:"\\ \n01.-+eEtrufalsn\x01', max_size=12))
def test_the_scanner_ends_only_where_json_ends(text: str) -> None:
    text = "[" + text
    scanner = JsonScanner()
    end, kept = scanner.scan(text, 0)
    if scanner.done:
        json.loads(kept)
    elif scanner.broken:
        with pytest.raises(ValueError):
            json.loads(text[: end + 1], strict=False)


def test_a_tape_gives_back_what_it_got() -> None:
    tape = Tape()
    tape.add("abc")
    taken = tape.take(2)
    tape.add("de")
    tape.put_back(taken)
    assert tape.take(len(tape)) == "abcde"
