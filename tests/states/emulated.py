"""`delta_step` on a CPU: its text compiled by the system's compiler, with lanes.h in place of a GPU's instructions."""

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

import torch

from octavo.ops.scan import delta_step

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
_RUN = """
static Told given;
extern "C" void run(const Told* told, u32 count, u32 threads) {
    given = *told;
    body = [] { delta_step(given); };
    num_blocks = count;
    for (block_id = 0; block_id < count; ++block_id) run_block(threads);
}
"""


@functools.cache
def _library(macros: tuple[tuple[str, int | str], ...]) -> ctypes.CDLL:
    text = Path(__file__).with_name("lanes.h").read_text() + Path(delta_step.__file__).with_suffix(".cu").read_text()
    folder = Path(tempfile.mkdtemp())
    source = folder / f"{hashlib.sha256(repr(macros).encode()).hexdigest()[:16]}.cpp"
    source.write_text(text + _RUN)
    assert COMPILER is not None, "there is a compiler"
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w", *(f"-D{name}={value}" for name, value in macros)]
    subprocess.run([COMPILER, *flags, str(source), "-o", str(source.with_suffix(".so"))], check=True)
    library = ctypes.CDLL(str(source.with_suffix(".so")))
    shutil.rmtree(folder)
    return library


@contextlib.contextmanager
def emulated(blocks: int) -> Iterator[list[int]]:
    """Within, `delta_step` serves tensors of a CPU, by so many blocks at most. Lists the tasks of each launch."""
    launches: list[int] = []

    def launch(told: delta_step.Told, own: dict[str, int | str], _: torch.device) -> None:
        launches.append(told.num_rows * int(own["KEY_HEADS"]))
        threads = 128 * int(own["PER"]) + 32
        _library(tuple(own.items())).run(ctypes.byref(told), min(blocks, launches[-1]), threads)

    with unittest.mock.patch.multiple(
        delta_step, launch=launch, serves=delta_step.fits, is_loaded=lambda macros, device: True
    ):
        yield launches
