"""JSON schemas in the words that the grammar library knows: what it lacks, said by alternatives.

Owns the rewriting of oneOf, not, if, dependencies, contains, uniqueItems, propertyNames, unevaluatedProperties and
format. Knows no library, no tokens and no texts. Invariant: a document that fits the rewritten schema fits the given
one. The reverse holds but for what can only be told in part: where a complement has no form of its own (patterns,
integers among numbers), and where the first match of `contains` comes late.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

from octavo.grammar.schema_sets import (
    TYPES,
    Schema,
    all_of,
    any_of,
    arrangements,
    crossed,
    key_of,
    kinds_of,
    name_pattern,
    of_types,
    other_than,
    without,
)
from octavo.request.validation import ParameterError

MAX_NODES = 8_000  # of what is made: alternatives of alternatives multiply
MAX_DEPTH = 48  # of references followed and alternatives nested
MAX_FIRST_MATCH = 16  # places of an array where the first match of `contains` may be
MAX_UNIQUE = 5  # values of which all arrangements are written out
FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)  # that the library knows; another one is no constraint, as JSON Schema says
# formats no text has two of
_APART = frozenset(("date", "date-time", "duration", "email", "ipv4", "ipv6", "time", "uuid"))

_OBJECT: dict[str, Any] = {"type": "object"}
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_SINGLE = ("additionalItems", "additionalProperties", "items")
# keyword -> type, the keyword of its contrary, and how far from it that begins
_COUNTS: dict[str, tuple[str, str, int]] = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
_BOUNDS = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}


def rewrite(schema: dict[str, Any]) -> Schema:
    """The schema in other words. Raises ParameterError, which names the keyword that has none."""
    try:
        return _Rewriter(schema).positive(schema, 0)
    except (AttributeError, KeyError, TypeError, re.error):  # a keyword's value is of a type that it cannot have
        message = "is no JSON schema: a keyword has a value of a wrong type"
        raise ParameterError("structured_outputs.json", message, "schema_invalid") from None


def _unsupported(keyword: str, why: str) -> ParameterError:
    return ParameterError("structured_outputs.json", f"cannot be used: {keyword} {why}", "unsupported")


class _Rewriter:
    """Rewrites the parts of one document."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._num_nodes = 0
        self._rules: dict[str, Callable[[dict[str, Any], int], list[Schema]]] = {
            "oneOf": self._one_of,
            "not": self._not,
            "if": self._if,
            "dependencies": functools.partial(self._dependencies, "dependencies"),
            "dependentRequired": functools.partial(self._dependencies, "dependentRequired"),
            "dependentSchemas": functools.partial(self._dependencies, "dependentSchemas"),
            "contains": self._contains,
            "uniqueItems": self._unique,
            "propertyNames": self._names,
            "unevaluatedProperties": self._unevaluated,
        }

    def positive(self, schema: Schema, depth: int) -> Schema:
        """What fits it, fits `schema`."""
        self._count(depth)
        if not isinstance(schema, dict):
            return schema
        made: dict[str, Any] = {}
        for key, value in schema.items():
            if key in self._rules or key in ("then", "else", "minContains", "maxContains"):
                continue
            if key == "format" and value not in FORMATS:
                continue
            made[key] = self._part(key, value, depth)
        more: list[Schema] = []
        for key, rule in self._rules.items():
            if key in schema:
                more += rule(schema, depth + 1)
        if more:
            made["allOf"] = [*made.get("allOf", []), *more]
        return made

    def negative(self, schema: Schema, depth: int) -> Schema:
        """What fits it, does not fit `schema`. False where that cannot be said."""
        self._count(depth)
        if not isinstance(schema, dict):
            return not schema
        ways: list[Schema] = []
        for key, value in schema.items():
            ways += self._violations(schema, key, value, depth + 1)
        return any_of(ways)

    def _count(self, depth: int) -> None:
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES or depth > MAX_DEPTH:
            message = f"is too complex: its alternatives would be more than {MAX_NODES}, or deeper than {MAX_DEPTH}"
            raise ParameterError("structured_outputs.json", message, "schema_too_complex")

    def _part(self, key: str, value: Any, depth: int) -> Any:
        """A keyword's value with the schemas in it rewritten."""
        if key in _LISTS and isinstance(value, list):
            return [self.positive(each, depth + 1) for each in value]
        if key in _MAPS and isinstance(value, Mapping):
            return {name: self.positive(each, depth + 1) for name, each in value.items()}
        if key in _SINGLE and isinstance(value, list):
            return [self.positive(each, depth + 1) for each in value]
        if key in _SINGLE and isinstance(value, dict):
            return self.positive(value, depth + 1)
        return value

    def resolve(self, reference: Any) -> Schema:
        """What a reference of the document leads to; anything, which proves nothing, if it leads nowhere."""
        node: Any = self._root
        if not isinstance(reference, str) or not reference.startswith("#"):
            return True
        for part in filter(None, reference[1:].split("/")):
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(node, Mapping) and name in node:
                node = node[name]
            elif isinstance(node, list) and name.isdigit() and int(name) < len(node):
                node = node[int(name)]
            else:
                return True
        return node if isinstance(node, dict | bool) else True

    # One rule per keyword: what the other keywords are to be joined with.

    def _one_of(self, schema: dict[str, Any], depth: int) -> list[Schema]:
        branches = schema["oneOf"]
        if not isinstance(branches, list) or not branches:
            raise ParameterError("structured_outputs.json", "oneOf must be a list of schemas", "schema_invalid")
        around = {key: value for key, value in schema.items() if key in ("type", "properties", "required")}
        ways: list[Schema] = []
        for index, branch in enumerate(branches):
            parts = [self.positive(branch, depth)]
            for other in branches[:index] + branches[index + 1 :]:
                one, two = ({"allOf": [around, each]} for each in (branch, other))
                if self._apart(one, two, 0):
                    continue
                open_both = not (self._apart(one, _OBJECT, 0) or self._apart(two, _OBJECT, 0))
                if open_both and self._apart({"allOf": [_OBJECT, one]}, two, 0):
                    parts.append(_OBJECT)  # they meet in what is no object, of which neither says anything
                else:
                    parts.append(self.negative(other, depth))
            ways.append(all_of(parts))
        if all(way is False for way in ways):
            raise _unsupported("oneOf", "has schemas of which none can be told from the others; use anyOf")
        return [any_of(ways)]

    def _not(self, schema: dict[str, Any], depth: int) -> list[Schema]:
        made = self.negative(schema["not"], depth)
        if made is False and schema["not"] not in (True, {}):
            raise _unsupported("not", "of this schema cannot be said in positive words")
        return [made]

    def _if(self, schema: dict[str, Any], depth: int) -> list[Schema]:
        condition, then, other = schema["if"], schema.get("then", True), schema.get("else", True)
        if then is True and other is True:
            return []
        return [
            any_of(
                [
                    all_of([self.positive(condition, depth), self.positive(then, depth)]),
                    all_of([self.negative(condition, depth), self.positive(other, depth)]),
                ]
            )
        ]

    def _dependencies(self, keyword: str, schema: dict[str, Any], depth: int) -> list[Schema]:
        given = schema[keyword]
        if not isinstance(given, dict):
            raise ParameterError("structured_outputs.json", f"{keyword} must be an object", "schema_invalid")
        return [any_of([without(name), self._dependent(name, needed, depth)]) for name, needed in given.items()]

    def _dependent(self, name: str, needed: Any, depth: int) -> Schema:
        if isinstance(needed, str):
            needed = [needed]
        if isinstance(needed, list):
            return {"required": list(dict.fromkeys([name, *needed]))}
        return all_of([{"required": [name]}, self.positive(needed, depth)])

    def _contains(self, schema: dict[str, Any], depth: int) -> list[Schema]:
        least, most = schema.get("minContains", 1), schema.get("maxContains")
        if least == 0 and most is None:
            return []
        if least != 1 or most is not None:
            raise _unsupported("minContains and maxContains", "are not supported, but for one match at least")
        wanted = self.positive(schema["contains"], depth)
        longest = schema.get("maxItems", MAX_FIRST_MATCH)
        num_places = min(longest if isinstance(longest, int) else MAX_FIRST_MATCH, MAX_FIRST_MATCH)
        ways: list[Schema] = [] if schema.get("type") == "array" else [of_types(set(TYPES) - {"array"})]
        for place in range(num_places):
            ways.append({"type": "array", "prefixItems": [*([{}] * place), wanted], "minItems": place + 1})
        return [any_of(ways)]

    def _unique(self, schema: dict[str, Any], depth: int) -> list[Schema]:
        if schema["uniqueItems"] is not True or schema.get("maxItems", 2) in (0, 1):
            return []
        values = self._values(schema.get("items", True), 0)
        if values is None or len(values) > MAX_UNIQUE or "prefixItems" in schema:
            message = f"is supported for items with an enum of {MAX_UNIQUE} values at most"
            raise _unsupported("uniqueItems", message)
        ways: list[Schema] = [] if schema.get("type") == "array" else [of_types(set(TYPES) - {"array"})]
        return [any_of([*ways, *arrangements(values)])]

    def _names(self, schema: dict[str, Any], depth: int) -> list[Schema]:
        names = schema["propertyNames"]
        if names is True or names == {}:
            return []
        if schema.get("patternProperties") or not isinstance(names, dict):
            raise _unsupported("propertyNames", "is not supported beside patternProperties")
        values = self._values(names, 0)
        if values is not None:
            allowed = {value: True for value in values if isinstance(value, str)}
            return [{"properties": allowed, "additionalProperties": False}]
        pattern = name_pattern(names)
        if pattern is None:
            raise _unsupported("propertyNames", "is supported with a pattern, an enum or lengths only")
        return [{"patternProperties": {pattern: True}, "additionalProperties": False}]

    def _unevaluated(self, schema: dict[str, Any], depth: int) -> list[Schema]:
        if schema["unevaluatedProperties"] is not False:
            if schema["unevaluatedProperties"] in (True, {}):
                return []
            raise _unsupported("unevaluatedProperties", "is supported where it is true or false only")
        found: dict[str, Any] = {}
        self._collect(schema, found, 0)
        return [{"properties": dict.fromkeys(found, True), "additionalProperties": False}]

    def _collect(self, schema: Schema, found: dict[str, Any], depth: int) -> None:
        """The names of the properties that a schema and all that must hold with it know."""
        self._count(depth)
        if not isinstance(schema, dict):
            return
        for key in ("anyOf", "oneOf", "if", "dependentSchemas", "patternProperties", "additionalProperties"):
            if key in schema:
                raise _unsupported("unevaluatedProperties", f"is not supported beside {key}")
        found |= schema.get("properties", {})
        for part in schema.get("allOf", []):
            self._collect(part, found, depth + 1)
        if "$ref" in schema:
            self._collect(self.resolve(schema["$ref"]), found, depth + 1)

    # What violates one keyword.

    def _violations(self, schema: dict[str, Any], key: str, value: Any, depth: int) -> list[Schema]:
        """Schemas, each of which excludes that `key` holds. Empty: the keyword excludes nothing, or none is known."""
        match key:
            case "type":
                kinds = set(value if isinstance(value, list) else [value])
                left = set(TYPES) - kinds - ({"number"} if "integer" in kinds else set())
                return [of_types(left)] if left else []
            case "const":
                return other_than([value])
            case "enum":
                return other_than(value)
            case "required":
                return [{"type": "object", **without(name)} for name in value] if isinstance(value, list) else []
            case "properties":
                return [
                    {"type": "object", "properties": {name: other}, "required": [name]}
                    for name, each in value.items()
                    if (other := self.negative(each, depth)) is not False
                ]
            case "$ref":
                return [self.negative(self.resolve(value), depth)]
            case "allOf":
                return [self.negative(each, depth) for each in value]
            case "anyOf" | "oneOf":  # to fit none of them is one way to fail either
                return [all_of([self.negative(each, depth) for each in value])]
            case "not":
                return [self.positive(value, depth)]
            case "if":
                then, other = schema.get("then", True), schema.get("else", True)
                return [
                    all_of([self.positive(value, depth), self.negative(then, depth)]),
                    all_of([self.negative(value, depth), self.negative(other, depth)]),
                ]
        if key in _COUNTS and isinstance(value, int):
            kind, opposite, step = _COUNTS[key]
            return [{"type": kind, opposite: value + step}] if value + step >= 0 else []
        if key in _BOUNDS and isinstance(value, int | float) and not isinstance(value, bool):
            return [{"type": "number", _BOUNDS[key]: value}]
        return []

    # What is known of a schema without rewriting it.

    def _apart(self, one: Schema, two: Schema, depth: int) -> bool:
        """Whether no document fits both, as far as can be proved."""
        if one is False or two is False:
            return True
        self._count(0)
        if depth > 8:
            return False
        ways_one, ways_two = self._ways(one, 0), self._ways(two, 0)
        if len(ways_one) * len(ways_two) > 64:
            return False
        return all(self._facts_apart(a, b, depth) for a in ways_one for b in ways_two)

    def _ways(self, schema: Schema, depth: int) -> list[list[dict[str, Any]]]:
        """The alternatives of a schema, each a list of plain schemas that hold together."""
        if not isinstance(schema, dict):
            return [[]]
        ways: list[list[dict[str, Any]]] = [[schema]]
        parts: list[list[Schema]] = [[each] for each in schema.get("allOf", [])]
        parts += [list(schema[key]) for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
        if "$ref" in schema:
            parts.append([self.resolve(schema["$ref"])])
        if depth > 8:
            return ways
        for alternatives in parts:
            deeper = [way for each in alternatives for way in self._ways(each, depth + 1)]
            if len(ways) * len(deeper) > 64:
                continue  # what is not looked at proves nothing
            ways = [[*way, *more] for way in ways for more in deeper]
        return ways

    def _facts_apart(self, one: list[dict[str, Any]], two: list[dict[str, Any]], depth: int) -> bool:
        both = [*one, *two]
        kinds = set(TYPES)
        for each in both:
            kinds &= kinds_of(each)
        if not kinds:
            return True
        values = [self._values(each, 0) for each in both]
        finite = [{key_of(value) for value in found} for found in values if found is not None]
        if len(finite) > 1 and not set.intersection(*finite):
            return True
        if kinds == {"object"}:
            return self._objects_apart(one, two, depth)
        if kinds == {"string"}:
            formats = {each["format"] for each in both if each.get("format") in _APART}
            return len(formats) > 1 or crossed(both, "minLength", "maxLength")
        if kinds == {"array"}:
            return crossed(both, "minItems", "maxItems")
        return kinds == {"number"} and crossed(both, "minimum", "maximum")

    def _objects_apart(self, one: list[dict[str, Any]], two: list[dict[str, Any]], depth: int) -> bool:
        both = [*one, *two]
        needed = {name for each in both for name in each.get("required", []) if isinstance(name, str)}
        for name in needed:
            if any(
                each.get("additionalProperties") is False
                and name not in each.get("properties", {})
                and not each.get("patternProperties")
                for each in both
            ):
                return True
            mine, theirs = (
                [each["properties"][name] for each in side if name in each.get("properties", {})] for side in (one, two)
            )
            if any(self._apart(a, b, depth + 1) for a in mine for b in theirs):
                return True
        return False

    def _values(self, schema: Schema, depth: int) -> list[Any] | None:
        """The values of which alone it allows some; None: not that few."""
        if not isinstance(schema, dict) or depth > 8:
            return None
        if "const" in schema:
            return [schema["const"]]
        if isinstance(schema.get("enum"), list):
            return list({key_of(value): value for value in schema["enum"]}.values())
        return self._values(self.resolve(schema["$ref"]), depth + 1) if "$ref" in schema else None
