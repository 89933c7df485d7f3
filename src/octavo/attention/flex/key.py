"""What a mod refers to, named completely: the key under which its compiled kernel is kept.

Owns the naming of functions (their code, constants, closures and the globals that they read), numbers, request fields
and captured tensors. Does not know kernels or files. Invariant: two mods with one name compile to one kernel, which
takes their tensors in one order; what cannot be named for certain is refused, never left out.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import functools
import math
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from octavo.attention.mods import BOUND, AttentionMods, NativeForm, RequestField
from octavo.request.fields import FieldSpec

Name = Any  # what JSON holds: nested lists of strings and numbers
_BUILTINS = frozenset(
    {
        "abs", "all", "any", "bool", "divmod", "enumerate", "float", "int", "isinstance", "len", "list", "map", "max",
        "min", "pow", "range", "reversed", "round", "slice", "sorted", "sum", "tuple", "zip",
    }
)  # fmt: skip
_TYPES = (bool, int, float, complex, str, bytes, tuple, list, slice, Tensor, torch.Size)
_MODULES = (math, operator, sys.modules["_operator"])  # whose functions depend on nothing but their arguments
_TORCH = ("torch.functional", "torch.nn.functional")  # modules in Python that keep nothing
_OWN = (AttentionMods, NativeForm, RequestField)  # their methods are functions, named where they may be called
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}

_UNSET = object()


class NotFingerprintable(ValueError):
    """Something that a mod refers to has no certain name."""


def name_mods(mods: AttentionMods, device: torch.device) -> tuple[Name, list[Tensor]]:
    """The name of what the kernels of `mods` depend on, and the tensors that they read, in the name's order.

    To be called while request fields are bound. Raises NotFingerprintable, naming what is of no known kind.
    """
    namer = _Fingerprinter(device)
    name = [
        ["mask", namer.name(mods.mask_mod, "mask_mod")],
        ["score", namer.name(mods.score_mod, "score_mod")],
        ["causal", mods.causal, _code(AttentionMods.visible.__code__)],
    ]
    return name, namer.tensors


def name_code(*functions: Callable[..., Any]) -> Name:
    """The code of functions of Octavo's own, whose globals are its own as well."""
    return [_code(function.__code__) for function in functions if isinstance(function, types.FunctionType)]


class _Fingerprinter:
    def __init__(self, device: torch.device) -> None:
        self.tensors: list[Tensor] = []
        self._device = device
        self._seen: dict[int, int] = {}
        self._held: list[object] = []  # so that no id is given twice

    def name(self, value: Any, place: str) -> Name:
        """The name of a value found at `place`, in JSON's kinds. What was met before is named by when."""
        plain = _plain(value)
        if plain is not None:
            return plain
        if type(value) in (tuple, torch.Size):
            return ["tuple", [self.name(part, f"{place}[{index}]") for index, part in enumerate(value)]]
        if id(value) in self._seen:
            return ["again", self._seen[id(value)]]
        self._seen[id(value)] = len(self._seen)
        self._held.append(value)
        if isinstance(value, Tensor):
            return self._tensor(value, place)
        if isinstance(value, types.FunctionType):
            return _torchs_own(value) or self._function(value, place)
        if isinstance(value, types.MethodType):
            return ["method", self.name(value.__func__, place), self.name(value.__self__, f"{place}.__self__")]
        if type(value) is functools.partial and not vars(value):
            parts = value.func, value.args, tuple(value.keywords.items())
            return ["partial", *(self.name(part, f"{place}'s {i}") for i, part in enumerate(parts))]
        if value is BOUND:
            return ["fields", [[key, self.name(table, f"the field {key}")] for key, table in BOUND.items()]]
        return self._known(value, place)

    def _known(self, value: Any, place: str) -> Name:
        """Objects of Octavo's own kinds, and functions in C that depend on their arguments alone."""
        if type(value) is FieldSpec:
            return ["spec", value.name, value.kind, repr(value.default), value.per_token]
        if type(value) in _OWN:
            parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            return [
                type(value).__qualname__,
                [[key, self.name(part, f"{place}.{key}")] for key, part in parts.items()],
                [self.name(method, method.__qualname__) for method in _methods(type(value))],
            ]
        if isinstance(value, types.BuiltinFunctionType):
            if value.__qualname__.startswith("_VariableFunctionsClass."):
                return ["torch", value.__name__]
            home = value.__self__
            if home in (torch._C._nn, getattr(torch._C, "_special", None)) or home in _MODULES:
                return ["function", getattr(home, "__name__", ""), value.__name__]
            if home is builtins and value.__name__ in _BUILTINS:
                return ["builtin", value.__name__]
        raise NotFingerprintable(f"{place} is of the kind {type(value).__module__}.{type(value).__qualname__}")

    def _tensor(self, tensor: Tensor, place: str) -> Name:
        """How a tensor lies, and which one it is. Its values are read at run time."""
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            raise NotFingerprintable(f"{place} is a tensor of a kind of its own")
        if vars(tensor) or tensor.grad_fn is not None or tensor.grad is not None:
            raise NotFingerprintable(f"{place} is a tensor that carries attributes")
        if tensor.device != self._device or not tensor.numel():
            raise NotFingerprintable(f"{place} is a tensor on {tensor.device} of {tensor.numel()} elements")
        self.tensors.append(tensor)
        return [
            "tensor",
            len(self.tensors) - 1,
            str(tensor.dtype),
            list(tensor.shape),
            list(tensor.stride()),
            tensor.requires_grad,
            tensor.storage_offset(),
            tensor.data_ptr() % 16,
            tensor.is_conj(),
            tensor.is_neg(),
        ]

    def _function(self, function: types.FunctionType, place: str) -> Name:
        if function.__dict__:
            raise NotFingerprintable(f"{place} carries attributes")
        code = function.__code__
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        found = {name: _content(cell) for name, cell in cells.items()}
        reads = [self._read(path, place, function.__globals__, found) for path in _reads(code, found, place)]
        closure = [
            [name, "unset" if value is _UNSET else self.name(value, f"{place}'s {name!r}")]
            for name, value in found.items()
            if not isinstance(value, types.ModuleType)  # their members are among what is read
        ]
        defaults = function.__defaults__ or (), tuple((function.__kwdefaults__ or {}).items())
        named = [self.name(default, f"{place}'s defaults") for default in defaults]
        return ["function", _code(code), named, closure, [read for read in reads if read is not None]]

    def _read(self, path: tuple[str, ...], place: str, names: dict[str, Any], closure: dict[str, Any]) -> Name | None:
        """What a path of names leads to, through modules only; None for what the function makes itself."""
        kind, first, *rest = path
        if kind == "closure":
            if first not in closure or not isinstance(closure[first], types.ModuleType):
                return None
            value = closure[first]
        elif first in names:
            value = names[first]
        elif first in _BUILTINS and hasattr(builtins, first):
            return ["builtin", first]
        else:
            raise NotFingerprintable(f"{place} reads {first!r}")
        told = first
        while isinstance(value, types.ModuleType):
            if not rest or not hasattr(value, rest[0]):
                raise NotFingerprintable(f"{place} uses the module {told} as a value")
            told, value = f"{told}.{rest[0]}", getattr(value, rest.pop(0))
        return [told, self.name(value, f"{place}'s {told!r}")]


