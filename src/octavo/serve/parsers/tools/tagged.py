"""Calls whose arguments stand between tags, as plain text: what the formats of Qwen 3 Coder, GLM and MiniMax share.

Owns Tagged, which follows the tags, and the reading of a text as a value of the type that the tool's schema names.
Invariant: arguments come out as JSON, as they come; a text that fits no type of its schema is a JSON string, so nothing
that a model writes is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from octavo.serve.parsers.base import Delta
from octavo.serve.parsers.calls import NAME
from octavo.serve.parsers.tools.base import Sectioned

_MAX_KEY = 256
_PYTHON = {"true": "true", "false": "false", "none": "null"}  # models write Python's words
_SYNONYMS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}
_TYPES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (bool, ("boolean",)),
    (int, ("integer", "number")),
    (float, ("number",)),
    (dict, ("object",)),
    (list, ("array",)),
)


class Tagged(Sectioned):
    """`call_open` NAME `name_end`, then arguments, then `call_close`.

    An argument is `key_open` KEY `key_end` `value_open` VALUE `value_close`.
    """

    name_end = key_open = key_end = value_open = value_close = call_close = ""
    trims = True  # a line break at each end of a value belongs to its tags

    def __init__(self, tools: Collection[str] | None = None, new_id: Callable[[], str] | None = None) -> None:
        """`tools` may map the names to their parameters' schemas; else no argument has a type."""
        super().__init__(tools, new_id)
        self._ends = ["\n" + self.value_close, self.value_close] if self.trims else [self.value_close]
        self._properties: Mapping[str, Any] = {}
        self._num_arguments = 0
        self._held: list[str] | None = []  # of a value whose type needs its whole text; None: it is a string
        self._types: frozenset[str] = frozenset()

    def finish(self) -> list[Delta]:
        """The rest, at the end of the output: an unfinished call stays a call."""
        if self._state == self._value:
            rest = self._tape.take(len(self._tape))
            if self._held is None:
                self._argue(_escaped(rest))
        elif self._state == self._between:
            self._tape.take(len(self._tape))
            self._argue("}")
        elif self._state in (self._key, self._value_begin, self._value_first):
            self._tape.take(len(self._tape))
        else:
            return super().finish()
        return self._taken()

    def _opened(self) -> bool:
        rest = self._tape.rest(64 + len(self.name_end) + 1)
        found = NAME.match(rest)
        at = found.end() if found else 0
        if found and rest.startswith(self.name_end, at):
            return self._begin_tagged(found[0], at + len(self.name_end))
        if len(rest) <= 64 and (found or not rest) and self.name_end.startswith(rest[at:]):
            return False
        self._say(self._lead)
        return self._go(self._text)

    def _begin_tagged(self, name: str, length: int) -> bool:
        """A call of `name`, whose head takes `length` characters, if it may be one."""
        if self._tools is not None and name not in self._tools:
            self._say(self._lead)
            return self._go(self._text)
        self._tape.take(length)
        schema = self._tools.get(name) if isinstance(self._tools, Mapping) else None
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._space.clear()
        self._lead, self._behind_call, self._num_arguments = "", True, 0
        self._out.append(Delta(tool_index=self.num_calls, tool_id=self._new_id(), tool_name=name))
        self.num_calls += 1
        self._argue("{")
        return self._go(self._between)

    def _between(self) -> bool:
        """Within a call, before an argument or the end."""
        tape = self._tape
        tape.skip_space()
        if not len(tape):
            return False
        more, closes = tape.starts_with(self.key_open), tape.starts_with(self.call_close)
        if more:
            tape.take(len(self.key_open))
            return self._go(self._key)
        if closes:
            tape.take(len(self.call_close))
        elif more is None or closes is None:
            return False
        self._argue("}")
        return self._leave()

    def _key(self) -> bool:
        rest = self._tape.rest(_MAX_KEY + len(self.key_end))
        at = rest.find(self.key_end)
        if at < 0 and len(rest) < _MAX_KEY + len(self.key_end):
            return False
        if at < 0:  # no key: the call ends here, and the rest is text
            self._argue("}")
            return self._go(self._text)
        self._tape.take(at + len(self.key_end))
        key = rest[:at].strip().strip('"')
        self._argue((", " if self._num_arguments else "") + json.dumps(key, ensure_ascii=False) + ": ")
        self._num_arguments += 1
        self._types = types_of(self._properties.get(key))
        return self._go(self._value_begin if self.value_open else self._value_first)

    def _value_begin(self) -> bool:
        tape = self._tape
        tape.skip_space()
        here = tape.starts_with(self.value_open) if len(tape) else None
        if here is None:
            return False
        if here:
            tape.take(len(self.value_open))
            return self._go(self._value_first)
        self._argue("null}")
        return self._go(self._text)

    def _value_first(self) -> bool:
        if self.trims and self._tape.starts_with("\n" + self.value_close) is None:
            return False  # whether the line break is the first one or the last one
        if self.trims and self._tape.peek() == "\n" and not self._tape.starts_with("\n" + self.value_close):
            self._tape.take(1)
        self._held = None if self._types == {"string"} else []
        if self._held is None:
            self._argue('"')
        return self._go(self._value)

    def _value(self) -> bool:
        before, mark = self._tape.take_before(self._ends)
        if self._held is not None:
            self._held.append(before)
        else:
            self._argue(_escaped(before))
        if not mark:
            return False
        self._argue('"' if self._held is None else as_json("".join(self._held), self._types))
        return self._go(self._between)


def _escaped(text: str) -> str:
    """A piece of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def types_of(schema: Any) -> frozenset[str]:
    """JSON's types that a schema names, alternatives together. Empty: it does not say."""
    if not isinstance(schema, Mapping):
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((_SYNONYMS.get(named, named),))
    if isinstance(named, list):
        return frozenset(_SYNONYMS.get(each, each) for each in named if isinstance(each, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset("string" if isinstance(value, str) else _type_of(value)[0] for value in values)
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            each = [types_of(one) for one in schema[word]]
            return frozenset().union(*each) if all(each) else frozenset()
    return frozenset()


def as_json(text: str, types: frozenset[str]) -> str:
    """A text as JSON of one of `types` (none: whatever it is), or as a JSON string if it is none of them."""
    bare = text.strip()
    word = _PYTHON.get(bare.lower(), bare)
    try:
        value = json.loads(word, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if isinstance(value, float) and "integer" in types and value.is_integer():
        return str(int(value))
    if not types or (not isinstance(value, str) and not types.isdisjoint(_type_of(value))):
        return word
    return json.dumps(text, ensure_ascii=False)  # a quoted text too: a string's argument means what stands there


def _type_of(value: Any) -> tuple[str, ...]:
    if value is None:
        return ("null",)
    if isinstance(value, str):
        return ("string",)
    return next(names for kind, names in _TYPES if isinstance(value, kind))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
