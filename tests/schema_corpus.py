"""JSON schemas as people write them, for each keyword that the grammar library lacks, and documents for and against.

The documents have the schema's order of properties, which a form's outputs keep.
"""

from __future__ import annotations

from typing import Any

_PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
_CARD = {"type": "object", "properties": {"card": {"type": "string"}, "cvc": {"type": "integer"}}}
_LINE = {
    "type": "object",
    "properties": {"type": {"const": "LineString"}, "n": {"type": "integer"}},
    "required": ["type", "n"],
}
_DOT = {
    "type": "object",
    "properties": {"type": {"const": "Point"}, "at": {"type": "array", "items": {"type": "number"}}},
    "required": ["type", "at"],
}
_EXTRA = {"additionalProperties": False}

# name -> schema, documents that fit it
EXACT: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "an unknown format": ({"type": "string", "format": "color"}, ["red", ""]),
    "a format of another kind": (
        {"type": "object", "properties": {"a": {"format": "regex", "type": "string"}}, **_EXTRA},
        [{}, {"a": "x"}],
    ),
    "formats of references": ({"type": "string", "format": "uri-reference"}, ["x", "a/b"]),
    "oneOf of required": (
        {**_PERSON, **_EXTRA, "oneOf": [{"required": ["name"]}, {"required": ["age"]}]},
        [{"name": "x"}, {"age": 3}],
    ),
    "oneOf of three required": (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}},
            **_EXTRA,
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}, {"required": ["c"]}],
        },
        [{"a": None}, {"b": None}, {"c": None}],
    ),
    "oneOf of references": (
        {
            "oneOf": [{"$ref": "#/definitions/line"}, {"$ref": "#/definitions/dot"}],
            "definitions": {"line": _LINE, "dot": _DOT},
        },
        [{"type": "LineString", "n": 1}, {"type": "Point", "at": [1, 2]}],
    ),
    "oneOf of plain references": (
        {
            "oneOf": [{"$ref": "#/$defs/s"}, {"$ref": "#/$defs/i"}],
            "$defs": {"s": {"type": "string"}, "i": {"type": "integer"}},
        },
        ["x", 3],
    ),
    "oneOf of a text or a list of texts": (
        {
            "oneOf": [{"$ref": "#/$defs/t"}, {"type": "array", "items": {"$ref": "#/$defs/t"}}],
            "$defs": {"t": {"type": "string", "minLength": 1}},
        },
        ["x", ["x", "y"], []],
    ),
    "oneOf of ranges": ({"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 5}]}, [2, 7]),
    "oneOf of ranges that meet": (
        {"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3}]},
        [2, 7],
    ),
    "oneOf of formats": ({"type": "string", "oneOf": [{"format": "ipv4"}, {"format": "ipv6"}]}, ["10.0.0.1", "::1"]),
    "oneOf of a set and its rest": (
        {"oneOf": [{"type": "string"}, {"enum": ["auto", "abc"]}]},
        ["x", "au", "autos", ""],
    ),
    "oneOf of null and a reference": (
        {"oneOf": [{"type": "null"}, {"$ref": "#/$defs/p"}], "$defs": {"p": {**_PERSON, **_EXTRA}}},
        [None, {}, {"name": "x"}],
    ),
    "oneOf by a discriminator": (
        {
            "type": "object",
            "properties": {"kind": {"enum": ["a", "b"]}, "v": {"type": "integer"}},
            "required": ["kind"],
            **_EXTRA,
            "oneOf": [
                {"properties": {"kind": {"const": "a"}}, "required": ["v"]},
                {"properties": {"kind": {"const": "b"}}},
            ],
        },
        [{"kind": "a", "v": 1}, {"kind": "b"}, {"kind": "b", "v": 1}],
    ),
    "not required": ({**_PERSON, **_EXTRA, "not": {"required": ["name", "age"]}}, [{}, {"name": "x"}, {"age": 1}]),
    "not one of": ({"type": "string", "not": {"enum": ["root", "rot"]}}, ["ro", "roots", "x", "", "rott"]),
    "not null": ({"not": {"type": "null"}}, ["x", True, {}]),
    "not a constant": ({"type": ["string", "boolean"], "not": {"const": True}}, [False, "true"]),
    "not a number of": ({"type": "integer", "not": {"enum": [2, 4]}}, [1, 3, 5, -2]),
    "not anyOf": ({**_PERSON, **_EXTRA, "not": {"anyOf": [{"required": ["name"]}, {"required": ["age"]}]}}, [{}]),
    "not of a property": (
        {**_PERSON, **_EXTRA, "not": {"properties": {"name": {"const": "x"}}, "required": ["name"]}},
        [{}, {"name": "y"}, {"age": 1}],
    ),
    "not not": ({"not": {"not": {"type": "boolean"}}}, [True]),
    "dependencies": ({**_CARD, **_EXTRA, "dependencies": {"card": ["cvc"]}}, [{}, {"cvc": 1}, {"card": "x", "cvc": 1}]),
    "dependencies of both": (
        {**_CARD, **_EXTRA, "dependencies": {"card": ["cvc"], "cvc": ["card"]}},
        [{}, {"card": "x", "cvc": 1}],
    ),
    "dependentRequired": (
        {**_CARD, **_EXTRA, "dependentRequired": {"card": ["cvc"]}},
        [{}, {"cvc": 1}, {"card": "x", "cvc": 1}],
    ),
    "dependencies on a schema": (
        {**_CARD, **_EXTRA, "dependencies": {"card": {"required": ["cvc"], "properties": {"cvc": {"minimum": 100}}}}},
        [{}, {"cvc": 1}, {"card": "x", "cvc": 123}],
    ),
    "dependentSchemas": (
        {**_CARD, **_EXTRA, "dependentSchemas": {"card": {"required": ["cvc"]}}},
        [{}, {"cvc": 1}, {"card": "x", "cvc": 1}],
    ),
    "if, then, else": (
        {
            "type": "object",
            "properties": {"country": {"enum": ["US", "DE"]}, "zip": {"type": "string"}},
            "required": ["country"],
            **_EXTRA,
            "if": {"properties": {"country": {"const": "US"}}},
            "then": {"required": ["zip"]},
            "else": {"properties": {"zip": {"maxLength": 2}}},
        },
        [{"country": "US", "zip": "12345"}, {"country": "DE"}, {"country": "DE", "zip": "1"}],
    ),
    "if without then": ({"type": "integer", "if": {"minimum": 5}, "else": {"maximum": 2}}, [1, 6]),
    "if alone": ({"type": "boolean", "if": {"const": True}}, [True, False]),
    "several ifs": (
        {
            "type": "object",
            "properties": {"a": {"type": "boolean"}, "b": {"type": "boolean"}, "c": {"type": "boolean"}},
            **_EXTRA,
            "allOf": [
                {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
                {"if": {"required": ["b"]}, "then": {"required": ["c"]}},
            ],
        },
        [{}, {"c": True}, {"b": True, "c": False}, {"a": True, "b": True, "c": True}],
    ),
    "contains": (
        {"type": "array", "items": {"enum": [1, 2, 3]}, "contains": {"const": 2}, "maxItems": 4},
        [[2], [1, 2], [1, 1, 3, 2], [2, 2]],
    ),
    "contains with no least": (
        {"type": "array", "items": {"type": "null"}, "contains": {"const": 1}, "minContains": 0},
        [[], [None]],
    ),
    "unique in name only": ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, [[], [1, 1]]),
    "unique values of a few": (
        {"type": "array", "items": {"enum": ["r", "w", "x"]}, "uniqueItems": True, "minItems": 1},
        [["r"], ["w", "r"], ["x", "r", "w"]],
    ),
    "unique and alone": (
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1},
        [[], [4]],
    ),
    "names by a pattern": (
        {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": {"type": "integer"}},
        [{}, {"a": 1}, {"a": 1, "b": 2}],
    ),
    "names by a pattern beside others": (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "B": {"type": "null"}},
            "propertyNames": {"pattern": "^[a-z]$"},
            "additionalProperties": {"type": "integer"},
        },
        [{}, {"a": None}, {"a": None, "c": 1}],
    ),
    "a property that is forbidden": (
        {"type": "object", "properties": {"a": {"not": {}}, "b": {"type": "null"}}, **_EXTRA},
        [{}, {"b": None}],
    ),
    "names by a list": (
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}},
        [{}, {"a": None}, {"a": None, "b": None}],
    ),
    "names by their length": (
        {"type": "object", "propertyNames": {"maxLength": 2}, "additionalProperties": {"type": "null"}},
        [{}, {"ab": None}],
    ),
    "nothing unevaluated": ({**_PERSON, "unevaluatedProperties": False}, [{}, {"name": "x", "age": 1}]),
    "nothing unevaluated beside parts": (
        {
            "allOf": [{"$ref": "#/$defs/p"}],
            "type": "object",
            "properties": {"id": {"type": "integer"}},
            "unevaluatedProperties": False,
            "$defs": {"p": _PERSON},
        },
        [{}, {"id": 1}, {"name": "x", "age": 2, "id": 1}],
    ),
    "deep within": (
        {
            "type": "object",
            "properties": {
                "list": {
                    "type": "array",
                    "items": {
                        "oneOf": [
                            {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], **_EXTRA},
                            {
                                "type": "object",
                                "properties": {"b": {"type": "null"}, "c": {"type": "string", "format": "x-y"}},
                                "required": ["b"],
                                **_EXTRA,
                                "dependencies": {"b": ["c"]},
                            },
                        ]
                    },
                }
            },
            **_EXTRA,
        },
        [{}, {"list": [{"a": None}, {"b": None, "c": "x"}]}],
    ),
    "a tree": (
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "leaf": {"type": "boolean"},
                        "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                    },
                    **_EXTRA,
                    "oneOf": [{"required": ["leaf"]}, {"required": ["kids"]}],
                }
            },
        },
        [{"leaf": True}, {"kids": []}, {"kids": [{"leaf": False}, {"kids": []}]}],
    ),
}

