"""JSON files of a model folder, read with suspicion: what must hold of a file and of each field.

Owns the size of a file, the typed reads and the form of a refusal. Knows no field by name. Invariant: a refusal is one
line that names the file, the field, the value and what would do.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from octavo.config.quoted import quoted

MAX_JSON_BYTES = 64 << 20  # of config.json, generation_config.json or a weight index
MAX_JSON_VALUES = 8 << 20  # of one file; a tensor's entry in a header has about ten
MAX_JSON_GROUPS = 1 << 20  # lists and objects of one file; a tensor's entry has three
_MAX_DIGITS = 40
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a regular file of sane size. Raises ValueError, one line, for anything else."""
    try:
        info = path.stat()
        text = path.read_text(encoding="utf-8") if _is_sane_file(info) else None
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file: a model folder holds config.json and *.safetensors") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text") from error
    if text is None:
        raise ValueError(f"{path}: a regular file of at most {MAX_JSON_BYTES} bytes is needed")
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid JSON: {str(error)[:300]}") from error
    if isinstance(value, dict):
        return value
    raise ValueError(f"{path}: not a JSON object")


def _is_sane_file(info: os.stat_result) -> bool:
    return stat.S_ISREG(info.st_mode) and info.st_size <= MAX_JSON_BYTES


def parse_json(text: str, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """The value that a file's text holds; pairs: see json.loads. Raises ValueError and RecursionError.

    Values are counted before any is made: while a file of millions of lists is read, no other thread runs.
    """
    groups = text.count("[") + text.count("{")
    count = groups + text.count(",")  # each begins a value
    if groups > MAX_JSON_GROUPS:
        raise ValueError(f"it holds {groups} lists and objects, the limit is {MAX_JSON_GROUPS}")
    if count > MAX_JSON_VALUES:
        raise ValueError(f"it holds {count} values, the limit is {MAX_JSON_VALUES}")
    value = json.loads(text, object_pairs_hook=pairs, parse_int=_integer)
    if _SURROGATE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            near = quoted(error.object[max(error.start - 20, 0) : error.end + 20])
            raise ValueError(f"it holds a lone surrogate, which is no text: {near}") from None
    return value


def _integer(text: str) -> int:
    """Raises ValueError for a long one, whose digits take quadratic time."""
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"an integer has {len(text)} digits, the limit is {_MAX_DIGITS}")
    return int(text)


class Fields:
    """Typed reads of a parsed JSON object; every refusal is one line with file, field, value and reason."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """`where`: the file's name for errors."""
        self.values = values
        self.where = where

    def refuse(self, name: str, value: object, why: str) -> NoReturn:
        """Raise the ValueError."""
        raise ValueError(f"{self.where}: unsupported {name}={json.dumps(value, default=str)[:100]} ({why})")

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value; null counts as absent."""
        value = self.values.get(name)
        return default if value is None else value

    def is_null(self, name: str) -> bool:
        """Whether the file has the field, and null in it."""
        return name in self.values and self.values[name] is None

    def integer(self, name: str, low: int, high: int, default: int | None = None, *, null: int | None = None) -> int:
        """An int in low..high. default: where it is absent; null: what a null of it means, else it is refused."""
        value: Any = null if self.is_null(name) else self.get(name, default)
        if type(value) is not int or not low <= value <= high:
            self.refuse(name, value, f"an integer from {low} to {high} is needed")
        return int(value)

    def number(
        self, name: str, low: float, high: float, default: float | None = None, *, null: float | None = None
    ) -> float:
        """A finite number in low..high; default and null as `integer`'s."""
        value: Any = null if self.is_null(name) else self.get(name, default)
        if type(value) not in (int, float) or not low <= value <= high:
            self.refuse(name, value, f"a number from {low:g} to {high:g} is needed")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean. A null is false, and refused where absence means true."""
        value = self.get(name, None if default and self.is_null(name) else default)
        if type(value) is not bool:
            self.refuse(name, value, "true or false is needed")
        return value

    def only(self, name: str, usual: object) -> None:
        """Absent, or the one value that is implemented."""
        if self.get(name, usual) != usual:
            self.refuse(name, self.get(name), f"only {json.dumps(usual)} is implemented")

    def mapping(self, name: str) -> Mapping[str, Any]:
        """An object; absent: empty."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            self.refuse(name, value, "an object is needed")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """An id or a non-empty list of ids below `vocab_size`; absent: ()."""
        value = self.get(name, ())
        ids = value if isinstance(value, (list, tuple)) else (value,)
        if (value != () and not ids) or any(type(i) is not int or not 0 <= i < vocab_size for i in ids):
            self.refuse(name, value, f"token ids from 0 to {vocab_size - 1} are needed")
        return tuple(ids)

    def layers(self, name: str, num_layers: int, default: Sequence[int]) -> Sequence[int]:
        """A list of numbers of layers, from 0 to `num_layers` - 1."""
        value = self.get(name, default)
        numbers: Sequence[Any] = value if isinstance(value, (list, range)) else [None]
        if any(type(layer) is not int or not 0 <= layer < num_layers for layer in numbers):
            self.refuse(name, value, f"a list of layer numbers from 0 to {num_layers - 1} is needed")
        return numbers

    def numbers(self, name: str, count: int, low: float, high: float) -> tuple[float, ...]:
        """A list of `count` finite numbers in low..high."""
        value = self.get(name)
        numbers: list[Any] = value if isinstance(value, list) else []
        if len(numbers) != count or any(type(n) not in (int, float) or not low <= n <= high for n in numbers):
            self.refuse(name, value, f"{count} numbers from {low:g} to {high:g} are needed")
        return tuple(map(float, numbers))
