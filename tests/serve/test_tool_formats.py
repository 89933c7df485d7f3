"""Calls as today's models write them: what is found, that no cut changes it, and that nothing malformed is lost."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.serve.parsers.output import TOOL_PARSERS, OutputParser, Parsed, ParserChoice, parse
from octavo.serve.parsers.tools.tagged import as_json, types_of
from patience import patient

TOOLS: dict[str, Any] = {
    "f": None,
    "a.b-c": {},
    "write": {
        "type": "object",
        "properties": {
            "path": {"type": "string"}, "count": {"type": "integer"}, "ratio": {"type": "number"},
            "on": {"type": "boolean"}, "tags": {"type": "array"}, "more": {"type": "object"},
            "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "maybe": {"type": ["string", "null"]},
            "kind": {"enum": ["a", "b"]}, "any": {},
        },
    },
}  # fmt: skip
PARIS = '{"city": "Paris"}'
V3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
V31 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
END = "<｜tool▁call▁end｜>"
KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>"

# parser, output, content, calls
CALLS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("qwen3_coder", "Hello <tool_ and <function", "Hello <tool_ and <function", []),
    ("qwen3_coder", "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", [("f", "{}")]),
    ("qwen3_coder", "I see.\n<tool_call>\n<function=write>\n<parameter=path>\n/a b\n</parameter>\n<parameter=count>"
     "\n3\n</parameter>\n</function>\n</tool_call>\n", "I see.", [("write", '{"path": "/a b", "count": 3}')]),
    ("qwen3_coder", "<tool_call><function=write><parameter=path>12</parameter><parameter=on>True</parameter>"
     '<parameter=tags>[1, "x"]</parameter></function></tool_call><tool_call><function=a.b-c></function></tool_call>ok',
     "ok", [("write", '{"path": "12", "on": true, "tags": [1, "x"]}'), ("a.b-c", "{}")]),
    ("qwen3_coder", "<function=write>\n<parameter=path>\n\n  x\n\n</parameter></function>", "",
     [("write", '{"path": "\\n  x\\n"}')]),  # without its outer tag; one line break at each end is the tags'
    ("qwen3_coder", '<tool_call><function=write><parameter=path>a "q" \\ é\n</p> < </parameter></function></tool_call>',
     "", [("write", '{"path": "a \\"q\\" \\\\ é\\n</p> < "}')]),
    ("qwen3_coder", "<tool_call><function=nobody><parameter=path>x</parameter></function></tool_call>",
     "<tool_call><function=nobody><parameter=path>x</parameter></function></tool_call>", []),
    ("qwen3_coder", '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    # cut off
    ("qwen3_coder", "<tool_call><function=write><parameter=path>ab</para", "", [("write", '{"path": "ab</para')]),
    ("qwen3_coder", "<tool_call><function=write><parameter=count>12", "", [("write", '{"count": ')]),
    ("qwen3_coder", "<tool_call><function=write><parameter=count>12</parameter>", "", [("write", '{"count": 12}')]),
    ("qwen3_coder", "<tool_call><function=f></function></tool_c", "", [("f", "{}")]),
    # malformed within a call: it ends there
    ("qwen3_coder", "<tool_call><function=f>oops</function></tool_call>", "oops</function></tool_call>", [("f", "{}")]),
    ("qwen3_coder", "<tool_call><function=f></tool_call> x", "x", [("f", "{}")]),
    ("glm45", "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a\n</arg_value>\n<arg_key>ratio</arg_key>\n"
     "<arg_value>2</arg_value>\n</tool_call>", "", [("write", '{"path": "a\\n", "ratio": 2}')]),
    ("glm45", "So:<tool_call>f<arg_key>x</arg_key><arg_value>[1]</arg_value></tool_call>\n<tool_call>f</tool_call>",
     "So:", [("f", '{"x": [1]}'), ("f", "{}")]),
    ("glm45", "<tool_call>nobody\n</tool_call>", "<tool_call>nobody\n</tool_call>", []),
    ("glm45", "<tool_call>f<arg_key>x</arg_key>oops</tool_call>", "oops</tool_call>", [("f", '{"x": null}')]),
    ("glm45", '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    ("glm45", "<tool_call>f", "<tool_call>f", []),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="write">\n<parameter name="path">a</parameter>\n<parameter name='
     '"more">{"x": [null]}</parameter>\n</invoke>\n<invoke name="f">\n</invoke>\n</minimax:tool_call>', "",
     [("write", '{"path": "a", "more": {"x": [null]}}'), ("f", "{}")]),
    ("minimax_m2", 'Hm. <minimax:tool_call><invoke name="f"></invoke></minimax:tool_call> Done', "Hm.Done",
     [("f", "{}")]),
    ("minimax_m2", '<invoke name="f"></invoke>', '<invoke name="f"></invoke>', []),
    ("deepseek_v3", f"{V3}f\n```json\n{PARIS}\n```{END}<｜tool▁calls▁end｜>", "", [("f", PARIS)]),
    ("deepseek_v3", f"Wait.\n{V3}f\n```json\n{PARIS}\n```{END}\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
     f'write\n```json\n{{"on": 1}}\n```{END}<｜tool▁calls▁end｜>', "Wait.", [("f", PARIS), ("write", '{"on": 1}')]),
    ("deepseek_v31", f"{V31}f<｜tool▁sep｜>{PARIS}{END}<｜tool▁call▁begin｜>f<｜tool▁sep｜>{{}}{END}"
     "<｜tool▁calls▁end｜>", "", [("f", PARIS), ("f", "{}")]),
    ("deepseek_v31", f"{V31}nobody<｜tool▁sep｜>{PARIS}{END}", f"{V31}nobody<｜tool▁sep｜>{PARIS}{END}", []),
    ("deepseek_v31", f'{V31}f<｜tool▁sep｜>{{"a": oops}}{END}<｜tool▁calls▁end｜>', "", [("f", '{"a": oops}')]),
    ("deepseek_v31", f"{V31}f", f"{V31}f", []),
    ("kimi_k2", f"{KIMI}functions.f:0<|tool_call_argument_begin|>{PARIS}<|tool_call_end|><|tool_call_begin|>functions."
     "a.b-c:1<|tool_call_argument_begin|> {} <|tool_call_end|><|tool_calls_section_end|>", "",
     [("f", PARIS), ("a.b-c", "{}")]),
    ("kimi_k2", f"Now.{KIMI}call_7<|tool_call_argument_begin|>{PARIS}<|tool_call_end|>",
     f"Now.{KIMI}call_7<|tool_call_argument_begin|>{PARIS}<|tool_call_end|>", []),
    ("openai", f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{PARIS}<|call|>", "", [("f", PARIS)]),
]  # fmt: skip

# output of GPT-OSS, reasoning, content, calls
HARMONY = [
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>", "Hm.",
     "Yes.", []),
    ("<|channel|>analysis<|message|>A.<|end|><|start|>assistant<|channel|>analysis<|message|>B.<|end|>", "A.\nB.", "",
     []),
    ("<|channel|>analysis<|message|>Use f.<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>"
     f"json<|message|>{PARIS}<|call|>", "Use f.", "", [("f", PARIS)]),
    (f"<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{PARIS}<|call|><|start|>assistant"
     "<|channel|>commentary<|message|>One moment.<|end|>", "", "One moment.", [("f", PARIS)]),
    (" to=functions.f<|channel|>commentary<|message|>{}", "", "", [("f", "{}")]),
    ("<|channel|>commentary to=python<|message|>{}<|call|>", "",
     "<|channel|>commentary to=python<|message|>{}<|call|>", []),
    ("Plain text <|end", "", "Plain text <|end", []),
    ("<|channel|>analysis<|message|>cut o", "cut o", "", []),
    ("<|channel|>ana", "", "<|channel|>ana", []),
    ("<|channel|>final<|message|>a<|end|> b", "", "ab", []),
]  # fmt: skip


def _parser(tools: str, reasoning: str = "none") -> OutputParser:
    numbers = itertools.count()
    return ParserChoice.of(None, tools, reasoning).parser(
        "<|start|>assistant", tools=TOOLS, new_id=lambda: f"id{next(numbers)}"
    )


def _fed(parser: OutputParser, pieces: Sequence[str]) -> Parsed:
    parsed = Parsed()
    for delta in itertools.chain.from_iterable(map(parser.feed, pieces)):
        parsed.add(delta)
    for delta in parser.finish():
        parsed.add(delta)
    return parsed


def _cuts(text: str) -> list[list[str]]:
    """Characters one by one, every cut in two, and 60 cuts in more."""
    rng = random.Random(len(text))
    truncation = [list(text)] + [[text[:at], text[at:]] for at in range(len(text) + 1)]
    for _ in range(60):
        marks = sorted(rng.choices(range(len(text) + 1), k=rng.randint(2, 9)))
        truncation.append([text[a:b] for a, b in itertools.pairwise([0, *marks, len(text)])])
    return truncation


@pytest.mark.parametrize(("name", "text", "content", "calls"), CALLS)
def test_calls_and_every_cut_of_them(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    whole = parse(_parser(name), text)
    assert [(call.name, call.arguments) for call in whole.calls] == calls
    assert whole.content == content
    for pieces in _cuts(text):
        assert _fed(_parser(name), pieces) == whole, pieces


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), HARMONY)
def test_harmony_and_every_cut_of_it(text: str, reasoning: str, content: str, calls: list[tuple[str, str]]) -> None:
    whole = parse(_parser("openai", "openai_gptoss"), text)
    assert (whole.reasoning, whole.content) == (reasoning, content)
    assert [(call.name, call.arguments) for call in whole.calls] == calls
    for pieces in _cuts(text):
        assert _fed(_parser("openai", "openai_gptoss"), pieces) == whole, pieces


def test_a_call_ends_reasoning_that_the_model_forgot_to_end() -> None:
    """Only where its mark is none that a thought could hold."""
    call = f"{KIMI}functions.f:0<|tool_call_argument_begin|>{PARIS}<|tool_call_end|><|tool_calls_section_end|>"
    for text in (f"<think>Hm. {call}", f"<think>Hm.</think>{call}", f"<think>Hm.</think> {call}"):
        whole = parse(_parser("kimi_k2", "qwen3"), text)
        assert (whole.reasoning, whole.content, len(whole.calls)) == ("Hm.", "", 1)
        for pieces in _cuts(text):
            assert _fed(_parser("kimi_k2", "qwen3"), pieces) == whole, pieces
    thought = "<think>I could write <tool_call> here.</think>Yes."
    assert parse(_parser("qwen3_coder", "qwen3"), thought).reasoning == "I could write <tool_call> here."


_PIECES = [
    "<tool_call>", "</tool_call>", "<function=f>", "<function=write>", "</function>", "<parameter=path>",
    "<parameter=on>", "</parameter>", "write", "f", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "path",
    "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="f">', '<parameter name="path">', "</invoke>", "<",
    ">",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>",
    "<|tool_call_end|>", "<|tool_calls_section_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function",
    "<｜tool▁sep｜>", "```json", "```", END, "<｜tool▁calls▁end｜>", "<|start|>", "assistant", "<|channel|>",
    "commentary", "analysis", "final", "to=functions.f", "<|message|>", "<|end|>", "<|call|>", "{}", '{"a":1}', "{",
    "}", '"', ":", "1", "true", " ", "\n", "é",
]  # fmt: skip
_NAMES = sorted({TOOL_PARSERS.resolve(name): name for name in TOOL_PARSERS}.values())


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from(_NAMES), st.randoms(use_true_random=False))
def test_no_text_and_no_cut_makes_a_difference(data: Any, name: str, rng: Any) -> None:
    """Any text of marks, well-formed or not: no error, each cut as the whole, and without a call nothing is lost."""
    head = {
        "qwen3_coder": "<tool_call><function=write>",
        "qwen3_xml": "<function=write><parameter=path>",
        "glm45": "<tool_call>write<arg_key>path",
        "glm47": "<tool_call>f",
        "minimax_m2": "<minimax:tool_call>",
        "kimi_k2": KIMI + "functions.f:0",
        "deepseek_v31": V31 + "f<｜tool▁sep｜>",
    }
    tokens = data.draw(st.lists(st.sampled_from([head.get(name, "<|channel|>"), *_PIECES]), max_size=20))
    reasoning = "openai_gptoss" if name == "openai" and rng.random() < 0.5 else "none"
    text = "".join(tokens)
    whole = parse(_parser(name, reasoning), text)
    for pieces in (tokens, list(text), *(_cuts(text)[-2:])):
        assert _fed(_parser(name, reasoning), pieces) == whole
    if not whole.calls and reasoning == "none":
        assert whole.content == text


def test_the_ids_are_the_model_s_where_it_writes_them() -> None:
    text = f"{KIMI}functions.f:3<|tool_call_argument_begin|>{{}}<|tool_call_end|><|tool_calls_section_end|>"
    assert [call.id for call in parse(_parser("kimi_k2"), text).calls] == ["functions.f:3"]
    forced = ParserChoice.of("[TOOL_CALLS]").parser("", tools=TOOLS, forced="=f")
    assert [len(call.id) for call in parse(forced, "{}").calls] == [9]  # as Mistral's template wants them


def test_strings_are_told_as_they_come() -> None:
    parser = _parser("qwen3_coder")
    assert [delta.tool_name for delta in parser.feed("<tool_call>\n<function=write>\n")] == ["write", ""]
    parser.feed("<parameter=path>\n")
    assert "".join(delta.arguments for delta in parser.feed("first li")) == '"first li'
    assert "".join(delta.arguments for delta in parser.feed("ne\nsecond\n")) == "ne\\nsecond"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("path", "12", "12"), ("path", '"q"', '"q"'), ("path", "null", "null"), ("count", " 12 ", 12),
        ("count", "12.0", 12), ("count", "twelve", "twelve"), ("ratio", "1e3", 1000.0), ("ratio", "NaN", "NaN"),
        ("on", "false", False), ("on", "False", False), ("on", "1", "1"), ("tags", "[1, 2]", [1, 2]),
        ("tags", "{}", "{}"), ("more", '{"a": [true]}', {"a": [True]}), ("either", "5", 5), ("either", "5a", "5a"),
        ("maybe", "null", None), ("maybe", "x", "x"), ("kind", "a", "a"), ("any", "5", 5), ("any", "x", "x"),
        ("tags", "[" * 9999, "[" * 9999), ("count", "9" * 5000, "9" * 5000),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_arguments_have_the_type_of_their_schema(key: str, text: str, value: Any) -> None:
    assert json.loads(as_json(text, types_of(TOOLS["write"]["properties"][key]))) == value


def test_types_of_schemas() -> None:
    assert types_of({"type": "int"}) == {"integer"} and types_of({"$ref": "#/x"}) == types_of(None) == frozenset()
    assert types_of({"enum": [1, "a", None]}) == {"integer", "string", "null"}
    assert types_of({"anyOf": [{"type": "string"}, {}]}) == frozenset()


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("<tool_call>\n<function=example>\n<parameter=x>", "Qwen3Coder", None),
        ("<think> <tool_call> <function=example>", "Qwen3Coder", "Reasoning"),
        ("<tool_call>{name}\n<arg_key>{k}</arg_key> <think></think>", "Glm45", "Reasoning"),
        ("<minimax:tool_call> <invoke name= <think>", "MiniMaxM2", "Reasoning"),
        ("{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'}} </think>", "DeepSeek", "Reasoning"),
        ("<|tool_calls_section_begin|>", "KimiK2", None),
        ("<|start|>assistant<|channel|>analysis<|message|>", "Harmony", "HarmonyReasoning"),
    ],
)
def test_templates_are_recognised(template: str, tools: str, reasoning: str | None) -> None:
    choice = ParserChoice.of(template)
    assert choice.tools is not None and choice.tools.__name__ == tools
    assert (choice.reasoning and choice.reasoning.__name__) == reasoning


@pytest.mark.parametrize("name", _NAMES)
def test_hostile_outputs_take_linear_time(name: str) -> None:
    heads = ("", "<tool_call><function=write><parameter=path>", "<tool_call>write<arg_key>path</arg_key><arg_value>")
    for head in heads:
        for unit in ("<tool_call><function=write><parameter=path>", "<", KIMI, V31 + "f<｜tool▁sep｜>", "<|channel|>"):
            text = head + unit * (50_000 // len(unit))
            began = time.process_time()
            _fed(_parser(name), [text[at : at + 7] for at in range(0, len(text), 7)])
            assert time.process_time() - began < patient(2)
