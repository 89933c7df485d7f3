"""A short convolution where many rows decode a token each, on Hopper GPUs: the kernel in CUDA C++.

Owns its constants and launch; `conv_decode.cu` does the work. Invariant: the bits are those of `conv_decode_gpu`.
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

_TILE, _AHEAD, _RESIDENT = 1024, 4, 2  # channels of a block; rows at once; blocks of a processor
_MOST_SHARED = 48 << 10  # bytes of a block, which need no leave
THREADS = 256
_TYPES = (torch.bfloat16, torch.float16)
_FOLDER = Path(__file__).parent
KERNEL = CudaKernel(
    "conv_decode",
    (_FOLDER / "kept.cu", _FOLDER / "conv_decode.cu"),
    "rows that decode are convolved by another kernel, which may be slower",
)


class Told(ctypes.Structure):
    """What a launch is told, as conv_decode.cu has it."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out", "rows", "query_start", "seq_lens")),
        *((name, ctypes.c_void_p) for name in ("state_table", "input_table", "state", "input")),
        ("x_row", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("num_rows", "state_columns", "input_columns", "state_first")),
        ("input_first", ctypes.c_int),
    ]


def serves(width: int, chunk: int, x: Tensor, kept: Sequence[Tensor]) -> bool:
    """Whether a layer's rows are convolved here. kept: states and inputs."""
    return x.is_cuda and is_hopper(x.device) and fits(width, chunk, x, kept)


def fits(width: int, chunk: int, x: Tensor, kept: Sequence[Tensor]) -> bool:
    """Whether the shape is one that the kernel knows, and lies on bounds of 8 bytes."""
    if x.dtype not in _TYPES or any(each.dtype != x.dtype for each in kept):
        return False
    if not 2 <= width <= min(chunk, 8) or x.shape[1] % 4 or x.stride(1) != 1:
        return False
    steps = [step for each in kept for step in each.stride()[:3]] + [x.stride(0)]
    return not any(step % 4 for step in steps) and not any(each.data_ptr() % 8 for each in (x, *kept))


def macros(
    sizes: tuple[int, int, int], block_size: int, forms: Sequence[Form], dtype: torch.dtype, acts: tuple[bool, bool]
) -> dict[str, int | str]:
    """A layer's. sizes: width, channels, a chunk's tokens; forms: of states and inputs; acts: whether bias, silu."""
    return {
        "WIDTH": sizes[0],
        "CHANNELS": sizes[1],
        "CHUNK": sizes[2],
        "AHEAD": _AHEAD,
        "BLOCK": block_size,
        "HALF": int(dtype == torch.float16),
        "HAS_BIAS": int(acts[0]),
        "SILU": int(acts[1]),
        "STATE_FORM": ",".join(map(str, forms[0])),
        "INPUT_FORM": ",".join(map(str, forms[1])),
    }


def shared_bytes(told: Told, own: dict[str, int | str], num_parts: int) -> int:
    """Of a block of one of so many parts of the rows."""
    return -(-int(told.num_rows) // num_parts) * _row_bytes(own)


def _row_bytes(own: dict[str, int | str]) -> int:
    return 8 * 2 * int(own["WIDTH"])


def parts_of(told: Told, own: dict[str, int | str], num_processors: int) -> int:
    """Of the rows: as many as keep a GPU busy, or more where a block's would not fit."""
    busy = min(int(told.num_rows), _RESIDENT * num_processors // num_tiles(own))
    return max(1, busy, -(-int(told.num_rows) // (_MOST_SHARED // _row_bytes(own))))


def num_tiles(own: dict[str, int | str]) -> int:
    """Of the channels, a block each."""
    return -(-int(own["CHANNELS"]) // _TILE)


def is_loaded(own: dict[str, int | str], device: torch.device) -> bool:
    """See CudaKernel."""
    return KERNEL.is_loaded(own, 0, device)


def launch(told: Told, own: dict[str, int | str], device: torch.device) -> None:
    """Run it. Ask `is_loaded` first."""
    parts = parts_of(told, own, processors(device))
    KERNEL.launch(told, num_tiles(own) * parts, THREADS, shared_bytes(told, own, parts), own, device)
