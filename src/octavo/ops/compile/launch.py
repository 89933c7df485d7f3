"""Launches: before the kernel ahead has ended (programmatic dependent launch, Hopper), and past Triton's own search.

Owns a launch's options and the calls that a kernel makes. A kernel with `PDL` calls `begin_after`, or `wait_before` and
later `end_before`, before it reads what another kernel wrote and before it writes anything; one program at least does
so on every path, for the kernel after it relies on that. What it reads before are constants: weights, and, behind a
kernel that calls `begin_whole`, what was written ahead of that one. A forward pass begins with such a kernel,
`octavo.ops.embedding.gpu`'s, or stands behind one, a drafter's draw, with nothing launched between: in its layers the
step's lengths, tables, slots and positions are constants, and so is what the cache holds of earlier steps and passes; a
division for the last layer is one behind torch's gathers, which begin whole.
Invariants: how a kernel is launched moves no bit; it is the machine code that Triton would choose. A kernel's first
launch waits until `octavo.ops.compile.fingerprint` has named Triton, or names it itself.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import functools
import time
from typing import Any

import torch
import triton
import triton.language as tl

from octavo.ops.compile.fingerprint import name_compiler


@triton.jit
def begin_after(PDL: tl.constexpr):
    """Let the next kernel be launched, and wait until the one before is done and its writes are seen."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin_whole(PDL: tl.constexpr):
    """Wait until all before is done and its writes are seen, and only then let the next kernel be launched."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_before(PDL: tl.constexpr):
    """Wait until the kernel before is done and its writes are seen."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def end_before(PDL: tl.constexpr):
    """Let the next kernel be launched once all programs are here or done, if none did before."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def ready_before(x, PDL: tl.constexpr):
    """Finite float32 numbers as they are, computed where this stands: the assembler else does so behind a wait below.

    It may not move what could trap.
    """
    if PDL:
        x = tl.inline_asm_elementwise(
            "{ .reg .pred over; setp.eq.f32 over, $1, 0f7F800000; @over trap; mov.b32 $0, $1; }",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=False,
            pack=1,
        )
    return x


def chained(device: torch.device) -> dict[str, Any]:
    """Options for the launch of a kernel that takes `PDL` and calls `begin_after`."""
    return {"PDL": True, "launch_pdl": True} if _has_pdl(device) else {"PDL": False}


@functools.cache
def _has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


_LOADING_SECONDS = 0.15  # loading takes a few ms, compiling a few tenths of a second at least
_slowest = 0.0  # of first launches, in seconds
_INT32 = 1 << 31
_ALIGNED = 15  # of addresses and numbers, Triton knows whether 16 divides them
_ONE = "1"  # a constant to Triton; as a key, the number would equal True, which says that 16 divides one
_SCALARS = frozenset({float, bool, type(None)})  # compiled for their kind alone


class Direct:
    """A kernel of Triton's, launched as ever: `kernel[grid](*arguments, **constants_and_options)`.

    Triton looks for what it has compiled longer than a launch takes. Where the arguments are given by place, and the
    constants, the last parameters, by name, it does so once for each key. A key tells apart all that Triton compiles
    differently; with an argument of a kind that has no key, every launch is Triton's. Its hooks around launches, and
    its check that globals have not changed, see the first launch of a key only.
    """

    def __init__(self, kernel: Any) -> None:
        """`kernel`: a JITFunction."""
        self.kernel = kernel
        self._ready: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        """The function that launches so many programs."""

        def launch(*args: Any, **constants: Any) -> None:
            active = triton.runtime.driver.active
            device = active.get_current_device()
            key, values = _look(args, [device, *constants, *constants.values()])
            ready = self._ready.get(key)
            if ready is None:
                compiled = _timed(self.kernel[grid], args, constants)
                if key:
                    self._keep(key, compiled, len(args), constants)
                return
            run, function, packed, last = ready
            x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
            run(x, y, z, active.get_current_stream(device), function, packed, None, None, None, *values, *last)

        return launch

    def _keep(self, key: tuple[Any, ...], compiled: Any, num_args: int, constants: dict[str, Any]) -> None:
        """Remember a kernel that was launched, if that can be repeated."""
        last = list(self.kernel.signature.parameters.values())[num_args:]
        is_last = self.kernel.constexprs == [num_args + i for i in range(len(last))]
        if is_last and getattr(compiled, "function", None) is not None:
            values = [constants.get(parameter.name, parameter.default) for parameter in last]
            self._ready[key] = compiled.run, compiled.function, compiled.packed_metadata, values


def once(kernel: Any, seen: set[Any]) -> Any:
    """What calls a kernel of Triton's as a launch does, but once for each key, which joins `seen`."""

    def call(*args: Any, **constants: Any) -> None:
        key, _ = _look(args, [id(kernel), *constants, *constants.values()])
        if not key or key not in seen:
            seen.add(key)
            kernel[(1,)](*args, **constants)

    return call


def _timed(launch: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """A kernel's first launch, which loads it, or compiles it before."""
    global _slowest
    name_compiler()
    began = time.perf_counter()
    compiled = launch(*args, **constants)
    _slowest = max(_slowest, time.perf_counter() - began)
    return compiled


def open_driver() -> None:
    """Let Triton find the GPU, for which it runs a program of the system's: 15 ms of its first launch."""
    triton.runtime.driver.active.get_current_device()


def has_compiled() -> bool:
    """Whether this process has compiled a kernel that is launched directly, or was as slow to load one."""
    return _slowest > _LOADING_SECONDS


def _look(args: tuple[Any, ...], parts: list[Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """(the key, which begins with `parts`, or () if there is none; the arguments, with addresses for tensors)."""
    values = []
    for arg in args:
        kind = type(arg)
        if kind is torch.Tensor:
            address = arg.data_ptr()
            parts += arg.dtype, address & _ALIGNED == 0
            values.append(address)
            continue
        if kind is int:
            parts += kind if -_INT32 <= arg < _INT32 else arg >> 63, _ONE if arg == 1 else arg & _ALIGNED == 0
        elif kind in _SCALARS:
            parts.append(kind)
        elif (known := getattr(arg, "compiled_for", None)) is not None:
            parts.append(known)
        else:
            return (), values
        values.append(arg)
    return tuple(parts), values


def launched(jit: Any) -> Any:
    """A decorator for kernels that the host launches: what `jit` makes of one, as a Direct unless it is interpreted."""

    def make(function: Any) -> Any:
        kernel = jit(function)
        return Direct(kernel) if isinstance(kernel, triton.runtime.JITFunction) else kernel

    return make
