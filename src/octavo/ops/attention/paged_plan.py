"""What is launched for a batch by `octavo.ops.attention.paged`, and the memory that the launches share.

Owns tiles, launches and their scratch memory. Invariant: a plan decides where something is computed, and no bit of it.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
from torch import Tensor

from octavo.ops.attention import decode, prefill
from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.attention.paged_decode_kernels import attend_rows
from octavo.ops.attention.paged_workload import CHUNK, EVERYTHING, WINDOW, count_leaves, count_tiles, divide
from octavo.ops.compile.launch import Direct

BLOCK_MULTIPLE = 16  # block sizes are multiples of this
MAX_HEAD_SIZE = 256
MAX_SHORT_QUERIES = 16  # rows of so many queries, as decode and verification have, share one tile if that holds them
_ROW_PROGRAMS, _ROW_REGISTERS = 4, 128  # programs for each processor that short rows are divided among, of threads
_WIDE_ROW_PROGRAMS, _WIDE_ROW_REGISTERS = 3, 168  # where those are too few
_ROW_STAGES, _WIDE_ROW_STAGES = 2, 3
_WIDE_ROWS = (5, 256)  # from and to so many rows wide programs are as fast or faster, on an H200
_FEW_PAIRS = 4  # rows are few if each (row, KV head) has so many processors
_FEW_PROGRAMS = (
    2  # that a processor has room for at once, where a tile has no more lines than the matrix unit: else one
)
_FEW_STAGES, _LEAN_FEW_STAGES = 4, 3
# Shared memory that the best tiles take, and those of float32 heads of more than 128; lean ones: 99 KiB, or the last.
_ROOM, _ROOM_FLOAT32, LEAST_FLOAT32 = 128 << 10, 208 << 10, 160 << 10
_TILE_PROGRAMS = (1, 2)  # where tiles give each processor fewer than the first, they are split until it has the second
_FIXED, _SPLIT, _SPARSE = 2, 12, 3  # in tiles: of a (row, KV head) besides its tokens, and see `divide`
_FOLDS, _LONG = 96, 16  # leaves of the longest row that attend_rows folds; where rows may have more, it folds so many


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """Head counts and sizes of a layer."""

    num_heads: int
    num_kv_heads: int
    size: int

    @property
    def group(self) -> int:
        """Heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded(self) -> int:
        """The power of two that a tile holds for a head, at least 16."""
        return max(16, power_of_two(self.size))


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """How many lines (queries x heads of a KV head) a program holds, and how it is compiled. Changes no bit."""

    lines: int
    warps: int
    stages: int
    registers: int | None = None  # at most so many for a thread, so that two programs share a processor


@dataclasses.dataclass(frozen=True, slots=True)
class RowsLaunch:
    """One launch of `attend_rows` or `attend_few`, over the rows of at most `short` queries."""

    tile: Tile
    short: int
    lines: int  # of a tile that can be there
    programs: int
    num_rows: int
    fold_limit: int  # leaves of a row that is not left to `merge`
    merges: bool
    max_leaves: int  # of a row, where `attend_few` takes them, undivided; else 0
    max_queries: int = MAX_SHORT_QUERIES  # of a row
    is_copied: bool = False  # for `decode`, in place of `attend_rows` where the tensors allow it

    @property
    def single(self) -> bool:
        """No row has more than one query: see `octavo.ops.attention.rope_decode`."""
        return self.max_queries == 1


@dataclasses.dataclass(frozen=True, slots=True)
class TilesLaunch:
    """One launch of `attend_tiles`, over the rows of more than `short` queries."""

    tile: Tile
    short: int
    num_tiles: int
    splits: int
    max_leaves: int


