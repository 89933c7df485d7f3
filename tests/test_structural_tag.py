"""Structural tags: what they mean, beside regexes that say the same, and what of them is refused in which words."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import numpy as np
import pytest

from octavo.grammar.compiler import Grammars, Matcher, Vocabulary
from octavo.request.sampling_params import ParameterError, SamplingParams, StructuredOutputsParams
from octavo.request.structured_outputs import read_structured_outputs

EOS, CALL, DONE = 0, 257, 258
WORDS = [b"<f", b"=a>1", b"></", b"</f>", b'{"n":', b" text", b"12<"]
TOKENS = [b"<eos>", *(bytes([byte]) for byte in range(256)), b"<|call|>", b"<|done|>", *WORDS]
GRAMMARS = Grammars(lambda: Vocabulary(TOKENS, [EOS, CALL, DONE], [EOS]), len(TOKENS), [EOS])

INTEGER: dict[str, Any] = {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0, "maximum": 99}}
POINT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    },
}
ANY, WORD = {"type": "any_text"}, {"type": "regex", "pattern": "[a-f]{1,3}"}
INTEGER_RE, POINT_RE = r"(?:0|[1-9]\d?)", r'\{"n":[12]\}'


def _tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _triggered(*, end: str = "</f>", **options: Any) -> dict[str, Any]:
    tags = [_tag("<f=a>", INTEGER, end), _tag("<f=b>", POINT, end)]
    return {"type": "triggered_tags", "triggers": ["<f="], "tags": tags, **options}


def _const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _all(kind: str, *elements: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"type": kind, "elements": list(elements), **options}


CALLS = f"(?:a>{INTEGER_RE}|b>{POINT_RE})</f>"
TEXT, END = r"(?:(?!<f=).)*", r"(?:(?!<f=|</x>).)*"
# a format, and a regex (of Python's, where . is any character) of the outputs that it has
MEANINGS: dict[str, tuple[dict[str, Any], str]] = {
    "triggered": (_triggered(), f"(?:{TEXT}<f={CALLS})*{TEXT}"),
    "at least one": (_triggered(at_least_one=True), f"<f={CALLS}(?:{TEXT}<f={CALLS})*{TEXT}"),
    "the first ends it": (_triggered(stop_after_first=True), f"{TEXT}(?:<f={CALLS})?"),
    "exactly one": (_triggered(at_least_one=True, stop_after_first=True), f"<f={CALLS}"),
    "excludes": (
        _triggered(excludes=["no", "/"]),
        r"(?:(?:(?!<f=|no|/).)*<f=" + CALLS + r")*(?:(?!<f=|no|/).)*",
    ),
    "tags without an end": (_triggered(end=""), f"(?:{TEXT}<f={CALLS[:-4]})*{TEXT}"),
    "two triggers": (
        {"type": "triggered_tags", "triggers": ["<f=", "@"],
         "tags": [_tag("<f=a>", INTEGER, "</f>"), _tag("@", WORD, ";"), _tag("@1", WORD, ";")]},
        rf"(?:(?:(?!<f=|@).)*(?:<f=a>{INTEGER_RE}</f>|@1?[a-f]{{1,3}};))*(?:(?!<f=|@).)*",
    ),
    "tags within a tag": (_tag("<x>", _triggered(), "</x>"), f"<x>(?:{END}<f={CALLS})*{END}</x>"),
    "text within a tag": (_tag("<x>", ANY, ["</x>", "</f>"]), r"<x>(?:(?!</x>|</f>).)*(?:</x>|</f>)"),
    "text that lacks": (_tag("<x>", {**ANY, "excludes": ["no"]}, "</x>"), r"<x>(?:(?!</x>|no).)*</x>"),
    "thoughts, then calls": (
        _all("sequence", _tag("<x>", ANY, "</x>"), _triggered()),
        rf"<x>(?:(?!</x>).)*</x>(?:{TEXT}<f={CALLS})*{TEXT}",
    ),
    "text, then a text": (_all("sequence", ANY, _const("<x>"), INTEGER), rf"(?:(?!<x>).)*<x>{INTEGER_RE}"),
    "text, then a tag": (_all("sequence", ANY, _tag("<x>", POINT, "</x>")), rf"(?:(?!<x>).)*<x>{POINT_RE}</x>"),
    "either": (_all("or", _const("text"), _tag("<x>", INTEGER, "</x>"), POINT),
               rf"text|<x>{INTEGER_RE}</x>|{POINT_RE}"),
    "either open": (_tag("<x>", _all("or", ANY, INTEGER), "</x>"), r"<x>(?:(?!</x>).)*</x>"),
    "perhaps": (_all("sequence", {"type": "optional", "content": INTEGER}, _const(";")), rf"(?:{INTEGER_RE})?;"),
    "often": ({"type": "plus", "content": _tag("<x>", INTEGER, "</x>")}, rf"(?:<x>{INTEGER_RE}</x>)+"),
    "at will": ({"type": "star", "content": _const("text")}, r"(?:text)*"),
    "so often": ({"type": "repeat", "min": 1, "max": 2, "content": _const("<f=")}, r"(?:<f=){1,2}"),
    "no limit": ({"type": "repeat", "min": 2, "max": -1, "content": _const("<f=")}, r"(?:<f=){2,}"),
    "separated": (
        {"type": "tags_with_separator", "separator": ";",
         "tags": [_tag("<x>", INTEGER, "</x>"), _tag("<f=b>", POINT, "</f>")]},
        rf"(?:(?:<x>{INTEGER_RE}</x>|<f=b>{POINT_RE}</f>)(?:;(?:<x>{INTEGER_RE}</x>|<f=b>{POINT_RE}</f>))*)?",
    ),
    "separated, one": (
        {"type": "tags_with_separator", "tags": [_tag("<x>", INTEGER, "</x>")], "separator": ";", "at_least_one": True,
         "stop_after_first": True},
        rf"<x>{INTEGER_RE}</x>",
    ),
    "dispatch": (
        {"type": "dispatch", "rules": [["<f=", INTEGER], ["@", WORD]]},
        rf"(?:(?:(?!<f=|@).)*(?:<f={INTEGER_RE}|@[a-f]{{1,3}}))*(?:(?!<f=|@).)*",
    ),
    "dispatch once": ({"type": "dispatch", "rules": [["<f=", INTEGER]], "loop": False}, rf"{TEXT}(?:<f={INTEGER_RE})?"),
    "regex up to its end": (_tag("<x>", {"type": "regex", "pattern": "^[a-f</x>]+$"}, "</x>"),
                            r"<x>(?!</x>)[a-f](?:(?!</x>)[a-f<\/x>])*</x>|<x>[</x>](?:(?!</x>)[a-f<\/x>])*</x>"),
    "a grammar": (_tag("<x>", {"type": "grammar", "grammar": 'root ::= "a" "b"?'}, "</x>"), "<x>ab?</x>"),
    "lark": (_tag("<x>", {"type": "grammar", "grammar": 'start: "a" INT\nINT: /[0-9]/'}, "</x>"), r"<x>a\d</x>"),
    "json alone": (POINT, POINT_RE),
}  # fmt: skip
FITTING = ["no", "a;", "1", "<f=a>1</f>", '{"n":2}', '<f=b>{"n":1}</f>', "ab", "<x>", "<x>7</x>;"]
PIECES = ["<f=", "a>", "b>", "<", "f", "12", "0", '{"n":1}', '{"n":', "3}", "</f>", "</x>", "<x>", "/", "no", "text",
          ";", "@", "@1", "ab", "a", "\n", "é"]  # fmt: skip


def _form(format: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag={"type": "structural_tag", "format": format})


def _allowed(matcher: Matcher, output: list[int]) -> list[int]:
    bits = np.zeros(GRAMMARS.num_words, np.int32)
    if not matcher.fill(np.array(output, np.int32), bits):
        return []
    found = np.unpackbits(bits.view(np.uint8), bitorder="little", count=len(TOKENS))
    return [int(token) for token in np.flatnonzero(found)]


def _has(matcher: Matcher, text: str, draw: random.Random) -> bool:
    """Whether an output may be this text and end there.

    Where a form leaves no choice the library allows the longest token alone: which tokens write a text is the mask's.
    """
    output, rest = list[int](), text.encode()
    while rest:
        fitting = [t for t in _allowed(matcher, output) if t != EOS and rest.startswith(TOKENS[t])]
        if not fitting:
            return False
        output.append(draw.choice(fitting))
        rest = rest[len(TOKENS[output[-1]]) :]
    return EOS in _allowed(matcher, output)


def _walk(matcher: Matcher, draw: random.Random, most: int) -> list[int]:
    """Some output that the matcher allows, pieces of the tags preferred."""
    output = list[int]()
    while len(output) < most:
        allowed = _allowed(matcher, output)
        assert allowed, ("nothing may follow", b"".join(TOKENS[token] for token in output))
        likely = [t for t in allowed if TOKENS[t] in WORDS or (t != EOS and TOKENS[t] in b'<f=abx>/{"n":12}@;')]
        if EOS in allowed and (not likely or draw.random() < 0.15):
            break
        output.append(draw.choice(likely if likely and draw.random() < 0.9 else [t for t in allowed if t != EOS]))
    return output


@pytest.mark.parametrize("name", MEANINGS)
def test_a_tag_has_the_outputs_that_it_says(name: str) -> None:
    format, regex = MEANINGS[name]
    form, draw = _form(format), random.Random(name)
    GRAMMARS.check(form)
    known, matcher, num_in = re.compile(regex, re.DOTALL), GRAMMARS.matcher(form), 0
    texts = ["".join(draw.choices(PIECES, k=draw.randrange(7))) for _ in range(120)]
    texts += ["".join(parts) for parts in itertools.product(["", "<x>"], *[["", *FITTING]] * 2, ["", "</x>"])]
    for _ in range(25):
        walked = b"".join(TOKENS[token] for token in _walk(matcher, draw, 40))
        text = walked.decode("utf-8", "replace")
        if "�" not in text:
            texts += [text, text[: draw.randrange(len(text) + 1)], text.replace("<", "", 1), text + draw.choice(PIECES)]
    for text in texts:
        is_in = known.fullmatch(text) is not None
        assert _has(matcher, text, draw) == is_in, text
        num_in += is_in
    assert num_in >= 3, "the texts say nothing of it"


def test_older_words_mean_the_same() -> None:
    schema = INTEGER["json_schema"]
    old = {
        "structures": [
            {"begin": "<f=a>", "schema": schema, "end": "</f>"},
            {"begin": "<f=b>", "schema": json.dumps(POINT["json_schema"]), "end": "</f>"},
        ],
        "triggers": ["<f=", "<f="],
    }
    for given in (old, {"type": "structural_tag", **old}, json.dumps(old)):
        assert StructuredOutputsParams(structural_tag=given) == _form(_triggered())
    assert read_structured_outputs({"structural_tag": json.dumps(old)}) == _form(_triggered())
    assert SamplingParams.from_optional(structured_outputs={"structural_tag": old}).structured_outputs is not None


def test_defaults_that_a_library_writes_out_change_nothing() -> None:
    """What serializes a tag says null, false and [] of all that nobody asked for, in words of later versions too."""
    unset: dict[str, Any] = {"excludes": [], "max_tokens": None, "later": None, "at_least": False, "others": []}
    said = {**_triggered(excludes=[], at_least_one=False), **unset}
    said["tags"] = [{**tag, "content": {**tag["content"], "style": "json", **unset}, **unset} for tag in said["tags"]]
    assert _form(said) == _form(_triggered())
    assert _form(_all("or", {**ANY, **unset}, {**WORD, **unset}, **unset)) == _form(_all("or", ANY, WORD))
    schema = {"type": "object", "additionalProperties": False, "default": None}
    assert "null" in str(_form({"type": "json_schema", "json_schema": schema, "later": None}).structural_tag)
    with pytest.raises(ParameterError, match="format has later, which is not known there"):
        _form({**ANY, "later": 5})


def test_a_text_of_a_tag_means_itself() -> None:
    for format, _ in MEANINGS.values():
        form = _form(format)
        assert StructuredOutputsParams(structural_tag=form.structural_tag) == form
        spelled = GRAMMARS.spell(form)[0]
        assert GRAMMARS.spell(spelled)[0] == spelled, "what the sandbox hands on is what the engine compiles"


def test_schemas_within_are_said_in_words_that_the_library_knows() -> None:
    rare = {"not": {"type": ["integer", "object", "array", "boolean", "null", "number"]}, "maxLength": 2}
    form = _form(_tag("<x>", {"type": "json_schema", "json_schema": rare}, "</x>"))
    assert '"not"' not in str(GRAMMARS.spell(form)[0].structural_tag)
    assert _has(GRAMMARS.matcher(form), '<x>"ab"</x>', random.Random(0))
    big = {"type": "integer", "minimum": 2**53 + 1, "maximum": 2**60}
    GRAMMARS.check(_form(_tag("<x>", {"type": "json_schema", "json_schema": big}, "</x>")))


def test_spaces_are_those_that_are_asked_for() -> None:
    draw, tag = random.Random(0), {"type": "structural_tag", "format": _tag("<x>", POINT, "</x>")}
    flexible = StructuredOutputsParams(structural_tag=tag, disable_any_whitespace=False)
    spaced = '<x>{ "n": 1 }</x>'
    assert _has(GRAMMARS.matcher(flexible), spaced, draw)
    assert not _has(GRAMMARS.matcher(StructuredOutputsParams(structural_tag=tag)), spaced, draw)


def test_special_tokens_write_their_marks() -> None:
    """Models whose calls begin with a special token say so with it; free text may say so in other tokens."""
    tags = [_tag("<|call|>a", INTEGER, "<|done|>"), _tag("<|call|>b", ANY, "<|done|>")]
    matcher = GRAMMARS.matcher(_form({"type": "triggered_tags", "triggers": ["<|call|>"], "tags": tags}))
    x, one, a, b, line = (TOKENS.index(text) for text in (b"x", b"1", b"a", b"b", b"\n"))
    assert CALL in _allowed(matcher, [x]) and DONE not in _allowed(matcher, [x])
    assert _allowed(matcher, [x, CALL]) == [a, b]
    for call in ([x, CALL, a, one, DONE], [CALL, b, x, DONE], [CALL, b, DONE, x, x, CALL, a, one, DONE, x]):
        for number, token in enumerate([*call, EOS]):
            assert token in _allowed(matcher, call[:number]), (call, number)
        for number in range(call.index(CALL) + 1, call.index(DONE)):
            assert EOS not in _allowed(matcher, call[:number])
    assert DONE not in _allowed(matcher, [CALL, a])
    spelled = [TOKENS.index(bytes([byte])) for byte in b"<|call|>"]
    assert _allowed(matcher, [x, *spelled]) == [a, b], "free text that says it in other tokens has said it"
    within = GRAMMARS.matcher(_form(_tag("<|call|>", INTEGER, "\n<|done|>")))
    assert _allowed(within, []) == [CALL] and _allowed(within, [CALL, one, line]) == [DONE]
    with pytest.raises(ParameterError, match="a special token within it"):
        GRAMMARS.check(_form(_tag("<|call|>", WORD, "\n<|done|>")))


REFUSED: list[tuple[object, str, str]] = [
    ("x", "is not JSON", "schema_invalid"),
    ([], "must be an object", "invalid_type"),
    ({}, "takes format, or structures and triggers", "grammar_invalid"),
    (_triggered(), "takes format, or structures and triggers", "grammar_invalid"),
    ({"format": INTEGER, "structures": []}, "takes format, or structures and triggers", "grammar_invalid"),
    ({"format": {"type": "secret words"}}, "format.type: the format is not supported", "unsupported"),
    ({"format": {"type": "token", "token": 3}}, "format.type: token is not supported; any_text, ", "unsupported"),
    ({"format": _tag("a", {"type": "qwen_xml_parameter"}, "b")}, "format.content.type: qwen_xml_", "unsupported"),
    ({"format": {**INTEGER, "style": "qwen_xml"}}, "format.style is not supported but for json", "unsupported"),
    ({"format": {**INTEGER, "any_order": True}}, "format.any_order is not supported", "unsupported"),
    ({"format": {**ANY, "max_tokens": 5}}, "format.max_tokens is not supported", "unsupported"),
    ({"format": {**ANY, "max_chars": 5}}, "format.max_chars is not supported", "unsupported"),
    ({"format": {**ANY, "more": 5}}, "format has more, which is not known there", "unsupported"),
    ({"format": _tag({"type": "token", "token": 5}, ANY, "")}, "tokens are not supported", "unsupported"),  # type: ignore[arg-type]
    ({"format": {"type": "const_string"}}, "format lacks value", "grammar_invalid"),
    ({"format": {"type": "const_string", "value": 5}}, "format.value is wrong: Expected `str`", "grammar_invalid"),
    ({"format": _all("sequence")}, "format.elements must not be empty", "grammar_invalid"),
    ({"format": _all("sequence", ANY, INTEGER)}, "format.elements[0] is free text", "grammar_invalid"),
    ({"format": {"type": "star", "content": ANY}}, "repeats free text that nothing ends", "grammar_invalid"),
    ({"format": {"type": "repeat", "min": 3, "max": 2, "content": INTEGER}}, "0 <= min <= max", "grammar_invalid"),
    ({"format": _tag("a", ANY, [])}, "has an empty end", "grammar_invalid"),
    ({"format": {**_triggered(), "triggers": []}}, "format.triggers must not be empty", "grammar_invalid"),
    ({"format": {**_triggered(), "triggers": ["<f=", "<g="]}}, "format.triggers[1] has no tag", "grammar_invalid"),
    ({"format": {**_triggered(), "triggers": ["<f=a"]}}, "format.tags[1] has a begin", "grammar_invalid"),
    ({"format": {**_triggered(), "triggers": ["<f=", "f="]}}, "stands within triggers[0]", "grammar_invalid"),
    ({"format": {**_triggered(), "tags": [_tag("<f=", ANY, "")]}}, "format.tags[0] has free text", "grammar_invalid"),
    ({"format": _tag("a", {"type": "regex", "pattern": ""}, "b")}, "format.content must not be", "grammar_invalid"),
    ({"format": {"type": "json_schema", "json_schema": False}}, "a schema that no document has", "grammar_invalid"),
    ({"structures": [{"begin": "secret", "end": ""}], "triggers": ["<"]}, "triggers[0] has no tag", "grammar_invalid"),
    ({"format": {"type": "json_schema", "json_schema": {"$ref": "http://secret"}}}, "is fetched", "unsupported"),
]


@pytest.mark.parametrize(("tag", "said", "code"), REFUSED)
def test_what_cannot_be_met_is_refused_by_name(tag: Any, said: str, code: str) -> None:
    with pytest.raises(ParameterError) as caught:
        StructuredOutputsParams(structural_tag=tag)
    assert (caught.value.field, caught.value.code) == ("structured_outputs.structural_tag", code)
    assert said in str(caught.value) and "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"type": "regex", "pattern": "(secret"}, "format.content cannot be used"),
        ({"type": "regex", "pattern": "a++"}, "format.content cannot be used: a possessive quantifier"),
        ({"type": "grammar", "grammar": "root ::= secret"}, "format.content cannot be used"),
        ({"type": "json_schema", "json_schema": {"type": "secret"}}, "format.content cannot be used"),
        ({"type": "json_schema", "json_schema": {"minimum": 3, "maximum": 2, "type": "integer"}}, "format.content"),
        ({"type": "json_schema", "json_schema": {"uniqueItems": True, "items": {}}}, "format.content cannot be used"),
    ],
)
def test_forms_within_are_refused_with_their_place(content: dict[str, Any], said: str) -> None:
    form = _form(_tag("<x>", content, "</x>"))
    with pytest.raises(ParameterError) as caught:
        GRAMMARS.check(form)
    assert caught.value.field == "structured_outputs.structural_tag"
    assert said in str(caught.value) and "secret" not in str(caught.value)
