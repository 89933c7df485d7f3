"""What of regexes and objects the grammar library reads otherwise than those who wrote them: refused by name.

Owns the checks of regexes (possessive quantifiers, sets within sets) and of `minProperties` (the library counts a key
that comes twice as two). Knows no library. Invariant: what passes means the same in the library as in Python's `re`
and in JSON Schema.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

from octavo.request.validation import ParameterError

MAX_REQUIRED_SETS = 64  # that say minProperties by `required`
_DATA = ("const", "enum", "default", "examples")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_QUANTIFIER = re.compile(r"[*+?]|\{\d+(,\d*)?\}")
_SET_OPERATION = re.compile(r"--|&&|~~")


def check_regex(field: str, text: str) -> None:
    """Refuse what Python's `re` reads otherwise. Raises ParameterError, code "unsupported"."""
    what = _otherwise(text)
    if what:
        raise ParameterError(field, f"cannot be used: {what}, which others read otherwise", "unsupported")


def _otherwise(text: str) -> str:
    at, in_class, class_began = 0, False, 0
    while at < len(text):
        if text[at] == "\\":
            at += 2
        elif in_class:
            if text[at] == "]" and at > class_began:
                in_class = False
            elif text[at] == "[":
                return "a [ within a set (a POSIX class, or a set within a set; write \\[ for the character)"
            elif _SET_OPERATION.match(text, at):
                return "a set operation (&&, -- or ~~; write \\&, \\- or \\~ for the characters)"
            at += 1
        elif text[at] == "[":
            in_class, at = True, at + (2 if text.startswith("[^", at) else 1)
            class_began = at
        elif found := _QUANTIFIER.match(text, at):
            at = found.end()
            if text.startswith("+", at):
                return "a possessive quantifier (a + behind *, +, ? or a count)"
        else:
            at += 1
    return ""


def distinct_keys(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with every `minProperties` such that no key has to come twice; the given one where none is at stake.

    Also checks its regexes. Raises ParameterError, code "unsupported", where that cannot be said.
    """
    made = _schema(schema, [])
    assert isinstance(made, dict), "a schema that is an object stays one"
    return made


def _schema(node: Any, around: list[Mapping[str, Any]]) -> Any:
    """A schema, or a list of them; `around`: schemas that hold together with it. Itself if nothing changes."""
    if isinstance(node, list):
        entries = [_schema(each, around) for each in node]
        return node if all(new is old for new, old in zip(entries, node, strict=True)) else entries
    if not isinstance(node, Mapping):
        return node
    patterns = node.get("patternProperties")
    for pattern in [node.get("pattern"), *(patterns if isinstance(patterns, Mapping) else ())]:
        if isinstance(pattern, str):
            check_regex("structured_outputs.json", pattern)
    together, made = [*around, node], dict[str, Any]()
    for key, value in node.items():
        if key in _MAPS and isinstance(value, Mapping):
            inner = {name: _schema(each, []) for name, each in value.items()}
            made[key] = value if all(inner[name] is value[name] for name in value) else inner
        elif key in _DATA:
            made[key] = value
        else:
            made[key] = _schema(value, together if key in ("allOf", "anyOf", "oneOf") else [])
    least = node.get("minProperties")
    if type(least) is int and least > 0:
        ways = _ways(together, least)
        if ways:
            made["allOf"] = [*made.get("allOf", []), {"anyOf": ways}]
            return made if all("minProperties" in way for way in ways) else _without_least(made)
    return node if all(made[key] is node[key] for key in node) else made


def _without_least(node: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key != "minProperties"}


def _ways(together: list[Mapping[str, Any]], least: int) -> list[dict[str, Any]]:
    """What to say in place of `minProperties`: one of these is to hold. None: it may stay. Raises ParameterError."""
    parts = list(_conjuncts(together))
    kinds = [part["type"] for part in parts if "type" in part]
    if any("object" not in (kind if isinstance(kind, list) else [kind]) for kind in kinds):
        return []
    needed = {name for part in parts for name in part.get("required") or () if isinstance(name, str)}
    listed = {name: each for part in parts for name, each in (part.get("properties") or {}).items()}
    others = [name for name, each in listed.items() if name not in needed and each is not False]
    is_closed = any(part.get("additionalProperties") is False and not part.get("patternProperties") for part in parts)
    # what is listed comes once, and so does the first other key; the library wants no choice among many
    if least <= len(needed) + 1 and (is_closed or not others):
        return []
    more = max(least - len(needed), 0)
    sets = itertools.combinations(others, more) if more <= len(others) else iter(())  # which would make room for `more`
    found = [{"required": list(names)} for names in itertools.islice(sets, MAX_REQUIRED_SETS + 1)]
    if found and len(found) <= MAX_REQUIRED_SETS:
        return found
    if not is_closed and least == len(needed) + len(others) + 1:  # all that is listed, and one more
        return [{"required": others, "minProperties": least}]
    if is_closed:
        return []  # nothing can come twice, and the library says what is wrong
    why = f"minProperties of {least} is not supported where keys are open: one could come twice; use required"
    raise ParameterError("structured_outputs.json", f"cannot be used: {why}", "unsupported")


def _conjuncts(parts: list[Mapping[str, Any]]) -> Any:
    for part in parts:
        yield part
        deeper = part.get("allOf")
        if isinstance(deeper, list):
            yield from _conjuncts([each for each in deeper if isinstance(each, Mapping)])
