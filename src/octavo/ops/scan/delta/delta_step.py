"""The gated delta rule where rows decode, on Hopper GPUs: the one kernel in CUDA C++.

Owns its constants and launch; `delta_step.cu` does the work. It is not Triton's, because a warp's copies come in a ring
that no other warp waits for, on past the end of a task: Triton copies a tile for a whole program, and begins each with
waits. Invariant: the bits are `delta_decode`'s.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from octavo.ops.scan.cuda_kernel import processors
from octavo.ops.scan.delta import loading
from octavo.ops.scan.kept import Form

_SLOT, _PLACES = 2048, 704  # see delta_step.cu
DEPTH = 4  # steps of a warp's ring
RESIDENT = {1: 3, 2: 2, 3: 1, 4: 1}  # blocks of a processor, by the heads of a key
serves = loading.serves


class Told(ctypes.Structure):
    """What a launch is told, as delta_step.cu has it."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "a", "b", "decay", "dt_bias", "out", "rows", "query_start")),
        *((name, ctypes.c_void_p) for name in ("seq_lens", "state_table", "input_table", "state", "key_kept")),
        *((name, ctypes.c_void_p) for name in ("value_kept", "update_kept", "total_kept", "rate_kept")),
        *((name, ctypes.c_int64) for name in ("qkv_row", "a_row", "b_row")),
        *((name, ctypes.c_int) for name in ("state_columns", "input_columns", "state_first", "input_first")),
        ("num_rows", ctypes.c_int),
        ("scale", ctypes.c_float),
    ]


def macros(heads: tuple[int, int], block_size: int, forms: Sequence[Form], dtype: torch.dtype) -> dict[str, int | str]:
    """The kernel's. forms: of what is kept."""
    own: dict[str, int | str] = {"DEPTH": DEPTH, "RESIDENT": RESIDENT[heads[0] // heads[1]]}
    return own | loading.macros(heads, block_size, forms, dtype)


def shared_bytes(own: dict[str, int | str]) -> int:
    """Of a block: rings, what warps share of two tasks, and where two tasks' things lie."""
    per, depth = int(own["PER"]), int(own["DEPTH"])
    brought, made = 64 * 272 + 256 + per * 320, per * (16 * 144 + 128 + 64 + 1040)
    return 4 * per * depth * _SLOT + 2 * brought + made + 2 * _PLACES


def is_loaded(own: dict[str, int | str], device: torch.device) -> bool:
    """See CudaKernel."""
    return loading.KERNELS["delta_step"].is_loaded(own, shared_bytes(own), device)


def launch(told: Told, own: dict[str, int | str], device: torch.device) -> None:
    """Run it; it may begin before the kernel ahead has ended. Ask `is_loaded` first."""
    blocks = min(told.num_rows * int(own["KEY_HEADS"]), int(own["RESIDENT"]) * processors(device))
    loading.KERNELS["delta_step"].launch(told, blocks, 128 * int(own["PER"]) + 32, shared_bytes(own), own, device)
