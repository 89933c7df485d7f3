"""Kernels of states in CUDA C++ on a CPU: compiled by the system's compiler, with lanes.h for its instructions.

Products of float32 take all its bits, as those of Triton's interpreter do.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from octavo.ops.scan import conv_decode
from octavo.ops.scan.delta import delta_prepare, delta_prompts, delta_step, loading
from octavo.ops.scan.mamba2 import mamba2_advance, mamba2_decode, mamba2_prompts
from octavo.states import delta_gpu

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
_RUN = """
static Told given;
extern "C" void run(const Told* told, u32 count, u32 threads) {
    given = *told;
    body = [] { KERNEL(given); };
    num_blocks = count;
    for (block_id = 0; block_id < count; ++block_id) run_block(threads);
}
"""
_OWN = mamba2_advance.KERNEL, mamba2_decode.KERNEL, mamba2_prompts.KERNEL, conv_decode.KERNEL
_KERNELS = loading.KERNELS | {each.name: each for each in _OWN}


@functools.cache
def _library(kernel: str, macros: tuple[tuple[str, int | str], ...]) -> ctypes.CDLL:
    own_source = _KERNELS[kernel].own_source
    text = Path(__file__).with_name("lanes.h").read_text() + own_source
    folder = Path(tempfile.mkdtemp())
    source = folder / f"{hashlib.sha256(repr(macros).encode()).hexdigest()[:16]}.cpp"
    source.write_text(text + _RUN)
    assert COMPILER is not None, "there is a compiler"
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-DTF32=0xffffffffu", f"-DKERNEL={kernel}"]
    flags += [f"-D{name}={value}" for name, value in macros]
    subprocess.run([COMPILER, *flags, str(source), "-o", str(source.with_suffix(".so"))], check=True)
    library = ctypes.CDLL(str(source.with_suffix(".so")))
    shutil.rmtree(folder)
    return library


@contextlib.contextmanager
def emulated(blocks: int, *, groups: int = 2, compares: bool = False) -> Iterator[list[str]]:
    """Within, they serve tensors of a CPU; `delta_step` by so many blocks at most. Lists launches by name.

    groups: of a block of `delta_prompts`. compares: with Triton's first, where one that is not loaded is not launched.
    """
    launches: list[str] = []
    loaded = set[ModuleType]()

    def shared(kernel: ModuleType) -> dict[str, Any]:
        return {"serves": loading.fits, "is_loaded": lambda macros, device: loaded.add(kernel) or True}

    def launch(told: delta_step.Told, own: dict[str, int | str], _: torch.device) -> None:
        assert delta_step in loaded or not compares
        launches.append("delta_step")
        threads, tasks = 128 * int(own["PER"]) + 32, told.num_rows * int(own["KEY_HEADS"])
        _library("delta_step", tuple(own.items())).run(ctypes.byref(told), min(blocks, tasks), threads)

    def walk(told: delta_prompts.Told, num_rows: int, own: dict[str, int | str], _: torch.device) -> None:
        assert delta_prompts in loaded or not compares
        launches.append("delta_prompts")
        heads = num_rows * int(own["HEADS"])
        own, blocks = {**own, "GROUPS": groups}, heads * 2 // groups
        _library("delta_prompts", tuple(own.items())).run(ctypes.byref(told), blocks, delta_prompts.threads_of(groups))

    def prepare(told: delta_prepare.Told, num_chunks: int, own: dict[str, int | str], _: torch.device) -> None:
        assert delta_prepare in loaded or not compares
        launches.append("delta_prepare")
        blocks = num_chunks * int(own["KEY_HEADS"])
        _library("delta_prepare", tuple(own.items())).run(ctypes.byref(told), blocks, 256)

    with (
        unittest.mock.patch.multiple(delta_step, launch=launch, **shared(delta_step)),
        unittest.mock.patch.multiple(delta_prompts, launch=walk, **shared(delta_prompts)),
        unittest.mock.patch.multiple(delta_prepare, launch=prepare, **shared(delta_prepare)),
        unittest.mock.patch.object(delta_gpu, "_agrees", delta_gpu._agrees if compares else lambda *_: True),
    ):
        yield launches


@contextlib.contextmanager
def advances_emulated(blocks: int) -> Iterator[list[str]]:
    """Within, `mamba2_advance` serves tensors of a CPU, by so many blocks at most. Lists launches by name."""
    launches: list[str] = []

    def launch(told: mamba2_advance.Told, own: dict[str, int | str], _: torch.device) -> None:
        launches.append("mamba2_advance")
        count = min(blocks, mamba2_advance.tasks_of(told, own))
        _library("mamba2_advance", tuple(own.items())).run(ctypes.byref(told), count, mamba2_advance.THREADS)

    own = {"serves": mamba2_advance.fits, "is_loaded": lambda *_: True, "launch": launch}
    with unittest.mock.patch.multiple(mamba2_advance, **own):
        yield launches


@contextlib.contextmanager
def decodes_emulated(blocks: int) -> Iterator[list[str]]:
    """Within, `mamba2_decode` serves tensors of a CPU, by so many blocks at most. Lists launches by name."""
    launches: list[str] = []

    def launch(told: mamba2_decode.Told, own: dict[str, int | str], _: torch.device) -> None:
        launches.append("mamba2_decode")
        count = min(blocks, mamba2_decode.blocks_of(told, own))
        _library("mamba2_decode", tuple(own.items())).run(ctypes.byref(told), count, mamba2_decode.THREADS)

    own = {"serves": mamba2_decode.fits, "is_loaded": lambda *_: True, "launch": launch}
    with unittest.mock.patch.multiple(mamba2_decode, **own):
        yield launches


@contextlib.contextmanager
def convolves_emulated(parts: int) -> Iterator[list[str]]:
    """Within, `conv_decode` serves tensors of a CPU, by so many parts of the rows. Lists launches by name."""
    launches: list[str] = []

    def launch(told: conv_decode.Told, own: dict[str, int | str], _: torch.device) -> None:
        launches.append("conv_decode")
        blocks = conv_decode.num_tiles(own) * min(parts, told.num_rows)
        _library("conv_decode", tuple(own.items())).run(ctypes.byref(told), blocks, conv_decode.THREADS)

    own = {"serves": conv_decode.fits, "is_loaded": lambda *_: True, "launch": launch}
    with unittest.mock.patch.multiple(conv_decode, **own):
        yield launches


@contextlib.contextmanager
def walks_emulated(blocks: int) -> Iterator[list[str]]:
    """Within, `mamba2_prompts` serves tensors of a CPU, by so many blocks at most. Lists launches by name."""
    launches: list[str] = []

    def launch(told: mamba2_prompts.Told, num_rows: int, own: dict[str, int | str], _: torch.device) -> None:
        launches.append("mamba2_prompts")
        count = min(blocks, num_rows * int(own["HEADS"]))
        _library("mamba2_prompts", tuple(own.items())).run(ctypes.byref(told), count, mamba2_prompts.THREADS)

    own = {"serves": mamba2_prompts.fits, "is_loaded": lambda *_: True, "launch": launch}
    with unittest.mock.patch.multiple(mamba2_prompts, **own):
        yield launches
