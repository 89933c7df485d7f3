"""Mamba-2 over prompts, with states in halves, on Hopper GPUs: chunks walked by CUDA C++.

Owns its constants and launch; `mamba2_prompts.cu` does the work. Invariant: the bits are those of `mamba2_walk`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from octavo.ops.compile import driver
from octavo.ops.scan.cuda_kernel import CudaKernel, processors
from octavo.ops.scan.kept import Form
from octavo.ops.scan.mamba2 import mamba2_decode

_SIZE, _STATES, _CHUNK = 64, 128, 64
_STAGES, _RING = 3, 2  # chunks that are on their way or used, and states that products and the cache take
_RESULT_GROUPS = 2  # warp groups that make results; two walk the states, and one helps
THREADS = 128 * (3 + _RESULT_GROUPS)
_BFLOAT16, _MOST_TOKENS = 9, 1 << 24  # of a descriptor; boxes lie within the tokens that there are
_FOLDER = Path(__file__).parent
KERNEL = CudaKernel(
    "mamba2_prompts",
    (_FOLDER.parent / "kept.cu", _FOLDER / "mamba2_prompts.cu"),
    "prompts of Mamba-2 are walked by another kernel, which may be slower",
)
serves, states_of = mamba2_decode.serves, mamba2_decode.states_of
fits = mamba2_decode.fits


class Told(ctypes.Structure):
    """What a launch is told, as mamba2_prompts.cu has it."""

    _fields_ = [
        ("states", ctypes.c_uint64 * 16),
        ("given", ctypes.c_uint64 * 16),
        *((name, ctypes.c_void_p) for name in ("xbc", "total", "dt", "skip", "out", "rows", "query_start")),
        *((name, ctypes.c_void_p) for name in ("seq_lens", "num_ahead", "state_table", "input_table")),
        *((name, ctypes.c_void_p) for name in ("state", "x_kept", "b_kept")),
        ("xbc_row", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("state_columns", "input_columns", "state_first", "input_first")),
        ("num_rows", ctypes.c_int),
        ("rest", ctypes.c_int * 13),  # up to a multiple of 64 bytes
    ]


def macros(heads: tuple[int, int], block_size: int, forms: Sequence[Form]) -> dict[str, int | str]:
    """A layer's. heads: and groups; forms: of what is kept."""
    names = "STATE_FORM", "X_FORM", "B_FORM"
    return {
        "HEADS": heads[0],
        "GROUPS": heads[1],
        "PER": heads[0] // heads[1],
        "BLOCK": block_size,
        "HALF": 0,
        "STAGES": _STAGES,
        "RING": _RING,
        "RESULT_GROUPS": _RESULT_GROUPS,
        **{name: ",".join(map(str, form)) for name, form in zip(names, forms, strict=False)},
    }


def shared_bytes(own: dict[str, int | str]) -> int:
    """Of a block: chunks, states, results, weights, tasks and barriers."""
    stages, ring, groups = (int(own[name]) for name in ("STAGES", "RING", "RESULT_GROUPS"))
    tile, state = 2 * _SIZE * _CHUNK, 4 * _SIZE * _STATES
    stage = 5 * tile + 1024
    return stages * stage + ring * state + groups * tile + 8 * _CHUNK * 4 + 2 * 64 + 16 * (stages + ring + 2)


def given_of(xbc: Tensor) -> ctypes.Array[ctypes.c_uint64]:
    """The descriptor of x, B and C of tokens; nothing for a CPU that emulates."""
    if not xbc.is_cuda:
        return (ctypes.c_uint64 * 16)()
    return (ctypes.c_uint64 * 16).from_buffer_copy(_described(xbc.data_ptr(), xbc.shape[1], 2 * xbc.stride(0)))


@functools.lru_cache(maxsize=4096)
def _described(address: int, columns: int, row: int) -> bytes:
    return driver.describe(address, _BFLOAT16, (columns, _MOST_TOKENS), (row,), (_SIZE, _CHUNK), 128)


def is_loaded(own: dict[str, int | str], device: torch.device) -> bool:
    """Whether the kernel is there: see CudaKernel."""
    return KERNEL.is_loaded(own, shared_bytes(own), device)


def launch(told: Told, num_rows: int, own: dict[str, int | str], device: torch.device) -> None:
    """Run it. num_rows: that are served, at most. Ask `is_loaded` first."""
    blocks = min(num_rows * int(own["HEADS"]), processors(device))
    if blocks:
        KERNEL.launch(told, blocks, THREADS, shared_bytes(own), own, device)
