"""Incremental text: whole characters only, and together the one-shot decode; stop strings across pieces."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.text.detokenizer import DecoderKind, StopChecker
from octavo.text.tokenizer import Tokenizer
from tiny_tokenizers import CORPUS, byte_fallback, byte_level, kinds, word_piece

KINDS = kinds()
TEXTS = st.text(
    alphabet=st.one_of(st.sampled_from(sorted(set("".join(CORPUS)))), st.characters(exclude_categories=["Cs"]))
)
FEW = settings(max_examples=150, deadline=None)


def _stream(tokenizer: Tokenizer, token_ids: list[int], prompt=(), **options) -> list[str]:
    detokenizer = tokenizer.detokenizer(prompt, **options)
    return [*map(detokenizer.add, token_ids), detokenizer.flush()]


@pytest.mark.parametrize("name", KINDS)
@FEW
@given(text=TEXTS)
def test_deltas_of_real_text_are_the_library_decode(name, text):
    tokenizer = Tokenizer(KINDS[name])
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    expected = KINDS[name].decode(token_ids, skip_special_tokens=True)
    deltas = _stream(tokenizer, token_ids)
    assert "".join(deltas) == tokenizer.decode(token_ids) == expected
    if "\ufffd" not in text and name != "other":
        assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_deltas_of_any_tokens_are_the_decode(name, skip):
    """Random ids: broken characters, special and unknown tokens. Byte fallback keeps more than the library does:
    there one broken byte spoils all whole characters of its run."""
    backend, rng = KINDS[name], random.Random(0)
    tokenizer = Tokenizer(backend)
    for _ in range(400):
        token_ids = [rng.randrange(tokenizer.num_token_ids + 2) for _ in range(rng.randrange(12))]
        decoded = tokenizer.decode(token_ids, skip_special_tokens=skip)
        assert "".join(_stream(tokenizer, token_ids, skip_special_tokens=skip)) == decoded
        if "byte_fallback" not in name:
            assert decoded == backend.decode(token_ids, skip_special_tokens=skip)


def test_broken_character_of_byte_fallback_is_one_sign_per_byte():
    backend = byte_fallback()
    tokenizer = Tokenizer(backend)
    token_ids = [backend.token_to_id("<0xE2>"), backend.token_to_id("<0x82>"), backend.token_to_id("f")]
    assert "".join(_stream(tokenizer, token_ids)) == backend.decode(token_ids) == "\ufffd\ufffdf"


@pytest.mark.parametrize("backend", [byte_level(), byte_fallback()], ids=["byte_level", "byte_fallback"])
def test_half_a_character_waits(backend):
    tokenizer = Tokenizer(backend)
    token_ids = tokenizer.encode("\U0001f680", add_special_tokens=False)  # not in the corpus
    deltas = _stream(tokenizer, token_ids)
    assert len(token_ids) >= 3
    assert "".join(deltas[:-2]).strip() == ""
    assert deltas[-2:] == ["\U0001f680", ""]


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback", "byte_fallback_no_strip", "metaspace", "other"])
def test_text_goes_on_after_the_prompt(name):
    tokenizer = Tokenizer(KINDS[name])
    text = "the quick foxes. a fox"
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.decode(token_ids)
    for cut in range(1, len(token_ids)):
        after = "".join(_stream(tokenizer, token_ids[cut:], prompt=token_ids[:cut]))
        assert tokenizer.decode(token_ids[:cut]) + after == whole


def test_a_character_begun_in_the_prompt_is_completed():
    tokenizer = Tokenizer(byte_level())
    token_ids = tokenizer.encode("a\U0001f680b")
    assert _stream(tokenizer, token_ids[-2:], prompt=token_ids[:-2]) == ["\U0001f680", "b", ""]


def test_special_tokens_without_spaces_between_them():
    tokenizer = Tokenizer(word_piece())
    options = {"skip_special_tokens": False}
    assert "".join(_stream(tokenizer, [1, 1, 2], **options)) == "[CLS] [CLS] the"
    joined = "".join(_stream(tokenizer, [1, 1, 2], **options, spaces_between_special_tokens=False))
    assert joined == "[CLS][CLS] the"


def test_decoder_kinds_are_read():
    found = {name: DecoderKind.of(backend) for name, backend in KINDS.items()}
    assert {name: kind.name for name, kind in found.items()} == {
        "byte_level": "byte_level",
        "byte_fallback": "byte_fallback",
        "byte_fallback_no_strip": "byte_fallback",
        "metaspace": "metaspace",
        "other": "other",
    }
    assert [found["byte_fallback"].strip, found["byte_fallback_no_strip"].strip] == [1, 0]


def test_endless_replacement_signs_are_told_in_constant_windows():
    """A window that always ends in U+FFFD must not grow with the text."""
    tokenizer = Tokenizer(word_piece())
    tokenizer.backend.add_tokens(["\ufffd"])
    token_id = tokenizer.backend.token_to_id("\ufffd")
    detokenizer = tokenizer.detokenizer()
    deltas = [detokenizer.add(token_id) for _ in range(100)]
    assert max(map(len, deltas)) < 20
    assert "".join(deltas) + detokenizer.flush() == tokenizer.decode([token_id] * 100)


def _first_stop(text: str, stops: list[str], skip_until: int = 0) -> tuple[str, str | None]:
    """By definition: the first end of a stop string, and of those that end there the longest."""
    for end in range(skip_until + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


SMALL = st.text(alphabet="abc", max_size=40)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=400, deadline=None)
@given(text=SMALL, stops=STOPS, truncation=st.lists(st.integers(0, 40)), include=st.booleans())
def test_stop_is_found_whatever_the_pieces(text, stops, truncation, include):
    checker = StopChecker(stops, include)
    borders = sorted({0, len(text), *(cut for cut in truncation if cut < len(text))})
    shown, found = "", None
    kept, expected = _first_stop(text, stops)
    for start, end in itertools.pairwise(borders):
        piece, found = checker.feed(text[start:end])
        shown += piece
        assert (kept + (expected or "") * include).startswith(shown)  # nothing of a stop string leaks
        if found:
            break
    shown += checker.flush()
    assert found == expected
    assert shown == kept + (expected or "") * include


@settings(max_examples=200, deadline=None)
@given(text=SMALL, stops=STOPS, passed=st.integers(0, 10))
def test_a_stop_completed_before_min_tokens_is_passed_over(text, stops, passed):
    checker = StopChecker(stops)
    shown, found = "", None
    for i, char in enumerate(text):
        piece, found = checker.feed(char, active=i >= passed)
        shown += piece
        if found:
            break
    assert (shown + checker.flush(), found) == _first_stop(text, stops, passed)


def test_what_cannot_begin_a_stop_is_given_at_once():
    checker = StopChecker(["###"])
    assert checker.feed("a#") == ("a", None)
    assert checker.feed("#b") == ("##b", None)
    assert checker.feed("##") == ("", None)
    assert checker.flush() == "##"
