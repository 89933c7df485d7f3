"""A drafter's last norm, its head and a draw in one kernel: `draw_drafts_of` of `octavo.ops.sampling.drafts`.

Owns that kernel's forms and launch, for one row of bfloat16 on Hopper; `drafts_head.cu` does the work. It is not
Triton's: its weights are told to leave the L2 first, so that the layer's stay there from one draft to the next. Does
not know layers. Invariant: the draft is that of `normed_logits` and `octavo.ops.sampling.drafts_gpu`: logits have their
bits, and how a vocabulary is split moves nothing. It begins whole, as a draw does, see `octavo.ops.compile.launch`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from pathlib import Path

import torch
from torch import Tensor

from octavo.ops import compile
from octavo.ops.compile import loaded
from octavo.ops.gemm import gpu as matmul
from octavo.ops.gemm.gemm_pipeline import is_hopper
from octavo.ops.inputs.tensors import DraftRows, RowTensors
from octavo.ops.norm import rms_norm
from octavo.ops.sampling import drafts_gpu

_KERNEL = "product_and_draft"
# Of a block, of a warp's ring, k of a stage: two blocks leave the next draft's entry room on a processor.
_WARPS, _STAGES, _PART, _BLOCKS = 4, 4, 128, 2
_AHEAD_BYTES = 12 << 20  # of the weights, that are on their way to the L2 when the row comes, beside the rings
_keeps: tuple[Tensor, ...] = ()
_KEPT_AT, _FIRST = -1, 1
_K = 1024, 2048, 4096
_CHECKED = 5  # rows, each alone
_WHOSE = "a drafter's head and its draws run"


class Told(ctypes.Structure):
    """What a launch is told, as drafts_head.cu has it."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "norm", "weight", "ids", "rows", "sample_of", "lengths")),
        *((name, ctypes.c_uint64) for name in ("token_ids", "total_len", "temperatures", "seeds", "drafts")),
        *((name, ctypes.c_uint64) for name in ("best", "arrived")),
        ("kept", ctypes.c_uint64 * 4),
        ("kept_bytes", ctypes.c_uint64 * 4),
        ("eps", ctypes.c_float),
        ("noise", ctypes.c_float),
        ("groups", ctypes.c_uint32),
        ("width", ctypes.c_int32),
        ("place", ctypes.c_int32),
    )


@functools.cache
def source() -> str:
    """The kernel's text, behind a lane's instructions."""
    lanes = Path(compile.__file__).with_name("lanes.cu").read_text(encoding="utf-8")
    return lanes + Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")


@functools.cache
def macros(k: int, processors: int) -> loaded.Macros:
    """Those of a head's weight of so many k."""
    ahead = _AHEAD_BYTES // (32 * _PART * _WARPS * _BLOCKS * processors)
    return {"K": k, "WARPS": _WARPS, "STAGES": _STAGES, "PART": _PART, "AHEAD": ahead, "FIRST": _FIRST, "HALF": 0}


