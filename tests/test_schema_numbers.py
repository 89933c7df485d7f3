"""Numbers of schemas at the ends of what 64 bits hold: no crash of the process, no text that does not fit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import jsonschema
import msgspec
import pytest

from octavo.grammar.compiler import Grammars, Vocabulary
from octavo.grammar.numbers import MAX_BOUND, safe_grammar, safe_numbers
from octavo.request.sampling_params import ParameterError, StructuredOutputsParams

TOKENS = [b"<eos>", *(bytes([byte]) for byte in range(256))]
GRAMMARS = Grammars(lambda: Vocabulary(TOKENS, [0], [0]), len(TOKENS), [0])
EDGE, EXACT = 2**63, 2**53
_INTEGER: dict[str, Any] = {"type": "integer"}

EXTREMES: list[dict[str, Any]] = [
    *({"const": sign * (EDGE + step)} for sign in (1, -1) for step in (-1, 0, 1, EDGE)),
    {"enum": [1, -EDGE]},
    {**_INTEGER, "const": -1e300},
    {"allOf": [{"enum": [1, -1e30]}, _INTEGER]},
    {"const": {"a": [-EDGE]}},
    *({"type": kind, "minimum": -EDGE, "maximum": -EDGE + 8} for kind in ("integer", "number")),
    *({"type": kind, "minimum": -1e30, "maximum": -1e29} for kind in ("integer", "number")),
    {"allOf": [{**_INTEGER, "minimum": -EDGE}, {"maximum": 8 - EDGE}]},
    {"$ref": "#/default", "default": {**_INTEGER, "minimum": -1e30, "maximum": -1e29}},
    {"$ref": "#/properties/const", "properties": {"const": {**_INTEGER, "minimum": -EDGE, "maximum": 8 - EDGE}}},
    {"not": {"const": -EDGE}},
    {**_INTEGER, "exclusiveMinimum": -EDGE - 1, "exclusiveMaximum": 1 - EDGE},
    *({"type": kind, "multipleOf": value} for kind in ("integer", "number") for value in (EDGE, 1e300, 5e-324)),
    *(
        {key: value}
        for key in ("minLength", "maxLength", "minItems", "maxItems", "maxProperties")
        for value in (2**31, 2**32, EDGE, 2 * EDGE - 1)
    ),
]

_CHILD = """
import sys, msgspec
from octavo.grammar.compiler import Grammars, Vocabulary
from octavo.request.sampling_params import ParameterError, StructuredOutputsParams
vocabulary = Vocabulary([b"<eos>", *(bytes([byte]) for byte in range(256))], [0], [0])
grammars = Grammars(lambda: vocabulary, 257, [0])
for form in msgspec.json.decode(sys.stdin.buffer.read(), type=list[StructuredOutputsParams]):
    print(form.form, form.json or form.grammar, flush=True)
    try:
        grammars.check(form)
    except ParameterError:
        pass
