"""Grammars and Matcher: what compiles, what is refused, and that a matcher's answer is its output's own."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest

import octavo.grammar.compiler
from octavo.grammar.compiler import NO_GRAMMARS, Grammars, Matcher, Vocabulary
from octavo.request.sampling_params import ParameterError, StructuredOutputsParams

EOS = 0
# single bytes, and words that overlap
TOKENS = [
    b"<eos>",
    *(bytes([byte]) for byte in range(256)),
    b"ab",
    b"abc",
    b"bc",
    b'{"',
    b'":',
    b"true",
    b"yes",
    b"<x>",
]
VOCABULARY = Vocabulary(TOKENS, [EOS, len(TOKENS) - 1], [EOS])
NUM_WORDS = -(-len(TOKENS) // 32)


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(lambda: VOCABULARY, len(TOKENS), [EOS])


def _form(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)


def _allowed(matcher: Matcher, output: list[int]) -> set[bytes] | None:
    """Texts of the tokens that may follow; None if the matcher says that nothing may."""
    bits = np.full(NUM_WORDS, -1, np.int32)
    if not matcher.fill(np.array(output, np.int32), bits):
        assert not bits.any()
        return None
    allowed = np.unpackbits(bits.view(np.uint8), bitorder="little", count=len(TOKENS))
    return {TOKENS[at] for at in np.flatnonzero(allowed)}


def _ids(text: str) -> list[int]:
    return [TOKENS.index(bytes([byte])) for byte in text.encode()]


def test_tokens_that_fit_are_allowed(grammars: Grammars) -> None:
    matcher = grammars.matcher(_form(regex="abc?"))
    assert _allowed(matcher, []) == {b"a", b"ab", b"abc"}
    assert _allowed(matcher, _ids("a")) == {b"b", b"bc"}
    assert _allowed(matcher, _ids("ab")) == {b"c", b"<eos>"}
    assert _allowed(matcher, _ids("abc")) == {b"<eos>"}
    assert _allowed(matcher, [*_ids("abc"), EOS]) is None
    assert _allowed(matcher, _ids("b")) is None


def test_special_tokens_are_no_text(grammars: Grammars) -> None:
    allowed = _allowed(grammars.matcher(_form(regex="[<>a-z]+")), [])
    assert allowed is not None and b"<" in allowed and b"<x>" not in allowed


def test_answers_do_not_depend_on_the_way(grammars: Grammars) -> None:
    """Outputs that grow, shrink and change, as with drafts and replays."""
    form = _form(json={"type": "object", "properties": {"ab": {"enum": ["abc", "yes", 5]}}, "required": ["ab"]})
    texts = ['{"ab":"abc"}', '{"ab": "yes"}', '{ "ab" :5}', '{"ab":"nope"}', "no"]
    wandering, rng = grammars.matcher(form), random.Random(0)
    for _ in range(300):
        text = rng.choice(texts)
        output = _ids(text[: rng.randint(0, len(text))])
        assert _allowed(wandering, output) == _allowed(grammars.matcher(form), output), output


def test_a_limit_that_others_met_is_not_ours(monkeypatch: pytest.MonkeyPatch, grammars: Grammars) -> None:
    """Matchers of one form share what they learn of it, and could wear it out for each other."""
    monkeypatch.setattr(octavo.grammar.compiler, "MAX_LEXER_STATES", 400)
    form, rng = _form(regex="(a|b)*a(a|b){18}"), random.Random(1)
    hungry, output = grammars.matcher(form), list[int]()
    while _allowed(hungry, output) is not None:
        output.append(rng.choice(_ids("ab")))
    assert len(output) < 2000
    modest = grammars.matcher(form)
    for length in range(18):
        assert _allowed(modest, _ids("ab" * 10)[:length]) == {b"a", b"b", b"ab"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"regex": "("}, "regex_invalid"),
    ({"regex": "(?<=a)b"}, "unsupported"),
    ({"regex": r"(a)\1"}, "unsupported"),
    ({"regex": "(" * 30_000 + ")" * 30_000}, "schema_too_complex"),
    ({"grammar": "start: nothing"}, "grammar_invalid"),
    ({"grammar": "start: start"}, "grammar_invalid"),
    ({"grammar": 'start: A\nA: A "x"'}, "grammar_invalid"),
    ({"grammar": "root ::= secret"}, "grammar_invalid"),
    ({"grammar": "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000}, "schema_too_complex"),
    ({"grammar": "nonsense ("}, "grammar_invalid"),
    ({"json": {"not": {}}}, "unsupported"),
    ({"json": {"type": "array", "items": {"title": "secret"}, "uniqueItems": True}}, "unsupported"),
    ({"json": {"type": "object", "propertyNames": {"pattern": "secret", "maxLength": 3}}}, "unsupported"),
    ({"json": {"uniqueItems": False, "oneOf": "secret"}}, "schema_invalid"),
    ({"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "schema_invalid"),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "schema_invalid"),
    ({"json": {"$ref": "#"}}, "schema_invalid"),
    ({"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "schema_invalid"),
    ({"json": {"$ref": "#/secret"}}, "schema_invalid"),
    ({"json": {"type": "secret"}}, "schema_invalid"),
    ({"json": {"type": "string", "pattern": "(secret"}}, "schema_invalid"),
]


@pytest.mark.parametrize(("fields", "code"), REFUSED)
def test_what_cannot_be_compiled_is_refused(grammars: Grammars, fields: dict[str, Any], code: str) -> None:
    form = _form(**fields)
    with pytest.raises(ParameterError) as caught:
        grammars.check(form)
    assert (caught.value.field, caught.value.code) == (f"structured_outputs.{form.form}", code), str(caught.value)
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)
    assert _allowed(grammars.matcher(form), []) is None


@pytest.mark.parametrize(
    "schema, said",
    [
        ({"$ref": "#/$defs/secret"}, "a $ref leads nowhere"),
        ({"$ref": "#secret"}, "a $ref leads nowhere"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "use anyOf"),
    ],
)
def test_a_refusal_says_what_would_do(grammars: Grammars, schema: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=re.escape(said)):
        grammars.check(_form(json=schema))


@pytest.mark.parametrize(
    "fields",
    [
        {"regex": "(a+)+$"},
        {"regex": "(ab){1,1000000}"},
        {"grammar": 'start: start "a" | "b"'},
        {"grammar": 'start: s\ns: s s | "a" | ""'},
        {"json": {"$defs": {"n": {"properties": {"c": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}},
    ],
)
def test_what_is_only_frightening_compiles(grammars: Grammars, fields: dict[str, Any]) -> None:
    grammars.check(_form(**fields))
    assert _allowed(grammars.matcher(_form(**fields)), [])


def test_spaces_between_parts_of_json_are_few(grammars: Grammars) -> None:
    matcher = grammars.matcher(_form(json={"type": "array", "items": {"const": 1}}, disable_any_whitespace=False))
    assert b" " in (_allowed(matcher, _ids("[" + " " * 19)) or ())
    assert b" " not in (_allowed(matcher, _ids("[" + " " * 20)) or ())
    bare = grammars.matcher(_form(json={"type": "array"}, disable_any_whitespace=True))
    assert b" " not in (_allowed(bare, _ids("[")) or ())
    dots = grammars.matcher(_form(json={"type": "array"}, whitespace_pattern=r"[.]{1,3}"))
    assert b"." in (_allowed(dots, _ids("[")) or ())


@pytest.mark.parametrize("form", [{"json": {"properties": {"a": {"enum": ["x y"]}}}}, {"json_object": True}])
def test_forced_json_is_compact(grammars: Grammars, form: dict[str, Any]) -> None:
    """Nobody reads the spaces, and a model that is unsure writes them until max_tokens."""
    matcher = grammars.matcher(_form(**form))
    for text in ("", "{", '{"a"', '{"a":', '{"a":"x y"', '{"a":"x y"}'):
        allowed = _allowed(matcher, _ids(text)) or set()
        assert not [token for token in allowed if token.strip(b" \t\r\n") != token], text
    assert b" " in (_allowed(matcher, _ids('{"a":"x')) or ())


@pytest.mark.parametrize("num_tokens", [264, 256])
def test_a_model_without_eos(num_tokens: int) -> None:
    """What ends an output is then a token that no logits have."""
    matcher = Grammars(lambda: VOCABULARY, num_tokens, []).matcher(_form(choice=["xy"]))
    bits = np.zeros(-(-(num_tokens + 1) // 32), np.int32)
    for output, wanted in ([], [TOKENS.index(b"x")]), (_ids("x"), [TOKENS.index(b"y")]), (_ids("xy"), []):
        assert matcher.fill(np.array(output, np.int32), bits)
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little", count=num_tokens)
        assert np.flatnonzero(allowed).tolist() == wanted


def test_an_engine_without_tokenizer() -> None:
    with pytest.raises(ParameterError, match="no tokenizer"):
        NO_GRAMMARS.check(_form(choice=["ab"]))


def test_a_tokenizer_that_adds_spaces_is_not_believed() -> None:
    """SentencePiece begins a text with a space: forced texts are then made of the tokens' own bytes."""

    class Spaced(Vocabulary, frozen=True):
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return _ids(" " + text)

    grammars = Grammars(lambda: Spaced(TOKENS, [EOS], [EOS]), len(TOKENS), [EOS])
    assert _allowed(grammars.matcher(_form(choice=["abyes"])), []) == {b"ab"}