def shared_bytes(own: loaded.Macros) -> int:
    """Of a block: the row, a best of each warp, rings."""
    k, warps, stages, part = (int(own[name]) for name in ("K", "WARPS", "STAGES", "PART"))
    return -(-(2 * k + 8 * warps) // 128) * 128 + warps * stages * 16 * (2 * part + 16)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _scratch(device: torch.device) -> Tensor:
    """The best of all blocks, and how many have told: zero between launches, of which one at a time may use it."""
    return torch.zeros(2, dtype=torch.int64, device=device)


def serves(x: Tensor, weight: Tensor, of: DraftRows) -> bool:
    """Whether `draw` runs these: one row, by a head of whole groups of channels. Not first in a capture."""
    (num_rows, k), n = x.shape, weight.shape[0]
    if num_rows != 1 or len(of.rows) != 1 or k not in _K or n % 16 or not matmul.is_reproducible():
        return False
    if not x.dtype == weight.dtype == torch.bfloat16 or not is_hopper(x.device) or not weight.is_contiguous():
        return False
    if (x.data_ptr() | weight.data_ptr()) % 16:
        return False
    own = macros(k, _processors(x.device))
    if not loaded.is_found(_KERNEL, source, shared_bytes(own), own, x.device, _WHOSE):
        return False
    compare = functools.partial(_draws_alike, weight)
    return loaded.agrees(_KERNEL, (n, k), own, x.device, compare, _WHOSE)


def _draws_alike(weight: Tensor) -> bool:
    (n, k), device = weight.shape, weight.device
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(_CHECKED, k, generator=generator, device=device).to(weight.dtype)
    norm, rows = torch.rand(k, generator=generator, device=device) + 0.5, torch.arange(_CHECKED, device=device)
    ids, one = 3 * torch.arange(n, device=device).flip(0), torch.ones(_CHECKED, dtype=torch.int32, device=device)
    tables = [RowTensors(x.new_zeros((_CHECKED, 8), dtype=torch.int32), 3 * one, 3 * one) for _ in range(2)]
    ours, theirs = (
        DraftRows(rows, (one, one), table, 2, (rows % 3) * 0.5, rows * 7919, 0.8, 3 * n) for table in tables
    )
    logits = torch.cat(
        [matmul.linear(rms_norm(x[i : i + 1], norm, 1e-6), weight, None, _room(x, n)) for i in range(_CHECKED)]
    )
    expected = drafts_gpu.draw_drafts(logits, ids, theirs)
    found = torch.cat([draw(x[i : i + 1], norm, 1e-6, weight, ids, _alone(ours, i)) for i in range(_CHECKED)])
    return torch.equal(found, expected) and torch.equal(tables[0].token_ids, tables[1].token_ids)


def _room(x: Tensor, n: int) -> Tensor:
    return x.new_empty((1, n), dtype=torch.float32)


def _alone(of: DraftRows, entry: int) -> DraftRows:
    some = slice(entry, entry + 1)
    return dataclasses.replace(of, rows=of.rows[some], live=(of.live[0][some], of.live[1][some]))


def draw(x: Tensor, norm: Tensor, eps: float, weight: Tensor, ids: Tensor | None, of: DraftRows) -> Tensor:
    """See `octavo.ops.sampling.drafts.draw_drafts_of`, of calls that `serves` takes."""
    drafts = torch.empty(1, dtype=torch.int64, device=x.device)
    processors = _processors(x.device)
    own = macros(weight.shape[1], processors)
    told = told_of(x, norm, eps, weight, ids, of, drafts, _scratch(x.device))
    blocks = min(_BLOCKS * processors, -(-weight.shape[0] // (16 * _WARPS)))
    loaded.run(_KERNEL, told, blocks, 32 * _WARPS, shared_bytes(own), own, x.device)
    return drafts


def told_of(
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    ids: Tensor | None,
    of: DraftRows,
    drafts: Tensor,
    scratch: Tensor,
) -> Told:
    """What a launch is told: addresses and numbers."""
    keeps = _keeps if of.place == _KEPT_AT or _KEPT_AT < 0 else ()
    assert x.stride(1) == 1 and (ids is None or len(ids) == len(weight)), "each channel has an id"
    return Told(
        *(tensor.data_ptr() for tensor in (x, norm, weight)),
        0 if ids is None else ids.data_ptr(),
        of.rows.data_ptr(),
        *(tensor.data_ptr() for tensor in (*of.live, of.table.token_ids, of.table.total_len)),
        *(tensor.data_ptr() for tensor in (of.temperatures, of.seeds, drafts)),
        scratch.data_ptr(),
        scratch.data_ptr() + 8,
        (ctypes.c_uint64 * 4)(*(tensor.data_ptr() for tensor in keeps)),
        (ctypes.c_uint64 * 4)(*(tensor.numel() * tensor.element_size() for tensor in keeps)),
        eps,
        of.noise,
        weight.shape[0] // 16,
        of.table.token_ids.shape[1],
        of.place,
    )
