"""A drafter's entry and its first product on Hopper GPUs, of one row: the one kernel in CUDA C++.

Owns its forms and launch; `row_entry.cu` does the work, with `octavo.ops.gemm.row.row_product`'s matrix unit. Does not
know layers. Invariant: the bits are those of `octavo.ops.embedding.beside_gpu` and, behind it, of
`octavo.ops.gemm.gemv`.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from octavo.ops.compile import loaded
from octavo.ops.gemm.row import row_product

_KERNEL = "row_entry"
_THREADS, _LINES, _PART, _STAGES = 128, 32, 256, 5  # attention, which is next, has room beside
SIZES = 1024, 2048


class Told(ctypes.Structure):
    """What a launch is told, as row_entry.cu has it."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("table", "first_norm", "second_norm", "weight", "out", "own")),
        *((name, ctypes.c_uint64) for name in ("ids", "pick", "states")),
        ("states_row", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("keeps_normed", ctypes.c_uint32),
    )


def macros(size: int, *, whole: bool) -> loaded.Macros:
    """The kernel's."""
    return {"K": 2 * size, "LINES": _LINES, "PART": _PART, "STAGES": _STAGES, "WHOLE": int(whole), "HALF": 0}


def shared_bytes(size: int) -> int:
    """Of a block: the row, and the ring."""
    return 4 * size + 128 + 2 * _STAGES * _PART * _LINES


@functools.cache
def source() -> str:
    """The kernel's text, behind a lane's instructions and the matrix unit's."""
    return row_product.text_of(_KERNEL, _LINES)


def is_found(size: int, device: torch.device, *, whole: bool) -> bool:
    """Whether the kernel is there. Not first in a capture."""
    own = macros(size, whole=whole)
    return loaded.is_found(_KERNEL, source, shared_bytes(size), own, device, "a drafter's entry runs")


def project(
    ids: Tensor,
    table: Tensor,
    states: Tensor,
    norms: tuple[Tensor, Tensor],
    eps: float,
    weight: Tensor,
    pick: Tensor | None,
    *,
    normed: bool,
    behind_draw: bool,
) -> tuple[Tensor, Tensor]:
    """See `octavo.ops.embedding.beside.project_beside`, of one row."""
    n, size = weight.shape[0], states.shape[1]
    out = torch.empty((1, n), dtype=states.dtype, device=states.device)
    own = states.new_empty(1, size) if normed or pick is not None else states
    told = told_of(ids, table, states, norms, eps, weight, pick, out, None if own is states else own, normed)
    form = macros(size, whole=not behind_draw)
    loaded.run(_KERNEL, told, n // _LINES, _THREADS, shared_bytes(size), form, states.device)
    return out, own


def told_of(
    ids: Tensor,
    table: Tensor,
    states: Tensor,
    norms: tuple[Tensor, Tensor],
    eps: float,
    weight: Tensor,
    pick: Tensor | None,
    out: Tensor,
    own: Tensor | None,
    normed: bool,
) -> Told:
    """What a launch is told: addresses and numbers."""
    first = (tensor.data_ptr() for tensor in (table, *norms, weight, out))
    rest = (0 if tensor is None else tensor.data_ptr() for tensor in (own, ids, pick, states))
    return Told(*first, *rest, states.stride(0), eps, int(normed))
