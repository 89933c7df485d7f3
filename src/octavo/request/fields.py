"""Fields that requests carry for an engine's attention mods, in `SamplingParams.extra_args`.

Owns FieldSpec (a field's name, kind, default and bounds), the two forms of a field per token, the check of a request's
values, and what they add to the name of its cached blocks. Knows no tensor and no mod. Invariant: what `read` gives are
plain numbers within the field's bounds, which fit the device tables; two ways to say the same give the same runs.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.request.validation import INT32_MAX, ParameterError, as_float, as_int, as_list, type_error

MAX_EXTRA_BYTES = 65_536  # of all that is no list of numbers
_MAX_FLOAT = 3.4e38
_RANGES = {"int": (-INT32_MAX - 1, INT32_MAX), "float": (-_MAX_FLOAT, _MAX_FLOAT)}
_DTYPES: dict[str, Any] = {"int": np.int64, "float": np.float64}
MAX_LOOKED_UP = 256  # names of which one like it is sought, which takes its time
_NEAR = 0.75  # of difflib: a letter or two


class Runs(NamedTuple):
    """A field's values of a request: values[i] for lengths[i] tokens, the last one for all that follow."""

    values: NDArray[Any]  # [N] int64 or float64, neighbours differ
    lengths: NDArray[np.int64]  # [N - 1], at least 1 each

    def expand(self, num_tokens: int) -> NDArray[Any]:
        """One value for each of the first `num_tokens` tokens."""
        ends = np.minimum(self.lengths.cumsum(), num_tokens)
        return self.values.repeat(np.diff(ends, prepend=0, append=num_tokens))


class FieldSpec(msgspec.Struct, frozen=True):
    """One named field, of numbers from `low` to `high` (None: all that 32 bits hold).

    per_token: one value per token of the request; tokens beyond the last one given repeat it.
    """

    name: str
    kind: str = "int"  # int (32 bits, signed) | float (32 bits)
    default: float = 0
    per_token: bool = False
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise ValueError(f"a request field's name must be an identifier, got {self.name!r}")
        if self.kind not in _RANGES:
            raise ValueError(f"request field {self.name}: kind must be int or float, got {self.kind!r}")
        lowest, highest = _RANGES[self.kind]
        for name in ("low", "high"):
            if getattr(self, name) is not None:
                _number(f"request field {self.name}: {name}", self.kind, getattr(self, name), lowest, highest)
        low, high = self.bounds
        if low > high:
            raise ValueError(f"request field {self.name}: low={low:g} is above high={high:g}")
        _number(f"request field {self.name}: default", self.kind, self.default, low, high)

    @property
    def bounds(self) -> tuple[int | float, int | float]:
        """The lowest and the highest value that a request may give."""
        lowest, highest = _RANGES[self.kind]
        low, high = lowest if self.low is None else self.low, highest if self.high is None else self.high
        return (int(low), int(high)) if self.kind == "int" else (float(low), float(high))

    def read(self, extra_args: Mapping[str, Any] | None) -> Runs:
        """The values of a request. Raises ParameterError.

        A field per token is a list, or {"lengths": [...], "values": [...]}: values[i] for lengths[i] tokens. Without
        values, runs are numbered from 0.
        """
        label = f"extra_args.{self.name}"
        value = (extra_args or {}).get(self.name)
        if value is None:
            return self._constant(self.default)
        if not self.per_token:
            return self._constant(_number(label, self.kind, value, *self.bounds))
        if isinstance(value, Mapping):
            lengths, values = self._read_runs(label, value)
        else:
            values = self._numbers(label, as_list(label, value, INT32_MAX, "a list of numbers"))
            lengths = np.ones(len(values), np.int64)
        if not len(values):
            return self.read(None)
        first = np.flatnonzero(np.append(True, values[1:] != values[:-1]))  # of each run
        return Runs(values[first], np.add.reduceat(lengths, first)[:-1])

    def _constant(self, value: float) -> Runs:
        return Runs(np.array([value], _DTYPES[self.kind]), np.zeros(0, np.int64))

    def _read_runs(self, label: str, value: Mapping[str, Any]) -> tuple[NDArray[np.int64], NDArray[Any]]:
        unknown = [str(name)[:64] for name in value if name not in ("lengths", "values")]
        if unknown or "lengths" not in value:
            raise ParameterError(label, "takes a list of numbers, or an object with lengths and values", "invalid_type")
        given = as_list(f"{label}.lengths", value["lengths"], INT32_MAX, "a list of whole numbers")
        lengths = _array(f"{label}.lengths", "int", given, 1, INT32_MAX)
        if value.get("values") is None:
            return lengths, self._numbers(label, list(range(len(lengths))))
        values = as_list(f"{label}.values", value["values"], INT32_MAX, "a list of numbers")
        if len(values) != len(lengths):
            raise ParameterError(label, f"needs as many values as lengths, got {len(values)} and {len(lengths)}")
        return lengths, self._numbers(f"{label}.values", values)

    def _numbers(self, label: str, values: list[Any]) -> NDArray[Any]:
        return _array(label, self.kind, values, *self.bounds)


