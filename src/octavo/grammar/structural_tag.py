"""A structural tag as a grammar of the library: free text until a trigger, then a form, then free text again.

Owns the translation of a tree (`octavo.request.structural_tag`) into rules: free text that something ends is a lazy
lexeme, which ends where that is complete for the first time, so a trigger cannot be passed over. A special token in a
text that has to come is written by itself; what ends free text may be spelled out, too. Compiles nothing. Invariant: no
error repeats what a user wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from octavo.grammar.text import grammar_text, name_of
from octavo.request import structural_tag as tags
from octavo.request.structured_outputs import StructuredOutputsParams
from octavo.request.validation import ParameterError

_ANY = "TEXT: /(?s:.*)/"
_EMPTY = '""'


def with_forms(
    structured: StructuredOutputsParams, change: Callable[[StructuredOutputsParams], StructuredOutputsParams]
) -> StructuredOutputsParams:
    """The same tag with each form within it as `change` returns it; itself if nothing changes. ParameterError."""
    tree = _tree(structured)

    def leaf(node: tags.Leaf, where: str) -> tags.Leaf:
        form = _form(node, structured)
        try:
            made = change(form)
        except ParameterError as error:
            message = str(error).removeprefix(f"{error.field}: ")
            raise ParameterError(name_of(structured), f"{where} {message}", error.code) from None
        return node if made is form else _leaf(made)

    made = tags.with_leaves(tree, leaf)
    if made == tree:
        return structured
    return msgspec.structs.replace(structured, structural_tag=msgspec.to_builtins(tags.StructuralTag(made)))


def tag_grammar(structured: StructuredOutputsParams, special: Mapping[str, int]) -> str:
    """The library's text of a tag. `special`: the special tokens of the vocabulary by their texts."""
    return _Writer(structured, special).write(_tree(structured))


def special_tokens(tokens: Sequence[bytes], special_token_ids: Iterable[int]) -> dict[str, int]:
    """Special tokens by their texts, for `tag_grammar`."""
    found = dict[str, int]()
    for token_id in special_token_ids:
        text = tokens[token_id].decode("utf-8", "replace")
        if text.strip():
            found.setdefault(text, token_id)
    return found


def _tree(structured: StructuredOutputsParams) -> tags.Format:
    assert isinstance(structured.structural_tag, str), "a constructed form holds its tag as text"
    return tags.read(msgspec.json.decode(structured.structural_tag), name_of(structured))


def _form(node: tags.Leaf, around: StructuredOutputsParams) -> StructuredOutputsParams:
    match node:
        case tags.JsonSchema():
            schema = node.json_schema if isinstance(node.json_schema, dict) else {}
            return StructuredOutputsParams(
                json=schema,
                disable_any_whitespace=around.disable_any_whitespace,
                whitespace_pattern=around.whitespace_pattern,
            )
        case tags.Regex():
            return StructuredOutputsParams(regex=node.pattern)
    return StructuredOutputsParams(grammar=node.grammar)


def _leaf(form: StructuredOutputsParams) -> tags.Leaf:
    if isinstance(form.json, str):
        return tags.JsonSchema(json_schema=json.loads(form.json))
    if form.regex is not None:
        return tags.Regex(form.regex)
    return tags.GrammarText(form.grammar or "")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")  # which JSON leaves as it is


def _row(*parts: str) -> str:
    return " ".join(part for part in parts if part and part != _EMPTY) or _EMPTY


def _choice(parts: Iterable[str]) -> str:
    found = list(dict.fromkeys(parts))
    return found[0] if len(found) == 1 else f"({' | '.join(found)})"