print("done")
"""


def test_no_extreme_ends_the_process() -> None:
    forms = [StructuredOutputsParams(json=schema) for schema in EXTREMES]
    forms += [StructuredOutputsParams(grammar=f"start: %json {json.dumps(schema)}") for schema in EXTREMES[:10]]
    child = subprocess.run(
        [sys.executable, "-c", _CHILD], input=msgspec.json.encode(forms), capture_output=True, check=False
    )
    assert child.stdout.splitlines()[-1:] == [b"done"], (child.returncode, child.stdout.splitlines()[-1:])


RANGES: list[dict[str, Any]] = [
    {"minimum": -EDGE, "maximum": EDGE - 1},
    {"minimum": -EDGE},
    {"maximum": EDGE - 1},
    {"minimum": EXACT + 1},
    {"minimum": EXACT + 1, "maximum": EXACT + 7},
    {"exclusiveMinimum": EXACT, "maximum": EXACT + 3},
    {"minimum": -EXACT - 5, "exclusiveMaximum": -EXACT},
    {"minimum": 0, "maximum": 1e30},
    {"minimum": 175928847299117063, "maximum": 1759288472991170630},
]


def _allows(compiled: Any, text: str) -> bool:
    matcher, data = compiled.deep_copy(), text.encode()
    return bool(matcher.try_consume_tokens([byte + 1 for byte in data]) == len(data) and matcher.is_accepting())


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("bounds", RANGES, ids=str)
def test_a_range_beyond_doubles_allows_nothing_else(bounds: dict[str, Any], kind: str) -> None:
    schema = {"type": kind, **bounds}
    compiled = GRAMMARS.build(StructuredOutputsParams(json=schema))
    ends = [round(value) for value in bounds.values()]
    near = [end + step for end in (*ends, 0, EXACT, EDGE, -EXACT, -EDGE) for step in (*range(-12, 13), 4096, -4096)]
    allowed = [text for value in near for text in (str(value), f"{value}.0") if _allows(compiled, text)]
    assert allowed
    for text in allowed:
        assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)), text


@pytest.mark.parametrize(
    "schema",
    [
        {"const": EXACT + 1},
        {"enum": ["a", [-EXACT - 1]]},
        {"type": "integer", "minimum": EXACT + 1, "maximum": EXACT + 1},
        {"type": "object", "properties": {"id": {"minimum": 1e29}}},
    ],
)
def test_what_no_double_says_is_refused_by_name(schema: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match=r"(const|enum|minimum).*use a string") as caught:
        GRAMMARS.check(StructuredOutputsParams(json=schema))
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        (EXACT + 1, "beyond 2**53, where it is no double"),
        (-4 * EXACT - 4, "beyond 2**53, where it is no double"),
        (EDGE - 1, "beyond 2**63 - 1024 in size"),
        (4 * EDGE, "beyond 2**63 - 1024 in size"),
        (1e300, "beyond 2**63 - 1024 in size"),
    ],
)
@pytest.mark.parametrize("keyword", ["const", "enum"])
def test_a_constant_that_would_lose_digits_is_refused_with_its_value_and_the_limit(keyword, value, limit) -> None:
    schema = {keyword: value if keyword == "const" else [0, value]}
    said = re.escape(f"{keyword} holds {value}, {limit}; use a string")
    forms = [{"json": {"items": schema}}, {"grammar": f"start: %json {json.dumps(schema)}"}]
    for form in forms if type(value) is float or abs(value) < 2 * EDGE else forms[1:]:  # as text it is a double there
        with pytest.raises(ParameterError, match=said):
            GRAMMARS.check(StructuredOutputsParams(**form))


@pytest.mark.parametrize("value", [EXACT - 1, EXACT + 2, 2**60, -MAX_BOUND, MAX_BOUND, 10**18, 1.5e17])
def test_a_constant_that_is_a_double_keeps_its_digits(value: float) -> None:
    compiled = GRAMMARS.build(StructuredOutputsParams(json={"enum": ["a", value]}))
    assert _allows(compiled, str(int(value)))
    assert not any(_allows(compiled, str(int(value) + step)) for step in (-2, -1, 1, 2))


LONG = 4611686018427387904
_COUNT = f"at most {2**32 - 1} is possible; lower it, or leave it out"
_DIGITS = f"as a whole number of its last decimal place it may be at most {2**32 - 1}; use fewer digits"


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "number", "multipleOf": 1e-300}, f"multipleOf is 1e-300, {_DIGITS}"),
        ({"type": "number", "multipleOf": 1e300}, f"multipleOf is 1e+300, {_DIGITS}"),
        ({"type": "number", "multipleOf": 0}, "multipleOf must be greater than 0"),
        ({"type": "string", "maxLength": LONG}, f"maxLength is {LONG}, {_COUNT}"),
        ({"type": "array", "items": {"type": "string", "minLength": LONG}}, f"minLength is {LONG}, {_COUNT}"),
        ({"type": "string", "maxLength": 1e30}, "maxLength must be an integer of at least 0, got 1e30"),
        ({"type": "array", "minItems": -1}, "minItems must be an integer of at least 0, got -1"),
        ({"type": "number", "minimum": "SECRET"}, "minimum must be a number"),
        ({"required": [3]}, "an item of required must be a string, got 3"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "minLength 5 is greater than maxLength 2, no text"),
        ({"type": "number", "minimum": 1e-300}, "a bound has too many decimal places"),
        ({"type": "SECRET"}, "type must be null, boolean, integer"),
        ({"type": "object", "minProperties": LONG}, f"minProperties of {LONG} is not supported"),
        ({"type": "string", "pattern": f"a{{{LONG}}}"}, f"a repetition is of more than {2**32 - 1}, use fewer"),
    ],
)
def test_a_number_that_cannot_be_held_is_refused_with_its_keyword_and_a_way_out(
    schema: dict[str, Any], said: str
) -> None:
    with pytest.raises(ParameterError, match=re.escape(f"cannot be used: {said}")) as caught:
        GRAMMARS.check(StructuredOutputsParams(json=schema))
    assert "SECRET" not in str(caught.value) and len(str(caught.value)) < 300


def test_what_is_safe_stays_as_it_is() -> None:
    schema = {"type": "integer", "minimum": -EXACT + 1, "exclusiveMaximum": 7.5, "const": MAX_BOUND, "examples": [EDGE]}
    assert safe_numbers(schema) is schema
    text = 'start: "%json {" | %json {"minimum": 5}'
    assert safe_grammar(text) == text
    assert safe_grammar(f'start: %json {{"minimum": {-EDGE}}} "x"') == f'start: %json {{"minimum": {-MAX_BOUND}}} "x"'


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 2147483649},
        {"type": ["integer", "null"], "multipleOf": 2**32 - 1},
        {"type": "number", "multipleOf": 0.100000007},
        {"allOf": [{"multipleOf": 999_983}, {"multipleOf": 999_979}]},
    ],
)
def test_a_multiple_with_many_remainders_is_refused_by_name(schema: dict[str, Any]) -> None:
    """The library took minutes for them, with a state for each remainder."""
    with pytest.raises(ParameterError, match="multipleOf"):
        safe_numbers(schema)


@pytest.mark.parametrize("multiple", [1, 7, 0.01, 0.25, 1000, 10**9, 2.5e-7, 3600.0])
def test_a_multiple_with_few_remainders_stays(multiple: float) -> None:
    schema = {"type": "number", "multipleOf": multiple}
    assert safe_numbers(schema) is schema
