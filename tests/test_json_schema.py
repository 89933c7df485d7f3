"""Schemas in other words: what a form allows fits its schema, and what fits is allowed, by jsonschema's judgement."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest

from octavo.grammar.compiler import Grammars, Vocabulary
from octavo.grammar.json_schema import FORMATS, rewrite
from octavo.grammar.schema_sets import other_strings
from octavo.request.sampling_params import ParameterError, StructuredOutputsParams
from schema_corpus import EXACT, PARTLY, REFUSED

TOKENS = [b"<eos>", *(bytes([byte]) for byte in range(256))]
ALL = {**EXACT, **PARTLY}
DOCUMENTS = list({json.dumps(each): each for _, documents in ALL.values() for each in documents}.values())
GRAMMARS = Grammars(lambda: Vocabulary(TOKENS, [0], [0]), len(TOKENS), [0])


def _form(schema: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True)


def _fits(schema: dict[str, Any], document: Any) -> bool:
    kind = jsonschema.Draft7Validator if "dependencies" in json.dumps(schema) else jsonschema.Draft202012Validator
    checker = jsonschema.FormatChecker(["ipv4", "ipv6"])
    return bool(kind(schema, format_checker=checker).is_valid(document))


def _allows(compiled: Any, document: Any) -> bool:
    matcher = compiled.deep_copy()
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    return bool(matcher.try_consume_tokens([byte + 1 for byte in text]) == len(text) and matcher.is_accepting())


@pytest.mark.parametrize("name", ALL)
def test_what_is_allowed_fits_and_what_fits_is_allowed(name: str) -> None:
    schema, documents = ALL[name]
    compiled = GRAMMARS.build(_form(schema))
    for document in documents:
        assert _fits(schema, document) and _allows(compiled, document), document
    for document in DOCUMENTS:
        if _allows(compiled, document):
            assert _fits(schema, document), document
        elif name in EXACT and "properties" not in json.dumps(schema):  # an order of properties is the schema's own
            assert not _fits(schema, document), document


@pytest.mark.parametrize("name", ALL)
def test_every_text_fits(name: str) -> None:
    schema, _ = ALL[name]
    compiled, draw, num_whole = GRAMMARS.build(_form(schema)), random.Random(name), 0
    for _ in range(24):
        matcher, text = compiled.deep_copy(), b""
        while len(text) < 200:
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            tokens = np.unpackbits(mask, bitorder="little").nonzero()[0].tolist()
            if 0 in tokens and (len(tokens) == 1 or draw.random() < 0.5):
                num_whole += 1
                assert _fits(schema, json.loads(text)), text
                break
            plain = [token for token in tokens if token in _PLAIN] or [token for token in tokens if token]
            ends = [token for token in plain if token - 1 in b'"}],'] if draw.random() < 0.4 else []
            token = draw.choice(ends or plain)
            assert matcher.consume_token(token)
            text += TOKENS[token]
    assert num_whole >= 4


_PLAIN = frozenset(byte + 1 for byte in range(32, 127))


@pytest.mark.parametrize(("schema", "keyword"), REFUSED)
def test_the_rest_is_refused_by_name(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(ParameterError) as caught:
        GRAMMARS.check(_form(schema))
    assert caught.value.code == "unsupported" and keyword in str(caught.value)


def test_formats_are_those_that_the_library_knows() -> None:
    for name in FORMATS:
        GRAMMARS.build(_form({"type": "string", "format": name}))
    schema = {"type": "string", "format": "json-pointer"}
    assert rewrite(schema) == {"type": "string"}


def test_what_the_library_knows_stays_as_it_is() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"anyOf": [{"type": "string", "format": "date"}]}},
        "required": ["a"],
        "enum": [{"oneOf": 1, "not": 2}],
    }
    assert rewrite(schema) == schema


def test_alternatives_that_multiply_are_refused() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for number in range(12):
        schema = {"oneOf": [{"type": "array", "items": schema}, {"not": schema}, {"minItems": number, "not": schema}]}
    with pytest.raises(ParameterError) as caught:
        rewrite(schema)
    assert caught.value.code == "schema_too_complex"


def test_every_text_but_some() -> None:
    import re

    texts = ["a", "ab", "b.c", "", "]x"]
    pattern = re.compile(other_strings(texts))
    for text in [*texts, "abc", "c", "b", "b.", "b.cd", "bxc", "]", "^", "\n"]:
        assert bool(pattern.fullmatch(text)) == (text not in texts), text
