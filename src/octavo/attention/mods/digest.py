"""A digest of attention mods: two processes with the same one compute the same masks and scores.

Owns what of a function counts: its code, constants, defaults, what it captured, and the globals that it names. What
cannot be named, e.g. an object of a class of one's own, makes the digest one that no other process has. Invariant:
equal digests mean equal mods; unequal ones mean nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import secrets
import types
from collections.abc import Iterable, Iterator
from typing import Any

from octavo.attention.mods import NO_MODS, AttentionMods

_PLAIN = (int, float, complex, str, bytes, type(None), type(...))
_KNOWN = ("torch", "math", "octavo", "builtins", "operator")  # packages that the numerics id stands for


def mods_digest(mods: Iterable[AttentionMods]) -> str:
    """Of each layer's mods; "" where none has any. Tensors that mods captured are read."""
    per_layer = list(mods)
    if all(own is NO_MODS for own in per_layer):
        return ""
    digest, seen = hashlib.blake2b(digest_size=16), _Seen()
    for own in per_layer:
        for part in _parts(own, seen):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


class _Seen:
    """What was named before and may be met again within itself: its number."""

    def __init__(self) -> None:
        self._numbers: dict[int, tuple[int, object]] = {}  # by id(), which stays its own while it is kept here

    def number(self, value: object) -> int | None:
        """None the first time."""
        if id(value) in self._numbers:
            return self._numbers[id(value)][0]
        self._numbers[id(value)] = len(self._numbers), value
        return None


def _parts(value: Any, seen: _Seen) -> Iterator[bytes]:
    if isinstance(value, _PLAIN):
        yield f"{type(value).__name__}:{value!r}".encode()
    elif isinstance(value, tuple | list):
        yield f"{type(value).__name__}:{len(value)}".encode()
        for entry in value:
            yield from _parts(entry, seen)
    elif isinstance(value, types.FunctionType):
        yield from _function(value, seen)
    elif isinstance(value, functools.partial):
        yield b"partial"
        yield from _parts((value.func, value.args, tuple(sorted(value.keywords.items()))), seen)
    elif isinstance(value, types.ModuleType | types.BuiltinFunctionType | type) and _is_known(value):
        yield f"{getattr(value, '__module__', '')}:{value.__name__}".encode()
    elif isinstance(value, types.CodeType):
        yield value.co_code
        yield from _parts((value.co_names, value.co_freevars, value.co_consts), seen)
    elif type(value).__module__ == "torch" and type(value).__name__ == "Tensor":
        import torch

        yield f"tensor:{value.dtype}:{list(value.shape)}".encode()
        yield value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    elif dataclasses.is_dataclass(value) and type(value).__module__.startswith("octavo."):
        yield type(value).__qualname__.encode()
        for field in dataclasses.fields(value):
            yield from _parts(getattr(value, field.name), seen)
    else:
        yield secrets.token_bytes(16)


def _function(function: types.FunctionType, seen: _Seen) -> Iterator[bytes]:
    number = seen.number(function)
    if number is not None:
        yield f"again:{number}".encode()
        return
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    if _is_known(function) and not cells:
        yield f"{function.__module__}:{function.__qualname__}".encode()
        return
    yield from _parts((function.__code__, function.__defaults__, cells), seen)
    yield from _parts(tuple(sorted((function.__kwdefaults__ or {}).items())), seen)
    if not _is_known(function):
        names = sorted(_names(function.__code__) & function.__globals__.keys())
        yield from _parts(tuple((name, function.__globals__[name]) for name in names), seen)


def _names(code: types.CodeType) -> set[str]:
    """The globals that a function, and those inside it, may name."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {*code.co_names, *(name for names in inner for name in names)}


def _is_known(value: Any) -> bool:
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return isinstance(name, str) and name.partition(".")[0].lstrip("_") in _KNOWN
