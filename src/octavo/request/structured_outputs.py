"""What form a user asks of an output: JSON, a regex, one of several texts, a grammar, or text with tags.

Owns StructuredOutputsParams (vLLM's names) and the limits that can be checked without compiling: sizes, depth, number
of choices, references. Does not know tokens, nor what the texts mean; `octavo.grammar.compiler` compiles them.
Invariant: a constructed StructuredOutputsParams asks for exactly one form, in plain text within the limits, so it
survives msgpack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from octavo.request.structural_tag import StructuralTag, read
from octavo.request.validation import ParameterError, as_strings, check_unicode, shown, type_error

MAX_TEXT_BYTES = 65_536  # of a schema, a regex, a grammar, or all choices together
MAX_DEPTH = 64
MAX_CHOICES = 1000  # also the values of one enum
FORMS = ("json", "regex", "choice", "grammar", "structural_tag", "json_object")
_FIELD = "structured_outputs"


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form of an output. Exactly one of the first six is given. Raises ParameterError on a bad value.

    After construction `json` and `structural_tag` are texts. Whether these can be compiled is for
    `octavo.grammar.compiler`.
    """

    json: str | dict[str, Any] | None = None  # a JSON schema
    regex: str | None = None  # matches the whole output
    choice: list[str] | None = None
    grammar: str | None = None  # Lark, or EBNF with ::= (GBNF)
    structural_tag: str | dict[str, Any] | None = None  # free text with forms in it, see `structural_tag`
    json_object: bool = False  # any JSON object
    disable_any_whitespace: bool | None = None  # False: a few spaces and line breaks may stand between JSON's parts
    whitespace_pattern: str | None = None  # a regex of what may stand there; by default nothing may: JSON is compact

    def __post_init__(self) -> None:
        """Check and normalise; runs on construction and decoding alike."""
        for name in ("json_object", "disable_any_whitespace"):
            value = getattr(self, name)
            if type(value) is not bool and (value is not None or name == "json_object"):
                raise type_error(f"{_FIELD}.{name}", "true or false", value)
        given = [name for name in FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            got = f"{len(given)} ({', '.join(given)})" if given else "none"
            raise ParameterError(_FIELD, f"takes exactly one of {', '.join(FORMS)}, got {got}", "conflicting")
        if self.json is not None:
            force_setattr(self, "json", _schema_text(self.json))
        if self.structural_tag is not None:
            force_setattr(self, "structural_tag", _tag_text(self.structural_tag))
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None:
                _check_text(f"{_FIELD}.{name}", getattr(self, name))
        if self.choice is not None:
            force_setattr(self, "choice", _choices(self.choice))
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise ParameterError(f"{_FIELD}.whitespace_pattern", "excludes disable_any_whitespace", "conflicting")

    @property
    def form(self) -> str:
        """Which one of FORMS is given."""
        return next(name for name in FORMS if getattr(self, name) not in (None, False))

    @property
    def key(self) -> bytes:
        """Equal for equal wishes: what a compiled form may be kept under."""
        return msgspec.json.encode(self)


def read_structured_outputs(value: object, field: str = _FIELD) -> StructuredOutputsParams:
    """One, or vLLM's JSON object of one: null stands for a default, unknown names raise ParameterError."""
    if isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise type_error(field, "an object", value)
    known = StructuredOutputsParams.__struct_fields__
    given = {}
    for name, entry in value.items():
        if name in known:
            given[name] = entry
        elif name == "disable_additional_properties" and entry not in (None, False):
            raise ParameterError(f"{field}.{name}", "is not supported", "unsupported_parameter")
        elif name not in ("disable_additional_properties", "disable_fallback"):
            raise ParameterError(f"{field}.{str(name)[:64]}", f"unknown: {', '.join(known)} are known", "unknown_field")
    return StructuredOutputsParams(**{name: entry for name, entry in given.items() if entry is not None})


def _check_text(name: str, text: object) -> None:
    if not isinstance(text, str):
        raise type_error(name, "a string", text)
    if not text:
        raise ParameterError(name, "must not be empty", "grammar_invalid")
    _check_size(name, len(text))
    check_unicode(name, text)
    _check_size(name, len(text.encode()))


def _check_size(name: str, num_bytes: int) -> None:
    if num_bytes > MAX_TEXT_BYTES:
        message = f"may have {MAX_TEXT_BYTES} bytes, got {num_bytes}"
        raise ParameterError(name, message, "schema_too_complex")


def _choices(value: object) -> list[str]:
    name = f"{_FIELD}.choice"
    choices = as_strings(name, value, MAX_CHOICES, MAX_TEXT_BYTES)
    if not choices:
        raise ParameterError(name, "must not be empty", "grammar_invalid")
    _check_size(name, sum(len(choice.encode()) for choice in choices))
    return list(dict.fromkeys(choices))


def _schema_text(schema: object) -> str:
    """The schema as compact JSON text, its keys in the given order. Raises ParameterError."""
    return _object_text(f"{_FIELD}.json", schema, "a JSON schema, that is an object")


def _tag_text(tag: object) -> str:
    """The tag as compact JSON text, in the newer words whichever it came in. Raises ParameterError."""
    name = f"{_FIELD}.structural_tag"
    text = _object_text(name, tag, "an object, or its JSON")
    made = msgspec.json.encode(StructuralTag(read(msgspec.json.decode(text), name)))
    _check_size(name, len(made))
    return made.decode()


def _object_text(name: str, given: object, wanted: str) -> str:
    schema = given
    if isinstance(schema, str):
        _check_size(name, len(schema))
        try:
            schema = msgspec.json.decode(schema.encode())
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            position = getattr(error, "start", None)
            where = "" if position is None else f" at character {position}"
            raise ParameterError(name, f"is not JSON{where}", "schema_invalid") from None
        except RecursionError:
            raise ParameterError(name, f"is nested deeper than {MAX_DEPTH}", "schema_too_complex") from None
    if not isinstance(schema, Mapping):
        raise type_error(name, wanted, schema)
    _check_tree(name, schema)
    try:
        text = msgspec.json.encode(schema)
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise ParameterError(name, "must hold JSON's types only", "invalid_type") from None
    _check_size(name, len(text))
    return text.decode()


def _check_tree(name: str, schema: object) -> None:
    """Bound the schema's depth, size and enums; refuse references that lead out of it, and what is no number."""
    num_nodes = 0
    level: list[object] = [schema]
    for _ in range(MAX_DEPTH + 1):
        deeper: list[object] = []
        for node in level:
            if isinstance(node, Mapping):
                _check_object(name, node)
                deeper += node.values()
            elif isinstance(node, list | tuple):
                deeper += node
            elif isinstance(node, float) and not math.isfinite(node):  # JSON would make it null
                raise ParameterError(name, f"holds {node}, which is no JSON number", "number_not_finite")
        if not deeper:
            return
        num_nodes += len(deeper)
        if num_nodes > MAX_TEXT_BYTES:  # each has at least one byte
            raise ParameterError(name, f"may have {MAX_TEXT_BYTES} bytes, got more", "schema_too_complex")
        level = deeper
    raise ParameterError(name, f"is nested deeper than {MAX_DEPTH}", "schema_too_complex")


def _check_object(name: str, node: Mapping[Any, Any]) -> None:
    reference, values = node.get("$ref"), node.get("enum")
    if isinstance(reference, str) and not reference.startswith("#"):
        raise ParameterError(name, "$ref must begin with #: nothing is fetched", "unsupported")
    if isinstance(values, list | tuple) and len(values) > MAX_CHOICES:
        message = f"enum may hold {MAX_CHOICES} values, got {shown(len(values))}"
        raise ParameterError(name, message, "schema_too_complex")
