"""The native CPU operators: finds, loads and switches the compiled library.

Owns which library serves (one per instruction set, built by setup.py, none without a compiler) and the C signatures.
It does not know what an operator computes. Nothing is loaded at import; the first `lib()` loads.
Invariants: all libraries give the same bits, so the choice is one of speed only. Which of the two chains of bfloat16
products is followed (`set_bfloat16_chain`) is a choice of bits: a packed weight or a cache's attention keeps the one
that was set when it was made. What an engine chooses (`Serving`) holds for its own calls alone: other engines, and the
process around them, keep theirs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

PTR = ctypes.c_void_p
I64 = ctypes.c_int64
I32 = ctypes.c_int32
U32 = ctypes.c_uint32
F32 = ctypes.c_float
F64 = ctypes.c_double
# Element types as the C ABI numbers them (vec.h: DType).
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
CACHE_CODES = {**DTYPE_CODES, torch.float8_e4m3fn: 2, torch.int8: 3}  # of what a KV cache holds

_FOLDER = Path(__file__).parent
_ISA_OF_CAPABILITY = {"AVX512": ("x86_64_v4", "x86_64_v3"), "AVX2": ("x86_64_v3",)}
CHAINS = ("auto", "pairs", "single")
MULTIPLIES_PAIRS = "x86_64_v4_bf16"  # AVX-512 with vdpbf16ps; the other libraries emulate that, slowly


class NullLibrary:
    """What `lib()` returns where no native library serves: false, and without functions."""

    isa = "none"

    def __bool__(self) -> bool:
        """Always false."""
        return False

    def __getattr__(self, name: str) -> Any:
        """No function is here; callers ask `if not lib` first."""
        raise AttributeError(f"native operator {name} was called, but no native library is loaded")


class _Here(threading.local):
    """What a thread that is within `Serving` computes with; None: what the process does."""

    library: Any = None
    chain: str | None = None


_NULL = NullLibrary()
_signatures: dict[str, tuple[Any, list[Any]]] = {}
_loaded: dict[str, Any] = {}
_active: Any = None  # outside of `Serving`
_chain = "auto"  # outside of `Serving`
_here = _Here()


def lib() -> Any:
    """The ctypes library in use, or the false null object. Loads on first use."""
    if _here.library is not None:
        return _here.library
    return _active if _active is not None else _activate()


def available() -> bool:
    """Whether native operators serve now."""
    return bool(lib())


def isa() -> str:
    """The instruction set in use: "x86_64_v4_bf16", "x86_64_v4", "x86_64_v3", "base" or "none"."""
    return str(lib().isa)


def built_isas() -> tuple[str, ...]:
    """The libraries that are built and that this processor can run, best first.

    One whose products of pairs have other bits than the emulation is not among them: to know that, it is loaded.
    """
    found = (name for name in _candidates() if _path(name).exists())
    return tuple(name for name in found if name != MULTIPLIES_PAIRS or _agrees(name))


def set_bfloat16_chain(name: str) -> None:
    """What weights packed and attention made from now on, outside of engines, do with bfloat16.

    They follow the chain "pairs" or "single", or with "auto" (as at import) the one that an engine takes by itself:
    pairs where the processor multiplies them. `octavo.ops.gemm` says what the chains are. Both run on every library;
    float32 rows know "single" alone. Raises ValueError for another name.
    """
    global _chain
    if name not in CHAINS:
        raise ValueError(f"unknown chain {name!r} of bfloat16 products: known are {', '.join(CHAINS)}")
    _chain = name


def multiplies_in_pairs() -> bool:
    """Whether the chain that is set is that of pairs, and compiled operators serve."""
    chain = _chain if _here.chain is None else _here.chain
    return available() and (chain == "pairs" or (chain == "auto" and isa() == MULTIPLIES_PAIRS))


def declare(name: str, argtypes: Sequence[Any], restype: Any = None) -> None:
    """Announce a C function once, at import of the module that calls it. Loads nothing."""
    _signatures[name] = (restype, list(argtypes))
    for library in _loaded.values():
        _apply(library, name)


class Serving:
    """Within: a library serves this thread, with a chain and a thread limit.

    Other threads, and this one afterwards, compute with what they had. Where several use one library at once, the limit
    of one may hold for another's operator, which costs time only. For one thread at a time.
    """

    def __init__(self, name: str, chain: str, num_threads: int) -> None:
        """`name`: a library, or "none" for the eager operators. Raises ValueError for what is not built."""
        self._library, self._chain, self._num_threads = _library(name), chain, num_threads
        self._before: list[tuple[Any, str | None]] = []

    def __enter__(self) -> None:
        """Begin."""
        library = self._library
        if library and library.octavo_num_threads() != self._num_threads:
            library.octavo_set_num_threads(self._num_threads)
        self._before.append((_here.library, _here.chain))
        _here.library, _here.chain = library, self._chain

    def __exit__(self, *_: object) -> None:
        """End."""
        _here.library, _here.chain = self._before.pop()
        if self._library and self._num_threads != self._library.own_num_threads:
            self._library.octavo_set_num_threads(self._library.own_num_threads)


def set_num_threads(count: int) -> None:
    """Limit the threads of every native operator (default: `torch.get_num_threads()` when the library loads)."""
    if count < 1:
        raise ValueError(f"the number of threads must be at least 1, got {count}")
    lib()
    for library in _loaded.values():
        library.own_num_threads = count  # outside of `Serving`
        library.octavo_set_num_threads(count)


def num_threads() -> int:
    """The thread limit in force; 1 where no native library serves."""
    library = lib()
    return int(library.octavo_num_threads()) if library else 1


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Within: the eager operators serve. For tests; process-wide, so not for concurrent use."""
    with _using(_NULL):
        yield