# Schemas of which the form says less than all: what it allows fits, what is listed is allowed.
PARTLY: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "oneOf of open objects": ({"oneOf": [_PERSON, {**_CARD, "required": ["card"]}]}, [{"name": "x"}, {}]),
    "contains in any place": (
        {"type": "array", "items": {"type": "integer"}, "contains": {"minimum": 10}},
        [[12], [1, 2, 13, 4], [1] * 15 + [10]],
    ),
    "if with a pattern": (
        {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"type": "null"}},
            **_EXTRA,
            "if": {"properties": {"a": {"pattern": "^x"}}, "required": ["a"]},
            "then": {"required": ["b"]},
        },
        [{}, {"a": "xy", "b": None}],
    ),
}

# schema -> the keyword that the refusal names
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
    ({"not": {}}, "not"),
    ({"type": "string", "not": {"pattern": "^x"}}, "not"),
    ({"oneOf": [{"type": "string"}, {"type": "string"}]}, "oneOf"),
    ({"type": "array", "contains": {"const": 1}, "minContains": 2}, "minContains"),
    ({"type": "object", "propertyNames": {"pattern": "a", "maxLength": 3}}, "propertyNames"),
    ({"type": "object", "anyOf": [{"required": ["a"]}], "unevaluatedProperties": False}, "unevaluatedProperties"),
]
