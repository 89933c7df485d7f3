"""Products of a few to hundreds of rows on Hopper GPUs, with what is added; products with their activation.

Owns the choice of a tile, which calls have one, the kernels' compilation and launch; `cluster_gemm.cu` does the
work, and `gated_gemm.cu` that of more rows. They are CUDA C++ and not Triton because blocks of a cluster share what
they read, and because tiles are as wide as the rows: Triton 3.6 has no such copies and knows powers of two only. Does
not know layers. Invariant: the bits are those of `matmul.linear`'s canonical order, rounded, then of an addition or
`activation.activate`, rounded again, whatever tile is chosen; a kernel that gives others, or cannot be had, is
told once and never used.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import logging
import os
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
from torch import Tensor

from octavo.ops.activation import GATED_KINDS, SQUARED_RELU, activate
from octavo.ops.compile import disk_cache, driver, nvrtc, side_by_side, validation_cache
from octavo.ops.gemm import gemm_pipeline
from octavo.ops.gemm import gpu as matmul
from octavo.ops.gemm.gemm_pipeline import ALIGNED, DEPTH, ELEMENTS, LINES, PROCESSORS, Tile, describe, is_hopper

_LOG = logging.getLogger(__name__)
_MOST_SUMS = 96  # of a thread, that leave room for three groups without that
_WIDEST = 256  # second lines of a block
_FULL_WAVE = 120  # blocks
_MOST_BLOCKS = 2 * PROCESSORS
_FEW_PROCESSORS = 4  # of the example, so that clusters walk
_COMPILERS = 8  # threads
_CHECKED = 300, 768, 1152  # rows, channels and K of the example that every kernel multiplies once
_SHORT = 3072  # the longest K whose weights are read fast enough by every block for itself
_MAX_ROWS_LONG = 320  # of plain products by longer ones
_FULL_ROWS = 256  # of such, beyond which blocks in one wave are to fill the processors
_FEWEST_BLOCKS = 96  # that read longer ones at the memory's pace; fewer, where they read few rows beside:
_FEWEST_OF_ALL, _FEW_ELEMENTS = 64, 3 << 17
_WHOLE_ROWS = 96  # that are not divided for such blocks' sake: the library is faster
MIN_ROWS, MAX_ROWS = 5, 512  # fewer are `skinny_gemm`'; beyond, only gates and ups have tiles
MIN_ROWS_LONG = 2  # by weights of a longer K than `_SHORT`
# Over these clusters walk, in bands of some 2,048 rows, which the L2 holds.
WALKED = tuple(Tile(2, width, second_shared=2, band=2048 // width) for width in (256, 192, 128))
_LEAST_WALKED_K = 512  # a tile's results are on their way while the next one begins
_TURN_ROWS = 24  # what a tile costs beside its rows, in rows
_USEFUL_SHARE = 0.8  # of the processors' time; below, the library with the activation behind it is faster


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """What a kernel computes, beside its tile."""

    dtype: torch.dtype
    activation: str | None  # of gates, or of all; or a plain product

    @property
    def is_gated(self) -> bool:
        """Whether the weight is gates and their ups."""
        return self.activation in GATED_KINDS

    def macros(self, tile: Tile) -> dict[str, int | str]:
        """The kernel's."""
        return gemm_pipeline.macros(tile, self.dtype) | {
            "GATED": int(self.is_gated),
            "TANH": GATED_KINDS.get(self.activation or "", 0),
            "SQUARED": int(self.activation == SQUARED_RELU),
        }

    def tile_for(self, num_rows: int, n: int, k: int) -> Tile | None:
        """See the function. An activation without gates has a plain product's tile, or else one of gates and ups.

        Not of the rows between: there the library with that behind it is faster.
        """
        tile = tile_for(num_rows, n, k, self.is_gated)
        if tile is None and self.activation is not None and not _MAX_ROWS_LONG < num_rows <= MAX_ROWS:
            return tile_for(num_rows, n, k, gated=True)
        return tile

    def source(self, tile: Tile) -> str:
        """The kernel's."""
        kernel = "gated_gemm.cu" if tile.band else "cluster_gemm.cu"
        return gemm_pipeline.source(tile, self.dtype, "cluster_gemm_results.cu", kernel)


