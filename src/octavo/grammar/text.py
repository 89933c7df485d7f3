"""What a form says, in the words of the grammar library, and what the library says of it, in words that help.

Owns the texts on both ways. Compiles nothing. Invariant: no error repeats what a user wrote.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

import msgspec

from octavo.config.quoted import plain
from octavo.grammar.dialect import check_regex, distinct_keys
from octavo.grammar.json_schema import rewrite
from octavo.grammar.numbers import MAX_COUNT, beyond_library, safe_grammar, safe_numbers
from octavo.request.outputs import TOO_COMPLEX
from octavo.request.structured_outputs import MAX_TEXT_BYTES, StructuredOutputsParams
from octavo.request.validation import ParameterError

CONVERSION_SECONDS = 0.25  # of processor time for a grammar with ::= that is too long in other words
# Between the parts of JSON, if asked for: without a bound, a model that is unsure writes spaces until max_tokens.
WHITESPACE = r"[ \t\r\n]{1,20}"
FIELD = "structured_outputs"
_GRAMMAR = "grammar_invalid"
_INVALID = {"json": "schema_invalid", "regex": "regex_invalid"}  # of other forms: _GRAMMAR
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
# the rule that a Lark grammar begins with, its modifiers included; with ::= it is a rule of the other notation
_LARK = re.compile(r"(?m)^[ \t]*(%llguidance\b|!?\??start\b[^:=\n]*:(?!:=))")
MET_A_LIMIT = re.compile(r"too (large|big|many|complex|deep)|limit|fuel|exceed|recursion|max is", re.IGNORECASE)
# what is left of the library's words -> words that help
_SAID_BETTER = {
    "Pointer": "a $ref leads nowhere",
    "Anchor": "a $ref leads nowhere",
    "Invalid type": "type must be null, boolean, integer, number, string, array or object, or a list of these",
    "invalid multiple of": "multipleOf must be greater than 0",
    "exceed the maximum number of nested parentheses/brackets": "a bound has too many decimal places, or a pattern too"
    " many brackets; use fewer",
    "oneOf constraints are not supported. Enable": "oneOf is not supported unless its schemas surely exclude each other"
    " (required constants do); use anyOf",
}
_BEYOND = {"decimal literal invalid": f"a repetition is of more than {MAX_COUNT}, use fewer"}
_EXPECTED = re.compile(r"Expected ([\w ]{1,24}) for '([\w$]{1,24})'( item)?, got (.*)", re.DOTALL)
_ORDER = re.compile(r"Unsatisfiable schema: (\w+) \(([-+.\de]+)\) is greater than (\w+) \(([-+.\de]+)\)")
_NUMBER = re.compile(r"-?[0-9][-+.0-9eE]*|true|false|null")
_KINDS = {
    "positive integer": "an integer of at least 0",
    "f64": "a number",
    "string": "a string",
    "array": "a list",
    "object": "an object",
}
_UNSUPPORTED = re.compile(r"unimplemented|not supported|unknown format|look-around|backreference", re.IGNORECASE)


def grammar_text(structured: StructuredOutputsParams) -> str:
    """llguidance's text of a form. Raises whatever the library raises."""
    import llguidance

    match structured.form:
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(structured.regex or "")
        case "choice":
            texts = (json.dumps(choice, ensure_ascii=False) for choice in structured.choice or ())
            lark = "start: " + " | ".join(texts)
            return llguidance.LLMatcher.grammar_from_lark(lark.replace("\x7f", r"\u007f"))  # which JSON leaves as it is
        case "grammar":
            text = structured.grammar or ""
            return llguidance.grammar_from("lark" if _LARK.search(text) else "grammar", text)
    schema = structured.json if isinstance(structured.json, str) else '{"type":"object"}'
    spaces = structured.whitespace_pattern or (WHITESPACE if structured.disable_any_whitespace is False else None)
    options: dict[str, Any] = {"lenient": False, "whitespace_flexible": spaces is not None}
    if spaces is not None:
        options["whitespace_pattern"] = spaces
    return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]


