"""Kernels in Gluon, run program by program in torch: what they compute and touch, without layouts, threads and races.

Owns the words of Gluon's language that the kernels of rotation and attention use. Does not know kernels. A function of
Gluon's is read as Python over tensors of the CPU: an address is a number that tells its tensor, shared memory a tensor
of its own, a matrix instruction a sum over 16 k in one order for all elements. So bits of results compare with those of
other kernels that run here, and not with a GPU's.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

_SPACE = 40  # an address is a tensor's place among all << _SPACE, and an element in it


class Memory:
    """Tensors that kernels are given by address."""

    def __init__(self) -> None:
        """Without any."""
        self._flat: list[Tensor] = []

    def address(self, tensor: Tensor) -> Pointer:
        """Of a tensor's first element. It lies in its storage by any strides."""
        flat = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
        self._flat.append(flat)
        place = len(self._flat) - 1 << _SPACE
        return Pointer(self, torch.tensor(place + tensor.storage_offset()), tensor.dtype)

    def at(self, place: Tensor) -> tuple[Tensor, Tensor]:
        """(a tensor's elements, those that addresses mean)."""
        which = torch.unique(place >> _SPACE).tolist()
        assert len(which) <= 1, "addresses are of one tensor"
        return self._flat[which[0] if which else 0], place & (1 << _SPACE) - 1


class Pointer:
    """Addresses, of any shape."""

    def __init__(self, memory: Memory, place: Tensor, dtype: torch.dtype) -> None:
        """`place`: int64."""
        self.memory, self.place = memory, place
        self.kind, self.dtype = dtype, SimpleNamespace(element_ty=dtype)

    def __add__(self, other: Any) -> Pointer:
        """Elements further on."""
        return Pointer(self.memory, self.place + other, self.kind)

    def __getitem__(self, key: Any) -> Pointer:
        """With further axes."""
        return Pointer(self.memory, self.place[key], self.kind)

    def load(self, mask: Any, other: Any) -> Tensor:
        """Elements where the mask is; those and `other`."""
        place, there = torch.broadcast_tensors(self.place, torch.as_tensor(True if mask is None else mask))
        found = torch.full(place.shape, 0 if other is None else other, dtype=self.kind)
        # Addresses of two tensors may be chosen among.
        for which in torch.unique(place[there] >> _SPACE).tolist():
            mine = there & (place >> _SPACE == which)
            flat, index = self.memory.at(place[mine])
            found[mine] = flat[index]
        return found

    def store(self, value: Any, mask: Any) -> None:
        """A value where the mask is."""
        value = torch.as_tensor(value).to(self.kind)
        there = torch.as_tensor(True if mask is None else mask)
        place, value, there = torch.broadcast_tensors(self.place, value, there)
        if not there.any():
            return
        flat, index = self.memory.at(place[there])
        flat[index] = value[there]


