"""Option: what a start line's option of another engine means here.

Owns the kinds of meanings, and the reading of values that come as JSON. Knows no option by name. Invariant: what is
read is a setting's value, nothing, or a ConfigError with the reason.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from octavo.config.settings import ConfigError

_LOG = logging.getLogger("octavo")
_OFF = ("", "none", "null", "false", "{}", "[]")  # values that ask for nothing
Translation = Callable[[str, Any], dict[str, Any]]


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """What one option means. Exactly one of `becomes` and `reason` is given."""

    becomes: Translation | None = None  # the settings that it means
    reason: str = ""  # why it changes nothing, or is refused
    harmless: Collection[str] | None = ()  # values that change nothing, in lower case; None: all
    kind: str = "value"  # of its flag: value, values or switch
    short: tuple[str, ...] = ()  # other flags of it, with their dashes
    server: bool = False  # it is the server's
    known: tuple[str, ...] = ()  # all values that it may have, where they are words; empty: any
    least: int | None = None  # it is a whole number from here on
    gives_way: bool = False  # whatever else means the same setting wins

    def read(self, name: str, value: Any, origin: str) -> dict[str, Any]:
        """The settings that it becomes. Raises ConfigError."""
        text = _text(value)
        if self.known and value is not None and text not in self.known and text not in _OFF:
            raise ConfigError(name, value, f"must be one of: {', '.join(self.known)}", "", origin)
        if self.least is not None and text not in _OFF and not (text.isdecimal() and int(text) >= self.least):
            raise ConfigError(name, value, f"a whole number of at least {self.least} is needed", "", origin)
        if self.becomes is not None:
            return self.becomes(name, value)
        if value is None or (text in _OFF and not self.harmless):
            return {}
        if self.harmless is not None and text not in self.harmless and text not in _OFF:
            change = "leave it out" + (f", or give {' or '.join(self.harmless)}" if self.harmless else "")
            raise ConfigError(name, value, self.reason, change, origin)
        _LOG.warning("%s=%s changes nothing: %s", name, text[:40], self.reason)
        return {}


def _text(value: Any) -> str:
    if isinstance(value, str):
        return " ".join(value.split()).lower()
    try:
        return json.dumps(value).lower()
    except (TypeError, ValueError):
        return f"a {type(value).__name__}"


def _is_on(name: str, value: Any) -> bool:
    text = _text(value)
    if text not in ("true", "false"):
        raise ConfigError(name, value, "expected true or false")
    return text == "true"


def same(to: str, **facts: Any) -> Option:
    """Another name of a setting."""
    return Option(becomes=lambda name, value: {to: value}, **facts)


def switch(to: str, *, when_on: bool, **facts: Any) -> Option:
    """A switch that sets one of ours to `when_on`, and to the opposite where it is negated."""
    return Option(becomes=lambda name, value: {to: _is_on(name, value) is when_on}, kind="switch", **facts)


def idle(reason: str, **facts: Any) -> Option:
    """It changes nothing here, whatever its value."""
    return Option(reason=reason, harmless=None, **facts)


def only(values: str, reason: str, **facts: Any) -> Option:
    """It changes nothing with these values (words with spaces), and is refused with others."""
    return Option(reason=reason, harmless=tuple(values.split()), **facts)


def never(reason: str, **facts: Any) -> Option:
    """It is refused unless it asks for nothing."""
    return Option(reason=reason, **facts)


def listed(name: str, value: Any) -> str:
    """A list, as JSON, as a list, or with commas, as a text with commas."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ConfigError(name, value, "expected a list in JSON, or values with commas") from None
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)


def mapping(name: str, value: Any) -> Mapping[str, Any]:
    """A mapping, or one in JSON. Raises ConfigError."""
    try:
        given = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, Mapping):
        raise ConfigError(name, value, "expected a mapping (JSON on the command line)")
    return given


def number(name: str, value: Any) -> float:
    """A number. Raises ConfigError."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(name, value, "expected a number") from None