def tile_for(num_rows: int, n: int, k: int, gated: bool) -> Tile | None:
    """The tile for a weight [n, k]; None where others serve: of all, the one whose busiest processor is done first.

    More than `MAX_ROWS` rows have tiles that clusters walk over. Of fewer, two blocks with the same long weights share
    them in a cluster: more read them too often, and clusters of four do not fit all processors at once. A block reads
    64 bytes a clock at most: where few have the whole of a long weight to read, and many rows each, the library is
    faster. Plain products of more rows by long weights are as fast there.
    """
    if num_rows > MAX_ROWS:
        return _walked_for(num_rows, n) if gated and _may_walk(n, k) else None
    least = MIN_ROWS_LONG if k > _SHORT else MIN_ROWS
    return _tile_for(_round_up(num_rows), n, k, gated) if num_rows >= least else None


@functools.lru_cache(maxsize=4096)
def _tile_for(num_rows: int, n: int, k: int, gated: bool) -> Tile | None:
    is_long = k > _SHORT
    if n % LINES or k % DEPTH or (is_long and not gated and num_rows > _MAX_ROWS_LONG):
        return None
    fewest = _FEWEST_OF_ALL if num_rows * k <= _FEW_ELEMENTS else _FEWEST_BLOCKS
    streams = is_long and not gated and num_rows <= LINES  # weights, which more blocks read if rows are first
    best: tuple[tuple[float, bool, int], Tile] | None = None
    for rows_first, groups in itertools.product((False,) if gated else (False, True), (1, 2, 3)):
        first, second = (num_rows, n) if rows_first else (n, num_rows)
        first_tiles = -(-first // (groups * LINES))
        if rows_first != streams and first_tiles != 2:  # where rows first were seen to win
            continue
        for second_tiles in range(-(-second // _WIDEST), _MOST_BLOCKS // first_tiles + 1):
            width = _round_up(-(-second // second_tiles))
            parts = 2 if groups == 3 and width > 2 * _MOST_SUMS else 1
            width = _round_up(-(-width // parts))
            row_tiles = first_tiles if rows_first else second_tiles
            if width * parts > _WIDEST or -(-second // (width * parts)) < second_tiles:
                continue
            blocks = first_tiles * second_tiles
            waves = -(-blocks // PROCESSORS)
            if is_long and (blocks < fewest or row_tiles > (2 if num_rows > _WHOLE_ROWS else 1)):
                continue
            if is_long and not gated and num_rows > _FULL_ROWS and (rows_first or waves > 1 or blocks < _FULL_WAVE):
                continue
            shared = row_tiles if is_long else 1
            tile = Tile(groups, width, parts, *((1, shared) if rows_first else (shared, 1)), rows_first)
            order = waves * tile.clocks, rows_first, -groups
            if best is None or order < best[0]:
                best = order, tile
    return None if best is None else best[1]


def _may_walk(n: int, k: int) -> bool:
    return n % LINES == k % DEPTH == 0 and k >= _LEAST_WALKED_K


@functools.lru_cache(maxsize=4096)
def _walked_for(num_rows: int, n: int) -> Tile | None:
    """Of all, the tile whose busiest cluster is done first; None if too much of the others' time is idle."""
    clusters = PROCESSORS // WALKED[0].cluster

    def cost(tile: Tile) -> int:
        tiles = -(-num_rows // tile.rows) * -(-n // (tile.cluster * tile.channels))
        return -(-tiles // clusters) * (tile.rows + _TURN_ROWS)

    best = min(WALKED, key=cost)
    useful = num_rows * n / (best.cluster * best.channels * clusters)
    return best if useful >= _USEFUL_SHARE * cost(best) else None


def _round_up(lines: int) -> int:
    return -(-lines // 16) * 16


def has_tile(x: Tensor, weight: Tensor, activation: str | None = None) -> bool:
    """Whether the rule has a tile for rows x [M, K] by weight [N, K], on whatever device they are."""
    n, k = weight.shape
    return _Kind(x.dtype, activation).tile_for(x.shape[0], n, k) is not None


def serves(
    x: Tensor, weight: Tensor, out: Tensor | None, activation: str | None = None, residual: Tensor | None = None
) -> bool:
    """Whether rows x [M, K] by a weight [N, K], or by gates before their ups, run here; into `out`, or a new tensor.

    With a residual [M, N] that is added, or none: one kernel serves both.
    While a graph is captured, only by a kernel that is loaded: by an earlier call for such rows, or `load_for`.
    """
    (num_rows, k), n = x.shape, weight.shape[0]
    if not (x.is_cuda and x.dtype == weight.dtype and x.dtype in ELEMENTS and matmul.is_reproducible()):
        return False
    if not is_hopper(x.device):
        return False
    weights = _Kind(x.dtype, activation), x.device, n, k
    _met[weights] = None
    if num_rows < MIN_ROWS_LONG:
        return False
    steps = 2 * x.stride(0) | x.data_ptr() | weight.data_ptr()
    for beside in (out, residual):
        if beside is not None:
            steps |= 2 * beside.stride(0) | beside.data_ptr()
            if beside.dtype != x.dtype or beside.stride(1) != 1:
                return False
    if steps % ALIGNED or x.stride(1) != 1 or not weight.is_contiguous():
        return False
    tile = weights[0].tile_for(num_rows, n, k)
    return tile is not None and _is_loaded(tile, weights)


_Weights = tuple[_Kind, torch.device, int, int]  # what multiplies weights of a shape [N, K], and where
_met: dict[_Weights, None] = {}  # that `serves` was asked about
_functions: dict[tuple[Tile, _Kind, int], int | None] = {}  # of a device, found right; None: not to be had


def load_for(num_rows: int) -> None:
    """Load the kernels for so many rows by the weights that `serves` was asked about. Waits for the GPU, a kernel once.

    A graph that is captured next finds them.
    """
    for weights in list(_met):
        kind, _, n, k = weights
        tile = kind.tile_for(num_rows, n, k)
        if tile is not None:
            _is_loaded(tile, weights)


def _is_loaded(tile: Tile, weights: _Weights) -> bool:
    """Whether the rule's kernel is there. Loads it unless a graph is captured; tells once why it cannot be had."""
    kind, device, n, k = weights
    name = tile, kind, device.index
    if name not in _functions:
        if (made := side_by_side.current()) is not None:
            _compile_ahead(made, weights)
            return True
        if torch.cuda.is_current_stream_capturing():
            return False
        try:
            code = _machine_codes(kind, n, k).get(tile) or compile_tile(tile, kind)  # kept
            _load(tile, kind, device, code)
        except (OSError, driver.DriverError, nvrtc.CompileError) as error:
            _LOG.warning("products by a weight [%d, %d] run on other kernels, which may be slower: %s", n, k, error)
            for other in _tiles(kind, n, k):
                _functions.setdefault((other, kind, device.index), None)
    return _functions[name] is not None


def _compile_ahead(made: side_by_side.Pass, weights: _Weights) -> None:
    """In a pass that launches nothing: the kernels for a weight's shape, and those that they will be compared with."""
    if weights in made.seen:
        return
    made.seen.add(weights)
    kind, device, n, k = weights
    missing = [tile for tile in _tiles(kind, n, k) if not nvrtc.is_cached(*_text(tile, kind))]
    for tile in missing:
        made.compile("cluster_gemm", (tile, kind), functools.partial(compile_tile, tile, kind))
    if missing and (kind, device) not in made.seen:
        made.seen.add((kind, device))
        _make_expected(_make_example(kind.dtype, device)[2], kind)


def _load(tile: Tile, kind: _Kind, device: torch.device, code: bytes) -> None:
    """Raises DriverError."""
    function = driver.load(code, "gated_gemm" if tile.band else "product", tile.shared_bytes)
    _check(function, tile, kind, device, code)
    _functions[tile, kind, device.index] = function


def _tiles(kind: _Kind, n: int, k: int) -> list[Tile]:
    """All that the rule chooses for a weight's shape."""
    rows = range(_round_up(MIN_ROWS), MAX_ROWS + 1, 16)
    found = (kind.tile_for(num_rows, n, k) for num_rows in rows)
    walked = WALKED if kind.activation is not None and _may_walk(n, k) else ()
    return [*walked, *dict.fromkeys(tile for tile in found if tile is not None)]  # the longest to compile first


@functools.cache
def _machine_codes(kind: _Kind, n: int, k: int) -> dict[Tile, bytes]:
    """Of the kernels that the rule chooses for a weight's shape those that are not kept: compiled all at once."""
    tiles = [tile for tile in _tiles(kind, n, k) if not nvrtc.is_cached(*_text(tile, kind))]
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _COMPILERS)) as pool:
        codes = pool.map(lambda tile: compile_tile(tile, kind), tiles)
        return dict(zip(tiles, codes, strict=True))


def compile_tile(tile: Tile, kind: _Kind) -> bytes:
    """The machine code of a kernel. Raises CompileError."""
    return nvrtc.machine_code(*_text(tile, kind))


def _text(tile: Tile, kind: _Kind) -> tuple[str, dict[str, int | str], str]:
    return kind.source(tile), kind.macros(tile), "sm_90a"


def _check(function: int, tile: Tile, kind: _Kind, device: torch.device, code: bytes) -> None:
    """Raises DriverError if the kernel has other bits than the canonical order, now or when that was kept."""

    def agrees() -> bool:
        x, weight, plain = _example(kind.dtype, device)
        expected = _expected(kind, device)
        out = torch.empty_like(expected)
        for result, residual in zip(out, (None, plain.flip(0)), strict=False):
            _launch(function, tile, kind, x, weight, result, residual, processors=_FEW_PROCESSORS)
        return torch.equal(out, expected)

    what = ["cluster_gemm", repr(tile), repr(kind), disk_cache.sum_of(code)]
    if not validation_cache.holds(what, device, agrees):
        raise driver.DriverError("it sums in another order")


@functools.cache
def _example(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    return _make_example(dtype, device)


def _make_example(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of many sizes, a weight, and their product in the canonical order; more steps than any ring has stages."""
    generator = torch.Generator(device).manual_seed(0)
    spread = torch.rand(_CHECKED[0], _CHECKED[2], generator=generator, device=device) * 16 - 8
    x = (torch.randn(spread.shape, generator=generator, device=device) * spread.exp2()).to(dtype)
    weight = torch.randn(_CHECKED[1:], generator=generator, device=device).to(dtype) * 0.02
    out = torch.empty(_CHECKED[:2], dtype=dtype, device=device)
    return x, weight, matmul.linear(x, weight, None, out, matmul.tile_for(16, *_CHECKED[1:], dtype))


@functools.cache
def _expected(kind: _Kind, device: torch.device) -> Tensor:
    return _make_expected(_example(kind.dtype, device)[2], kind)


def _make_expected(plain: Tensor, kind: _Kind) -> Tensor:
    """What kernels make of the example: its product and that plus its own last rows first, or the activation."""
    if kind.activation is not None:
        return activate(plain, kind.activation)[None]
    return torch.stack((plain, (plain.float() + plain.flip(0).float()).to(plain.dtype)))


def product(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    activation: str | None = None,
    tile: Tile | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x [M, K] by weight [N, K], transposed, into out [M, N]; [M, N / 2] of gates and ups. tile: not the rule's.

    residual [M, N]: added to the rounded product, which is rounded again.
    """
    (num_rows, k), n = x.shape, weight.shape[0]
    kind = _Kind(x.dtype, activation)
    if tile is None:
        tile = kind.tile_for(num_rows, n, k)
        assert tile is not None, "ask `serves` first"
    elif (tile, kind, x.device.index) not in _functions:
        _load(tile, kind, x.device, compile_tile(tile, kind))
    function = _functions.get((tile, kind, x.device.index))
    if function is None:
        assert side_by_side.current() is not None, "ask `serves` first"
        return out
    _launch(function, tile, kind, x, weight, out, residual)
    return out


def _launch(
    function: int,
    tile: Tile,
    kind: _Kind,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    residual: Tensor | None = None,
    processors: int = PROCESSORS,
) -> None:
    (num_rows, k), n = x.shape, weight.shape[0]
    boxes = tile.boxes()
    row_box, channel_box = boxes if tile.rows_first else boxes[::-1]
    row_tiles, channel_tiles = -(-num_rows // tile.rows), -(-n // tile.channels)
    tile_rows = _rows_of(tile, num_rows)
    row_box = row_box * tile_rows // tile.rows
    element = ELEMENTS[x.dtype]
    rows = describe(x.data_ptr(), element, (k, num_rows), (2 * x.stride(0),), (DEPTH, row_box))
    if not kind.is_gated:
        channels = describe(weight.data_ptr(), element, (k, n), (2 * k,), (DEPTH, channel_box))
    else:  # 8 gates beside their ups
        channels = describe(
            weight.data_ptr(), element, (k, 8, 2, n // 16), (2 * k, n * k, 16 * k), (DEPTH, 8, 2, channel_box // 16)
        )
    tiles = (row_tiles, channel_tiles) if tile.rows_first else (channel_tiles, row_tiles)
    clusters = -(-tiles[0] // tile.second_shared), -(-tiles[1] // tile.first_shared)
    blocks, size = clusters[0] * clusters[1] * tile.cluster, tile.cluster
    sides = (rows, channels) if tile.rows_first else (channels, rows)
    params: _Params | _WalkedParams
    if tile.band:
        # of a group's results: its channels of all rows, or twice as many channels of half of the rows at a time
        box, swizzle = ((LINES // 2, tile.rows), 64) if kind.is_gated else ((LINES, tile.rows // 2), 128)
        results = describe(out.data_ptr(), element, out.shape[::-1], (2 * out.stride(0),), box, swizzle=swizzle)
        params, blocks = _WalkedParams(*sides, results, k // DEPTH, *clusters), min(blocks, processors // size * size)
    else:
        added = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
        shape = num_rows, out.shape[1], k // DEPTH
        params = _Params(*sides, out.data_ptr(), out.stride(0), *added, *shape, clusters[1], tile_rows)
    start = ctypes.addressof(params)
    offsets = _offsets(type(params))
    places = (ctypes.c_void_p * len(offsets))(*(start + offset for offset in offsets))
    stream = triton.runtime.driver.active.get_current_stream(x.device.index)
    driver.launch_chained(function, blocks, size, tile.threads, tile.shared_bytes, stream, places)


def _rows_of(tile: Tile, num_rows: int) -> int:
    """Of a block that copies its rows for itself: no more than tiles need, since lines beyond the last row are slow."""
    shared = tile.first_shared if tile.rows_first else tile.second_shared
    return tile.rows if tile.band or shared > 1 else -(-num_rows // -(-num_rows // tile.rows))


class _Params(ctypes.Structure):
    """The kernel's, in order."""

    _fields_ = [
        ("first", ctypes.c_uint64 * 16),
        ("second", ctypes.c_uint64 * 16),
        ("out", ctypes.c_uint64),
        ("stride", ctypes.c_uint64),
        ("residual", ctypes.c_uint64),
        ("residual_stride", ctypes.c_uint64),
        ("rows", ctypes.c_int),
        ("channels", ctypes.c_int),
        ("steps", ctypes.c_int),
        ("second_clusters", ctypes.c_int),
        ("tile_rows", ctypes.c_int),
    ]


class _WalkedParams(ctypes.Structure):
    """Of the kernel whose clusters walk."""

    _fields_ = [
        ("first", ctypes.c_uint64 * 16),
        ("second", ctypes.c_uint64 * 16),
        ("out", ctypes.c_uint64 * 16),
        ("steps", ctypes.c_int),
        ("first_clusters", ctypes.c_uint),
        ("second_clusters", ctypes.c_uint),
    ]


@functools.cache
def _offsets(params: type[_Params | _WalkedParams]) -> list[int]:
    return [getattr(params, name).offset for name, *_ in params._fields_]