@contextlib.contextmanager
def using(name: str) -> Iterator[None]:
    """Within: the library of instruction set `name` serves. For tests; process-wide."""
    with _using(_load(name)):
        yield


@contextlib.contextmanager
def _using(library: Any) -> Iterator[None]:
    global _active
    previous = lib()
    _active = library
    try:
        yield
    finally:
        _active = previous


def _activate() -> Any:
    global _active
    wanted = os.environ.get("OCTAVO_NATIVE", "auto")
    names = built_isas()
    if wanted == "auto":
        wanted = names[0] if names else "none"
    _active = _library("none" if wanted in ("off", "0") else wanted)
    return _active


def _library(name: str) -> Any:
    """Raises ValueError for what is not built, or does not run here."""
    if name == "none":
        return _NULL
    if name not in _loaded and name not in built_isas():
        known = ", ".join(("none", *built_isas()))
        raise ValueError(f"native={name!r} names no library that is built and runs here: known are {known}")
    return _load(name)


def _candidates() -> tuple[str, ...]:
    # torch has asked the processor already; its AVX2 and AVX512 levels imply what setup.py compiles for.
    names = _ISA_OF_CAPABILITY.get(torch.backends.cpu.get_cpu_capability(), ("base",))
    has_pairs = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return (MULTIPLIES_PAIRS, *names) if names[0] == "x86_64_v4" and has_pairs() else names


@functools.cache
def _agrees(name: str) -> bool:
    """Whether library `name` multiplies pairs on this processor as the emulation does."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-(1 << 31), 1 << 31, (3, 1 << 14), generator=generator, dtype=torch.int64).to(torch.int32)
    words[:, : 1 << 13] &= -0x3E003E01  # small exponents: sums that leave the normal numbers
    # 2^-126 - 1.5 * 2^-151 is less than the least normal number, and rounds up to it among denormals
    words[0, 0], words[1, 0], words[2, 0] = 0x00800000, -0x5E400000, 0x12000000
    own, emulated = torch.empty_like(words[0]), torch.empty_like(words[0])
    for emulates, out in enumerate((own, emulated)):
        _load(name).octavo_dot_pairs(*(each.data_ptr() for each in (*words, out)), words.shape[1], emulates)
    sums = own.view(torch.float32), emulated.view(torch.float32)
    return bool(((own == emulated) | (sums[0].isnan() & sums[1].isnan())).all())


def _path(name: str) -> Path:
    return _FOLDER / f"_octavo_cpu_{name}.so"


def _load(name: str) -> Any:
    if name not in _loaded:
        library: Any = ctypes.CDLL(str(_path(name)))
        library.isa = name
        for function in _signatures:
            _apply(library, function)
        library.own_num_threads = torch.get_num_threads()
        library.octavo_set_num_threads(library.own_num_threads)
        _loaded[name] = library
    return _loaded[name]


def _apply(library: Any, name: str) -> None:
    try:
        function = getattr(library, name)
    except AttributeError:
        raise RuntimeError(
            f"{_path(library.isa).name} has no {name}: it is older than its sources, "
            "run `python setup.py build_ext --inplace`"
        ) from None
    function.restype, function.argtypes = _signatures[name]


declare("octavo_set_num_threads", [I32])
declare("octavo_num_threads", [], I32)
declare("octavo_vector_lanes", [], I32)
declare("octavo_advise_huge", [PTR, I64])
declare("octavo_dot_pairs", [PTR, PTR, PTR, PTR, I64, I32])
