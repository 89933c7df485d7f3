"""Structural tags: a tree of formats that says where an output is free text and where it has a form.

Owns the formats (xgrammar's names, which vLLM and SGLang take), the older words `structures` and `triggers`, and what
can be said of a tree without compiling it. Knows no grammar: `octavo.grammar.structural_tag` writes one. Invariant: a
tree that `read` returns says of every free text where it ends, and of every trigger what follows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import msgspec
from msgspec.structs import replace

from octavo.request.validation import ParameterError

MAX_REPEATS = 1000


class _Format(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True, omit_defaults=True):
    """One piece of an output."""


class AnyText(_Format, tag="any_text", frozen=True):
    """Text up to what follows the format, or to the end of the output."""

    excludes: list[str] = []  # none of these stands in it
    max_tokens: int | None = None
    max_chars: int | None = None


class ConstString(_Format, tag="const_string", frozen=True):
    """This text."""

    value: str


class JsonSchema(_Format, tag="json_schema", frozen=True):
    """A JSON document."""

    json_schema: dict[str, Any] | bool
    style: str = "json"
    any_order: bool = False


class Regex(_Format, tag="regex", frozen=True):
    """A text that the whole regex matches."""

    pattern: str


class GrammarText(_Format, tag="grammar", frozen=True):
    """A text of a grammar, Lark or GBNF."""

    grammar: str


class Sequence_(_Format, tag="sequence", frozen=True):
    """One behind the other."""

    elements: list[Format]


class Or(_Format, tag="or", frozen=True):
    """One of these."""

    elements: list[Format]


class Optional_(_Format, tag="optional", frozen=True):
    """This, or nothing."""

    content: Format


class Plus(_Format, tag="plus", frozen=True):
    """This, once or more often."""

    content: Format


class Star(_Format, tag="star", frozen=True):
    """This, as often as the model likes."""

    content: Format


class Repeat(_Format, tag="repeat", frozen=True):
    """This, `min` to `max` times; -1 is no limit."""

    min: int
    max: int
    content: Format


class Tag(_Format, tag="tag", frozen=True):
    """`begin`, the content, and one of `end`; an empty end leaves the end to what follows."""

    begin: str
    content: Format
    end: str | list[str]

    @property
    def ends(self) -> tuple[str, ...]:
        """What may end it; nothing where that is left to what follows."""
        ends = [self.end] if isinstance(self.end, str) else self.end
        return tuple(end for end in ends if end)


class TriggeredTags(_Format, tag="triggered_tags", frozen=True):
    """Free text; where a trigger is complete, one of the tags that begin with it goes on."""

    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False  # a tag comes first, before any text
    stop_after_first: bool = False
    excludes: list[str] = []  # none of these stands in the free text


class TagsWithSeparator(_Format, tag="tags_with_separator", frozen=True):
    """Tags and nothing else, with the separator between two of them."""

    tags: list[Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class Dispatch(_Format, tag="dispatch", frozen=True):
    """Free text; behind one of the patterns its format follows. `read` makes TriggeredTags of it."""

    rules: list[tuple[str, Format]]
    loop: bool = True
    excludes: list[str] = []


Leaf = JsonSchema | Regex | GrammarText
Format = (
    AnyText
    | ConstString
    | JsonSchema
    | Regex
    | GrammarText
    | Sequence_
    | Or
    | Optional_
    | Plus
    | Star
    | Repeat
    | Tag
    | TriggeredTags
    | TagsWithSeparator
    | Dispatch
)
_REPEATED = (Optional_, Plus, Star, Repeat)
_KNOWN = {str(each.__struct_config__.tag): frozenset(each.__struct_fields__) for each in Format.__args__}
_NAMES = sorted(_KNOWN)


class StructuralTag(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The whole, as a client sends it."""

    format: Format
    type: str = "structural_tag"


class _Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tag in the older words."""

    begin: str
    end: str
    schema: dict[str, Any] | str | None = None


class _Structures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The older words."""

    structures: list[_Structure]
    triggers: list[str]
    type: str = "structural_tag"
    at_least_one: bool = False


def read(value: object, field: str) -> Format:
    """The tree of a JSON object, in the newer words or the older ones. Raises ParameterError that names `field`."""
    assert isinstance(value, dict), "whoever calls has looked"
    is_old = "structures" in value
    if is_old == ("format" in value):
        raise ParameterError(field, "takes format, or structures and triggers", "grammar_invalid")
    try:
        if is_old:
            found: Format = _of_structures(msgspec.convert(value, _Structures))
        else:
            found = msgspec.convert({**value, "format": _without_unset(value["format"])}, StructuralTag).format
    except msgspec.ValidationError as error:
        _refuse_shape(value, str(error), field)
    except RecursionError:
        raise ParameterError(field, "is nested too deep", "schema_too_complex") from None
    return _Check(field).checked(found, "format")


