"""A head's product and the draw in one kernel, on Hopper GPUs: tokens of dozens to hundreds of rows, without logits.

Owns which calls run here, the kernel's tiles, its scratch memory, compilation and launch; `fused_lm_head_sampling.cu`
does the work. Does not know sampling parameters beyond a row's temperature and seed. Invariant: tokens and failures are
those of `matmul.linear` in float32 and `sample.draw`; a kernel that gives others, or cannot be had, is told once and
never used.
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

from octavo.ops.compile import disk_cache, driver, nvrtc, validation_cache
from octavo.ops.compile.stream_scratch import StreamScratch
from octavo.ops.gemm import gpu as matmul
from octavo.ops.gemm.gemm_pipeline import ALIGNED, DEPTH, ELEMENTS, Tile, describe, is_hopper, macros, source
from octavo.ops.sampling import gpu as sample

_LOG = logging.getLogger(__name__)
_FEWEST_CHANNELS = 1 << 16  # fewer tiles keep the processors busy too unevenly
# Rows that are drawn here, which nearly fill tiles: with more padding, noise that is long hides what is saved.
MAX_ROWS, _MOST_PADDING = 512, 16
ROWS = tuple(rows for rows in range(1, MAX_ROWS + 1) if -rows % 128 <= _MOST_PADDING)
_KEPT = 16  # sums that a thread settles at a time
# Two blocks share what they read: the rows, or where row tiles come in pairs the weights.
SHARED_ROWS = Tile(2, 256, first_shared=2, rows_first=True, kept=_KEPT)
SHARED_WEIGHTS = Tile(2, 256, second_shared=2, rows_first=True, kept=_KEPT)
_CHECKED_ROWS = {SHARED_ROWS: 72, SHARED_WEIGHTS: 200}  # of the first product of a kernel

_REASONS = OSError, driver.DriverError, nvrtc.CompileError  # that kernels cannot be had

_Heads = tuple[torch.dtype, torch.device]
_are_found: dict[_Heads, bool] = {}  # whether the kernels are found right
_functions: dict[tuple[Tile, _Heads], int] = {}  # that are loaded


def tile_for(num_rows: int) -> Tile:
    """The tile for a number of rows."""
    return SHARED_ROWS if -(-num_rows // SHARED_ROWS.rows) % 2 else SHARED_WEIGHTS


def supports(weight: Tensor) -> Collection[int]:
    """The numbers of rows that are drawn here by a head's weight [N, K], if they are laid out plainly.

    The first call for a dtype compares the kernels with what they stand for, once a machine: that waits for the GPU,
    and is none while a graph is captured.
    """
    n, k = weight.shape
    fits = n >= _FEWEST_CHANNELS and not k % DEPTH and weight.dtype in ELEMENTS and weight.is_contiguous()
    is_served = fits and is_hopper(weight.device) and matmul.is_reproducible() and not weight.data_ptr() % ALIGNED
    return ROWS if is_served and _are_right(weight) else ()


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether rows x [M, K] by weight [N, K] are drawn here.

    While a graph is captured, only by a kernel that is loaded: by an earlier call for such rows, or `load_for`.
    """
    if len(x) not in supports(weight) or x.dtype != weight.dtype or x.stride(1) != 1:
        return False
    if (2 * x.stride(0) | x.data_ptr()) % ALIGNED:
        return False
    return _is_loaded(tile_for(len(x)), (weight.dtype, weight.device))


def load_for(num_rows: int) -> None:
    """Load the kernel that draws so many rows by heads of the kinds that `supports` was asked about."""
    for kind in [kind for kind, are_right in _are_found.items() if are_right and num_rows in ROWS]:
        _is_loaded(tile_for(num_rows), kind)


def _are_right(weight: Tensor) -> bool:
    """Whether the kernels draw the right tokens; tells once why they cannot be had."""
    kind = weight.dtype, weight.device
    if kind not in _are_found:
        if torch.cuda.is_current_stream_capturing():
            return False
        try:
            _check(weight)
            _are_found[kind] = True
        except _REASONS as error:
            _give_up(kind, error)
    return _are_found[kind]


def _is_loaded(tile: Tile, kind: _Heads) -> bool:
    """Whether a right kernel is there. Loads it unless a graph is captured."""
    if (tile, kind) not in _functions and not torch.cuda.is_current_stream_capturing():
        try:
            _load(tile, kind)
        except _REASONS as error:
            _give_up(kind, error)
    return (tile, kind) in _functions


