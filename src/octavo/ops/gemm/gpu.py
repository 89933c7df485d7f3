"""Dense products on a GPU: which kernel, with which tile, for a shape and a number of rows.

Owns the choice and the canonical order: an output is one float32 accumulator that walks K in order, in the 16-wide
steps of the matrix units (in single fused multiply-adds for float32), then the bias, then one rounding. K is never
split. Few rows run Triton tiles; many rows run cuBLASLt, told not to split K, where `check_library` has found it to
give the bits of that order; on Hopper `cluster_gemm` takes most between. It knows nothing of layers. Invariant: a
row's bits depend on that row, the weight and the order above only, so every choice made here is free to follow the
number of rows. The fast numerics (`select`) leave everything to the library, and keep no promise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.ops.compile import validation_cache
from octavo.ops.compile.launch import chained
from octavo.ops.gemm.kernels import product

_LOG = logging.getLogger(__name__)
NUMERICS = ("reproducible", "fast")
# What the library may do, process-wide: (sum in narrower types, split K), and which of torch's two it is.
_WAYS = {"whole": ((False, False), "cublaslt"), "fast": ((True, True), "cublas"), "split": ((False, True), "cublas")}
_LIBRARY = threading.RLock()  # from a choice of the way to the product that it is for
_library_way = ""  # what torch was last told
# Shapes (N, K, dtype) that `check_library` has seen, and those where it found another order.
_checked: set[tuple[int, int, torch.dtype]] = set()
_without_library: set[tuple[int, int, torch.dtype]] = set()
_CHECKED_ROWS = (17, 40, 64, 130, 256, 512, 1024)
_CHECKED_BYTES = 1 << 28  # of one result
# Of weights [n, k] of one row's products whose own kernel streams them faster: both at least, and n at most.
_STREAMED, _MOST_STREAMED = 4096, 16384
_MOST_COLUMNS = 8  # rows that stream weights of more channels


class _Here(threading.local):
    """What a thread has chosen: two engines of one process do not disturb each other."""

    numerics = "reproducible"


_HERE = _Here()


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """What a program computes and how it is compiled. Changes no bit."""

    rows: int
    channels: int
    depth: int  # k of one step of the pipeline
    warps: int
    stages: int
    swap: bool = False  # channels are the first side of the matrix unit, whose second may be 8 rows only
    group: int = 8  # row tiles that share a sweep over the channels
    ahead: int = 0  # steps of K, at most 3, whose weights are read before the kernel ahead is done


def select(numerics: str) -> str:
    """Choose "reproducible" (as at import) or "fast" products for this thread, before anything is captured.

    Returns what was chosen before. Raises ValueError for another name.
    """
    if numerics not in NUMERICS:
        raise ValueError(f"unknown numerics {numerics!r}: known are {', '.join(NUMERICS)}")
    before, _HERE.numerics = _HERE.numerics, numerics
    return before


def is_reproducible() -> bool:
    """Whether this thread's products keep the canonical order."""
    return _HERE.numerics == "reproducible"


