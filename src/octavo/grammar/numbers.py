"""Numbers of JSON schemas that the grammar library reads right: it holds bounds and constants as doubles.

Owns the limits of what may be handed to the library: beyond 2**53 it would round in silence, and at -2**63 it crashes
with the whole process. Knows no library and no tokens. Invariant: a document that fits what `safe_numbers` returns
fits what it was given, with integers of any size; what has no such form is refused by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from octavo.config.quoted import quoted
from octavo.request.validation import ParameterError

MAX_EXACT = 2**53  # up to here every integer is a double
MAX_COUNT = 2**32 - 1  # of characters, and of a multiple's digits
MAX_BOUND = 2**63 - 1024  # the largest double that is an int64
MAX_MULTIPLE = 100_000  # the library makes a state for each remainder: half a second at this size
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("const", "enum", "default", "examples")
_EMBEDDED = "%json"
_HELD = ("multipleOf", "minLength", "maxLength")


def safe_numbers(schema: dict[str, Any], field: str = "structured_outputs.json") -> dict[str, Any]:
    """The schema with bounds that the library reads right; the given one where nothing is to be said otherwise.

    A bound beyond 2**53 goes to the next double within the range, and to 2**63 - 1024 at most. Raises ParameterError,
    code "unsupported", for a constant or a range that cannot be said so.
    """
    made = _Numbers(schema, field).schema(schema)
    assert isinstance(made, dict), "a schema that is an object stays one"
    return made


def safe_grammar(text: str, field: str = "structured_outputs.grammar") -> str:
    """A Lark grammar whose `%json` schemas are safe in the same way. Raises ParameterError as `safe_numbers` does."""
    parts, at = [], 0
    while (found := text.find(_EMBEDDED, at)) >= 0:
        start = found + len(_EMBEDDED)
        while start < len(text) and text[start].isspace():
            start += 1
        try:
            schema, end = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):  # the library says what is wrong with it
            parts.append(text[at:start])
            at = start
            continue
        safe = safe_numbers(schema, field) if isinstance(schema, dict) else schema
        parts += [text[at:start], text[start:end] if safe is schema else json.dumps(safe)]
        at = end
    return "".join([*parts, text[at:]])


def beyond_library(schema: Any) -> str:
    """Of a schema that the library refused: the first number in it that the library cannot hold; empty: none.

    It names the keyword, the value and what would do.
    """
    parts: list[Any] = [schema]
    while parts:
        node = parts.pop()
        parts += node if isinstance(node, list) else node.values() if isinstance(node, Mapping) else ()
        for key in _HELD if isinstance(node, Mapping) else ():
            value = node.get(key)
            if type(value) not in (int, float) or not 0 <= value < math.inf:
                continue
            if key != "multipleOf" and type(value) is int and value > MAX_COUNT:
                return f"{key} is {quoted(value)}, at most {MAX_COUNT} is possible; lower it, or leave it out"
            if key == "multipleOf" and _in_decimals(float(value)) > MAX_COUNT:
                limit = f"as a whole number of its last decimal place it may be at most {MAX_COUNT}"
                return f"multipleOf is {quoted(value)}, {limit}; use fewer digits or decimal places"
    return ""


def _in_decimals(value: float) -> float:
    """A number times the power of ten that makes it whole, as the library makes it, in doubles."""
    while not value.is_integer():
        value *= 10.0
    return value


class _Numbers:
    """Goes through one document."""

    def __init__(self, root: dict[str, Any], field: str) -> None:
        self._root, self._field = root, field
        self._multiple = 1  # of all `multipleOf` of the document, which a value may have to meet together

    def schema(self, node: Any) -> Any:
        """A schema, or a keyword's value with schemas in it. The same object if nothing in it changes."""
        if isinstance(node, list):
            entries = [self.schema(each) for each in node]
            return node if all(new is old for new, old in zip(entries, node, strict=True)) else entries
        if not isinstance(node, Mapping):
            return node
        made: dict[str, Any] = {}
        for key, value in node.items():
            if key in _MAPS and isinstance(value, Mapping):
                inner = {name: self.schema(each) for name, each in value.items()}
                made[key] = value if all(inner[name] is value[name] for name in value) else inner
            elif key in _DATA:
                if key in ("const", "enum"):
                    self._constant(key, value)
                made[key] = value
            else:
                made[key] = self.schema(value)
        self._reference(node.get("$ref"))
        self._multiple_of(node.get("multipleOf"))
        bounds = self._bounds(node)
        if bounds is not None:
            kept = {key: value for key, value in made.items() if key not in _BOUNDS}
            return kept | bounds
        return node if all(made[key] is node[key] for key in node) else made

    def _constant(self, key: str, value: Any) -> None:
        if isinstance(value, Mapping):
            value = list(value.values())
        if isinstance(value, list):
            for each in value:
                self._constant(key, each)
        elif type(value) in (int, float) and abs(value) > MAX_BOUND:  # a double is a bound, beside the type integer
            raise self._unsupported(f"{key} holds {str(value)[:40]}, beyond 2**63 - 1024 in size; use a string")
        elif type(value) is int and int(float(value)) != value:
            raise self._unsupported(f"{key} holds {value}, beyond 2**53, where it is no double; use a string")

    def _reference(self, reference: Any) -> None:
        """Refuse a way to a schema within data, unless its numbers are safe as they are."""
        if not isinstance(reference, str) or not any(f"/{name}" in reference for name in _DATA):
            return
        target: Any = self._root
        for name in filter(None, reference.removeprefix("#").split("/")):
            if isinstance(target, Mapping) and name in target:
                target = target[name]
            elif isinstance(target, list) and name.isdigit() and int(name) < len(target):
                target = target[int(name)]
            else:
                raise self._unsupported("$ref leads through a constant")
        if target is not self._root and "$ref" in json.dumps(target):
            raise self._unsupported("$ref leads to a constant that holds a $ref")
        if self.schema(target) is not target:
            raise self._unsupported("$ref leads to a constant with bounds beyond 2**53")

    def _multiple_of(self, value: Any) -> None:
        if type(value) not in (int, float) or not math.isfinite(value):
            return  # the library says that it is no number
        digits = int("".join(map(str, Decimal(repr(value)).normalize().as_tuple().digits)))
        self._multiple = math.lcm(self._multiple, max(digits, 1))
        if self._multiple > MAX_MULTIPLE:
            raise self._unsupported(
                f"multipleOf, of all of the schema together, leaves more than {MAX_MULTIPLE} remainders"
            )

    def _bounds(self, node: Mapping[str, Any]) -> dict[str, Any] | None:
        """The bounds in doubles within the range; None: they may stay."""
        given = {key: node[key] for key in _BOUNDS if key in node}
        strict = {key for key in ("exclusiveMinimum", "exclusiveMaximum") if type(given.get(key)) is bool}
        numbers = {key: value for key, value in given.items() if key not in strict}
        if not all(type(value) in (int, float) for value in numbers.values()):
            return None  # the library says that it is no number
        if all(abs(value) < MAX_EXACT for value in numbers.values()):
            return None
        lows: list[int | float] = []
        highs: list[int | float] = []
        for key, value in numbers.items():
            is_strict = key.startswith("exclusive") or given.get(f"exclusive{key.capitalize()}") is True
            (lows if key.endswith("inimum") else highs).append(_within(value, key.endswith("inimum"), is_strict))
        low, high = max(lows, default=None), min(highs, default=None)
        if low is not None and (low > MAX_BOUND or (high is not None and low > high)):
            raise self._unsupported(
                f"{' and '.join(numbers)} leave no number that is a double up to 2**63 - 1024 in size; use a string"
            )
        if high is not None and high < -MAX_BOUND:
            raise self._unsupported(f"{' and '.join(numbers)} leave no number of at least -2**63 + 1024; use a string")
        made = {} if low is None else {"minimum": max(low, -MAX_BOUND)}
        return made | ({} if high is None else {"maximum": min(high, MAX_BOUND)})

    def _unsupported(self, why: str) -> ParameterError:
        return ParameterError(self._field, f"cannot be used: {why}", "unsupported")


_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")


def _within(value: int | float, is_low: bool, is_strict: bool) -> int | float:
    """The next double at or within a bound; an integer where it is one."""
    towards = math.inf if is_low else -math.inf
    if abs(value) > 2 * MAX_BOUND:  # whatever it is exactly
        return int(math.copysign(2 * MAX_BOUND, value))
    near = float(value)
    is_outside = near < value if is_low else near > value  # Python compares exactly
    if is_outside or (is_strict and near == value):
        near = math.nextafter(near, towards)
    return int(near) if near.is_integer() else near
