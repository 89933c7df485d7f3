"""The gated delta rule over prompts, on Hopper GPUs: chunks walked by CUDA C++.

Owns its launch; `delta_prompts.cu` does the work. It is not Triton's, because transposed products follow one another in
a warp's registers, where Triton turns operands in shared memory between them. Invariant: the bits are those of
`delta_walk` and `delta_scan`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from octavo.ops.compile import driver
from octavo.ops.scan.cuda_kernel import processors
from octavo.ops.scan.delta import loading

serves, macros = loading.serves, loading.macros
GROUPS = 1, 2  # of a block
_FLOAT32 = 7  # of a descriptor
_compared: ContextVar[int] = ContextVar("groups", default=0)  # 0: nothing is compared


class Told(ctypes.Structure):
    """What a launch is told, as delta_prompts.cu has it."""

    _fields_ = [
        ("states", ctypes.c_uint64 * 16),
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "total", "rate", "before", "factor")),
        *((name, ctypes.c_void_p) for name in ("inverse", "out", "rows", "query_start", "seq_lens", "num_ahead")),
        *((name, ctypes.c_void_p) for name in ("state_table", "input_table", "state", "key_kept", "value_kept")),
        *((name, ctypes.c_void_p) for name in ("update_kept", "total_kept", "rate_kept")),
        ("value_row", ctypes.c_int64),
        *(
            (name, ctypes.c_int)
            for name in ("state_columns", "input_columns", "state_first", "input_first", "num_rows")
        ),
        ("rest", ctypes.c_int * 15),  # up to a multiple of 64 bytes
    ]


def states_of(state: torch.Tensor) -> ctypes.Array[ctypes.c_uint64]:
    """The descriptor of what is kept of states, as lines of 128 channels; nothing for a CPU that emulates."""
    if not state.is_cuda:
        return (ctypes.c_uint64 * 16)()
    extent = 1 + sum((size - 1) * step for size, step in zip(state.shape, state.stride(), strict=True))
    return (ctypes.c_uint64 * 16).from_buffer_copy(_described(state.data_ptr(), extent // 128))


@functools.lru_cache(maxsize=4096)
def _described(address: int, lines: int) -> bytes:
    return driver.describe(address, _FLOAT32, (128, lines), (512,), (32, 64), 128)


def groups_of(num_heads: int, processors: int) -> int:
    """Warp groups of a block, of 64 channels of a head each: one if all then run at once. num_heads: of all rows."""
    return 1 if 2 * num_heads <= processors else 2


@contextlib.contextmanager
def with_groups(groups: int) -> Iterator[None]:
    """Whatever the number of rows, blocks have so many groups meanwhile: to compare the bits of either kernel."""
    token = _compared.set(groups)
    try:
        yield
    finally:
        _compared.reset(token)


def threads_of(groups: int) -> int:
    """Of a block: its groups', and those of four warps that help."""
    return 128 * groups + 128


def shared_bytes(groups: int) -> int:
    """Of a block: three chunks' operands or two, and weighted keys of two."""
    pitch, buffers = 128 * groups + 16, 4 - groups
    chunk = 5 * 64 * 128 + 64 * (pitch + 112 + 96) + 512
    return buffers * (-(-chunk // 1024) * 1024) + 4 * 64 * 128


def is_loaded(own: dict[str, int | str], device: torch.device) -> bool:
    """Whether the kernel is there, for both numbers of groups: see CudaKernel."""
    found = [loading.KERNELS["delta_prompts"].is_loaded({**own, "GROUPS": n}, shared_bytes(n), device) for n in GROUPS]
    return all(found)


def launch(told: Told, num_rows: int, own: dict[str, int | str], device: torch.device) -> None:
    """Run it. Ask `is_loaded` first."""
    num_heads = num_rows * int(own["HEADS"])
    groups = _compared.get() or groups_of(num_heads, processors(device))
    blocks, shared = num_heads * 2 // groups, shared_bytes(groups)
    loading.KERNELS["delta_prompts"].launch(told, blocks, threads_of(groups), shared, {**own, "GROUPS": groups}, device)
