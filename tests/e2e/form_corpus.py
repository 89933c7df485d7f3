"""Forms that end by themselves within a bounded number of tokens, with what their outputs must satisfy."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_WORD = {"type": "string", "maxLength": 6}
_SMALL = {"type": "integer", "minimum": 0, "maximum": 99}
_POINT = _object(x=_SMALL, y=_SMALL)

SCHEMAS: dict[str, dict[str, Any]] = {
    "string": _WORD,
    "string of a length": {"type": "string", "minLength": 3, "maxLength": 5},
    "string with a pattern": {"type": "string", "pattern": "^[A-Z][a-z]{2,4}$"},
    "string enum": {"enum": ["red", "green", "blue"]},
    "mixed enum": {"enum": ["one", 2, None, True, 3.5]},
    "enum of umlauts": {"enum": ["größe", "naïve", "日本"]},
    "enum of quotes": {"enum": ['say "hi"', "back\\slash", "new\nline"]},
    "const": {"const": "fixed"},
    "const object": {"const": {"a": [1, 2], "b": None}},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time", "maxLength": 20},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "integer": _SMALL,
    "negative": {"type": "integer", "minimum": -50, "maximum": -3},
    "exclusive": {"type": "integer", "exclusiveMinimum": 7, "exclusiveMaximum": 10},
    "several types": {"type": ["boolean", "null"]},
    "any of": {"anyOf": [{"type": "boolean"}, {"enum": ["maybe"]}]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 20}]},
    "object": _object(name=_WORD, age=_SMALL),
    "optional": {
        "type": "object",
        "properties": {"a": _SMALL, "b": _SMALL},
        "required": ["b"],
        "additionalProperties": False,
    },
    "empty object": {"type": "object", "additionalProperties": False},
    "nested": _object(user=_object(name=_WORD, tags=_object(first=_WORD))),
    "strange names": _object(**{"a b": _SMALL, "ö": _SMALL, 'q"': _SMALL}),
    "array": {"type": "array", "items": _SMALL, "minItems": 1, "maxItems": 3},
    "array of three": {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3},
    "array of objects": {"type": "array", "items": _POINT, "minItems": 1, "maxItems": 2},
    "tuple": {
        "type": "array",
        "prefixItems": [_WORD, _SMALL, {"type": "boolean"}],
        "items": False,
        "minItems": 3,
    },
    "reference": {"$defs": {"p": _POINT}, **_object(origin={"$ref": "#/$defs/p"})},
    "titles": {"title": "T", "description": "text", **_object(a={**_SMALL, "title": "A", "default": 3})},
    "tool call": _object(name={"enum": ["get_weather", "get_time"]}, arguments=_object(city=_WORD)),
}

REGEXES = {
    "letters": r"[a-z]{3,8}",
    "anchored": r"^[a-z]{3,5}@[a-z]{2,6}\.com$",
    "phone": r"\(\d{3}\) \d{3}-\d{4}",
    "alternatives": r"(yes|no|maybe)( please)?",
    "hex": r"0x[0-9a-fA-F]{1,8}",
    "umlauts": r"[äöü]{2,4}",
    "classes": r"[^\s\w]{2}\w{1,3}",
    "dotted": r"(\d{1,3}\.){3}\d{1,3}",
    "identifier": r"def [a-z_]{1,12}\(\):",
    "several lines": r"a\n{1,2}b",
}

CHOICES = {
    "two": ["yes", "no"],
    "prefixes": ["a", "ab", "abc"],
    "texts": ["def main():", "class Main:", "import os\n"],
    "quotes": ['"', "\\", "'", "\t"],
    "control characters": ["a\x7fb", "\x00", "\x1b\x85"],
    "unicode": ["ß", "日本語", "\U0001f600"],
}

# grammar, a regex for its outputs
GRAMMARS = {
    "lark": ('start: "a" B "c"\nB: /[0-9]{1,3}/', r"a[0-9]{1,3}c"),
    "lark of rules": ('start: hail " " name\nhail: "hi" | "hello"\nname: /[a-z]{2,5}/', r"(hi|hello) [a-z]{2,5}"),
    "lark repeats": ('start: item ("," item){1,2}\nitem: "x" | "y"', r"[xy](,[xy]){1,2}"),
    "gbnf": ('root ::= "SELECT " col " FROM t"\ncol ::= "a" | "b" | "*"', r"SELECT [ab*] FROM t"),
    "gbnf classes": ("root ::= [a-c] [0-9]?", r"[a-c][0-9]?"),
    "json within": ('start: "<" body ">"\nbody: %json {"type": "boolean"}', r"<(true|false)>"),
}

_YES = {"type": "json_schema", "json_schema": {"type": "boolean"}}


def _tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


# format, a regex for its outputs
TAGS: dict[str, tuple[dict[str, Any], str]] = {
    "tag": (_tag("<a>", {"type": "json_schema", "json_schema": _SMALL}, "</a>"), r"<a>\d{1,2}</a>"),
    "text up to a mark": (_tag("def ", {"type": "any_text", "excludes": ["zz"]}, ":"), r"(?s)def [^:]*:"),
    "text, then a call": (
        {"type": "sequence", "elements": [{"type": "any_text"}, _tag("(", _YES, ")")]},
        r"(?s)[^(]*\((true|false)\)",
    ),
    "one call": (
        {
            "type": "triggered_tags",
            "triggers": ["<f="],
            "tags": [_tag("<f=a>", _YES, "</f>"), _tag("<f=b>", {"type": "const_string", "value": "no"}, "</f>")],
            "at_least_one": True,
            "stop_after_first": True,
        },
        r"<f=(a>(true|false)|b>no)</f>",
    ),
    "separated": (
        {"type": "repeat", "min": 2, "max": 3, "content": _tag("- ", {"type": "regex", "pattern": "[a-z]{2,5}"}, "\n")},
        r"(- [a-z]{2,5}\n){2,3}",
    ),
}


def forms() -> dict[str, dict[str, Any]]:
    """Name -> arguments of StructuredOutputsParams."""
    found: dict[str, dict[str, Any]] = {f"json: {name}": {"json": schema} for name, schema in SCHEMAS.items()}
    found |= {f"regex: {name}": {"regex": regex} for name, regex in REGEXES.items()}
    found |= {f"choice: {name}": {"choice": choice} for name, choice in CHOICES.items()}
    found |= {f"grammar: {name}": {"grammar": grammar} for name, (grammar, _) in GRAMMARS.items()}
    return found | {f"tag: {name}": {"structural_tag": {"format": format}} for name, (format, _) in TAGS.items()}


def satisfies(form: dict[str, Any], text: str) -> bool:
    """Whether a whole output has the form."""
    if "json" in form:
        try:
            jsonschema.validate(json.loads(text), form["json"])
        except (ValueError, jsonschema.ValidationError):
            return False
        return True
    if "regex" in form:
        return re.fullmatch(form["regex"], text) is not None
    if "choice" in form:
        return text in form["choice"]
    if "structural_tag" in form:
        known = next(regex for format, regex in TAGS.values() if format == form["structural_tag"]["format"])
        return re.fullmatch(known, text) is not None
    pattern = next(pattern for grammar, pattern in GRAMMARS.values() if grammar == form["grammar"])
    return re.fullmatch(pattern, text) is not None
