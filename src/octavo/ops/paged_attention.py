"""Attention over the paged cache in Triton: one operator for prefill, decode and verification.

Owns the canonical order of the sums, the launches and their scratch memory; the arithmetic is in
`paged_attention_kernels`. Does not know requests, layers or backends. Invariant: the bits of a (query, head) depend on
its own q and on its own K and V in logical order, never on the batch, the chunk, the split, the block size, the tile
or where blocks lie. Its eager twin is `octavo.ops.attention.paged_attention_eager`.

The canonical order: absolute leaves of LEAF tokens from position 0; inside a leaf an online softmax, from scratch,
over tiles of BN tokens in ascending order; leaves folded in ascending order with one formula (the split-KV scheme of
Flash-Decoding with splits at fixed places). A fold in registers and a fold of leaves that programs wrote apart are
the same operations, so how many programs share a row is free. All sums are float32; K and V of a hidden token are
read as 0.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch

from octavo.ops.paged_attention_kernels import attend, merge

BN = 64  # tokens per step of the online softmax
LEAF = 512  # tokens per independent partial result; a multiple of BN
BLOCK_MULTIPLE = 16  # block sizes are multiples of this
# Where a batch gives each processor fewer programs than the first number, rows are split until it has the second.
_DECODE_PROGRAMS = (3, 8)
_PREFILL_PROGRAMS = (1, 2)
_GATHER = 32  # leaves that a merging program loads at once
_CHUNK = 128  # leaves whose factors it finds at once
_CHANNELS = 32  # channels that it merges
MAX_HEAD_SIZE = 256
_LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """How many lines (queries x heads of a KV head) a program holds, and how it is compiled. Changes no bit."""

    lines: int
    warps: int
    stages: int
    registers: int | None = None  # at most so many for a thread, so that two programs share a processor


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """One launch of `attend` over the rows of at most (`is_short`) or of more than `short` queries."""

    tile: Tile
    is_short: bool
    short: int
    width: int  # queries that a short row may have in this batch
    num_tiles: int
    splits: int
    max_leaves: int
    num_lines: int  # (token, ...) places that `merge` writes, if split
    num_parts: int  # partial results in the scratch memory
    part_size: int  # channels of one


class Scratch:
    """The partial results of split rows, at one address until it grows.

    Grows to the largest launch seen, up to `limit` bytes; a launch that needs more is not split. What a graph was
    captured with is kept.
    """

    def __init__(self, device: torch.device, limit: int = 256 << 20) -> None:
        """`limit`: bytes."""
        self._device, self._limit = device, limit
        self._memory = torch.empty(0, dtype=torch.float32, device=device)
        self._captured: list[torch.Tensor] = []

    def fits(self, num_leaves: int, head_size: int) -> bool:
        """Whether so many partial results may be held at once."""
        return 4 * num_leaves * (head_size + 4) <= self._limit

    def reserve(self, num_leaves: int, head_size: int, *, for_capture: bool = False) -> None:
        """Make room. Must happen before a graph is captured that uses it."""
        assert self.fits(num_leaves, head_size), "a launch that does not fit is not split"
        if self._memory.numel() < num_leaves * (head_size + 4):
            self._memory = torch.empty(num_leaves * (head_size + 4), dtype=torch.float32, device=self._device)
        if for_capture and not any(memory is self._memory for memory in self._captured):
            self._captured.append(self._memory)

    def parts(self, num_leaves: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Flat room for the sums [num_leaves * head_size] and for four numbers of each [num_leaves * 4]."""
        self.reserve(num_leaves, head_size)
        return self._memory[: num_leaves * head_size], self._memory[num_leaves * head_size :]


def can_run_on(device: torch.device) -> bool:
    """CUDA, or any device under Triton's interpreter (TRITON_INTERPRET=1)."""
    return device.type == "cuda" or not hasattr(attend, "device_caches")


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; a small number for the interpreter."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


def padded_head_size(head_size: int) -> int:
    """The power of two that a tile holds for a head, at least 16."""
    return max(16, 1 << (head_size - 1).bit_length())


