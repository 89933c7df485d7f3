"""What the gated delta rule's kernels in CUDA C++ share: layers that they serve, their text, loading and launches."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence
from pathlib import Path

import torch
import triton
from torch import Tensor

from octavo.ops import compile
from octavo.ops.compile import driver, nvrtc, side_by_side
from octavo.ops.gemm.gemm_pipeline import is_hopper
from octavo.ops.scan.kept import Form

_LOG = logging.getLogger(__name__)
_SIZE, _CHUNK = 128, 64  # of a head's keys and values; tokens
_MOST_HEADS = 4  # of one key
_TYPES = (torch.bfloat16, torch.float16)
_functions: dict[tuple[str, int | None, tuple[tuple[str, int | str], ...]], int | None] = {}  # None: not to be had


def serves(heads: tuple[int, int], sizes: tuple[int, int], chunk: int, qkv: Tensor, kept: Sequence[Tensor]) -> bool:
    """Whether a layer's decoding runs here. heads: of values and keys; sizes: of a key and a value.

    kept: states, keys, values, updates, each head's and each token's in one line.
    """
    if not (qkv.is_cuda and qkv.dtype in _TYPES and kept[0].dtype == torch.float32 and is_hopper(qkv.device)):
        return False
    return fits(heads, sizes, chunk, qkv, kept)


def fits(heads: tuple[int, int], sizes: tuple[int, int], chunk: int, qkv: Tensor, kept: Sequence[Tensor]) -> bool:
    """Whether the shape is one that the kernel knows, and lies on bounds of 16 bytes."""
    per = heads[0] // heads[1]
    if sizes != (_SIZE, _SIZE) or chunk != _CHUNK or per > _MOST_HEADS:
        return False
    steps = [step * each.element_size() for each in kept for step in (*each.stride()[:3],)]
    steps += [each.data_ptr() for each in (*kept, qkv)] + [qkv.stride(0) * qkv.element_size()]
    return all(each.dtype == qkv.dtype for each in kept[1:]) and not any(step % 16 for step in steps)


def macros(heads: tuple[int, int], block_size: int, forms: Sequence[Form], dtype: torch.dtype) -> dict[str, int | str]:
    """A layer's. forms: of what is kept."""
    names = "STATE_FORM", "KEY_FORM", "VALUE_FORM", "UPDATE_FORM", "TOTAL_FORM", "RATE_FORM"
    return {
        "HEADS": heads[0],
        "KEY_HEADS": heads[1],
        "PER": heads[0] // heads[1],
        "BLOCK": block_size,
        "HALF": int(dtype == torch.float16),
        **{name: ",".join(map(str, form)) for name, form in zip(names, forms, strict=True)},
    }


@functools.cache
def source(kernel: str) -> str:
    """A kernel's, behind a lane's instructions."""
    return Path(compile.__file__).with_name("lanes.cu").read_text(encoding="utf-8") + own_source(kernel)


def own_source(kernel: str) -> str:
    """Of this folder."""
    names = ("delta_scout", "delta_step") if kernel == "delta_step" else (kernel,)
    return "".join(Path(__file__).with_name(f"{each}.cu").read_text(encoding="utf-8") for each in names)


def is_found(kernel: str, shared: int, own: dict[str, int | str], device: torch.device) -> bool:
    """Whether a kernel is there, whose blocks take so many bytes of shared memory.

    Loads it unless a graph is captured; tells once why it cannot be had.
    """
    name = kernel, device.index, tuple(own.items())
    if name not in _functions:
        if (made := side_by_side.current()) is not None:
            made.compile(kernel, name[2], functools.partial(nvrtc.machine_code, source(kernel), own, "sm_90a"))
            return True
        if torch.cuda.is_current_stream_capturing():
            return False
        try:
            _functions[name] = driver.load(nvrtc.machine_code(source(kernel), own, "sm_90a"), kernel, shared)
        except (OSError, driver.DriverError, nvrtc.CompileError) as error:
            _LOG.warning("the gated delta rule runs on other kernels, which may be slower: %s", error)
            _functions[name] = None
    return _functions[name] is not None


def run(
    kernel: str,
    told: ctypes.Structure,
    blocks: int,
    threads: int,
    shared: int,
    own: dict[str, int | str],
    device: torch.device,
) -> None:
    """Launch a kernel that `is_found`, or nothing in a pass that compiles."""
    function = _functions.get((kernel, device.index, tuple(own.items())))
    if function is not None:
        params = (ctypes.c_void_p * 1)(ctypes.addressof(told))
        stream = triton.runtime.driver.active.get_current_stream(device.index)
        driver.launch_chained(function, blocks, 1, threads, shared, stream, params)
