"""Kernels in CUDA C++, compiled when they are needed, by the compiler that torch brings, and kept on disk.

Owns the compiler's calls and what names a kept kernel. Does not know what a kernel computes. Invariant: machine code is
that of this source, these macros, this device's kind and these versions, whether it was compiled now or is kept.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from octavo.ops.compile import disk_cache


class CompileError(RuntimeError):
    """There is no compiler, or it refuses the source."""


def machine_code(source: str, macros: Mapping[str, int | str], arch: str) -> bytes:
    """A cubin of CUDA C++ for a kind of GPU, as "sm_90a": from disk, or compiled now and kept. Raises CompileError."""
    key = _key(source, macros, arch)
    code = disk_cache.find("cuda", key, lambda: base64.b64encode(compile_cubin(source, macros, arch)).decode())
    return base64.b64decode(code)


def is_cached(source: str, macros: Mapping[str, int | str], arch: str) -> bool:
    """Whether `machine_code` need not compile. What is kept counts as used now."""
    return disk_cache.has("cuda", _key(source, macros, arch))


def _key(source: str, macros: Mapping[str, int | str], arch: str) -> list[Any]:
    return [disk_cache.sum_of(source), dict(sorted(macros.items())), arch, disk_cache.versions()]


def compile_cubin(source: str, macros: Mapping[str, int | str], arch: str) -> bytes:
    """A cubin of CUDA C++. Raises CompileError. Threads may compile at the same time."""
    return compile_told(source, macros, arch)[0]


def compile_told(source: str, macros: Mapping[str, int | str], arch: str, *options: str) -> tuple[bytes, str]:
    """A cubin of CUDA C++, and what the compiler said, as with the option "--ptxas-options=-v". Raises CompileError."""
    library, program = _library(), ctypes.c_void_p()
    flags = ["--std=c++17", f"--gpu-architecture={arch}", *(f"-D{name}={value}" for name, value in macros.items())]
    flags += options
    status = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None)
    if status:
        raise CompileError(f"nvrtcCreateProgram failed with {status}")
    try:
        status = library.nvrtcCompileProgram(
            program, len(flags), (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
        )
        told = _fetch(library, program, "ProgramLog").decode(errors="replace").strip()
        if status:
            raise CompileError(f"{macros}: {told}")
        return _fetch(library, program, "CUBIN"), told
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _fetch(library: Any, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    status = getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    room = ctypes.create_string_buffer(size.value)
    if status or getattr(library, f"nvrtcGet{what}")(program, room):
        raise CompileError(f"the compiler gives no {what}")
    return room.raw.rstrip(b"\0") if what == "ProgramLog" else room.raw


@functools.cache
def _library() -> Any:
    """NVRTC: as the loader finds it, or where a package beside torch brings it, with what it loads by itself."""
    name = f"libnvrtc.so.{(torch.version.cuda or '13').split('.')[0]}"
    found = [path for folder in sys.path for path in Path(folder).glob(f"nvidia/*/lib/{name}")]
    for path in (Path(name), *found):
        try:
            for part in path.parent.glob("libnvrtc-builtins.so.*") if path in found else ():
                ctypes.CDLL(str(part))
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    raise CompileError(f"there is no {name}")
