"""Kernels compiled side by side: in a pass nothing of Triton's is launched; what would be, threads compile meanwhile.

Owns the pass: whose launches it takes, the threads, what is counted and told. Does not know which kernels a step
launches: whoever makes a pass issues its steps. Compilers leave Python to the other threads, and most of a compilation
is theirs. Invariants: what is compiled is what the same launch would compile later, which finds it; only the pass's own
thread is in it; no index within is out of its table, though nothing was computed: all are zero, as new tensors are.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call"
from __future__ import annotations

import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

from octavo.ops.compile import launch
from octavo.ops.compile.fingerprint import name_compiler

Told = Callable[[int, int, str], object]
"""Called from any thread, one call at a time: (kernels done, kernels asked for so far, the name of the last)."""
_MODE = getattr(triton, "AsyncCompileMode", None)  # Triton 3.6 has it
_ONE = threading.Lock()  # a process makes one pass at a time
_PARSING = threading.Lock()  # Python 3.11 counts the depth of all trees that threads build in one place, and may raise
_MAX_THREADS = 32


# Calls of torch's by name: what they give is empty; what they take are indices, and a table first.
_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
_INDEXED = frozenset(
    {
        "__getitem__",
        "__setitem__",
        "gather",
        "index_add_",
        "index_copy_",
        "index_select",
        "scatter_",
        "scatter_add_",
        "take",
        "take_along_dim",
    }
)


class _Mine(threading.local):
    current: Pass | None = None
    has_made = False  # whether this thread of a pass has compiled what it was asked for last


_MINE = _Mine()


class Pass(concurrent.futures.Executor):
    """One pass: what its thread would launch is submitted here, by Triton and by `compile`."""

    def __init__(self, told: Told, num_threads: int) -> None:
        """Start the threads."""
        self._pool = concurrent.futures.ThreadPoolExecutor(num_threads, "octavo-compile")
        self._told, self._lock = told, threading.Lock()
        self._futures: list[concurrent.futures.Future[Any]] = []
        self._num_done = self._num_made = 0
        self.seen: set[Hashable] = set()
        self.naming = ""  # the kernel that Triton submits next

    @property
    def num_made(self) -> int:
        """Kernels that were compiled so far, and not found on disk."""
        return self._num_made

    def submit(self, make: Callable[..., Any], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[Any]:
        """As an Executor's."""
        name = self.naming
        future = self._pool.submit(_make_whole, make, *args, **kwargs)
        with self._lock:
            self._futures.append(future)
            self._told(self._num_done, len(self._futures), name)
        future.add_done_callback(lambda _: self._count(name))
        return future

    def compile(self, name: str, key: Hashable, make: Callable[[], object]) -> None:
        """Let a thread compile another compiler's kernel, once for each key. What it raises shows when it is used."""
        if (name, key) not in self.seen:
            self.seen.add((name, key))
            self.naming = name
            self.submit(self._made, make)

    def is_settled(self, seconds: float) -> bool:
        """Whether all is done, now or after so many seconds at most, and nothing was compiled."""
        concurrent.futures.wait(self._futures, seconds)
        return self._num_done == len(self._futures) and not self._num_made

    def count_made(self, **facts: Any) -> None:
        """Called by Triton for each kernel that is there."""
        _MINE.has_made = not facts.get("cache_hit")
        with self._lock:
            self._num_made += _MINE.has_made

    def close(self) -> None:
        """Wait for the threads."""
        self._pool.shutdown()

    def _made(self, make: Callable[[], object]) -> object:
        made = make()
        self.count_made()
        return made

    def _count(self, name: str) -> None:
        with self._lock:
            self._num_done += 1
            self._told(self._num_done, len(self._futures), name)


def _make_whole(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `make` gives; if that was compiled now, with what Triton launches it by, which some Tritons compile too."""
    _MINE.has_made = False
    made = make(*args, **kwargs)
    launcher = getattr(triton.runtime.driver.active, "launcher_cls", None)
    if _MINE.has_made and launcher is not None and hasattr(made, "metadata"):
        with contextlib.suppress(Exception):  # it shows again at the launch
            launcher(made.src, made.metadata)
    return made


class _Zeros(TorchFunctionMode):
    """New tensors are zero, since no kernel writes them, and so is every index that follows from them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _EMPTY:
            return func(*args, **kwargs).zero_()
        if name in _INDEXED:
            table, *rest = args
            args, kwargs = (table, *map(_at_zero, rest)), {key: _at_zero(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)


def _at_zero(value: Any) -> Any:
    is_index = isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dtype != torch.bool
    return torch.zeros_like(value) if is_index else value


def current() -> Pass | None:
    """The pass that this thread is in."""
    return _MINE.current


def can_compile() -> bool:
    """Whether this Triton compiles aside. Where it does not, kernels are compiled as they are first launched."""
    return _MODE is not None


@contextlib.contextmanager
def compiling(told: Told, num_threads: int = 0) -> Iterator[Pass]:
    """Within: this thread's launches are compiled and not run. At the end all of them are there.

    num_threads: 0 means as many as processors. A kernel that does not compile is not told here: its launch raises.
    """
    assert _MODE is not None, "ask `can_compile` first"
    name_compiler()  # or every thread would sum up Triton's files
    with _ONE, contextlib.ExitStack() as stack:
        made = Pass(told, num_threads or min(_processors(), _MAX_THREADS))
        stack.callback(made.close)
        _MINE.current = made
        stack.callback(setattr, _MINE, "current", None)
        stack.enter_context(_taken())
        stack.enter_context(_listening(made))
        stack.enter_context(_MODE(made, ignore_errors=True))
        stack.enter_context(_Zeros())
        yield made


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def _listening(made: Pass) -> Iterator[None]:
    """Within: the pass hears of every kernel, beside whoever did before."""
    knobs = triton.knobs.compilation
    before = knobs.listener

    def listen(**facts: Any) -> None:
        made.count_made(**facts)
        if before is not None:
            before(**facts)

    knobs.listener = listen
    try:
        yield
    finally:
        knobs.listener = before


@contextlib.contextmanager
def _taken() -> Iterator[None]:
    """Within: launches of a thread that is in a pass launch nothing, and one thread at a time parses a kernel."""
    run, parse, find = JITFunction.run, JITFunction.parse, launch.Direct.__getitem__

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        made = _MINE.current
        if made is not None:
            made.naming, warmup = self.__name__, True
        return run(self, *args, grid=grid, warmup=warmup, **options)

    def parse_alone(self: Any) -> Any:
        with _PARSING:
            return parse(self)

    def find_or_compile(self: launch.Direct, grid: tuple[int, ...]) -> Any:
        made = _MINE.current
        return find(self, grid) if made is None else launch.once(self.kernel, made.seen)

    swapped: Any = JITFunction, launch.Direct
    swapped[0].run, swapped[0].parse, swapped[1].__getitem__ = compile_only, parse_alone, find_or_compile
    try:
        yield
    finally:
        swapped[0].run, swapped[0].parse, swapped[1].__getitem__ = run, parse, find
