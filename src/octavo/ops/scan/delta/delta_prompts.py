"""The gated delta rule over prompts from a border on, on Hopper GPUs: chunks walked by CUDA C++.

Owns which layers it serves, its compilation and launch; `delta_prompts.cu` does the work. It is not Triton's, because
transposed products follow one another in a warp's registers, where Triton turns operands in shared memory between them.
Invariant: the bits are `delta_walk`'s.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from octavo.ops.scan.delta import delta_step
from octavo.ops.scan.kept import Form

serves = delta_step.serves
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


def macros(heads: tuple[int, int], block_size: int, forms: Sequence[Form], dtype: torch.dtype) -> dict[str, int | str]:
    """The kernel's. forms: of what is kept."""
    names = "HEADS", "KEY_HEADS", "BLOCK", "HALF", "STATE_FORM", "KEY_FORM", "VALUE_FORM", "UPDATE_FORM"
    shared = delta_step.macros(heads, block_size, forms, dtype)
    return {name: shared[name] for name in names}


def is_loaded(own: dict[str, int | str], device: torch.device) -> bool:
    """See `delta_step.is_loaded`."""
    return delta_step.is_found("delta_prompts", SHARED, own, device)


def launch(told: Told, num_rows: int, own: dict[str, int | str], device: torch.device) -> None:
    """Run it. Ask `is_loaded` first."""
    delta_step.run("delta_prompts", told, num_rows * int(own["HEADS"]), 256, SHARED, own, device)