def _load(tile: Tile, kind: _Heads) -> int:
    """Raises what _REASONS are."""
    code = machine_codes(kind[0])[tile]
    SCRATCH.of(kind[1])
    return _functions.setdefault((tile, kind), driver.load(code, "product_and_draw", tile.shared_bytes))


def _give_up(kind: _Heads, error: Exception) -> None:
    _LOG.warning("logits are written and read again where tokens alone are asked for, slower: %s", error)
    _are_found[kind] = False


@functools.cache
def machine_codes(dtype: torch.dtype) -> dict[Tile, bytes]:
    """The kernels' machine code: kept, or compiled now. Raises CompileError."""
    missing = [tile for tile in _CHECKED_ROWS if not nvrtc.is_cached(*_text(tile, dtype))]
    with ThreadPoolExecutor(len(_CHECKED_ROWS)) as pool:
        compiled = dict(zip(missing, pool.map(lambda tile: compile_tile(tile, dtype), missing), strict=True))
    return {tile: compiled.get(tile) or compile_tile(tile, dtype) for tile in _CHECKED_ROWS}


def compile_tile(tile: Tile, dtype: torch.dtype) -> bytes:
    """The machine code of a kernel. Raises CompileError."""
    return nvrtc.machine_code(*_text(tile, dtype))


def _text(tile: Tile, dtype: torch.dtype) -> tuple[str, dict[str, int | str], str]:
    return source(tile, dtype, "../sampling/fused_lm_head_sampling.cu"), macros(tile, dtype), "sm_90a"


def _check(weight: Tensor) -> None:
    """Raises DriverError if a kernel draws other tokens than the two that it stands for, now or when that was kept."""
    codes = machine_codes(weight.dtype)
    what = ["fused_lm_head_sampling", *weight.shape, *(disk_cache.sum_of(codes[tile]) for tile in codes)]
    if not validation_cache.holds(what, weight.device, lambda: all(_agrees(tile, weight) for tile in codes)):
        raise driver.DriverError("the kernel that draws as it multiplies draws other tokens")


def _agrees(tile: Tile, weight: Tensor) -> bool:
    num_rows, device = _CHECKED_ROWS[tile], weight.device
    function = _load(tile, (weight.dtype, device))
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(num_rows, weight.shape[1], generator=generator, device=device).to(weight.dtype)
    rows = torch.arange(num_rows, device=device)
    tables = rows, (rows % 2).float(), rows * 7, rows.flip(0)
    logits = matmul.linear(x, weight, None, x.new_empty(num_rows, weight.shape[0], dtype=torch.float32))
    expected = sample.draw(logits, *tables)
    return all(map(torch.equal, _launch(function, tile, x, weight, *tables), expected))


def draw(
    x: Tensor, weight: Tensor, rows: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """See `octavo.ops.gemm.fused.fused_linear_sampling`, of calls that `serves` takes. Launches must not overlap."""
    tile, kind = tile_for(len(x)), (weight.dtype, weight.device)
    function = _functions.get((tile, kind)) or _load(tile, kind)
    return _launch(function, tile, x, weight, rows, temperatures, seeds, positions)


def _make_scratch(device: torch.device) -> tuple[Tensor, ...]:
    """(scores, codes, arrived, told), see `Parts`; between launches the last two are zero."""
    entries = torch.cuda.get_device_properties(device).multi_processor_count * SHARED_ROWS.rows
    return (
        torch.empty(entries, dtype=torch.float32, device=device),
        torch.empty(entries, dtype=torch.int32, device=device),
        torch.zeros(MAX_ROWS // SHARED_ROWS.rows, dtype=torch.int32, device=device),
        torch.zeros(MAX_ROWS, dtype=torch.int32, device=device),
    )


SCRATCH = StreamScratch(_make_scratch)


def _launch(
    function: int,
    tile: Tile,
    x: Tensor,
    weight: Tensor,
    rows: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor]:
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
        _Addresses(*(tensor.data_ptr() for tensor in SCRATCH.of(device))),
        tokens.data_ptr(),
        failed.data_ptr(),
        num_rows,
        n,
        k // DEPTH,
        channel_clusters,
    )
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
        ("first", ctypes.c_uint64 * 16),
        ("second", ctypes.c_uint64 * 16),
        ("tables", _Addresses),
        ("parts", _Addresses),
        ("tokens", ctypes.c_uint64),
        ("failed", ctypes.c_uint64),
        ("rows", ctypes.c_int),
        ("channels", ctypes.c_int),
        ("steps", ctypes.c_int),
        ("channel_clusters", ctypes.c_int),
    ]


_OFFSETS = [getattr(_Params, name).offset for name, *_ in _Params._fields_]
