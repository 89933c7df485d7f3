"""What a setting is: a typed dataclass field that says once what it accepts, whoever sets it.

Owns the field factory `setting`, the reading of values (CLI text, YAML and Python values alike), the filling of a
config from layers, the error ConfigError, and the strict YAML reader. Does not know which settings exist. Invariant:
`read_value` either gives a value of the setting's kind that lies in its range and choices, or raises a ConfigError that
names the setting, the value, the limit and what to change.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from octavo.config.quoted import quoted

_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_BYTES = {unit: factor for letter, factor in _BINARY.items() for unit in (letter, letter.lower(), f"{letter}iB")}
_MAX_YAML_BYTES = 1 << 20
_T = TypeVar("_T")


class ConfigError(ValueError):
    """A setting that cannot be used. `str()` is one line: setting, value, origin, limit, and what to change."""

    def __init__(self, field: str, value: object, limit: str, change: str = "", origin: str = "") -> None:
        """`limit` says what must hold; `change`, which setting to change (default: `field` itself)."""
        self.field, self.value, self.limit, self.origin = field, value, limit, origin
        self.change = change or f"change {flag_name(field)}"
        super().__init__(str(self))

    def __str__(self) -> str:
        """One line."""
        origin = f" (from {self.origin})" if self.origin else ""
        return f"{self.field}={quoted(self.value)}{origin}: {self.limit}; {self.change}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What one field accepts. Numbers lie in [low, high]; `above` is an exclusive lower limit."""

    help: str
    kind: str  # str | int | float | bool | dict | length | bytes | mods
    optional: bool = False  # None is a value: resolved later
    choices: tuple[str, ...] = ()
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    low: float = -math.inf
    high: float = math.inf
    above: float = -math.inf
    short: str = ""  # one-letter flag
    has_auto: bool = False  # of a length: auto, that is -1, is a value
    default: Any = None
    several: bool = False  # of a str: values with commas; a list of them, and a flag with several, is taken too

    def describe_range(self) -> str:
        """The range in words, or "" when there is none."""
        if math.isfinite(self.above):
            return f"greater than {self.above:g}, at most {self.high:g}"
        if math.isfinite(self.low) and math.isfinite(self.high):
            return f"from {int(self.low)} to {int(self.high)}"
        return f"at least {int(self.low)}" if math.isfinite(self.low) else ""


def python_names(text: str) -> str:
    """A text with the names of flags as arguments of Python. What is in backticks, a command line, stays as it is."""
    return re.sub(r"`[^`]*`|--(no-)?([a-z][a-z0-9-]*[a-z0-9])", _python_name, text)


def _python_name(found: re.Match[str]) -> str:
    if found[2] is None:
        return found[0]
    return found[2].replace("-", "_") + ("=False" if found[1] else "")


def setting(default: Any, help: str, kind: str, **facts: Any) -> Any:
    """A dataclass field of EngineConfig's kind: a default, and a Setting as its metadata."""
    made = Setting(help=help, kind=kind, optional=default is None, default=default, **facts)
    metadata = {"setting": made}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def settings_of(config_class: type) -> dict[str, Setting]:
    """Name -> Setting of a config dataclass, in the order of its fields."""
    return {field.name: field.metadata["setting"] for field in dataclasses.fields(config_class)}


def flag_name(field: str) -> str:
    """The CLI flag of a field."""
    return "--" + field.replace("_", "-")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "did you mean X?" for a near miss, else ""."""
    bare = {word.lstrip("-"): word for word in known}  # that both begin with dashes brings no two flags nearer
    close = difflib.get_close_matches(name.lstrip("-"), bare, n=1, cutoff=0.74)  # what is further off misleads
    return f"did you mean {bare[close[0]]}?" if close else ""


def parse_length(text: str) -> int:
    """A count of tokens: 4096, 16k (thousands), 16K (times 1024), 25.6k; auto and -1 are -1. Raises ValueError."""
    text = text.strip()
    if text in ("auto", "-1"):
        return -1
    factor = {**_DECIMAL, **_BINARY}.get(text[-1:], 0)
    return _scaled(text[:-1], factor) if factor else int(text)


def parse_bytes(text: str) -> int:
    """A count of bytes: 1048576, 512M, 4G, 4GiB (powers of 1024). Raises ValueError."""
    text = text.strip()
    for unit in sorted(_BYTES, key=len, reverse=True):
        if text.endswith(unit):
            return _scaled(text.removesuffix(unit), _BYTES[unit])
    return int(text)


def _scaled(number: str, factor: int) -> int:
    value = float(number) * factor
    if not math.isfinite(value) or round(value) != value:
        raise ValueError(f"{number} times {factor} is not a whole number")
    return round(value)


def read_value(name: str, fact: Setting, value: Any) -> Any:
    """`value` (text of a flag or the environment, or a YAML or Python value) as the setting's kind, checked."""
    if value is None or (fact.optional and value in ("none", "None")):
        if not fact.optional:
            raise ConfigError(name, None, f"expected {_noun(fact)}")
        return None
    converted = _convert(name, fact, value)
    if fact.choices:
        converted = fact.aliases.get(converted, converted)
        if converted not in fact.choices:
            known = ", ".join(fact.choices)
            hint = did_you_mean(_SHORT_TYPES.get(converted, str(converted)), fact.choices)
            raise ConfigError(name, value, f"must be one of {known}", hint)
    if isinstance(converted, (int, float)) and not isinstance(converted, bool):
        _check_range(name, fact, converted)
    return converted