class _Writer:
    """Writes one tree. An expression that is asked for with `ends` has one of these behind it; without, nothing."""

    def __init__(self, structured: StructuredOutputsParams, special: Mapping[str, int]) -> None:
        self._structured, self._special = structured, special
        longest_first = sorted(special, key=len, reverse=True)
        self._any_special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._lines, self._grammars, self._texts = [_ANY], list[dict[str, Any]](), dict[tuple[str, ...], str]()
        self._ends, self._marks = dict[tuple[str, ...], str](), dict[tuple[str, str], str]()

    def write(self, tree: tags.Format) -> str:
        start = f"start: {self._expression(tree, ())}"
        lark = "\n".join([start, *self._lines])
        return json.dumps({"grammars": [{"name": "structural_tag", "lark_grammar": lark}, *self._grammars]})

    def _expression(self, node: tags.Format, ends: tuple[str, ...]) -> str:
        match node:
            case tags.AnyText():
                return self._free(node.excludes, ends)
            case tags.ConstString():
                return _row(self._literal(node.value), self._end(ends))
            case tags.Regex():
                return self._regex(node, ends)
            case tags.JsonSchema() | tags.GrammarText():
                return _row(self._embedded(node), self._end(ends))
            case tags.Sequence_():
                return self._sequence(node, ends)
            case tags.Or():
                return _choice(self._expression(each, ends) for each in node.elements)
            case tags.Optional_() | tags.Plus() | tags.Star() | tags.Repeat():
                return _row(f"({self._expression(node.content, ())}){_times(node)}", self._end(ends))
            case tags.Tag():
                return _row(self._literal(node.begin), self._body(node, ends))
            case tags.TriggeredTags():
                return self._triggered(node, ends)
            case tags.TagsWithSeparator():
                return self._separated(node, ends)
        raise AssertionError("a tree that was read holds no other formats")

    def _body(self, node: tags.Tag, ends: tuple[str, ...]) -> str:
        """A tag behind its begin."""
        if node.ends:
            return _row(self._expression(node.content, node.ends), self._end(ends))
        return self._expression(node.content, ends)

    def _sequence(self, node: tags.Sequence_, ends: tuple[str, ...]) -> str:
        """The parts; where free text goes on up to the next one, what that begins with ends it."""
        parts, begun = list[str](), False
        for part, following in zip(node.elements, [*node.elements[1:], None], strict=True):
            own = ends if following is None else ()
            leads_on = following is not None and tags.leads_on(part)
            if leads_on and following is not None:
                own = (tags.begins_with(following),)
            if not begun:
                parts.append(self._expression(part, own))
            elif isinstance(part, tags.Tag):
                parts.append(self._body(part, own))
            else:
                parts.append(self._end(own))
            begun = leads_on
        return _row(*parts)

    def _triggered(self, node: tags.TriggeredTags, ends: tuple[str, ...]) -> str:
        bodies = [self._rule(self._body(tag, ())) for tag in node.tags]
        dispatched = []
        for trigger in node.triggers:
            rests = [
                _row(self._literal(tag.begin.removeprefix(trigger)), body)
                for tag, body in zip(node.tags, bodies, strict=True)
                if tag.begin.startswith(trigger)
            ]
            dispatched.append(_row(self._until(trigger, node.excludes), _choice(rests)))
        again, tail = self._rule(*dispatched), self._free(node.excludes, ends)
        if not node.at_least_one:
            return _choice([tail, _row(again, self._end(ends))]) if node.stop_after_first else f"{again}* {tail}"
        first = self._rule(*(_row(self._literal(t.begin), body) for t, body in zip(node.tags, bodies, strict=True)))
        return _row(first, self._end(ends)) if node.stop_after_first else f"{first} {again}* {tail}"

    def _separated(self, node: tags.TagsWithSeparator, ends: tuple[str, ...]) -> str:
        tag = self._rule(*(self._expression(each, ()) for each in node.tags))
        more = "" if node.stop_after_first else f"({_row(self._literal(node.separator), tag)})*"
        return _row(f"({_row(tag, more)}){'' if node.at_least_one else '?'}", self._end(ends))

    def _free(self, excludes: list[str], ends: tuple[str, ...]) -> str:
        """Free text up to one of `ends`, that included, or up to the end of the output."""
        return _choice(self._until(end, excludes) for end in ends) if ends else self._text(excludes)

    def _until(self, mark: str, excludes: list[str]) -> str:
        """Free text up to the first `mark`, that included."""
        return self._up_to(self._text(excludes), mark)

    def _up_to(self, terminal: str, mark: str) -> str:
        """What a terminal matches, up to the first `mark`, that included.

        No terminal holds special tokens: where one begins the mark, the terminal ends by itself. Further on it would
        not: the library then knows of the lazy lexeme alone.
        """
        key = terminal, mark
        if key not in self._marks:
            self._marks[key] = self._rule(f"{terminal} {_quoted(mark)}", option="[lazy]")
        lazy, found = self._marks[key], self._any_special.search(mark)
        if not found:
            return lazy
        if found.start():
            what = "ends free text, or a regex, by a text with a special token within it; only its beginning may be one"
            raise ParameterError(name_of(self._structured), what, "unsupported")
        return _choice([lazy, _row(terminal, f"<[{self._special[found[0]]}]>", self._literal(mark[found.end() :]))])

    def _text(self, excludes: list[str]) -> str:
        """The terminal of free text in which none of `excludes` stands."""
        if not excludes:
            return "TEXT"
        key = tuple(excludes)
        if key not in self._texts:
            name = self._texts[key] = f"TEXT_{len(self._texts)}"
            self._lines.append(f"{name}: TEXT & ~(TEXT {_choice(map(_quoted, excludes))} TEXT)")
        return self._texts[key]

    def _literal(self, text: str) -> str:
        """A text, each special token within it written by itself, as the tokenizer would."""
        parts, at = list[str](), 0
        for found in self._any_special.finditer(text):
            parts.append(_quoted(text[at : found.start()]))
            parts.append(f"<[{self._special[found[0]]}]>")
            at = found.end()
        return _row(*parts, _quoted(text[at:]))

    def _end(self, ends: tuple[str, ...]) -> str:
        if ends and ends not in self._ends:
            self._ends[ends] = self._rule(*dict.fromkeys(map(self._literal, ends)))
        return self._ends[ends] if ends else ""

    def _regex(self, node: tags.Regex, ends: tuple[str, ...]) -> str:
        """A regex ends where what is to follow it is there for the first time: it might swallow that otherwise."""
        text: str = json.loads(grammar_text(_form(node, self._structured)))["grammars"][0]["lark_grammar"]
        regex = text.removeprefix("start: ").strip()
        return _choice(self._up_to(regex, end) for end in ends) if ends else self._rule(regex)

    def _embedded(self, node: tags.JsonSchema | tags.GrammarText) -> str:
        """The name of a grammar of its own."""
        name, text = f"form_{len(self._grammars)}", grammar_text(_form(node, self._structured))
        grammar = json.loads(text)["grammars"][0] if isinstance(node, tags.JsonSchema) else {"lark_grammar": text}
        self._grammars.append({**grammar, "name": name})
        return f"@{name}"

    def _rule(self, *choices: str, option: str = "") -> str:
        name = f"rule_{len(self._lines)}"
        self._lines.append(f"{name}{option}: {' | '.join(choices)}")
        return name


def _times(node: tags.Optional_ | tags.Plus | tags.Star | tags.Repeat) -> str:
    match node:
        case tags.Optional_():
            return "?"
        case tags.Plus():
            return "+"
        case tags.Star():
            return "*"
    return f"{{{node.min},{node.max if node.max >= 0 else ''}}}"
