"""A head's product and the draw in one kernel, on Hopper GPUs: tokens of dozens to hundreds of rows, without logits.

Owns which calls run here, the kernel's tiles, its scratch memory, compilation and launch; `head_draw.cu` does the work.
Does not know sampling parameters beyond a row's temperature and seed. Invariant: tokens and failures are those of
`matmul.linear` in float32 and `sample.draw`; a kernel that gives others, or cannot be had, is told once and never used.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
from torch import Tensor

from octavo.ops.gpu import driver, matmul, runtime_compiler, sample
from octavo.ops.gpu.cluster_ring import ALIGNED, DEPTH, ELEMENTS, Tile, describe, is_hopper, macros, source

_LOG = logging.getLogger(__name__)
_FEWEST_CHANNELS = 1 << 16  # fewer tiles keep the processors busy too unevenly
# Rows that are drawn here, which nearly fill tiles: with more padding, noise that is long hides what is saved.
MAX_ROWS, _MOST_PADDING = 512, 16
ROWS = tuple(rows for rows in range(1, MAX_ROWS + 1) if -rows % 128 <= _MOST_PADDING)
# Two blocks share what they read: the rows, or where row tiles come in pairs the weights.
SHARED_ROWS = Tile(2, 256, first_shared=2, rows_first=True)
SHARED_WEIGHTS = Tile(2, 256, second_shared=2, rows_first=True)
_CHECKED_ROWS = {SHARED_ROWS: 72, SHARED_WEIGHTS: 200}  # of the first product of a kernel

_functions: dict[tuple[torch.dtype, torch.device], dict[Tile, int]] = {}  # found right; empty: not to be had


def tile_for(num_rows: int) -> Tile:
    """The tile for a number of rows."""
    return SHARED_ROWS if -(-num_rows // SHARED_ROWS.rows) % 2 else SHARED_WEIGHTS


def takes(weight: Tensor) -> Collection[int]:
    """The numbers of rows that are drawn here by a head's weight [N, K], if they are laid out plainly.

    The first call for a dtype loads the kernels and waits for the GPU, if no graph is captured.
    """
    n, k = weight.shape
    fits = n >= _FEWEST_CHANNELS and not k % DEPTH and weight.dtype in ELEMENTS and weight.is_contiguous()
    is_served = fits and is_hopper(weight.device) and matmul.is_reproducible() and not weight.data_ptr() % ALIGNED
    return ROWS if is_served and _are_loaded(weight) else ()


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether rows x [M, K] by weight [N, K] are drawn here."""
    if len(x) not in takes(weight) or x.dtype != weight.dtype or x.stride(1) != 1:
        return False
    return not (2 * x.stride(0) | x.data_ptr()) % ALIGNED


def _are_loaded(weight: Tensor) -> bool:
    """Whether the kernels are there, which this loads; tells once why they cannot be had."""
    kind = weight.dtype, weight.device
    if kind not in _functions:
        if torch.cuda.is_current_stream_capturing():
            return False
        try:
            codes = machine_codes(weight.dtype)
            found = {tile: driver.load(code, "product_and_draw", tile.shared_bytes) for tile, code in codes.items()}
            _check(found, weight)
        except (OSError, driver.DriverError, runtime_compiler.CompileError) as error:
            _LOG.warning("logits are written and read again where tokens alone are asked for, slower: %s", error)
            found = {}
        _functions[kind] = found
    return bool(_functions[kind])


@functools.cache
def machine_codes(dtype: torch.dtype) -> dict[Tile, bytes]:
    """The kernels' machine code: kept, or compiled now. Raises CompileError."""
    with ThreadPoolExecutor(len(_CHECKED_ROWS)) as pool:
        codes = pool.map(lambda tile: compile_tile(tile, dtype), _CHECKED_ROWS)
        return dict(zip(_CHECKED_ROWS, codes, strict=True))


def compile_tile(tile: Tile, dtype: torch.dtype) -> bytes:
    """The machine code of a kernel. Raises CompileError."""
    return runtime_compiler.machine_code(source(tile, dtype, "head_draw.cu"), macros(tile, dtype), "sm_90a")


