"""ParameterError, and the checks of single values that every parameter shares.

Owns the form of a user's mistake and the reading of numbers, lists and texts from foreign hands. Knows no parameter
by name. Invariant: what comes back is a plain int, float, str or list in the given range, and no error repeats content.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Sized
from typing import Any

INT32_MAX = 2**31 - 1


class ParameterError(ValueError):
    """A user's mistake: `field` and `code` for programs; the text names field, value and limit."""

    def __init__(self, field: str, message: str, code: str = "out_of_range") -> None:
        """`message` goes after the field's name: "must be in [0, 2], got 3"."""
        super().__init__(f"{field}: {message}"[:300])
        self.field = field
        self.code = code


def shown(value: object) -> str:
    """A value for an error text: numbers as they are if short, anything else as its kind and size."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 70 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        return f"a string of {len(value)} characters"
    return f"a {type(value).__name__}"


def type_error(name: str, wanted: str, value: object) -> ParameterError:
    """What to raise where `value` has the wrong type."""
    return ParameterError(name, f"must be {wanted}, got {shown(value)}", "invalid_type")


def plain_int(value: object) -> int | None:
    """An integer of any kind as a plain int, numpy's among them. None for anything else, bools and arrays too."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:  # no integer; or an array, which promises more than it holds
        return None


def as_int(name: str, value: object, low: int, high: int) -> int:
    """`value` as a plain int in [low, high]; bools and floats are refused, numpy's integers are taken."""
    if type(value) is not int:
        found = plain_int(value)
        if found is None:
            raise type_error(name, "an integer", value)
        value = found
    if not low <= value <= high:
        raise ParameterError(name, f"must be in [{low}, {high}], got {shown(value)}")
    return value


def as_float(name: str, value: object, low: float, high: float, *, above: bool = False) -> float:
    """`value` as a plain finite float in [low, high], or `above` low; bools are refused, ints are taken."""
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, int | numbers.Real):
            raise type_error(name, "a number", value)
        if isinstance(value, int) and value.bit_length() > 64:  # float() would overflow
            raise _out_of(name, value, low, high, above=above)
        value = float(value)
    if not math.isfinite(value):
        raise ParameterError(name, f"must be finite, got {value}", "number_not_finite")
    if not low <= value <= high or (above and value == low):
        raise _out_of(name, value, low, high, above=above)
    return value


def _out_of(name: str, value: float, low: float, high: float, *, above: bool) -> ParameterError:
    return ParameterError(name, f"must be in {'(' if above else '['}{low:g}, {high:g}], got {shown(value)}")


def as_list(name: str, value: object, most: int, wanted: str) -> list[Any]:
    """`value` as a list of at most `most` entries, None as an empty one."""
    if value is None:
        return []
    if type(value) is list:
        num = len(value)
    elif isinstance(value, str | bytes | dict) or not (isinstance(value, Sized) and isinstance(value, Iterable)):
        raise type_error(name, wanted, value)
    else:
        try:
            num = len(value)
        except TypeError:  # arrays without an axis
            raise type_error(name, wanted, value) from None
    if num > most:
        raise ParameterError(name, f"may hold at most {most} entries, got {num}", "too_many_items")
    return list(value)


def listed(name: str, value: Any, wanted: str) -> list[Any]:
    """`value` as a list, if it is one that is neither text nor an object. Raises ParameterError."""
    value = value.tolist() if hasattr(value, "tolist") else value  # arrays are welcome
    if isinstance(value, str | bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise ParameterError(name, f"must be {wanted}, got {type(value).__name__}", "invalid_type")
    return list(value)


def as_ids(name: str, value: object, most: int) -> list[int]:
    """`value` as a list of at most `most` token ids."""
    entries = as_list(name, value, most, "a list of token ids")
    return [as_int(f"{name}[{i}]", entry, 0, INT32_MAX) for i, entry in enumerate(entries)]


def check_unicode(name: str, text: str) -> None:
    """Refuse lone surrogates: they are no text and cannot be encoded. Raises ParameterError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"holds a lone surrogate at character {error.start}"
        raise ParameterError(name, message, "invalid_unicode") from None


def as_strings(name: str, value: object, most: int, most_chars: int) -> list[str]:
    """`value` as a list of at most `most` texts of 1 to `most_chars` characters."""
    entries = as_list(name, value, most, "a list of strings")
    for i, entry in enumerate(entries):
        if not isinstance(entry, str):
            raise type_error(f"{name}[{i}]", "a string", entry)
        if not 1 <= len(entry) <= most_chars:
            raise ParameterError(f"{name}[{i}]", f"must have 1 to {most_chars} characters, got {len(entry)}")
        check_unicode(f"{name}[{i}]", entry)
    return entries
