"""JSON schemas as sets of values: what fits one of them, all of them, or something else than given values.

Owns what needs no reference to be followed. Knows no library, no tokens and no texts.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

Schema = dict[str, Any] | bool
TYPES = ("null", "boolean", "object", "array", "string", "number")


def any_of(ways: list[Schema]) -> Schema:
    """What fits one of the schemas."""
    ways = [way for way in ways if way is not False]
    if any(way is True or way == {} for way in ways):
        return True
    return (ways[0] if len(ways) == 1 else {"anyOf": ways}) if ways else False


def all_of(parts: list[Schema]) -> Schema:
    """What fits all of them."""
    if any(part is False for part in parts):
        return False
    parts = [part for part in parts if part is not True and part != {}]
    return (parts[0] if len(parts) == 1 else {"allOf": parts}) if parts else True


def of_types(kinds: set[str]) -> Schema:
    """Every value of these types."""
    return {"type": [kind for kind in TYPES if kind in kinds]}


def without(name: str) -> dict[str, Any]:
    """What has no property of this name."""
    return {"properties": {name: False}}


def kinds_of(schema: dict[str, Any]) -> set[str]:
    """The types that a plain schema allows; integers count as numbers."""
    given = schema.get("type")
    if given is not None:
        kinds = set(given if isinstance(given, list) else [given])
        return (kinds - {"integer"} | {"number"}) if "integer" in kinds else kinds
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return {kind_of(value) for value in values} if isinstance(values, list) else set(TYPES)


def kind_of(value: Any) -> str:
    """A value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return {str: "string", int: "number", float: "number", list: "array", dict: "object"}[type(value)]


def key_of(value: Any) -> Any:
    """Equal for values that JSON Schema holds for equal: 1 and 1.0, though not 1 and true."""
    if isinstance(value, list):
        return "array", tuple(key_of(each) for each in value)
    if isinstance(value, dict):
        return "object", frozenset((name, key_of(each)) for name, each in value.items())
    return kind_of(value), value


def crossed(schemas: list[dict[str, Any]], low: str, high: str) -> bool:
    """Whether some lower bound lies above some upper bound."""
    lows = [each[low] for each in schemas if isinstance(each.get(low), int | float)]
    highs = [each[high] for each in schemas if isinstance(each.get(high), int | float)]
    return bool(lows and highs) and max(lows) > min(highs)


def other_than(values: Any) -> list[Schema]:
    """Every value but these, where each kind of them has a complement."""
    if not isinstance(values, list):
        return []
    by_kind: dict[str, list[Any]] = {}
    for value in values:
        by_kind.setdefault(kind_of(value), []).append(value)
    left = set(TYPES) - set(by_kind)
    ways: list[Schema] = [of_types(left)] if left else []
    if "boolean" in by_kind:
        ways += [{"const": value} for value in (True, False) if value not in by_kind["boolean"]]
    if "string" in by_kind:
        ways.append({"type": "string", "pattern": other_strings(by_kind["string"])})
    if "number" in by_kind:
        numbers = sorted(set(by_kind["number"]))
        ways.append({"type": "number", "exclusiveMaximum": numbers[0]})
        ways += [
            {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high}
            for low, high in itertools.pairwise(numbers)
            if not (isinstance(low, int) and high == low + 1)
        ]
        ways.append({"type": "number", "exclusiveMinimum": numbers[-1]})
    return ways


def other_strings(texts: list[str]) -> str:
    """A regex without look-around for every text but these."""
    end = ""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[end] = {}

    def others(node: dict[str, Any]) -> str:
        chars = sorted(char for char in node if char)
        if not chars:
            return r"[\s\S]+"
        ways = [re.escape(char) + others(node[char]) for char in chars]
        ways.append("[^" + "".join(re.escape(char) for char in chars) + r"][\s\S]*")
        return f"({'|'.join(ways)}){'' if end in node else '?'}"

    return f"^{others(tree)}$"


def arrangements(values: list[Any]) -> list[Schema]:
    """Every list of different values out of `values`."""
    found: list[Schema] = [{"type": "array", "maxItems": 0}]

    def extend(chosen: list[Any], rest: list[Any]) -> None:
        for place, value in enumerate(rest):
            longer = [*chosen, value]
            items = [{"const": each} for each in longer]
            found.append({"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)})
            extend(longer, rest[:place] + rest[place + 1 :])

    extend([], values)
    return found


def name_pattern(names: dict[str, Any]) -> str | None:
    """A regex of the names that a schema of names allows, if it has one keyword only."""
    keys = {key for key in names if key not in ("type", "description", "title", "$comment", "format")}
    if keys == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    if keys and keys <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return r"^[\s\S]*$" if not keys else None
