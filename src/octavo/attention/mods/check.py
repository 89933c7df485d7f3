"""Mods evaluated once, before the first request: what can be wrong with a user's functions is told at the start.

Owns what is tried (both ends of all positions, all heads, every field's default and bounds) and the messages. Knows no
kernel and no request. Invariant: a mod that passes takes every legal position and every value of a field that was
tried, gives tensors of the right kind, and reads nothing that was not declared. Nothing of a batch is evaluated: what a
mod does in the middle of its ranges, only a step shows.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.attention.mods import NO_MODS, AttentionMods, RequestField, bound
from octavo.cache.specs import AttentionSpec
from octavo.config.quoted import said
from octavo.config.settings import ConfigError
from octavo.request.fields import FieldSpec

_PAIR, _RECTANGLE = ("b", "h", "q_idx", "kv_idx"), ("b", "q_first", "q_last", "kv_first", "kv_last")
_ARGUMENTS = {"mask_mod": _PAIR, "score_mod": ("score", *_PAIR), "some": _RECTANGLE, "every": _RECTANGLE}
_DTYPES = {"int": torch.int32, "float": torch.float32}
_BRANCH = "data-dependent control flow"  # in vmap's own words


def check_mods(
    layers: Iterable[tuple[AttentionMods, AttentionSpec]],
    fields: Sequence[FieldSpec],
    max_model_len: int,
    device: str,
    slack: int = 0,
) -> None:
    """Evaluate the user's mods of all layers. fields: the request fields of all of them. Raises ConfigError.

    slack: tokens by which the query side of a hint's rectangle may end behind `max_model_len`.
    """
    done: set[tuple[int, int]] = set()
    for mods, spec in layers:
        if mods is not NO_MODS and (id(mods), spec.num_heads) not in done:
            done.add((id(mods), spec.num_heads))
            _Check(mods, spec.num_heads, fields, max_model_len, torch.device(device), slack).run()


class _WrongError(Exception):
    """What a mod gives is of the wrong kind."""


class _Check:
    """One layer's mods."""

    def __init__(
        self,
        mods: AttentionMods,
        num_heads: int,
        fields: Sequence[FieldSpec],
        max_model_len: int,
        device: torch.device,
        slack: int,
    ) -> None:
        self._mods, self._length, self._device, self._slack = mods, max_model_len, device, slack
        self._heads = torch.arange(num_heads, device=device)
        ends = sorted(at for at in {0, 1, max_model_len // 2, max_model_len - 1} if at < max_model_len)
        self._positions = torch.tensor(ends, device=device)
        self._specs = fields if mods.fields else ()  # as backends bind them
        self._rows = _field_values(self._specs)  # one table row for each choice of values
        self._tables = {field.name: self._table(field) for field in self._specs}

    def _table(self, field: FieldSpec) -> Tensor:
        values = torch.tensor([row[field.name] for row in self._rows], device=self._device).to(_DTYPES[field.kind])
        return values[:, None].expand(-1, self._length) if field.per_token else values

    def run(self) -> None:
        for part, arguments in _ARGUMENTS.items():
            function = getattr(self._mods, part)
            if function is None:
                continue
            self._check_arity(part, function, arguments)
            call = self._call_of(part, function)
            for row in range(len(self._rows)):
                self._try(part, call, row)

    def _check_arity(self, part: str, function: Callable[..., Any], arguments: Sequence[str]) -> None:
        try:
            inspect.signature(function).bind(*arguments)
        except TypeError:
            raise self._refused(f"{part} must take ({', '.join(arguments)})") from None
        except ValueError:  # of a builtin: the call will tell
            pass

    def _call_of(self, part: str, function: Callable[..., Any]) -> Callable[[int], object]:
        """`part` for all pairs, or all rectangles, of a table row, as backends call it."""
        at = self._positions
        if part in ("some", "every"):
            first, last = at[:, None].to(torch.int32), at[None, :].to(torch.int32)

            def hint(row: int) -> object:
                b = torch.full((len(at), 1), row, device=self._device)
                return _checked(
                    part, function(b, first, first + self._slack, last, last), torch.bool, (len(at), len(at))
                )

            return hint
        is_score = part == "score_mod"
        dtype = torch.float32 if is_score else torch.bool

        def one(*place: Tensor) -> Tensor:
            return _checked(part, function(*place), dtype, ())

        given = (0,) if is_score else ()
        each = torch.vmap(one, in_dims=(*given, None, None, None, 0))
        each = torch.vmap(each, in_dims=(*given, None, None, 0, None))
        each = torch.vmap(each, in_dims=(*given, None, 0, None, None))
        score = torch.zeros(len(self._heads), len(at), len(at), device=self._device)

        def pairs(row: int) -> object:
            b = torch.tensor(row, device=self._device)
            return each(*((score,) if is_score else ()), b, self._heads, at, at)

        return pairs

    def _try(self, part: str, call: Callable[[int], object], row: int) -> None:
        try:
            with bound(self._tables), _WithinTables():
                call(row)
        except _WrongError as error:
            raise self._refused(str(error)) from None
        except (Exception, SystemExit) as error:
            if isinstance(error, KeyError) and _raised_in(error) == RequestField.__getitem__.__code__.co_filename:
                raise self._refused(
                    f"{part} reads the request field {error.args[0]!r}, which its mods do not list: give "
                    "AttentionMods(fields=(...,))"
                ) from error
            told = said(error)
            if _BRANCH in told:
                raise self._refused(
                    f"{part} branches on a tensor (if, and, or, not, int(), float(), bool()): use torch.where, & and |"
                ) from error
            if "same device" in told or "on cpu" in told:
                told += f" (tensors that it captures must lie on {self._device})"
            raise self._refused(f"{part} fails: {told}{self._where(row)}") from error

    def _where(self, row: int) -> str:
        """With which values it failed."""
        own, usual = self._rows[row], self._rows[0]
        changed = [f"{name}={value}" for name, value in own.items() if value != usual[name]]
        if not changed:
            return f" (at positions up to {self._length - 1}, max_model_len={self._length})"
        return f" (with the request field {', '.join(changed)}: give request_field(...) low and high)"

    def _refused(self, limit: str) -> ConfigError:
        return ConfigError("attention_mods", self._mods.name, limit, "change the mod")


def _raised_in(error: BaseException) -> str:
    """The file that raised an error."""
    return traceback.extract_tb(error.__traceback__)[-1].filename


def _field_values(fields: Sequence[FieldSpec]) -> list[dict[str, int | float]]:
    """Defaults; then each field at its bounds, alone; then all at once."""
    usual = {field.name: field.read(None).values[0].item() for field in fields}
    rows = [usual]
    for end in (0, 1):
        rows += [{**usual, field.name: field.bounds[end]} for field in fields]
        if len(fields) > 1:
            rows.append({field.name: field.bounds[end] for field in fields})
    return rows


def _checked(part: str, found: object, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """What a mod gave. Raises _WrongError unless it is a tensor of `dtype` that broadcasts to `shape`."""
    name = str(dtype).removeprefix("torch.")
    if not isinstance(found, Tensor):
        given = "None" if found is None else type(found).__name__
        raise _WrongError(f"{part} must give a {name} tensor, got {given}")
    if found.dtype != dtype:
        raise _WrongError(f"{part} must give a {name} tensor, got one of {found.dtype}")
    if not shape and found.ndim:
        raise _WrongError(f"{part} must give one value for a pair, got a tensor of shape {list(found.shape)}")
    try:
        fits = torch.broadcast_shapes(found.shape, shape) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise _WrongError(
            f"{part} must give a tensor that broadcasts to the rectangles' shape {list(shape)}, got {list(found.shape)}"
        )
    return found


class _WithinTables(TorchDispatchMode):
    """Looks at the places that tensors are indexed with: on a GPU a wrong one would end the process's device."""

    def __init__(self) -> None:
        """Nothing to keep."""
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See torch."""
        if func is torch.ops.aten.index.Tensor:
            axis = 0
            for places in args[1]:
                _check_places(args[0], axis, places)
                axis += places.ndim if places is not None and places.dtype == torch.bool else 1
        elif func in (torch.ops.aten.index_select.default, torch.ops.aten.gather.default):
            _check_places(args[0], args[1], args[2])
        return func(*args, **(kwargs or {}))


def _check_places(table: Tensor, axis: int, places: Tensor | None) -> None:
    """Raises IndexError for a place that an axis of `table` has not."""
    if places is None or places.dtype in (torch.bool, torch.uint8) or not places.numel() or not table.ndim:
        return
    size, (low, high) = table.shape[axis], (int(end) for end in places.aminmax())
    if low < -size or high >= size:
        wrong = high if high >= size else low
        raise IndexError(f"index {wrong} is out of bounds for dimension {axis} with size {size}")
