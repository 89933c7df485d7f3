"""JSON from outside, read strictly.

Owns the reading of a request's body: one object, of plain values, whose size, depth and numbers are bounded before
anything is built. Knows no field. Invariant: what `parse` returns has no duplicate keys, no lone surrogates, no
infinite or huge numbers, and is at most MAX_DEPTH deep; every refusal is an ApiError that repeats no content.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from octavo.serve.errors import ApiError, bad_request

MAX_DEPTH = 64
_MAX_DIGITS = 20  # of an integer; 2**64 has so many
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # one without an end takes the rest: no second try
_LONG_INTEGER = re.compile(rb"(?<![0-9.eE+-])-?[0-9]{%d,}+(?!\.[0-9]|[eE][+-]?[0-9])" % (_MAX_DIGITS + 1))
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse(body: bytes, max_items: int) -> dict[str, Any]:
    """The object that a body holds. Raises ApiError."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise bad_request("invalid_unicode", f"the body is not UTF-8 at byte {error.start}") from None
    _check_shape(_STRING.sub(b'""', body), max_items)
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        offset = len(text[: error.pos].encode())
        raise bad_request("invalid_json", f"the body is not JSON at byte {offset}") from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(value, dict):
        raise bad_request("invalid_json", "the body must be a JSON object (byte 0)")
    if _SURROGATE.search(text):
        for name, entry in value.items():
            if not _is_text(name):
                raise bad_request("invalid_unicode", "a key holds a lone surrogate")
            if not _is_text(_ENCODER.encode(entry)):
                raise bad_request("invalid_unicode", f"{name[:64]}: holds a lone surrogate", name[:64])
    return value


def _check_shape(bare: bytes, max_items: int) -> None:
    """Bounds, from the body without its strings, before a value is built."""
    if bare.count(b",") + bare.count(b"[") + bare.count(b"{") > max_items:  # each begins a value
        raise bad_request("too_many_items", f"the body holds more than {max_items} values")
    if _LONG_INTEGER.search(bare):
        raise bad_request("out_of_range", f"an integer has more than {_MAX_DIGITS} digits")
    depth = 0
    for bracket in bare.translate(None, _NOT_BRACKETS):
        if bracket in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise _too_deep()
        else:
            depth -= 1


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _too_deep() -> ApiError:
    return bad_request("too_deep", f"the body is nested deeper than {MAX_DEPTH}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        name = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        shown = name if name.isidentifier() and len(name) <= 64 else None
        raise bad_request("duplicate_key", f"{shown or 'a key'} is given twice", shown)
    return made


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        _not_finite(text)
    return value


def _not_finite(_: str) -> NoReturn:
    raise bad_request("number_not_finite", "the body holds a number that is not finite")


_ENCODER = json.JSONEncoder(ensure_ascii=False)
_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_float, parse_constant=_not_finite)