class Shared:
    """Shared memory, or a part of it. What was never written is NaN."""

    def __init__(self, values: Tensor) -> None:
        """A view of one piece."""
        self.values, self.dtype = values, values.dtype

    def index(self, place: Any) -> Shared:
        """One of the first axis."""
        assert 0 <= int(place) < len(self.values), f"{place} of {len(self.values)}"
        return Shared(self.values[int(place)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        """Some of an axis."""
        return Shared(self.values.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Shared:
        """Axes in another order."""
        return Shared(self.values.permute(order))

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], _: Any) -> Shared:
        assert dtype == self.dtype, "the same numbers"
        return Shared(self.values.view(shape))

    def load(self, _: Any) -> Tensor:
        """What it holds."""
        return self.values.clone()

    def store(self, value: Tensor) -> None:
        """All of it."""
        assert value.shape == self.values.shape, (value.shape, self.values.shape)
        self.values.copy_(value)


def _mma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    for k in range(0, a.shape[1], 16):
        products = a[:, k : k + 16, None].float() * b[None, k : k + 16].float()
        for step in (8, 4, 2, 1):
            products = products[:, :step] + products[:, step : 2 * step]
        c = c + products[:, 0]
    return c


def _where(condition: Any, x: Any, y: Any) -> Any:
    if isinstance(x, Pointer):
        return Pointer(x.memory, torch.where(condition, x.place, y.place), x.kind)
    return torch.where(torch.as_tensor(condition), torch.as_tensor(x), torch.as_tensor(y))


def _atomic_add(at: Pointer, value: int, **_: Any) -> Tensor:
    before = at.load(None, None)
    at.store(before + value, None)
    return before


def _pair(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda x, y: function(torch.as_tensor(x), torch.as_tensor(y))


def _copy(shared: Shared, at: Pointer, mask: Any = None) -> None:
    shared.store(at.load(mask, 0))


def _language(program: int, programs: int) -> dict[str, Any]:
    """What the names of a kernel's module mean, besides its own functions."""
    nothing, constexpr = (lambda *_, **__: None), (lambda value: value)
    words = {
        "allocate_shared_memory": lambda dtype, shape, _: Shared(torch.full(shape, float("nan"), dtype=dtype)),
        "arange": lambda start, end, _=None: torch.arange(start, end),
        "atomic_add": _atomic_add,
        "bfloat16": torch.bfloat16,
        "broadcast": lambda x, y: torch.broadcast_tensors(x, y),
        "constexpr": constexpr,
        "convert_layout": lambda x, _, assert_trivial=False: x,
        "debug_barrier": nothing,
        "div_rn": _pair(torch.div),
        "exp2": torch.exp2,
        "extra": SimpleNamespace(cuda=SimpleNamespace(gdc_wait=nothing, gdc_launch_dependents=nothing)),
        "float32": torch.float32,
        "fma": lambda x, y, z: (torch.as_tensor(x).double() * y + z).float(),
        "full": lambda shape, value, dtype, _: torch.full(shape, value, dtype=dtype),
        "int32": torch.int32,
        "int64": torch.int64,
        "join": lambda x, y: torch.stack((x, y), -1),
        "load": lambda at, mask=None, other=None, cache_modifier="": at.load(mask, other),
        "max": lambda x, axis: x.amax(axis),
        "maximum": _pair(torch.maximum),
        "min": lambda x, axis: x.amin(axis),
        "minimum": _pair(torch.minimum),
        "num_programs": lambda _: programs,
        "permute": lambda x, order: x.permute(order),
        "program_id": lambda _: torch.tensor(program),
        "reshape": lambda x, shape: x.reshape(shape),
        "sqrt_rn": torch.sqrt,
        "static_range": range,
        "store": lambda at, value, mask=None: at.store(value, mask),
        "to_tensor": torch.tensor,
        "sum": lambda x, axis: x.sum(axis),
        "where": _where,
        "zeros": lambda shape, dtype, _: torch.zeros(shape, dtype=dtype),
        "zeros_like": torch.zeros_like,
    }
    names = ("SliceLayout", "BlockedLayout", "DotOperandLayout", "NVMMADistributedLayout", "SwizzledSharedLayout")
    layouts = dict.fromkeys(names, nothing)
    language = SimpleNamespace(**words, **layouts)
    copies = SimpleNamespace(async_copy_global_to_shared=_copy, commit_group=nothing, wait_group=nothing)
    return {"gl": language, "tl": language, "async_copy": copies, "mma_v2": _mma}


def _read(function: Any, language: dict[str, Any], read: dict[int, Any]) -> Any:
    """A function of Gluon's as Python, and all that it calls."""
    if id(function) not in read:
        source = textwrap.dedent(inspect.getsource(function.fn))
        source = re.sub(r"\w+\.type\.layout", "None", source[source.index("def ") :])
        names = dict(function.fn.__globals__)
        exec(compile(source, function.fn.__code__.co_filename, "exec", dont_inherit=True), names)
        read[id(function)] = names[function.fn.__name__]
        for name, value in function.fn.__globals__.items():
            if isinstance(value, JITFunction) and re.search(rf"\b{name}\(", source) and value is not function:
                names[name] = _read(value, language, read)
            elif type(value).__name__ == "constexpr":
                names[name] = value.value
        names.update({name: value for name, value in language.items() if name in names})
    return read[id(function)]


def run(kernel: Any, grid: tuple[int], *args: Any, **constants: Any) -> None:
    """A launch: one program after another, the last one first if there are many, on tensors of the CPU."""
    memory = Memory()
    given = [memory.address(arg) if isinstance(arg, Tensor) else arg for arg in args]
    given = [torch.tensor(arg) if type(arg) is int else arg for arg in given]
    parameters = inspect.signature(kernel.fn).parameters
    fixed = {name: value for name, value in constants.items() if name in parameters}
    for program in reversed(range(grid[0])):
        _read(kernel, _language(program, grid[0]), {})(*given, **fixed)


class InTorch:
    """A kernel whose launches run in torch: `kernel[grid](*args, **constants)`."""

    def __init__(self, kernel: Any) -> None:
        """`kernel`: what `octavo.ops.compile.launch.launched` makes."""
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        """The function that launches so many programs."""
        return lambda *args, **constants: run(self._kernel.kernel, grid, *args, **constants)
