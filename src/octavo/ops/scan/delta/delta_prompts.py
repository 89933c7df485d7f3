"""The gated delta rule over prompts, on Hopper GPUs: chunks walked by CUDA C++.

Owns its launch; `delta_prompts.cu` does the work. It is not Triton's, because transposed products follow one another in
a warp's registers, where Triton turns operands in shared memory between them. Invariant: the bits are those of
`delta_walk` and `delta_scan`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from octavo.ops.scan.delta import loading
from octavo.ops.scan.kept import Form

serves = loading.serves
GROUPS = 2  # warp groups of a block, each with 64 channels of a head; four warps help one alone
THREADS = 256


class Told(ctypes.Structure):
    """What a launch is told, as delta_prompts.cu has it."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "total", "rate", "before", "factor")),
        *((name, ctypes.c_void_p) for name in ("inverse", "out", "rows", "query_start", "seq_lens", "num_ahead")),
        *((name, ctypes.c_void_p) for name in ("state_table", "input_table", "state", "key_kept", "value_kept")),
        *((name, ctypes.c_void_p) for name in ("update_kept", "total_kept", "rate_kept")),
        ("value_row", ctypes.c_int64),
        *(
            (name, ctypes.c_int)
            for name in ("state_columns", "input_columns", "state_first", "input_first", "num_rows")
        ),
    ]


def macros(heads: tuple[int, int], block_size: int, forms: Sequence[Form], dtype: torch.dtype) -> dict[str, int | str]:
    """The kernel's. forms: of what is kept."""
    return {"GROUPS": GROUPS} | loading.macros(heads, block_size, forms, dtype)


def shared_bytes(own: dict[str, int | str]) -> int:
    """Of a block: two chunks' operands, and weighted keys and results of one."""
    pitch = 128 * int(own["GROUPS"]) + 16
    chunk = 5 * 64 * 128 + 64 * (pitch + 144 + 96) + 512
    return 2 * (-(-chunk // 1024) * 1024) + 2 * 64 * 128 + 64 * pitch


def is_loaded(own: dict[str, int | str], device: torch.device) -> bool:
    """Whether the kernel is there: see `loading`."""
    return loading.is_found("delta_prompts", shared_bytes(own), own, device)


def launch(told: Told, num_rows: int, own: dict[str, int | str], device: torch.device) -> None:
    """Run it. Ask `is_loaded` first."""
    blocks = num_rows * int(own["HEADS"]) * 2 // int(own["GROUPS"])
    loading.run("delta_prompts", told, blocks, THREADS, shared_bytes(own), own, device)