@dataclasses.dataclass(frozen=True, slots=True)
class PromptsLaunch:
    """One launch of `prefill`, in place of `attend_tiles` where the tensors allow it."""

    tile_start: Tensor  # of `count_tiles`
    programs: int


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The launches of a batch for the layers that are alike, and the division of its short rows."""

    rows: RowsLaunch | None
    tiles: TilesLaunch | None
    prompts: PromptsLaunch | None
    work: Tensor  # see paged_workload
    capacity: int  # leaves of rows that may be split

    @property
    def leaf_base(self) -> Tensor:
        """The part of `work` behind the starts."""
        assert self.rows is not None, "short rows are divided"
        return self.work[2 * (self.rows.programs + 1) :]


class Scratch:
    """Partial results and counters, shared by the launches of a stream, at one address until they grow.

    Grows to the largest launch seen, up to `limit` bytes of partial results; what would need more is not split. What a
    graph was captured with is kept. Counters are 0 between launches.
    """

    def __init__(self, device: torch.device, limit: int = 64 << 20) -> None:
        """`limit`: bytes."""
        self._device, self._limit = device, limit
        self._parts = torch.empty(0, dtype=torch.float32, device=device)
        self._counters = torch.zeros(0, dtype=torch.int32, device=device)
        self._captured: list[Tensor] = []

    def capacity(self, leaf_size: int) -> int:
        """How many leaves of `leaf_size` numbers may be held."""
        return self._limit // (4 * leaf_size)

    def reserve(self, num_leaves: int, leaf_size: int, num_counters: int, *, for_capture: bool = False) -> None:
        """Make room. Must happen before a graph is captured that uses it.

        Raises RuntimeError where counters would have to grow inside a capture: the zeros would be the graph's, and
        whatever else used them before it runs would count from what memory held.
        """
        size = min(num_leaves, self.capacity(leaf_size)) * leaf_size
        if self._parts.numel() < size:
            self._parts = torch.empty(size, dtype=torch.float32, device=self._device)
        if self._counters.numel() < num_counters:
            if _captures(self._device):
                had = self._counters.numel()
                raise RuntimeError(
                    f"attention has {had} counters and a graph needs {num_counters}: reserve them before"
                )
            self._counters = torch.zeros(num_counters, dtype=torch.int32, device=self._device)
        if for_capture:
            kept = {id(tensor) for tensor in self._captured}
            self._captured += [tensor for tensor in (self._parts, self._counters) if id(tensor) not in kept]

    @property
    def counters(self) -> Tensor:
        """0 between launches."""
        return self._counters

    def parts(self, num_leaves: int, lines: int, padded: int) -> tuple[Tensor, Tensor, Tensor]:
        """Flat room for the sums [leaves, lines, padded] and two numbers of each line, and the counters."""
        sums = num_leaves * lines * padded
        return self._parts[:sums], self._parts[sums : sums + num_leaves * lines * 2], self._counters


def can_run_on(device: torch.device) -> bool:
    """CUDA, or any device under Triton's interpreter (TRITON_INTERPRET=1)."""
    return device.type == "cuda" or not isinstance(attend_rows, Direct)


def _captures(device: torch.device) -> bool:
    """Whether what is launched becomes a part of a graph, and is not done now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a small number for the interpreter."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have; the interpreter's has no end."""
    if device.type != "cuda":
        return 1 << 30
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])