def _plain(value: Any) -> Name | None:
    """The name of what is told by its value."""
    if value is None or value is Ellipsis or type(value) in (bool, int, str):
        return [type(value).__name__, value if type(value) in (bool, str) else repr(value)]
    if type(value) is float:
        return ["float", value.hex()]
    if type(value) in (complex, bytes):
        return [type(value).__name__, repr(value)]
    if isinstance(value, torch.dtype | torch.device):
        return ["torch", repr(value)]
    if isinstance(value, type) and value in _TYPES:
        return ["type", value.__qualname__]
    return None


def _torchs_own(function: types.FunctionType) -> Name | None:
    """The name of a function that torch's own modules define."""
    module = sys.modules.get(function.__module__ or "")
    if function.__module__ in _TORCH and getattr(module, function.__qualname__, None) is function:
        return ["torch", function.__module__, function.__qualname__]
    return None


def _methods(owner: type) -> list[types.FunctionType]:
    """What a mod may call of an object of Octavo's own."""
    names = {"visible", "some_visible", "all_visible", "__getitem__"}
    return [value for name, value in vars(owner).items() if name in names and isinstance(value, types.FunctionType)]


def _code(code: types.CodeType) -> Name:
    """All of a code object that decides what it does: neither its name nor its lines."""
    counts = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags]
    names = [list(part) for part in (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)]
    return [
        "code",
        counts,
        code.co_code.hex(),
        names,
        code.co_exceptiontable.hex(),
        [_const(x) for x in code.co_consts],
    ]


def _const(value: Any) -> Name:
    if isinstance(value, types.CodeType):
        return _code(value)
    if isinstance(value, tuple):
        return ["tuple", [_const(part) for part in value]]
    if isinstance(value, frozenset):
        return ["frozenset", sorted((_const(part) for part in value), key=repr)]
    plain = _plain(value)
    if plain is None:
        raise NotFingerprintable(f"a constant of the kind {type(value).__name__}")
    return plain


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a branch that the factory did not take
        return _UNSET


def _reads(code: types.CodeType, closure: dict[str, Any], place: str) -> Iterator[tuple[str, ...]]:
    """Each name that a function or one within it reads from outside, with the attributes read of it at once."""
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("EXTENDED_ARG", "CACHE")]
    for at, step in enumerate(steps):
        what, _, kind = step.opname.partition("_")
        outside = kind in ("GLOBAL", "NAME") or ("DEREF" in kind and step.argval in closure)
        if what == "IMPORT" or (outside and what in ("STORE", "DELETE")):
            raise NotFingerprintable(f"{place} imports, or sets a name outside itself ({step.argval!r})")
        if step.opname in _ATTRIBUTES and step.argval.startswith("_"):
            raise NotFingerprintable(f"{place} reads the attribute {step.argval!r}")
        if what == "LOAD" and (outside or "GLOBALS" in kind):
            path = [step.argval]
            for after in steps[at + 1 :]:
                if after.opname not in _ATTRIBUTES:
                    break
                path.append(after.argval)
            yield ("closure" if "DEREF" in kind else "global", *path)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _reads(const, closure, place)