def tile_for(num_rows: int, n: int, k: int, dtype: torch.dtype) -> Tile:
    """The tile for a shape and a number of rows: the best of a sweep on an H200."""
    if dtype == torch.float32:
        return Tile(16, 32, 32, 4, 3) if num_rows <= 16 else Tile(64, 64, 32, 8, 3)
    if num_rows <= 8:
        if n > 65536:
            return Tile(8, 64, 256, 4, 3, swap=True)
        return Tile(8, 16, 256, 1, 4, swap=True) if n <= 16384 else Tile(8, 32, 256, 2, 4, swap=True)
    if num_rows <= 16 or (num_rows <= 32 and n <= 1024):
        if n > 65536:
            return Tile(16, 64, 256, 4, 3)
        if n <= 4096 or k <= 3072:
            return Tile(8, 32, 256, 2, 4, swap=True, ahead=1)
        return Tile(16, 32, 256, 2, 4, swap=True)
    if num_rows <= 32:
        return Tile(16, 64, 256, 4, 3, swap=True) if n <= 4096 else Tile(32, 64, 128, 4, 4, swap=True)
    if num_rows <= 128:
        if n <= 2048:
            return Tile(64, 16, 128, 4, 4) if k % 256 else Tile(16, 64, 256, 4, 3, swap=True, ahead=1)
        return Tile(64, 64, 64, 4, 4)
    return Tile(128, 128, 64, 8, 4) if num_rows <= 1024 else Tile(128, 256, 64, 8, 3)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tile: Tile | None = None) -> Tensor:
    """`x @ weight.T + bias` into out [M, N]: see `octavo.ops.gemm.linear`. tile: this one instead of the table's."""
    num_rows, k = x.shape
    n = weight.shape[0]
    assert weight.is_contiguous() and x.stride(1) == out.stride(1) == 1, "last axes are contiguous, weights whole"
    assert x.dtype == weight.dtype or x.dtype == torch.float32, "activations are as wide as the weights, or float32"
    if not num_rows:
        return out
    if tile is None:
        if not is_reproducible():
            out = _library(x, weight.to(x.dtype), out, may_split=True)
            return out if bias is None else out.add_(bias)
        if bias is None and _prefers_library(num_rows, n, k) and _may_use_library(x, weight, out):
            return _library(x, weight, out, may_split=False)
        if 1 < num_rows <= _MOST_COLUMNS and n > _MOST_STREAMED:
            from octavo.ops.gemm import streamed_gemm

            if streamed_gemm.serves(x, weight, bias):
                streamed_gemm.product(x, weight, out)
                return out
        if num_rows == 1 and min(n, k) >= _STREAMED and n <= _MOST_STREAMED:
            from octavo.ops.gemm import gemv

            if gemv.serves(x, weight, bias, None, normed=False, out_dtype=out.dtype):
                gemv.product(x, weight, out)
                return out
        tile = tile_for(num_rows, n, k, x.dtype)
    programs = -(-num_rows // tile.rows) * -(-n // tile.channels)
    product[(programs,)](
        x, weight, out if bias is None else bias, out, num_rows, x.stride(0), out.stride(0), N=n, K=k, BM=tile.rows,
        BN=tile.channels, BK=tile.depth, GROUP=tile.group, STAGES=tile.stages, SWAP=tile.swap,
        AHEAD=min(tile.ahead, -(-k // tile.depth)), HAS_BIAS=bias is not None, PRECISION="ieee",
        num_warps=tile.warps,
        **chained(x.device),
    )  # fmt: skip
    return out


def check_library(weight: Tensor) -> bool:
    """Whether, for this weight's shape [N, K] and dtype, the library gives the canonical order's bits.

    Compares both over several numbers of heavy-tailed rows; a shape that fails runs Triton tiles at any number of rows.
    The answer is kept on disk under all that it follows from. Once per shape and process, before anything is captured.
    """
    (n, k), dtype = weight.shape, weight.dtype
    shape = n, k, dtype
    if not is_reproducible() or shape in _checked:
        return shape not in _without_library
    if not validation_cache.holds(["library", n, k, str(dtype)], weight.device, lambda: _agrees(weight)):
        _LOG.warning(
            "cuBLASLt sums in another order for a %s weight %s: products of many rows are slower", dtype, shape
        )
        _without_library.add(shape)
    _checked.add(shape)
    return shape not in _without_library


def _agrees(weight: Tensor) -> bool:
    (n, k), dtype = weight.shape, weight.dtype
    generator = torch.Generator(weight.device).manual_seed(0)
    for num_rows in _CHECKED_ROWS:
        if 4 * num_rows * n > _CHECKED_BYTES:
            break
        spread = torch.rand(num_rows, k, generator=generator, device=weight.device) * 16 - 8
        values = torch.randn(num_rows, k, generator=generator, device=weight.device) * spread.exp2()
        x, ours, theirs = values.to(dtype), *values.new_empty(2, num_rows, n).to(dtype)
        if not (_prefers_library(num_rows, n, k) and _may_use_library(x, weight, theirs)):
            continue
        linear(x, weight, None, ours, tile_for(1, n, k, dtype))
        if not torch.equal(ours, _library(x, weight, theirs, may_split=False)):
            return False
    return True


def open_library() -> None:
    """Let the library multiply something on the default device, for its first products take 110 ms."""
    x = torch.zeros(32, 32, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        _library(x, x, torch.empty(32, 32, dtype=dtype), may_split=not is_reproducible())


def _prefers_library(num_rows: int, n: int, k: int) -> bool:
    """Whether the library is the faster one: its unsplit kernels fall far behind where a long K meets few tiles."""
    if n > 65536:
        return num_rows > 32
    return num_rows > 16 and (k < 3072 or num_rows * n >= 1 << 17)


def _may_use_library(x: Tensor, weight: Tensor, out: Tensor) -> bool:
    n, k = weight.shape
    aligned = not (n % 8 or k % 8 or x.stride(0) % 8 or out.stride(0) % 8 or x.data_ptr() % 16 or out.data_ptr() % 16)
    return (
        aligned and x.is_cuda and x.dtype == weight.dtype != torch.float32 and (n, k, x.dtype) not in _without_library
    )


def _library(x: Tensor, weight: Tensor, out: Tensor, *, may_split: bool) -> Tensor:
    """torch's product. Without `may_split` only kernels that do not split K may be chosen."""
    with _LIBRARY:
        _choose_way("fast" if may_split else "whole")
        if out.dtype == x.dtype:
            return torch.mm(x, weight.t(), out=out)
        return torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)


@contextlib.contextmanager
def free_library() -> Iterator[None]:
    """torch's own products within may split K, and add up in float32: for what needs no canonical order."""
    with _LIBRARY:
        _choose_way("split")
        yield


def _choose_way(way: str) -> None:
    global _library_way
    if _library_way == way:
        return
    reductions, library = _WAYS[way]
    torch.backends.cuda.preferred_blas_library(library)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reductions
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = reductions
    _library_way = way