def _is_lean(heads: Heads, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the best tiles are more than a program may have."""
    return shared_bytes(device) < (_ROOM_FLOAT32 if dtype == torch.float32 and heads.padded > 128 else _ROOM)


def sees(mask_spec: MaskSpec) -> int:
    """The kernels' word for window and chunk; `MaskSpec.reach` is the number that belongs to it."""
    return WINDOW if mask_spec.window else CHUNK if mask_spec.chunk else EVERYTHING


def power_of_two(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << (number - 1).bit_length()


def row_lines(heads: Heads, max_query_len: int, *, lean: bool = False) -> int:
    """Lines for rows of few queries: of all if they are at most MAX_SHORT_QUERIES, else of those that a tile holds."""
    queries = max_query_len if max_query_len <= MAX_SHORT_QUERIES else 1
    return max(8, power_of_two(heads.group), min(32 if lean else 64, power_of_two(queries * heads.group)))


def rows_tile(
    heads: Heads, num_rows: int, lines: int, dtype: torch.dtype, cache_dtype: torch.dtype, *, lean: bool = False
) -> Tile:
    """The tile for rows of few queries, of `row_lines` lines.

    Of a cache of 8 bits none has 8 lines: Triton would give them the matrix instruction of a warp with channels in
    fours, as they were loaded, whose sums are not those of the other tiles, which take them in twos.
    """
    lines = max(lines, 16 if cache_dtype.itemsize == 1 else 8)
    if dtype == torch.float32 or heads.padded > 128:
        return Tile(lines, 4, 1 if lean and heads.padded > 128 else 2)
    is_wide = _WIDE_ROWS[0] <= num_rows <= _WIDE_ROWS[1]
    if lines > 8:
        return Tile(lines, 4, _ROW_STAGES)
    return Tile(lines, 4, *((_WIDE_ROW_STAGES, _WIDE_ROW_REGISTERS) if is_wide else (_ROW_STAGES, _ROW_REGISTERS)))


def tiles_tile(heads: Heads, max_query_len: int, dtype: torch.dtype, *, lean: bool = False) -> Tile:
    """The tile for rows of many queries."""
    stages = 1 if lean and heads.padded > 128 else 2
    if dtype == torch.float32:
        return Tile(max(16, power_of_two(heads.group)), 4, stages)
    if heads.padded <= 128 and max_query_len * heads.group > 64 and not lean:
        return Tile(max(128, power_of_two(heads.group)), 8, 2, 128)
    return Tile(max(64, power_of_two(heads.group)), 4, stages)


class Planner:
    """Makes the plans of layers that are alike, in memory that keeps its address until it grows."""

    def __init__(
        self,
        heads: Heads,
        mask_spec: MaskSpec,
        dtype: torch.dtype,
        device: torch.device,
        scratch: Scratch,
        processors: int = 0,
        *,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        """dtype: of queries; cache_dtype: of K and V, if another. processors: to plan for, 0 for the device's."""
        self.heads, self.mask_spec, self._dtype, self._scratch = heads, mask_spec, dtype, scratch
        self._cache_dtype, self._lean = cache_dtype or dtype, _is_lean(heads, dtype, device)
        self._processors = processors or num_processors(device)
        self._work = self._tile_start = torch.zeros(0, dtype=torch.int32, device=device)
        self._captured: list[Tensor] = []

    def plan(
        self,
        query_start: Tensor,
        seq_lens: Tensor,
        *,
        num_tokens: int,
        max_query_len: int,
        max_seq_len: int,
        min_query_len: int = 0,
        for_capture: bool = False,
        is_padded: bool = False,
        tile: Tile | None = None,
    ) -> Plan:
        """The plan of a batch. Launches the division of its short rows and waits for nothing.

        The numbers are the host's, as bounds: wider ones change no bit. A plan that is made for a graph, inside
        its capture, holds for all lengths and queries within them. is_padded: whether tokens may be nobody's. tile: for
        rows of many queries, other than the table's.
        """
        heads, mask_spec, num_rows = self.heads, self.mask_spec, seq_lens.shape[0]
        reach = min(max_seq_len, mask_spec.reach + max_query_len) if mask_spec.reach else max_seq_len
        max_leaves = count_leaves(reach) + 1
        held = row_lines(heads, max_query_len, lean=self._lean)
        short = held // heads.group
        rows, tiles, prompts, capacity = None, None, None, 0
        # a graph's rows may have fewer, also behind it, in a drafter's passes
        may_differ = for_capture or is_padded or num_tokens < num_rows * max_query_len
        if max_query_len <= short or (may_differ and min_query_len <= short):  # some row may be short
            rows, capacity = self._rows(held, query_start, seq_lens, min(short, max_query_len), max_leaves, for_capture)
        if max_query_len > short:
            chosen = tile or tiles_tile(heads, max_query_len, self._dtype, lean=self._lean)
            tiles = self._tiles(
                chosen, short, num_tokens // (chosen.lines // heads.group) + num_rows, max_leaves, for_capture
            )
            if tiles.splits == 1 and tile is None:
                prompts = self._prompts(query_start, short, num_tokens, for_capture)
        return Plan(rows, tiles, prompts, self._work, capacity)

    def _prompts(self, query_start: Tensor, short: int, num_tokens: int, for_capture: bool) -> PromptsLaunch | None:
        heads, num_rows = self.heads, len(query_start) - 1
        device = query_start.device
        if not prefill.can_serve(device, self._dtype, heads.group, heads.size, self.mask_spec.causal):
            return None
        self._scratch.reserve(0, 1, 1, for_capture=for_capture)
        if self._tile_start.numel() <= num_rows:
            self._tile_start = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        if for_capture:
            self._keep(self._tile_start)
        queries = prefill.queries_of_tile(heads.group)
        count_tiles[(1,)](query_start, self._tile_start, num_rows, short, QUERIES=queries, ROWS=512, num_warps=4)
        items = (num_tokens // queries + num_rows) * heads.num_kv_heads
        return PromptsLaunch(self._tile_start, min(items, self._processors))

    def _keep(self, tensor: Tensor) -> None:
        """What a graph was captured with stays where it is."""
        if not any(kept is tensor for kept in self._captured):
            self._captured.append(tensor)

    def _rows(
        self, held: int, query_start: Tensor, seq_lens: Tensor, max_queries: int, max_leaves: int, for_capture: bool
    ) -> tuple[RowsLaunch, int]:
        """The launch for rows of up to `max_queries` queries, and how many leaves their partial results may have.

        held: see `row_lines`.
        """
        heads, num_rows, short = self.heads, seq_lens.shape[0], held // self.heads.group
        tile = rows_tile(heads, num_rows, held, self._dtype, self._cache_dtype, lean=self._lean)
        lines, num_pairs = power_of_two(max_queries * heads.group), num_rows * heads.num_kv_heads
        leaf_size = heads.num_kv_heads * lines * (heads.padded + 2)
        capacity = min(num_rows * max_leaves, self._scratch.capacity(leaf_size))
        self._scratch.reserve(capacity, leaf_size, num_pairs * max_queries, for_capture=for_capture)
        merges = max_leaves > _FOLDS
        is_copied = decode.can_serve(
            seq_lens.device,
            self._dtype,
            heads.group,
            heads.size,
            self.mask_spec.causal,
            held,
            self._cache_dtype,
        )
        is_few = num_pairs * _FEW_PAIRS <= self._processors and self._dtype != torch.float32 and heads.padded <= 128
        is_few &= not is_copied or self._cache_dtype == self._dtype
        if is_few and capacity == num_rows * max_leaves and not merges:
            room = _FEW_PROGRAMS if tile.lines <= 8 else 1
            programs = min(num_pairs * max_leaves, room * self._processors)
            stages = _LEAN_FEW_STAGES if self._lean else _FEW_STAGES
            tile = dataclasses.replace(tile, stages=stages, registers=None)
            rows = RowsLaunch(tile, short, lines, programs, num_rows, 0, False, max_leaves, max_queries)
            return rows, capacity
        programs = _ROW_PROGRAMS if tile.registers == _ROW_REGISTERS else _WIDE_ROW_PROGRAMS
        programs = (decode.PROGRAMS if is_copied else programs) * self._processors
        limit = _LONG if merges else 1 << 30
        rows = RowsLaunch(tile, short, lines, programs, num_rows, limit, merges, 0, max_queries, is_copied)
        self._divide(rows, query_start, seq_lens, capacity, for_capture)
        return rows, capacity

    def _divide(
        self, rows: RowsLaunch, query_start: Tensor, seq_lens: Tensor, capacity: int, for_capture: bool
    ) -> None:
        size = 2 * (rows.programs + 1) + 2 * rows.num_rows + 1
        if self._work.numel() < size:
            self._work = torch.zeros(size, dtype=torch.int32, device=seq_lens.device)
        if for_capture:
            self._keep(self._work)
        divide[(rows.programs + 1,)](
            query_start, seq_lens, self._work, rows.num_rows, rows.short, self.mask_spec.reach, rows.programs, capacity,
            rows.fold_limit, KV_HEADS=self.heads.num_kv_heads, SEES=sees(self.mask_spec), FIXED=_FIXED, SPLIT=_SPLIT,
            SPARSE=_SPARSE, ROWS=512, num_warps=4, PDL=False,
        )  # fmt: skip

    def _tiles(self, tile: Tile, short: int, num_tiles: int, max_leaves: int, for_capture: bool) -> TilesLaunch:
        whole = num_tiles * self.heads.num_kv_heads
        splits = min(max_leaves, -(-_TILE_PROGRAMS[1] * self._processors // whole))
        leaf_size = tile.lines * (self.heads.padded + 2)
        num_leaves = whole * max_leaves
        if whole >= _TILE_PROGRAMS[0] * self._processors or num_leaves > self._scratch.capacity(leaf_size):
            splits = 1
        if splits > 1:
            self._scratch.reserve(num_leaves, leaf_size, whole, for_capture=for_capture)
        return TilesLaunch(tile, short, num_tiles, splits, max_leaves)
