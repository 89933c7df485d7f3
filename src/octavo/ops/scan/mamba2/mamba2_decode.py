"""Mamba-2 where many rows decode a token each, with states in halves, on Hopper GPUs: the kernel in CUDA C++.

Owns its constants and launch; `mamba2_decode.cu` does the work. Invariant: the bits are those of `mamba2_decode_gpu`.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from octavo.ops.compile import driver
from octavo.ops.gemm.gemm_pipeline import is_hopper
from octavo.ops.scan.cuda_kernel import CudaKernel, processors
from octavo.ops.scan.kept import Form

_SIZE, _STATES, _CHUNK, _LEAST = 64, 128, 64, 4
_STAGES = 6  # heads that are on their way or used; more, or five, are no faster
THREADS = 32 * (_STAGES + 3)  # a stage's, the asker and two scouts
_BFLOAT16 = 9  # of a descriptor
_FOLDER = Path(__file__).parent
KERNEL = CudaKernel(
    "mamba2_decode",
    (_FOLDER.parent / "kept.cu", _FOLDER / "mamba2_decode.cu"),
    "rows of Mamba-2 decode by another kernel, which may be slower",
)


class Told(ctypes.Structure):
    """What a launch is told, as mamba2_decode.cu has it."""

    _fields_ = [
        ("states", ctypes.c_uint64 * 16),
        *((name, ctypes.c_void_p) for name in ("rows", "query_start", "seq_lens", "state_table", "input_table")),
        *((name, ctypes.c_void_p) for name in ("x", "b", "total", "dt", "xbc", "given_dt", "decay", "dt_bias")),
        *((name, ctypes.c_void_p) for name in ("skip", "out", "state")),
        *((name, ctypes.c_int64) for name in ("xbc_row", "dt_row")),
        *((name, ctypes.c_float) for name in ("dt_min", "dt_max")),
        *((name, ctypes.c_int) for name in ("num_rows", "state_columns", "input_columns", "state_first")),
        ("input_first", ctypes.c_int),
        ("rest", ctypes.c_int * 5),  # up to a multiple of 64 bytes
    ]


def serves(
    heads: tuple[int, int], sizes: tuple[int, int], chunk: int, given: Sequence[Tensor], kept: Sequence[Tensor]
) -> bool:
    """Whether a layer decodes here. heads: and groups; sizes: of a head and its states; given: x, B and C, and dt."""
    return kept[0].is_cuda and is_hopper(kept[0].device) and fits(heads, sizes, chunk, given, kept)


def fits(
    heads: tuple[int, int], sizes: tuple[int, int], chunk: int, given: Sequence[Tensor], kept: Sequence[Tensor]
) -> bool:
    """Whether the shape is one that the kernel knows, and lies on bounds that copies need.

    kept: states, x, B, sums and steps; states by lines of 128 bytes, the others by 16.
    """
    if (*sizes, chunk) != (_SIZE, _STATES, _CHUNK) or heads[0] % heads[1] or heads[0] // heads[1] % _LEAST:
        return False
    if [(each.dtype, each.stride(1)) for each in given] != [(torch.bfloat16, 1)] * 2:
        return False
    if [each.dtype for each in kept] != [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]:
        return False
    bounds = [step * kept[0].element_size() % 128 for step in kept[0].stride()[:3]] + [kept[0].data_ptr() % 16]
    bounds += [step * each.element_size() % 16 for each in kept[1:] for step in each.stride()[:3]]
    bounds += [each.data_ptr() % 16 for each in kept[1:]] + [given[0].data_ptr() % 16, given[0].stride(0) * 2 % 16]
    return not any(bounds)


def macros(heads: tuple[int, int], block_size: int, forms: Sequence[Form]) -> dict[str, int | str]:
    """A layer's. heads: and groups; forms: of what is kept."""
    per = heads[0] // heads[1]
    names = "STATE_FORM", "X_FORM", "B_FORM", "TOTAL_FORM", "DT_FORM"
    return {
        "HEADS": heads[0],
        "GROUPS": heads[1],
        "PER": per,
        "EACH": math.gcd(per, 16),
        "STAGES": _STAGES,
        "BLOCK": block_size,
        "HALF": 0,
        **{name: ",".join(map(str, form)) for name, form in zip(names, forms, strict=True)},
    }


def shared_bytes(own: dict[str, int | str]) -> int:
    """Of a block: stages of a state and its x; B, sums and steps of a task; two tasks; barriers."""
    each, stages = int(own["EACH"]), int(own["STAGES"])
    stage = 2 * _SIZE * _STATES + _CHUNK * (2 * _SIZE + 16)
    tokens = _CHUNK * (2 * _STATES + 16 + 2 * (4 * each + 16) + 3 * 8)
    task = 48 + each * (16 + 2 * _CHUNK) + 2 * _STATES + 8 * _CHUNK
    return stages * stage + 2 * tokens + 2 * task + 2 * 8 * stages + 6 * 8


def states_of(state: Tensor) -> ctypes.Array[ctypes.c_uint64]:
    """The descriptor of what is kept of states, as lines of 64 numbers of 16 bits; nothing for a CPU that emulates."""
    if not state.is_cuda:
        return (ctypes.c_uint64 * 16)()
    extent = 1 + sum((size - 1) * step for size, step in zip(state.shape, state.stride(), strict=True))
    return (ctypes.c_uint64 * 16).from_buffer_copy(_described(state.data_ptr(), extent * 4 // 128))


@functools.lru_cache(maxsize=4096)
def _described(address: int, lines: int) -> bytes:
    return driver.describe(address, _BFLOAT16, (_SIZE, lines), (2 * _SIZE,), (_SIZE, _STATES), 128)


def is_loaded(own: dict[str, int | str], device: torch.device) -> bool:
    """See CudaKernel."""
    return KERNEL.is_loaded(own, shared_bytes(own), device)


def launch(told: Told, own: dict[str, int | str], device: torch.device) -> None:
    """Run it. Ask `is_loaded` first."""
    KERNEL.launch(told, min(processors(device), blocks_of(told, own)), THREADS, shared_bytes(own), own, device)


def blocks_of(told: Told, own: dict[str, int | str]) -> int:
    """Of a launch, at most."""
    return int(told.num_rows) * int(own["HEADS"]) // _LEAST