_SHORT_TYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # hinted at, not taken: nor does vLLM
_NOUNS = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "dict": "a mapping (JSON on the command line)",
    "length": "a number of tokens such as 4096, 16k or 16K",
    "bytes": "a number of bytes such as 536870912, 512M or 4G",
    "mods": "module:name, file.py:name, or octavo.AttentionMods",
}
_INT_READERS: dict[str, Callable[[str], int]] = {"int": int, "length": parse_length, "bytes": parse_bytes}
_BOOLS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def _noun(fact: Setting) -> str:
    return _NOUNS[fact.kind] + (", or auto" if fact.has_auto else "")


def _convert(name: str, fact: Setting, value: Any) -> Any:
    expected = ConfigError(name, value, f"expected {_noun(fact)}")
    try:
        match fact.kind, value:
            case "bool", bool():
                return value
            case "bool", str():
                return _BOOLS[value.lower()]
            case "dict", Mapping():
                return dict(value)
            case "dict", str():
                loaded = json.loads(value)
                if not isinstance(loaded, dict):
                    raise expected
                return loaded
            case "mods", str():
                if ":" not in value or not value.isprintable():
                    raise expected
                return value
            case "mods", object():
                return value  # checked where it is used: this module loads no torch
            case "str", (list() | tuple()) if fact.several and all(isinstance(entry, str) for entry in value):
                return ",".join(value)
            case "str", object() if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
                return str(value).removeprefix("torch.")
            case "str", str():
                if not value or not value.isprintable():
                    raise expected
                return value
            case "float", (int() | float() | str()) if not isinstance(value, bool):
                return float(value)
            case (("int" | "length" | "bytes"), int()) if not isinstance(value, bool):
                return value
            case (("int" | "length" | "bytes"), str()):
                return _INT_READERS[fact.kind](value)
    except (ValueError, KeyError, OverflowError, RecursionError):
        raise expected from None
    raise expected


def _check_range(name: str, fact: Setting, value: float) -> None:
    is_auto = fact.has_auto and value == -1
    in_range = fact.low <= value <= fact.high and value > fact.above  # False for NaN
    if not in_range and not is_auto:
        raise ConfigError(name, value, f"must be {fact.describe_range()}")


def fill(config_class: type[_T], layers: Iterable[tuple[str, Mapping[str, Any]]]) -> tuple[_T, dict[str, str]]:
    """A config from layers of (origin, values); the last one that names a field wins.

    Returns it and, per field, where its value came from. An unknown name is a ConfigError with a suggestion.
    """
    known = settings_of(config_class)
    values: dict[str, Any] = {}
    origins = dict.fromkeys(known, "default")
    for origin, layer in layers:
        for name, value in layer.items():
            if name not in known:
                hint = did_you_mean(name, known) or "run `octavo doctor --explain` for the list"
                raise ConfigError(name, value, "unknown setting", hint, origin)
            try:
                values[name] = read_value(name, known[name], value)
            except ConfigError as error:
                raise ConfigError(name, value, error.limit, error.change, origin) from None
            origins[name] = origin
    try:
        return config_class(**values), origins
    except ConfigError as error:
        origin = origins.get(error.field, "")
        raise ConfigError(error.field, error.value, error.limit, error.change, origin) from None


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The top-level mapping of a YAML file, plain data only.

    Refuses tags, anchors, aliases, merge keys, duplicate keys and files above 1 MiB. Raises ConfigError.
    """
    import yaml

    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_YAML_BYTES + 1)
    except OSError as error:
        raise ConfigError("config", str(path), f"cannot be read: {error.strerror}") from None
    if len(data) > _MAX_YAML_BYTES:
        raise ConfigError("config", str(path), f"is larger than {_MAX_YAML_BYTES} bytes")
    try:
        loader = _strict_loader()(data)
        try:
            values = loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split()) or "nested too deeply"
        raise ConfigError("config", str(path), f"is not plain YAML: {reason[:200]}", "change the file") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError("config", str(path), "must be a mapping of setting names to values", "change the file")
    return {key.replace("-", "_"): value for key, value in values.items()}


def _strict_loader() -> Any:
    """A SafeLoader that knows no tags, no anchors, no aliases and no duplicate keys."""
    import yaml

    class StrictLoader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            for forbidden in ("anchor", "tag"):
                if getattr(event, forbidden, None) is not None:
                    raise yaml.YAMLError(f"line {event.start_mark.line + 1}: tags, anchors and aliases are refused")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                text = str(key.value).replace("-", "_")
                if key.tag == "tag:yaml.org,2002:merge":
                    raise yaml.YAMLError(f"line {key.start_mark.line + 1}: merge keys are refused")
                if text in seen:
                    raise yaml.YAMLError(f"line {key.start_mark.line + 1}: {text!r} is given twice")
                seen.add(text)
            return super().construct_mapping(node, deep)

    return StrictLoader
