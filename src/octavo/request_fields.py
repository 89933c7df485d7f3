"""Fields that requests carry for an engine's attention mods, in `SamplingParams.extra_args`.

Owns FieldSpec (a field's name, kind and default), the check of a request's values, and what they add to the name of its
cached blocks. Knows no tensor and no mod. Invariant: what `read` gives are plain numbers that fit the device tables.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from octavo.checks import INT32_MAX, as_float, as_int, as_list

_MAX_FLOAT = 3.4e38


class FieldSpec(msgspec.Struct, frozen=True):
    """One named field. per_token: one value per token of the request; tokens beyond the last one given repeat it."""

    name: str
    kind: str = "int"  # int (32 bits, signed) | float (32 bits)
    default: float = 0
    per_token: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not self.name.isidentifier():
            raise ValueError(f"a request field's name must be an identifier, got {self.name!r}")
        if self.kind not in ("int", "float"):
            raise ValueError(f"request field {self.name}: kind must be int or float, got {self.kind!r}")

    def read(self, extra_args: Mapping[str, Any] | None) -> list[int | float]:
        """The values of a request: one, or up to one per token. Raises ParameterError."""
        label = f"extra_args.{self.name}"
        value = (extra_args or {}).get(self.name)
        if value is None:
            return [self._number(label, self.default)]
        if not self.per_token:
            return [self._number(label, value)]
        values = as_list(label, value, INT32_MAX, "a list of numbers")
        return [self._number(f"{label}[{i}]", entry) for i, entry in enumerate(values)] or self.read(None)

    def _number(self, label: str, value: object) -> int | float:
        if self.kind == "int":
            value = int(value) if isinstance(value, float) and value.is_integer() else value
            return as_int(label, value, -INT32_MAX - 1, INT32_MAX)
        return as_float(label, value, -_MAX_FLOAT, _MAX_FLOAT)


def check_fields(specs: Sequence[FieldSpec], extra_args: Mapping[str, Any] | None) -> None:
    """Check a request's values of all fields. Raises ParameterError naming the field."""
    for spec in specs:
        spec.read(extra_args)


def salt_with_fields(cache_salt: str, specs: Sequence[FieldSpec], extra_args: Mapping[str, Any] | None) -> str:
    """The cache salt of a request whose K and V depend on its fields: requests with other values share no blocks.

    The salt itself where every field has its default.
    """
    values = {spec.name: spec.read(extra_args) for spec in specs}
    if all(values[spec.name] == spec.read(None) for spec in specs):
        return cache_salt
    digest = hashlib.blake2b(msgspec.msgpack.encode(values), digest_size=16).hexdigest()
    return f"{cache_salt}\0{digest}"  # a user's salt holds no control character


def salt_with_prompt(cache_salt: str, prompt_token_ids: Sequence[int]) -> str:
    """The cache salt of a request whose K and V depend on its whole prompt, as under a mask that looks ahead."""
    digest = hashlib.blake2b(np.array(prompt_token_ids, "<i8").tobytes(), digest_size=16).hexdigest()
    return f"{cache_salt}\0{digest}"
