"""A kernel in CUDA C++ behind lanes.cu's instructions: its text, its machine code on each GPU, its launches.

Does not know what it computes. Invariants: nothing is loaded while a graph is captured, and where passes compile
without a launch nothing is launched; a kernel that cannot be had is told of once.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import logging
from collections.abc import Mapping
from pathlib import Path

import torch
import triton

from octavo.ops.compile import driver, nvrtc, side_by_side

_LOG = logging.getLogger(__name__)
_LANES = Path(__file__).with_name("lanes.cu")
_ARCH = "sm_90a"

Macros = Mapping[str, int | str]


@dataclasses.dataclass(frozen=True)
class CudaKernel:
    """texts: files whose text makes it, in order; instead: what is said where it cannot be had."""

    name: str
    texts: tuple[Path, ...]
    instead: str
    _functions: dict[tuple[int | None, frozenset[tuple[str, int | str]]], int | None] = dataclasses.field(
        default_factory=dict, compare=False
    )  # None: not to be had

    @functools.cached_property
    def own_source(self) -> str:
        """Its text alone."""
        return "".join(path.read_text(encoding="utf-8") for path in self.texts)

    @functools.cached_property
    def source(self) -> str:
        """Its text behind a lane's instructions."""
        return _LANES.read_text(encoding="utf-8") + self.own_source

    def is_loaded(self, macros: Macros, shared: int, device: torch.device) -> bool:
        """Whether it is there for a GPU, with blocks of `shared` bytes. Loads it unless a graph is captured."""
        key = device.index, frozenset(macros.items())
        if key not in self._functions:
            own = dict(macros)
            if (made := side_by_side.current()) is not None:
                self._compile_ahead(made, own)
                return True
            if torch.cuda.is_current_stream_capturing():
                return False
            try:
                self._functions[key] = driver.load(nvrtc.machine_code(self.source, own, _ARCH), self.name, shared)
            except (OSError, driver.DriverError, nvrtc.CompileError) as error:
                _LOG.warning("%s: %s", self.instead, error)
                self._functions[key] = None
        return self._functions[key] is not None

    def _compile_ahead(self, made: side_by_side.Pass, own: dict[str, int | str]) -> None:
        """In a pass: once, and only what is not kept, or no start would find that nothing is missing."""
        asked = self.name, tuple(own.items())
        if asked not in made.seen and not nvrtc.is_cached(self.source, own, _ARCH):
            made.compile(*asked, functools.partial(nvrtc.machine_code, self.source, own, _ARCH))
        made.seen.add(asked)

    def launch(
        self, told: ctypes.Structure, blocks: int, threads: int, shared: int, macros: Macros, device: torch.device
    ) -> None:
        """Run it on the current stream, where it may begin before the kernel ahead has ended; nothing if not loaded."""
        function = self._functions.get((device.index, frozenset(macros.items())))
        if function is not None:
            params = (ctypes.c_void_p * 1)(ctypes.addressof(told))
            stream = triton.runtime.driver.active.get_current_stream(device.index)
            driver.launch_chained(function, blocks, 1, threads, shared, stream, params)


@functools.cache
def processors(device: torch.device) -> int:
    """Of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count
