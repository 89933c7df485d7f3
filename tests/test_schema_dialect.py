"""What the grammar library reads otherwise than Python's `re` and JSON Schema do, and Lark's ways to begin."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest

from octavo.grammar.compiler import Grammars, Vocabulary
from octavo.request.sampling_params import ParameterError, StructuredOutputsParams

TOKENS = [b"<eos>", *(bytes([byte]) for byte in range(256))]
GRAMMARS = Grammars(lambda: Vocabulary(TOKENS, [0], [0]), len(TOKENS), [0])


def _allows(text: str, **form: Any) -> bool:
    matcher, data = GRAMMARS.build(StructuredOutputsParams(**form)), text.encode()
    return bool(matcher.try_consume_tokens([byte + 1 for byte in data]) == len(data) and matcher.is_accepting())


@pytest.mark.parametrize("start", ["?start", "!start", "!?start", "start", "\n  ?start "])
def test_a_lark_grammar_may_begin_with_a_modifier(start: str) -> None:
    assert _allows("ab", grammar=f'{start}: x "b"\nx: "a"')
    assert _allows("ab", grammar=f'x: "a"\n{start}: x "b"')


OTHERWISE = [
    ("a++a", "possessive"),
    ("a*+", "possessive"),
    ("a?+", "possessive"),
    ("a{2}+", "possessive"),
    ("(ab){1,}+", "possessive"),
    ("[[:alpha:]]", "POSIX"),
    ("x[a[bc]]", "POSIX"),
    ("[a-c--b]", "set operation"),
    ("[a-z&&b]", "set operation"),
    ("[^a~~b]", "set operation"),
]


@pytest.mark.parametrize(("regex", "named"), OTHERWISE)
def test_what_others_read_otherwise_is_refused_by_name(regex: str, named: str) -> None:
    object_form = {"type": "object", "patternProperties": {regex: True}}
    for form in ({"regex": regex}, {"json": {"type": "string", "pattern": regex}}, {"json": object_form}):
        with pytest.raises(ParameterError, match=named) as caught:
            GRAMMARS.check(StructuredOutputsParams(**form))
        assert caught.value.code == "unsupported"


@pytest.mark.parametrize(
    ("regex", "text"),
    [
        (r"a\++", "a+++"),
        (r"[]a]+", "a]"),
        (r"[^]]+", "a"),
        (r"[\[\-&]+", "[-&"),
        ("a+?b", "aab"),
        (r"[+*]+", "+*"),
        (r"a{2}[+]", "aa+"),
        (r"\[[ab]+\]", "[ab]"),
        ("(a+)+", "aa"),
        ("[a-]+--", "a---"),
    ],
)
def test_what_all_read_alike_is_allowed(regex: str, text: str) -> None:
    assert _allows(text, regex=regex)


_CLOSED = {"additionalProperties": False}
_PQ = {"p": {"type": "boolean"}, "q": {"type": "boolean"}}
TWICE: list[dict[str, Any]] = [
    {"type": "object", "properties": _PQ, "minProperties": 2},
    {"type": "object", "properties": _PQ, **_CLOSED, "minProperties": 2},
    {"type": "object", "properties": _PQ, "required": ["p"], "minProperties": 3, "maxProperties": 4},
    {"allOf": [{"type": "object", "required": ["p"]}, {"minProperties": 2}]},
    {"type": "object", "propertyNames": {"enum": ["p", "q"]}, "minProperties": 2},
    {"type": "array", "items": {"type": "object", "required": ["p"], "minProperties": 2}},
    {"type": "object", "required": ["minProperties"], "properties": {"minProperties": {"type": "null"}}},
]


@pytest.mark.parametrize("schema", TWICE, ids=json.dumps)
def test_a_key_that_comes_twice_counts_once(schema: dict[str, Any]) -> None:
    form = {"json": schema, "disable_any_whitespace": True}
    num_allowed = 0
    names = ("p", "q", "x", "minProperties")
    documents = [keys for length in (1, 2, 3) for keys in itertools.product(names, repeat=length)]
    compiled = GRAMMARS.build(StructuredOutputsParams(**form))
    for keys in documents:
        for value in ("true", "null"):
            text = "{" + ",".join(f'"{key}":{value}' for key in keys) + "}"
            text = f"[{text}]" if schema.get("type") == "array" else text
            matcher, data = compiled.deep_copy(), text.encode()
            if matcher.try_consume_tokens([byte + 1 for byte in data]) == len(data) and matcher.is_accepting():
                num_allowed += 1
                assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), text
    assert num_allowed


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "minProperties": 2},
        {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2, "maxProperties": 2},
        {"type": "object", "patternProperties": {"^[ab]$": True}, **_CLOSED, "minProperties": 2},
        {"type": "object", "propertyNames": {"pattern": "^[pq]$"}, "minProperties": 2},
        {"type": "object", "properties": _PQ, "minProperties": 5},
        {"type": "array", "items": {"anyOf": [{"type": "null"}, {"minProperties": 2}]}},
    ],
    ids=json.dumps,
)
def test_where_a_key_could_come_twice_minproperties_is_refused(schema: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="minProperties") as caught:
        GRAMMARS.check(StructuredOutputsParams(json=schema))
    assert caught.value.code == "unsupported"
