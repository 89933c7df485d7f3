"""The gated delta rule over prompts from a border on, on Hopper GPUs: chunks walked by CUDA C++.

Owns its launch; `delta_prompts.cu` does the work. It is not Triton's, because transposed products follow one another in
a warp's registers, where Triton turns operands in shared memory between them. Invariant: the bits are `delta_walk`'s.
"""

from __future__ import annotations

import ctypes

import torch

from octavo.ops.scan.delta import loading

serves, macros = loading.serves, loading.macros
SHARED = 2 * (3 * 64 * 272 + 2 * 64 * 144 + 64 * 96 + 512) + 64 * 272


class Told(ctypes.Structure):
    """What a launch is told, as delta_prompts.cu has it."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("query", "key", "value", "total", "rate", "before", "factor", "inverse")
        ),
        *((name, ctypes.c_void_p) for name in ("out", "rows", "query_start", "seq_lens", "state_table", "input_table")),
        *((name, ctypes.c_void_p) for name in ("state", "key_kept", "value_kept", "update_kept")),
        ("value_row", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("state_columns", "input_columns", "state_first", "input_first")),
    ]


def is_loaded(own: dict[str, int | str], device: torch.device) -> bool:
    """Whether the kernel is there: see `loading`."""
    return loading.is_found("delta_prompts", SHARED, own, device)


def launch(told: Told, num_rows: int, own: dict[str, int | str], device: torch.device) -> None:
    """Run it. Ask `is_loaded` first."""
    loading.run("delta_prompts", told, num_rows * int(own["HEADS"]), 256, SHARED, own, device)
