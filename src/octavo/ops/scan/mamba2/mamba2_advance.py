"""States of Mamba-2 in halves behind chunks that decoding ended, on Hopper GPUs: the kernel in CUDA C++.

Owns its constants and launch; `mamba2_advance.cu` does the work. Invariant: the bits are those of `mamba2_advance_gpu`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from octavo.ops.gemm.gemm_pipeline import is_hopper
from octavo.ops.scan.cuda_kernel import CudaKernel, processors
from octavo.ops.scan.kept import Form

_SIZE, _STATES, _CHUNK = 64, 128, 64
THREADS, MOST_ROWS = 256, 1024
_RESIDENT = 2  # blocks of a processor
_FOLDER = Path(__file__).parent
KERNEL = CudaKernel(
    "mamba2_advance",
    (_FOLDER.parent / "kept.cu", _FOLDER / "mamba2_advance.cu"),
    "states of Mamba-2 advance by another kernel, which may be slower",
)


class Told(ctypes.Structure):
    """What a launch is told, as mamba2_advance.cu has it."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "query_start", "seq_lens", "state_table", "input_table")),
        *((name, ctypes.c_void_p) for name in ("state", "x", "b", "total", "dt")),
        *((name, ctypes.c_int) for name in ("num_rows", "num_layers", "state_next", "input_next")),
        *((name, ctypes.c_int) for name in ("state_columns", "input_columns", "state_first", "input_first")),
    ]


def serves(heads: tuple[int, int], sizes: tuple[int, int], chunk: int, num_rows: int, kept: Sequence[Tensor]) -> bool:
    """Whether a layer's states advance here. heads: and groups; sizes: of a head and its states; kept: states, x, B."""
    return kept[0].is_cuda and is_hopper(kept[0].device) and fits(heads, sizes, chunk, num_rows, kept)


def fits(heads: tuple[int, int], sizes: tuple[int, int], chunk: int, num_rows: int, kept: Sequence[Tensor]) -> bool:
    """Whether the shape is one that the kernel knows, and lies on bounds of 16 bytes."""
    if (*sizes, chunk) != (_SIZE, _STATES, _CHUNK) or heads[0] // heads[1] % 4 or num_rows > MOST_ROWS:
        return False
    steps = [step * each.element_size() for each in kept[:3] for step in each.stride()[:3]]
    steps += [each.data_ptr() for each in kept[:3]]
    types = [each.dtype for each in kept[:3]]
    return types == [torch.float32, torch.bfloat16, torch.bfloat16] and not any(step % 16 for step in steps)


def macros(heads: tuple[int, int], block_size: int, forms: Sequence[Form]) -> dict[str, int | str]:
    """A layer's. forms: of what is kept."""
    per = heads[0] // heads[1]
    names = "STATE_FORM", "X_FORM", "B_FORM", "TOTAL_FORM", "DT_FORM"
    return {
        "HEADS": heads[0],
        "PER": per,
        "EACH": 4 if per % 8 else 8,
        "BLOCK": block_size,
        "HALF": 0,
        **{name: ",".join(map(str, form)) for name, form in zip(names, forms, strict=True)},
    }


def shared_bytes(own: dict[str, int | str]) -> int:
    """Of a block: states, tokens, gates, B, weights, where two tasks' things lie, and which rows end a chunk."""
    places = 4 * _CHUNK * 8 + 2 * int(own["EACH"]) * 8
    return 2 * 4 * _SIZE * _STATES + 3 * (2 * _CHUNK * _SIZE + 512) + 2 * _CHUNK * _STATES + 8 * 256 + 2 * places + 128


def is_loaded(own: dict[str, int | str], device: torch.device) -> bool:
    """See CudaKernel."""
    return KERNEL.is_loaded(own, shared_bytes(own), device)


def launch(told: Told, own: dict[str, int | str], device: torch.device) -> None:
    """Run it. Ask `is_loaded` first."""
    blocks = min(tasks_of(told, own), _RESIDENT * processors(device))
    KERNEL.launch(told, blocks, THREADS, shared_bytes(own), own, device)


def tasks_of(told: Told, own: dict[str, int | str]) -> int:
    """Of a launch, at most."""
    return int(told.num_rows * told.num_layers) * (int(own["HEADS"]) // int(own["EACH"]))
