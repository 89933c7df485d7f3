"""What octavo's products for Hopper in CUDA C++ have in common: tiles, the ring's text, descriptors, and who runs them.

Owns `gemm_pipeline.cu`, which is put ahead of a kernel's own text, and the macros that both are compiled with. Does not
know what becomes of the sums. Invariant: a sum has the bits of `matmul.linear`'s canonical order, whatever the tile.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from pathlib import Path

import torch

from octavo.ops.compile import driver

DEPTH, LINES = 64, 64  # as the kernels': k of a stage, first lines of a group of warps
PROCESSORS = 132  # of the GPUs that the tiles are made for, at least
ALIGNED = 16  # bytes, of what the copy engine steps over
ELEMENTS = {torch.float16: 6, torch.bfloat16: 9}  # the driver's numbers
_SHARED_BYTES = 232448  # of a block
_REGISTERS = {2: 240, 3: 160}  # of a thread that multiplies, by groups, where sums are many
_MAX_STAGES = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """What a block computes, and who shares what it reads: see the kernel's macros. Changes no bit."""

    groups: int
    width: int
    parts: int = 1
    first_shared: int = 1
    second_shared: int = 1
    rows_first: bool = False
    band: int = 0  # clusters walk over tiles, along so many of rows at a time; 0: a block has one tile
    kept: int = 0  # sums of a thread, for which there is room behind the ring

    @property
    def lines(self) -> tuple[int, int]:
        """Of the first and of the second side."""
        return self.groups * LINES, self.parts * self.width

    @property
    def rows(self) -> int:
        """Of a block."""
        return self.lines[0 if self.rows_first else 1]

    @property
    def channels(self) -> int:
        """Of a block; gates and ups both count."""
        return self.lines[1 if self.rows_first else 0]

    @property
    def stages(self) -> int:
        """Of the ring: as many as fit."""
        return min((_SHARED_BYTES - self._results) // self._stage, _MAX_STAGES)

    @property
    def shared_bytes(self) -> int:
        """What the ring and its barriers take, and results where they have a place of their own."""
        return self.stages * self._stage + self._results

    @property
    def _stage(self) -> int:
        return sum(self.lines) * DEPTH * 2 + 16

    @property
    def _results(self) -> int:
        return self.groups * self.width * LINES if self.band else self.groups * 128 * 4 * self.kept

    @property
    def registers(self) -> int:
        """Of a thread that multiplies, which takes them from others; 0: as many as launched."""
        return _REGISTERS[self.groups] if self.parts > 1 or self.band or self.kept else 0

    @property
    def threads(self) -> int:
        """Of a block: those that multiply, and a warp that copies, or four where registers move."""
        return 128 * self.groups + (128 if self.registers else 32)

    @property
    def clocks(self) -> float:
        """Of a processor, for 16 k: the matrix unit's or the shared memory's. Fits the times that an H200 takes.

        The memory moves 128 bytes each: to every group of warps its first and all second lines, and what is copied.
        """
        first, second = self.lines
        read = self.groups * self.parts * (16 + self.width / 4)
        return max(first * second / 128, read + (first + second) / 4)

    @property
    def cluster(self) -> int:
        """Blocks that share what they read."""
        return self.first_shared * self.second_shared

    def boxes(self) -> tuple[int, int]:
        """Lines that a block copies of the first and of the second side, for all that share them."""
        first, second = self.lines
        return first // self.first_shared, second // self.second_shared


def macros(tile: Tile, dtype: torch.dtype) -> dict[str, int | str]:
    """The ring's, of a plain product."""
    return {
        "GROUPS": tile.groups,
        "WIDTH": tile.width,
        "PARTS": tile.parts,
        "STAGES": tile.stages,
        "FIRST_SHARED": tile.first_shared,
        "SECOND_SHARED": tile.second_shared,
        "ROWS_FIRST": int(tile.rows_first),
        "BAND": tile.band,
        "GATED": 0,
        "SQUARED": 0,
        "HALF": int(dtype == torch.float16),
        "CONSUMER_REGISTERS": tile.registers,
    }


def source(tile: Tile, dtype: torch.dtype, *files: str) -> str:
    """The texts of a kernel's files, behind the ring's, behind the matrix unit's instruction, which names its sums."""
    count, element = tile.width // 2, "f16" if dtype == torch.float16 else "bf16"
    names = ", ".join(f"%{index}" for index in range(count))
    sums = ", ".join(f'"+f"(sums[{index}])' for index in range(count))
    return (
        f"__device__ inline void multiply(float (&sums)[{count}], unsigned long long first, "
        "unsigned long long second) {\n"
        '    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.'
        f'm64n{tile.width}k16.f32.{element}.{element} {{{names}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0; }}"\n'
        f'        : {sums} : "l"(first), "l"(second));\n}}\n'
    ) + "".join(map(_text, ("gemm_pipeline.cu", *files)))


@functools.cache
def _text(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether a device runs these kernels, and is as wide as their tiles are made for."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return torch.cuda.get_device_properties(device).multi_processor_count >= PROCESSORS


@functools.lru_cache(maxsize=4096)
def describe(
    address: int,
    element: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = 128,
) -> ctypes.Array[ctypes.c_uint64]:
    """`driver.describe`, of a tensor in steps of the ring unless said: as a kernel's parameter."""
    return (ctypes.c_uint64 * 16).from_buffer_copy(driver.describe(address, element, shape, strides, box, swizzle))
