"""The gated delta rule over prompts, on Hopper GPUs: all that needs no state, made chunk by chunk in CUDA C++.

Owns its launch; `delta_prepare.cu` does the work: that of `normalize_keys`, `scan_gates` and `delta_chunks` at once, so
that q and k are read once and go from one to the next in shared memory. Invariant: the bits are those of the three.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from octavo.ops.scan.delta import loading
from octavo.ops.scan.kept import Form

serves = loading.serves
RESIDENT = {1: 4, 2: 4, 3: 3, 4: 3}  # blocks of a processor, by the heads of a key


class Told(ctypes.Structure):
    """What a launch is told, as delta_prepare.cu has it."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "a", "b", "decay", "dt_bias", "query", "key", "total", "rate")),
        *((name, ctypes.c_void_p) for name in ("before", "factor", "inverse", "rows", "query_start", "seq_lens")),
        *((name, ctypes.c_void_p) for name in ("num_ahead", "input_table", "key_kept", "total_kept", "rate_kept")),
        *((name, ctypes.c_int64) for name in ("qkv_row", "a_row", "b_row")),
        *((name, ctypes.c_int) for name in ("input_columns", "input_first", "num_rows")),
        ("scale", ctypes.c_float),
    ]


def macros(heads: tuple[int, int], block_size: int, forms: Sequence[Form], dtype: torch.dtype) -> dict[str, int | str]:
    """The kernel's. forms: of what is kept."""
    return {"RESIDENT": RESIDENT[heads[0] // heads[1]]} | loading.macros(heads, block_size, forms, dtype)


def shared_bytes(own: dict[str, int | str]) -> int:
    """Of a block: keys and queries, and of each head triangles, sums and rates."""
    return 2 * 64 * 256 + int(own["PER"]) * (4 * 1024 + 2 * 64 * 4)


def is_loaded(own: dict[str, int | str], device: torch.device) -> bool:
    """See CudaKernel."""
    return loading.KERNELS["delta_prepare"].is_loaded(own, shared_bytes(own), device)


def launch(told: Told, num_chunks: int, own: dict[str, int | str], device: torch.device) -> None:
    """Run it. Ask `is_loaded` first. num_chunks: of all rows, at most; two more of each."""
    blocks = num_chunks * int(own["KEY_HEADS"])
    loading.KERNELS["delta_prepare"].launch(told, blocks, 256, shared_bytes(own), own, device)
