"""The head and draw of `octavo.ops.sampling.drafts_head` in CUDA C++, for `draft.py`: how it is launched."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from octavo.ops import compile, sampling
from octavo.ops.compile import driver, nvrtc
from octavo.ops.inputs.tensors import DraftRows

_PTR = ctypes.c_uint64


class Told(ctypes.Structure):
    """`Told` of drafts_head.cu."""

    _fields_ = (
        *((name, _PTR) for name in ("x", "norm", "weight", "ids", "rows", "sample_of", "lengths", "token_ids")),
        *((name, _PTR) for name in ("total_len", "temperatures", "seeds", "drafts", "best", "arrived")),
        ("eps", ctypes.c_float),
        ("noise", ctypes.c_float),
        ("groups", ctypes.c_uint32),
        ("width", ctypes.c_int32),
        ("place", ctypes.c_int32),
    )


def source() -> str:
    """The kernel's, behind a lane's instructions."""
    lanes = Path(compile.__file__).with_name("lanes.cu").read_text(encoding="utf-8")
    return lanes + Path(sampling.__file__).with_name("drafts_head.cu").read_text(encoding="utf-8")


def macros(k: int, warps: int, stages: int, part: int, kept: int) -> dict[str, int | str]:
    """A launch's."""
    return {"K": k, "WARPS": warps, "STAGES": stages, "PART": part, "KEPT": kept, "HALF": 0}


def shared_bytes(k: int, warps: int, stages: int, part: int) -> int:
    """Of a block."""
    return -(-(2 * k + 8 * warps + 8 * warps * stages) // 128) * 128 + warps * stages * 16 * (2 * part + 16)


@functools.cache
def _function(k: int, *form: int) -> int:
    code = nvrtc.machine_code(source(), macros(k, *form), "sm_90a")
    return driver.load(code, "draft_head", shared_bytes(k, *form[:3]))


@functools.cache
def _scratch(device: torch.device) -> Tensor:
    return torch.zeros(2, dtype=torch.int64, device=device)


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
    """What a launch is told."""
    return Told(
        *(tensor.data_ptr() for tensor in (x, norm, weight)),
        0 if ids is None else ids.data_ptr(),
        of.rows.data_ptr(),
        *(tensor.data_ptr() for tensor in (*of.live, of.table.token_ids, of.table.total_len)),
        *(tensor.data_ptr() for tensor in (of.temperatures, of.seeds, drafts)),
        scratch.data_ptr(),
        scratch.data_ptr() + 8,
        eps,
        of.noise,
        weight.shape[0] // 16,
        of.table.token_ids.shape[1],
        of.place,
    )


def draw(
    blocks: int,
    form: tuple[int, int, int, int],
    x: Tensor,
    norm: Tensor,
    eps: float,
    weight: Tensor,
    ids: Tensor | None,
    of: DraftRows,
) -> Tensor:
    """As `drafts_head.draw`. form: warps, stages, k of a stage, parts of a line that stay in the L2."""
    drafts, k = torch.empty(1, dtype=torch.int64, device=x.device), weight.shape[1]
    told = told_of(x, norm, eps, weight, ids, of, drafts, _scratch(x.device))
    params = (ctypes.c_void_p * 1)(ctypes.addressof(told))
    stream, shared = torch.cuda.current_stream().cuda_stream, shared_bytes(k, *form[:3])
    driver.launch_chained(_function(k, *form), blocks, 1, 32 * form[0], shared, stream, params)
    return drafts