def _check(functions: dict[Tile, int], weight: Tensor) -> None:
    """Raises DriverError if a kernel draws other tokens than the two that it stands for. Waits for the GPU."""
    watched = torch.cuda.get_sync_debug_mode()
    if watched:
        torch.cuda.set_sync_debug_mode("default")
    try:
        for tile, function in functions.items():
            num_rows, device = _CHECKED_ROWS[tile], weight.device
            generator = torch.Generator(device).manual_seed(0)
            x = torch.randn(num_rows, weight.shape[1], generator=generator, device=device).to(weight.dtype)
            rows = torch.arange(num_rows, device=device)
            tables = rows, (rows % 2).float(), rows * 7, rows.flip(0)
            logits = matmul.linear(x, weight, None, x.new_empty(num_rows, weight.shape[0], dtype=torch.float32))
            expected = sample.draw(logits, *tables)
            if not all(map(torch.equal, _launch(function, tile, x, weight, *tables), expected)):
                raise driver.DriverError("the kernel that draws as it multiplies draws other tokens")
    finally:
        if watched:
            torch.cuda.set_sync_debug_mode(watched)


def draw(
    x: Tensor, weight: Tensor, rows: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """See `octavo.ops.fused.drawn_linear`, of calls that `serves` takes. Launches must not overlap."""
    tile = tile_for(len(x))
    return _launch(_functions[weight.dtype, weight.device][tile], tile, x, weight, rows, temperatures, seeds, positions)


@functools.cache
def _scratch(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(scores, codes, arrived) of parts; between launches the last is zero. The first call is not under a capture."""
    entries = torch.cuda.get_device_properties(device).multi_processor_count * SHARED_ROWS.rows
    return (
        torch.empty(entries, dtype=torch.float32, device=device),
        torch.empty(entries, dtype=torch.int32, device=device),
        torch.zeros(MAX_ROWS // SHARED_ROWS.rows, dtype=torch.int32, device=device),
    )


def _launch(
    function: int, tile: Tile, x: Tensor, weight: Tensor, rows: Tensor, temperatures: Tensor, seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (num_rows, k), n, device = x.shape, weight.shape[0], x.device
    for tensor, dtype in ((rows, torch.int64), (temperatures, torch.float32), (seeds, torch.int64)):
        assert tensor.dtype == dtype and tensor.is_contiguous(), "tables are contiguous, of the kernel's types"
    assert positions.dtype == torch.int64 and positions.is_contiguous(), "positions are int64"
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    failed = torch.empty(num_rows, dtype=torch.uint8, device=device)
    row_box, channel_box = tile.boxes()
    element, clusters = ELEMENTS[x.dtype], tile.first_shared * tile.second_shared
    row_clusters = -(-num_rows // (tile.rows * tile.second_shared))
    channel_clusters = min(
        torch.cuda.get_device_properties(device).multi_processor_count // clusters // row_clusters,
        -(-n // (tile.channels * tile.first_shared)),
    )
    params = _Params(
        describe(x.data_ptr(), element, (k, num_rows), (2 * x.stride(0),), (DEPTH, row_box)),
        describe(weight.data_ptr(), element, (k, n), (2 * k,), (DEPTH, channel_box)),
        _Addresses(*(tensor.data_ptr() for tensor in (rows, temperatures, seeds, positions))),
        (ctypes.c_uint64 * 3)(*(tensor.data_ptr() for tensor in _scratch(device))), tokens.data_ptr(),
        failed.data_ptr(), num_rows, n, k // DEPTH, channel_clusters,
    )  # fmt: skip
    start = ctypes.addressof(params)
    places = (ctypes.c_void_p * len(_OFFSETS))(*(start + offset for offset in _OFFSETS))
    stream = triton.runtime.driver.active.get_current_stream(device.index)
    blocks = row_clusters * channel_clusters * clusters
    driver.launch_chained(function, blocks, clusters, tile.threads, tile.shared_bytes, stream, places)
    return tokens, failed


_Addresses = ctypes.c_uint64 * 4


class _Params(ctypes.Structure):
    """The kernel's, in order."""

    _fields_ = [
        ("first", ctypes.c_uint64 * 16), ("second", ctypes.c_uint64 * 16), ("tables", _Addresses),
        ("parts", ctypes.c_uint64 * 3), ("tokens", ctypes.c_uint64), ("failed", ctypes.c_uint64),
        ("rows", ctypes.c_int), ("channels", ctypes.c_int), ("steps", ctypes.c_int),
        ("channel_clusters", ctypes.c_int),
    ]  # fmt: skip


_OFFSETS = [getattr(_Params, name).offset for name, *_ in _Params._fields_]