def decode_tile(group: int, dtype: torch.dtype) -> Tile:
    """The tile for rows of few queries."""
    lines = max(16, 1 << (group - 1).bit_length())
    if dtype == torch.float32:
        return Tile(lines, 4, 2)
    return Tile(lines, max(2, lines // 16), 3)


def prefill_tile(group: int, max_query_len: int, head_size: int, dtype: torch.dtype) -> Tile:
    """The tile for rows of many queries."""
    if dtype == torch.float32:
        return decode_tile(group, dtype)
    if head_size <= 128 and max_query_len * group > 64:
        return Tile(max(128, 1 << (group - 1).bit_length()), 8, 2, 128)
    return Tile(max(64, 1 << (group - 1).bit_length()), 4, 2)


def plan_launches(
    *,
    num_rows: int,
    num_tokens: int,
    max_query_len: int,
    max_seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    window: int,
    dtype: torch.dtype,
    scratch: Scratch,
    processors: int,
) -> tuple[Launch, ...]:
    """The launches of a batch, from numbers that the host knows. They are upper bounds: larger ones change no bit."""
    group = num_heads // num_kv_heads
    reach = min(max_seq_len, window + max_query_len) if window else max_seq_len
    max_leaves = -(-reach // LEAF) + bool(window)
    padded = padded_head_size(head_size)

    def launch(tile: Tile, short: int, width: int, programs: tuple[int, int]) -> Launch:
        num_tiles = num_rows if width else num_tokens // (tile.lines // group) + num_rows
        num_lines = num_rows * width if width else num_tokens
        num_parts, whole = num_lines * num_heads * max_leaves, num_tiles * num_kv_heads
        splits = min(max_leaves, -(-programs[1] * processors // whole))
        if splits <= 1 or whole >= programs[0] * processors or not scratch.fits(num_parts, padded):
            splits, num_lines, num_parts = 1, 0, 0
        return Launch(tile, width > 0, short, width, num_tiles, splits, max_leaves, num_lines, num_parts, padded)

    tile = decode_tile(group, dtype)
    short = tile.lines // group
    launches = []
    if max_query_len <= short or num_tokens < num_rows * max_query_len:  # some row may be short
        launches.append(launch(tile, short, min(short, max_query_len), _DECODE_PROGRAMS))
    if max_query_len > short:
        tile = prefill_tile(group, max_query_len, padded, dtype)
        launches.append(launch(tile, short, 0, _PREFILL_PROGRAMS))
    return tuple(launches)


def paged_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    launches: tuple[Launch, ...],
    scratch: Scratch,
) -> None:
    """Causal attention of each row's queries, the last of its `seq_lens[row]` tokens, written to `out`.

    q, out: [tokens, heads, head_size] float32, bfloat16 or float16; kv: [blocks, kv_heads, block_size, 2 * head_size]
    of the same dtype or float8_e4m3fn, K then V; q, out and kv have any strides but a contiguous last axis; block_size
    is a multiple of 16. query_start: [rows + 1], seq_lens: [rows], block_table: [rows, width], all int32. Tokens of a
    row with seq_len 0 become 0; tokens beyond `query_start[-1]` stay as they are. window: tokens that a query sees,
    itself included, 0 for all. soft_cap: scores become cap * tanh(score / cap), 0 for none. key_scale, value_scale:
    what stored K and V are multiplied with. launches: from `plan_launches` with bounds that hold for this batch.
    """
    assert query_start.dtype == seq_lens.dtype == block_table.dtype == torch.int32, "lengths and tables are int32"
    assert q.stride(2) == kv.stride(3) == out.stride(2) == block_table.stride(1) == 1, "last axes are contiguous"
    _, num_heads, head_size = q.shape
    _, num_kv_heads, block_size, _ = kv.shape
    padded, num_rows = padded_head_size(head_size), seq_lens.shape[0]
    score, cap = scale * key_scale * _LOG2_E, 0.0
    if soft_cap:
        score, cap = soft_cap * _LOG2_E, 2.0 * _LOG2_E * scale * key_scale / soft_cap
    for launch in launches:
        split = launch.splits > 1
        parts, part_stats = scratch.parts(launch.num_parts, padded)
        attend[(num_kv_heads, launch.num_tiles, launch.splits)](
            q, kv, out, query_start, seq_lens, block_table, parts, part_stats, q.stride(0), q.stride(1),
            out.stride(0), out.stride(1), kv.stride(0), kv.stride(1), kv.stride(2), block_table.stride(0),
            num_rows, launch.short, launch.width, launch.splits, launch.max_leaves, window, score, cap, value_scale,
            GROUP=num_heads // num_kv_heads, HEAD=head_size, PADDED=padded, BLOCK=block_size, BM=launch.tile.lines,
            BN=BN, LEAF=LEAF, STAGES=launch.tile.stages, WINDOW=window > 0, SOFT_CAP=soft_cap > 0,
            SHORT=launch.is_short, SPLIT=split, PRECISION="ieee", num_warps=launch.tile.warps,
            maxnreg=launch.tile.registers,
        )  # fmt: skip
        if split:
            channels = min(padded, _CHANNELS)
            merge[(num_heads, launch.num_lines, padded // channels)](
                out, query_start, seq_lens, parts, part_stats, out.stride(0), out.stride(1), num_rows, launch.short,
                launch.width, launch.max_leaves, window, value_scale, HEAD=head_size, PADDED=padded, LEAF=LEAF,
                GATHER=_GATHER, CHUNK=_CHUNK, CHANNELS=channels, SHORT=launch.is_short, WINDOW=window > 0, num_warps=1,
            )  # fmt: skip