def _without_unset(node: object, kind: str = "") -> object:
    """A format without what is null, and without unknown fields that ask for nothing. kind: where it says none."""
    if not isinstance(node, dict):
        return node
    known = _KNOWN.get(str(node.get("type", kind)), frozenset(node))
    given = {name: value for name, value in node.items() if value is not None}
    kept = {name: value for name, value in given.items() if name in known or name == "type" or value not in (False, [])}
    if "content" in kept:
        kept["content"] = _without_unset(kept["content"])
    for name, own in (("elements", ""), ("tags", "tag")):
        if isinstance(kept.get(name), list):
            kept[name] = [_without_unset(each, own) for each in kept[name]]
    if isinstance(kept.get("rules"), list):
        pairs = [list(each) if isinstance(each, list | tuple) else each for each in kept["rules"]]
        kept["rules"] = [[*map(_without_unset, each)] if isinstance(each, list) else each for each in pairs]
    return kept


def _of_structures(old: _Structures) -> TriggeredTags:
    tags = []
    for each in old.structures:
        schema: Any = {} if each.schema is None else each.schema
        if isinstance(schema, str):
            try:
                schema = msgspec.json.decode(schema.encode())
            except (msgspec.DecodeError, UnicodeEncodeError):
                raise msgspec.ValidationError("a schema that is a text must be JSON - at `$.structures[...]`") from None
            if not isinstance(schema, dict | bool):
                raise msgspec.ValidationError("a schema must be an object - at `$.structures[...]`")
        tags.append(Tag(begin=each.begin, content=JsonSchema(json_schema=schema), end=each.end))
    return TriggeredTags(triggers=old.triggers, tags=tags, at_least_one=old.at_least_one)


def _refuse_shape(value: object, said: str, field: str) -> NoReturn:
    """What the decoder says, with the place, and without what a user wrote but for a short name."""
    what, _, place = said.partition(" - at `$")
    place = place.rstrip("`").lstrip(".")
    quoted = re.search(r"'([^']*)'$|`([^`]*)`", what)
    name = (quoted[1] or quoted[2] or "") if quoted else ""
    where = f"{place} " if place else ""
    if what.startswith("Invalid value") and place.endswith("type"):
        shown = f"{name} is" if re.fullmatch(r"[a-z_]{1,40}", name) else "the format is"
        raise ParameterError(field, f"{place}: {shown} not supported; {', '.join(_NAMES)} are", "unsupported")
    if place.rpartition(".")[2] in ("begin", "end") and isinstance(_at(value, place), dict):
        raise ParameterError(field, f"{where}is an object: tokens are not supported; take their text", "unsupported")
    if what.startswith("Object contains unknown field"):
        shown = name if re.fullmatch(r"\w{1,40}", name) else "a field"
        raise ParameterError(field, f"{where}has {shown}, which is not known there", "unsupported")
    if what.startswith("Object missing required field"):
        raise ParameterError(field, f"{where or 'it '}lacks {name}", "grammar_invalid")
    raise ParameterError(field, f"{where}is wrong: {what.partition(', got')[0][:120]}", "grammar_invalid")


def _at(value: object, place: str) -> object:
    """What stands at a place that the decoder names, as format.tags[0].begin; None where that is nothing."""
    for name, number in re.findall(r"(\w+)|\[(\d+)\]", place):
        if name and isinstance(value, dict):
            value = value.get(name)
        elif number and isinstance(value, list) and int(number) < len(value):
            value = value[int(number)]
        else:
            return None
    return value


def leads_on(node: Format) -> bool:
    """Whether it ends only where what follows begins: free text is its last part."""
    match node:
        case AnyText():
            return True
        case TriggeredTags():
            return not (node.at_least_one and node.stop_after_first)
        case Sequence_():
            return leads_on(node.elements[-1])
        case Or():
            return any(map(leads_on, node.elements))
        case Tag():
            return not node.ends and leads_on(node.content)
    return False


def begins_with(node: Format) -> str:
    """The text that it begins with, if there is one."""
    return node.value if isinstance(node, ConstString) else node.begin if isinstance(node, Tag) else ""


def with_leaves(node: Format, change: Callable[[Leaf, str], Leaf], where: str = "format") -> Format:
    """The tree with each schema, regex and grammar as `change` returns it, which is told the place as well."""
    if isinstance(node, Leaf):
        return change(node, where)
    if isinstance(node, Sequence_ | Or):
        parts = [with_leaves(each, change, at) for each, at in _numbered(node.elements, where, "elements")]
        return replace(node, elements=parts)
    if isinstance(node, TriggeredTags | TagsWithSeparator):
        parts = [with_leaves(each, change, at) for each, at in _numbered(node.tags, where, "tags")]
        return replace(node, tags=parts)
    if isinstance(node, (*_REPEATED, Tag)):
        return replace(node, content=with_leaves(node.content, change, f"{where}.content"))
    return node


def _numbered(parts: Sequence[Format], where: str, name: str) -> Iterator[tuple[Format, str]]:
    for number, part in enumerate(parts):
        yield part, f"{where}.{name}[{number}]"


