"""StructuredOutputsParams: exactly one form, within limits; and what is refused in which words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from octavo.request.sampling_params import ParameterError, SamplingParams, StructuredOutputsParams
from octavo.request.structured_outputs import MAX_TEXT_BYTES, read_structured_outputs


def _deep(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({}, "structured_outputs", "conflicting"),
    ({"regex": "a", "choice": ["a"]}, "structured_outputs", "conflicting"),
    ({"json": {}, "json_object": True}, "structured_outputs", "conflicting"),
    ({"json": "x"}, "structured_outputs.json", "schema_invalid"),
    ({"json": '{"a": \ud800}'}, "structured_outputs.json", "schema_invalid"),
    ({"json": "[]"}, "structured_outputs.json", "invalid_type"),
    ({"json": "true"}, "structured_outputs.json", "invalid_type"),
    ({"json": 5}, "structured_outputs.json", "invalid_type"),
    ({"json": {"a": object()}}, "structured_outputs.json", "invalid_type"),
    ({"json": {"a": float}}, "structured_outputs.json", "invalid_type"),
    ({"json": {"const": float("nan")}}, "structured_outputs.json", "number_not_finite"),
    ({"json": {"items": [{"maximum": float("inf")}]}}, "structured_outputs.json", "number_not_finite"),
    ({"json": {"enum": list(range(1001))}}, "structured_outputs.json", "schema_too_complex"),
    ({"json": {"enum": list(range(50_000))}}, "structured_outputs.json", "schema_too_complex"),
    ({"json": {"const": "x" * MAX_TEXT_BYTES}}, "structured_outputs.json", "schema_too_complex"),
    ({"json": " " * MAX_TEXT_BYTES + "{}"}, "structured_outputs.json", "schema_too_complex"),
    ({"json": _deep(70)}, "structured_outputs.json", "schema_too_complex"),
    ({"json": '{"items":' * 2000 + "{}" + "}" * 2000}, "structured_outputs.json", "schema_too_complex"),
    ({"json": {"$ref": "http://example.com/x.json"}}, "structured_outputs.json", "unsupported"),
    ({"json": {"items": [{"$ref": "file:///etc/passwd"}]}}, "structured_outputs.json", "unsupported"),
    ({"regex": ""}, "structured_outputs.regex", "grammar_invalid"),
    ({"regex": 5}, "structured_outputs.regex", "invalid_type"),
    ({"regex": "a" * (MAX_TEXT_BYTES + 1)}, "structured_outputs.regex", "schema_too_complex"),
    ({"regex": "é" * (MAX_TEXT_BYTES // 2 + 1)}, "structured_outputs.regex", "schema_too_complex"),
    ({"grammar": "\ud800"}, "structured_outputs.grammar", "invalid_unicode"),
    ({"choice": []}, "structured_outputs.choice", "grammar_invalid"),
    ({"choice": "ab"}, "structured_outputs.choice", "invalid_type"),
    ({"choice": [""]}, "structured_outputs.choice[0]", "out_of_range"),
    ({"choice": [1]}, "structured_outputs.choice[0]", "invalid_type"),
    ({"choice": ["a"] * 1001}, "structured_outputs.choice", "too_many_items"),
    ({"choice": ["a" * 40_000, "b" * 40_000]}, "structured_outputs.choice", "schema_too_complex"),
    ({"json_object": 1}, "structured_outputs.json_object", "invalid_type"),
    (
        {"json_object": True, "disable_any_whitespace": True, "whitespace_pattern": " "},
        "structured_outputs.whitespace_pattern",
        "conflicting",
    ),
]


@pytest.mark.parametrize(("fields", "field", "code"), BAD)
def test_bad_forms_are_refused(fields: dict[str, Any], field: str, code: str) -> None:
    with pytest.raises(ParameterError) as caught:
        StructuredOutputsParams(**fields)
    assert (caught.value.field, caught.value.code) == (field, code)
    assert len(str(caught.value)) <= 300 and "passwd" not in str(caught.value)


def test_a_cyclic_schema_is_too_deep() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(ParameterError, match="deeper"):
        StructuredOutputsParams(json=schema)


def test_limits_themselves_are_allowed() -> None:
    StructuredOutputsParams(json=_deep(63))
    StructuredOutputsParams(json={"enum": list(range(1000))})
    StructuredOutputsParams(regex="a" * MAX_TEXT_BYTES)
    StructuredOutputsParams(choice=[str(number) for number in range(1000)])


def test_a_schema_is_kept_as_text_in_its_order() -> None:
    for schema in ({"b": 1, "a": [1.5, None, "é"]}, '{"b": 1,\n "a": [1.5, null, "\\u00e9"]}'):
        assert StructuredOutputsParams(json=schema).json == '{"b":1,"a":[1.5,null,"é"]}'


def test_equal_wishes_have_one_key() -> None:
    first = StructuredOutputsParams(json={"type": "object"})
    assert first.key == StructuredOutputsParams(json='{ "type": "object" }').key
    assert first.key != StructuredOutputsParams(json={"type": "object"}, disable_any_whitespace=True).key


def test_it_survives_the_way_to_the_engine() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b", "a"]))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert again == params and again.structured_outputs is not None
    assert (again.structured_outputs.form, again.structured_outputs.choice) == ("choice", ["a", "b"])


def test_json_objects_are_read_as_vllm_sends_them() -> None:
    value = {"regex": "a+", "json": None, "disable_fallback": True, "disable_additional_properties": False}
    assert read_structured_outputs(value) == StructuredOutputsParams(regex="a+")
    assert SamplingParams.from_optional(structured_outputs=value).structured_outputs is not None
    for bad, code in [
        ({"regexp": "a"}, "unknown_field"),
        ({"disable_additional_properties": True}, "unsupported_parameter"),
        ({"structural_tag": {"format": {"type": "token"}}}, "unsupported"),
        ([], "invalid_type"),
    ]:
        with pytest.raises(ParameterError) as caught:
            read_structured_outputs(bad)
        assert caught.value.code == code


def test_sampling_params_take_nothing_else() -> None:
    with pytest.raises(ParameterError, match="structured_outputs"):
        SamplingParams(structured_outputs="a+")  # type: ignore[arg-type]