def _number(label: str, kind: str, value: object, low: float, high: float) -> int | float:
    if kind == "int":
        value = int(value) if isinstance(value, float) and value.is_integer() else value
        return as_int(label, value, int(low), int(high))
    return as_float(label, value, low, high)


def _array(label: str, kind: str, values: list[Any], low: float, high: float) -> NDArray[Any]:
    """Numbers in [low, high], all at once where they are plain ones: a prompt may have a million."""
    if set(map(type, values)) <= ({int} if kind == "int" else {int, float}):
        try:
            found = np.array(values, _DTYPES[kind])
            if bool(((found >= low) & (found <= high)).all()):
                return found
        except OverflowError:
            pass
    each = [_number(f"{label}[{i}]", kind, value, low, high) for i, value in enumerate(values)]  # says which is wrong
    return np.array(each, _DTYPES[kind])


def check_plain(extra_args: object) -> None:
    """Check what is known without a model: plain data, of which lists of numbers are counted by `check_fields`.

    Raises ParameterError.
    """
    if extra_args is None:
        return
    if not isinstance(extra_args, dict):
        raise type_error("extra_args", "an object", extra_args)
    try:
        msgspec.msgpack.encode(extra_args)
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise ParameterError("extra_args", "must hold plain data only", "invalid_type") from None
    _check_size({name: value for name, value in extra_args.items() if not _is_numbers(value)})


def _is_numbers(value: object) -> bool:
    """Whether it may be a field per token, in either form."""
    if isinstance(value, dict):
        return bool(value) and set(value) <= {"lengths", "values"} and all(map(_is_numbers, value.values()))
    return isinstance(value, list | tuple) and set(map(type, value)) <= {int, float}


def _check_size(extra_args: Mapping[str, Any]) -> None:
    size = len(msgspec.msgpack.encode(extra_args))
    if size > MAX_EXTRA_BYTES:
        raise ParameterError("extra_args", f"must encode to at most {MAX_EXTRA_BYTES} bytes, got {size}")


def check_fields(specs: Sequence[FieldSpec], extra_args: Mapping[str, Any] | None, max_model_len: int) -> None:
    """Check a request's values of all fields, and the size of what it gives beside them.

    A field per token may have as many values as fit MAX_EXTRA_BYTES, and at least one for each of `max_model_len`
    tokens. A name that no field has, but nearly, is a mistake; others are a plug-in's. Raises ParameterError, which
    names the field.
    """
    if not extra_args:
        return
    names = {spec.name for spec in specs}
    most = max(max_model_len, MAX_EXTRA_BYTES)
    for spec in specs:
        value = extra_args.get(spec.name)
        parts = list(value.values()) if isinstance(value, Mapping) else [value]
        longest = max((len(part) for part in parts if isinstance(part, list | tuple)), default=0)
        if longest > most:
            limit = f"may hold {most} values (max_model_len is {max_model_len}), got {longest}"
            raise ParameterError(f"extra_args.{spec.name}", limit, "too_many_items")
        spec.read(extra_args)
    missing = [name for name in names if name not in extra_args]
    for name in itertools.islice(extra_args, MAX_LOOKED_UP):
        near = [] if name in names else difflib.get_close_matches(str(name)[:64], missing, n=1, cutoff=_NEAR)
        if near:
            raise ParameterError(
                f"extra_args.{str(name)[:64]}", f"unknown request field, did you mean {near[0]}?", "unknown_field"
            )
    _check_size({name: value for name, value in extra_args.items() if name not in names})


def salt_with_fields(cache_salt: str, specs: Sequence[FieldSpec], extra_args: Mapping[str, Any] | None) -> str:
    """The cache salt of a request whose K and V depend on its fields: requests with other values share no blocks.

    The salt itself where every field has its default.
    """
    values = {spec.name: [part.tolist() for part in spec.read(extra_args)] for spec in specs}
    if all(values[spec.name] == [part.tolist() for part in spec.read(None)] for spec in specs):
        return cache_salt
    digest = hashlib.blake2b(msgspec.msgpack.encode(values), digest_size=16).hexdigest()
    return f"{cache_salt}\0{digest}"  # a user's salt holds no control character


def salt_with_prompt(cache_salt: str, prompt_token_ids: Sequence[int]) -> str:
    """The cache salt of a request whose K and V depend on its whole prompt, as under a mask that looks ahead."""
    digest = hashlib.blake2b(np.array(prompt_token_ids, "<i8").tobytes(), digest_size=16).hexdigest()
    return f"{cache_salt}\0{digest}"
