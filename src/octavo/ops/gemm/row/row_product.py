"""Products of one row by weights that wait in shared memory, on Hopper GPUs: the one kernel in CUDA C++.

Owns its forms and launch; `row_product.cu` does the work. It is not Triton's, because four warps' matrix unit steps
through k in less time than one warp's, and reads the row as one of 64 lines that nobody has to write. Does not know
layers. Invariant: the bits are those of `octavo.ops.gemm.gemv`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.ops import compile
from octavo.ops.activation import GATED_KINDS
from octavo.ops.compile import loaded
from octavo.ops.gemm.gemm_pipeline import is_hopper

_KERNEL = "row_product"
_THREADS, _MAX_LINES = 128, 64
_MAX_BYTES = 100 << 10  # of the weights that a processor holds for a kernel: two kernels share it
_K = 1024, 2048, 3072
_CHECKED = 8  # rows, each alone


class Told(ctypes.Structure):
    """What a launch is told, as row_product.cu has it."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "norm", "weight", "residual", "out")),
        ("ups", ctypes.c_uint32),
        ("eps", ctypes.c_float),
    )


@functools.cache
def lines_for(n: int, k: int, gated: bool, processors: int) -> int:
    """Lines of the weight [n, k] that a block has, so that each processor has one block at most; 0: not served."""
    sides = 2 if gated else 1
    for channels in range(8, _MAX_LINES // sides + 1, 8):
        if n % (sides * channels) == 0 and n <= processors * sides * channels:
            lines = sides * channels
            return lines if 2 * k * lines <= _MAX_BYTES else 0
    return 0


def macros(k: int, lines: int, *, normed: bool, gated: bool, adds: bool) -> loaded.Macros:
    """The kernel's."""
    return {"K": k, "LINES": lines, "NORM": int(normed), "GATED": int(gated), "ADD": int(adds), "HALF": 0}


def shared_bytes(own: loaded.Macros) -> int:
    """Of a block: the row, sums, weights."""
    k, lines = int(own["K"]), int(own["LINES"])
    return -(-(2 * k + 128 + 4 * lines) // 128) * 128 + 2 * k * lines


@functools.cache
def source(lines: int) -> str:
    """The kernel's text, behind a lane's instructions and the matrix unit's."""
    return text_of(_KERNEL, lines)


def text_of(kernel: str, lines: int) -> str:
    """Of a kernel of this folder."""
    lanes = Path(compile.__file__).with_name("lanes.cu").read_text(encoding="utf-8")
    return lanes + _step(lines // 2) + own_source(kernel)


def own_source(kernel: str) -> str:
    """Of this folder."""
    return "".join(Path(__file__).with_name(f"{each}.cu").read_text(encoding="utf-8") for each in ("row_norm", kernel))


def _step(count: int) -> str:
    """64 lines by 2 * count, 16 of k."""
    names = ", ".join(f"%{i}" for i in range(count))
    sums = ", ".join(f'"+f"(sum[{i}])' for i in range(count))
    return (
        f"__device__ inline void step(float (&sum)[{count}], unsigned long long first, unsigned long long second) {{\n"
        '    asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.'
        f'm64n{2 * count}k16.f32.bf16.bf16 {{{names}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0; }}"\n'
        f'        : {sums} : "l"(first), "l"(second));\n}}\n'
    )


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def serves(
    x: Tensor, weight: Tensor, activation: str | None, *, normed: bool, adds: bool, plain: Callable[..., None]
) -> bool:
    """Whether x [1, K] by weight [N, K] runs here: bfloat16; silu or no activation. Not first in a capture.

    plain: as `product`, by the kernel whose bits it must have.
    """
    (num_rows, k), gated = x.shape, activation in GATED_KINDS
    if num_rows != 1 or k not in _K or (normed and k & (k - 1)) or activation not in (None, "silu"):
        return False
    if not x.dtype == weight.dtype == torch.bfloat16 or not is_hopper(x.device):
        return False
    lines = lines_for(weight.shape[0], k, gated, num_processors(x.device))
    if not lines or x.data_ptr() % 16 or weight.data_ptr() % 16:
        return False
    own = macros(k, lines, normed=normed, gated=gated, adds=adds)
    text = functools.partial(source, lines)
    whose = "products of one row run"
    if not loaded.is_found(_KERNEL, text, shared_bytes(own), own, x.device, whose):
        return False
    compare = functools.partial(_multiplies_alike, weight, activation, plain, normed, adds)
    return loaded.agrees(_KERNEL, (*weight.shape,), own, x.device, compare, whose)


def _multiplies_alike(
    weight: Tensor, activation: str | None, plain: Callable[..., None], normed: bool, adds: bool
) -> bool:
    """Of rows of many sizes, and a weight in which no number is zero."""
    (n, k), device, generator = weight.shape, weight.device, torch.Generator(weight.device).manual_seed(0)
    spread = torch.rand(_CHECKED, k, generator=generator, device=device) * 16 - 8
    x = (torch.randn(spread.shape, generator=generator, device=device) * spread.exp2()).to(weight.dtype)
    weight = (torch.randn(n, k, generator=generator, device=device) * 0.02).to(weight.dtype)
    width = n // 2 if activation in GATED_KINDS else n
    norm = torch.rand(k, generator=generator, device=device) + 0.5 if normed else None
    ours, theirs = x.new_empty(_CHECKED, width), x.new_empty(_CHECKED, width)
    for row in range(_CHECKED):
        residual = spread[row : row + 1, :1].expand(1, width).to(x.dtype).contiguous() if adds else None
        given: dict[str, Any] = {"norm": norm, "eps": 1e-6, "residual": residual, "activation": activation}
        for multiply, out in ((product, ours), (plain, theirs)):
            multiply(x[row : row + 1], weight, out[row : row + 1], **given)
    return torch.equal(ours, theirs)


def product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> None:
    """Into out [1, N]: the product of x, normed if there is a norm, through the activation, or plus the residual."""
    (n, k), gated = weight.shape, activation in GATED_KINDS
    lines = lines_for(n, k, gated, num_processors(x.device))
    own = macros(k, lines, normed=norm is not None, gated=gated, adds=residual is not None)
    told = told_of(x, weight, out, norm, eps, residual, gated)
    loaded.run(_KERNEL, told, n // lines, _THREADS, shared_bytes(own), own, x.device)


def told_of(
    x: Tensor, weight: Tensor, out: Tensor, norm: Tensor | None, eps: float, residual: Tensor | None, gated: bool
) -> Told:
    """What a launch is told: addresses and numbers."""
    first = (x, x if norm is None else norm, weight, x if residual is None else residual, out)
    return Told(*(tensor.data_ptr() for tensor in first), weight.shape[0] // 2 if gated else 0, eps)