class _Check:
    """Goes through one tree."""

    def __init__(self, field: str) -> None:
        self._field = field

    def checked(self, node: Format, where: str) -> Format:
        """The node with what is within it; ParameterError where it cannot be met."""
        match node:
            case Dispatch():
                return self.checked(self._of_dispatch(node, where), where)
            case Sequence_() | Or():
                self._some(node.elements, where, "elements")
                elements = [self.checked(each, at) for each, at in _numbered(node.elements, where, "elements")]
                made: Format = replace(node, elements=elements)
                if isinstance(made, Sequence_):
                    self._sequence(made, where)
                return made
            case Optional_() | Plus() | Star() | Repeat():
                content = self.checked(node.content, f"{where}.content")
                if leads_on(content):
                    self._refuse(where, "repeats free text that nothing ends; put it into a tag with an end")
                if isinstance(node, Repeat) and not (0 <= node.min <= MAX_REPEATS and self._is_most(node)):
                    self._refuse(where, f"takes 0 <= min <= max <= {MAX_REPEATS}, or -1 as max")
                return replace(node, content=content)
            case Tag():
                if isinstance(node.end, list) and (not node.end or "" in node.end):
                    self._refuse(where, "has an empty end among several, or none: give the texts that end it")
                return replace(node, content=self.checked(node.content, f"{where}.content"))
            case TriggeredTags() | TagsWithSeparator():
                return self._tags(node, where)
        self._leaf(node, where)
        return JsonSchema(node.json_schema) if isinstance(node, JsonSchema) else node  # equal wishes have one text

    def _of_dispatch(self, node: Dispatch, where: str) -> TriggeredTags:
        self._some(node.rules, where, "rules")
        patterns = [pattern for pattern, _ in node.rules]
        tags = [Tag(begin=pattern, content=content, end="") for pattern, content in node.rules]
        return TriggeredTags(patterns, tags, stop_after_first=not node.loop, excludes=node.excludes)

    def _tags(self, node: TriggeredTags | TagsWithSeparator, where: str) -> Format:
        self._some(node.tags, where, "tags")
        tags = []
        for each, at in _numbered(node.tags, where, "tags"):
            tag = self.checked(each, at)
            if leads_on(tag):
                self._refuse(at, "has free text that nothing ends; give it an end")
            tags.append(tag)
        if isinstance(node, TriggeredTags):
            node = replace(node, triggers=list(dict.fromkeys(node.triggers)))
            self._triggers(node, where)
            self._texts(node.excludes, where, "excludes")
        return replace(node, tags=tags)

    def _triggers(self, node: TriggeredTags, where: str) -> None:
        self._some(node.triggers, where, "triggers")
        self._texts(node.triggers, where, "triggers")
        for number, trigger in enumerate(node.triggers):
            for other, text in enumerate(node.triggers):
                if other != number and trigger in text:
                    what = f"stands within triggers[{other}], so where it is complete both would be"
                    self._refuse(f"{where}.triggers[{number}]", f"{what}; give one of them")
            if not any(tag.begin.startswith(trigger) for tag in node.tags):
                self._refuse(f"{where}.triggers[{number}]", "has no tag that begins with it")
        for number, tag in enumerate(node.tags):
            if not tag.begin.startswith(tuple(node.triggers)):
                self._refuse(f"{where}.tags[{number}]", "has a begin that starts with none of the triggers")

    def _sequence(self, node: Sequence_, where: str) -> None:
        for number, (part, following) in enumerate(zip(node.elements, node.elements[1:], strict=False)):
            if leads_on(part) and not begins_with(following):
                what = "is free text, and what follows it begins with no text of its own: a const_string or a tag would"
                self._refuse(f"{where}.elements[{number}]", what)

    def _leaf(self, node: Format, where: str) -> None:
        match node:
            case AnyText():
                self._texts(node.excludes, where, "excludes")
                for name in ("max_tokens", "max_chars"):
                    if getattr(node, name) is not None:
                        self._refuse(f"{where}.{name}", "is not supported; max_tokens of the request is", "unsupported")
            case JsonSchema():
                if node.style != "json":
                    self._refuse(f"{where}.style", "is not supported but for json", "unsupported")
                if node.any_order:
                    self._refuse(f"{where}.any_order", "is not supported", "unsupported")
                if node.json_schema is False:
                    self._refuse(where, "is a schema that no document has")
            case Regex() | GrammarText():
                if not (node.pattern if isinstance(node, Regex) else node.grammar):
                    self._refuse(where, "must not be empty")

    def _some(self, parts: Sequence[object], where: str, name: str) -> None:
        if not parts:
            self._refuse(f"{where}.{name}", "must not be empty")

    def _texts(self, texts: Sequence[str], where: str, name: str) -> None:
        for number, text in enumerate(texts):
            if not text:
                self._refuse(f"{where}.{name}[{number}]", "must not be empty")

    @staticmethod
    def _is_most(node: Repeat) -> bool:
        return node.max == -1 or node.min <= node.max <= MAX_REPEATS

    def _refuse(self, where: str, what: str, code: str = "grammar_invalid") -> NoReturn:
        raise ParameterError(self._field, f"{where} {what}", code)