def in_safe_words(structured: StructuredOutputsParams) -> StructuredOutputsParams:
    """The form without what the library reads otherwise; itself where there is nothing. Raises ParameterError."""
    if structured.form == "regex":
        check_regex(name_of(structured), structured.regex or "")
    if structured.form == "grammar":
        text = structured.grammar or ""
        safe = safe_grammar(text)
        return structured if safe == text else msgspec.structs.replace(structured, grammar=safe)
    if structured.form != "json" or not isinstance(structured.json, str):
        return structured
    schema = json.loads(structured.json)
    made = safe_numbers(distinct_keys(schema))
    return structured if made is schema else msgspec.structs.replace(structured, json=made)


def as_lark(structured: StructuredOutputsParams) -> StructuredOutputsParams:
    """A grammar with ::= in the library's own notation; itself where that cannot be. Raises ParameterError."""
    from llguidance import gbnf_to_lark

    text, began = structured.grammar or "", time.thread_time()
    if _LARK.search(text):
        return structured
    try:
        made = gbnf_to_lark.gbnf_to_lark(text)
    except Exception:  # whatever is wrong with it, the compiler says it better
        return structured
    if len(made.encode()) <= MAX_TEXT_BYTES:
        return msgspec.structs.replace(structured, grammar=made)
    if time.thread_time() - began > CONVERSION_SECONDS:  # the engine would have to do it again
        raise ParameterError(name_of(structured), "takes too long to be read", TOO_COMPLEX)
    return structured


def other_words(structured: StructuredOutputsParams) -> StructuredOutputsParams | None:
    """The same form with a schema that says it in words the library knows; None if there are none. ParameterError."""
    assert isinstance(structured.json, str), "a constructed form holds its schema as text"
    schema = json.loads(structured.json)
    made = rewrite(schema)
    if made is False:
        raise no_text(structured)
    return None if made == schema else msgspec.structs.replace(structured, json={} if made is True else made)


def name_of(structured: StructuredOutputsParams) -> str:
    """The field that holds it."""
    return f"{FIELD}.{structured.form}"


def refusal(structured: StructuredOutputsParams, text: str) -> ParameterError:
    """The library's error as a user's: the sentence that says what is wrong, without what it quotes."""
    code = _INVALID.get(structured.form, _GRAMMAR)
    if _UNSUPPORTED.search(text):
        code = "unsupported"
    elif MET_A_LIMIT.search(text):
        code = TOO_COMPLEX
    named = re.search(r"^error: (.+)$", text, re.MULTILINE)  # a regex's error has many lines
    line = named[1] if named else text.strip().partition("\n")[0]
    place = _PLACE.match(line)
    what = line[place.end() :] if place else line
    what = _of_numbers(structured, what)
    if not what.startswith("Unimplemented keys"):  # those are the JSON schema's own names
        # what follows a colon, a quote or a bracket may be the user's
        what = re.split(r": |[\"'(\[]", what)[0].strip()
    what = _SAID_BETTER.get(what, what)
    where = f" (line {place[1]}, column {place[2]})" if place else ""
    reason = f": {what[:160]}{where}" if what else where
    return ParameterError(name_of(structured), f"cannot be used{reason}", code)


def _of_numbers(structured: StructuredOutputsParams, what: str) -> str:
    """The library's words of a keyword's value as ours, if they are of one: keywords and numbers alone are repeated."""
    expected, order = _EXPECTED.match(what), _ORDER.fullmatch(what)
    if expected:
        kind = _KINDS.get(expected[1], expected[1])
        got = f", got {plain(expected[4], 40)}" if _NUMBER.fullmatch(expected[4]) else ""
        return f"{'an item of ' * bool(expected[3])}{expected[2]} must be {kind}{got}"
    if order:
        return f"{order[1]} {order[2]} is greater than {order[3]} {order[4]}, no text satisfies both"
    if what in _BEYOND or what.startswith("Value for 'multipleOf' has too many digits"):
        schema = json.loads(structured.json) if isinstance(structured.json, str) else None
        return beyond_library(schema) or _BEYOND.get(what, "multipleOf has too many digits, use fewer")
    return what


def no_text(structured: StructuredOutputsParams) -> ParameterError:
    """What to raise for a form that no text has."""
    return ParameterError(name_of(structured), "no text satisfies it", _INVALID.get(structured.form, _GRAMMAR))
