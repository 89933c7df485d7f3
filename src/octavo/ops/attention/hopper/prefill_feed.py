"""What feeds `prefill_kernel` beside it: one warp that copies, and four that widen tiles of 8 bits a number.

Owns how a program finds its tiles, what it tells the warps that compute, and the order in which K and V come. Does not
know what is computed. Invariant: what arrives in shared memory is what the cache holds, in the type that is computed
with, and zeros where nothing may be read.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from octavo.ops.attention.hopper.narrow_tiles import widen_tile
from octavo.ops.attention.paged_workload import BN, first_seen

LINES = 128  # of a tile: two consumers of what a warp group's matrix instruction holds
_LINES, _BN = gl.constexpr(LINES // 2), gl.constexpr(BN)
WORD = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
_ROWS = gl.constexpr(gl.BlockedLayout([4], [32], [1], [0]))
barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton renamed it


@gluon.jit
def word(words, index: gl.constexpr):
    """What the producer has told, of a warp group's threads."""
    return gl.max(words.index(index).load(WORD), 0)


@gluon.jit
def _find(item, total, query_start, seq_lens, tile_start, num_rows, KV_HEADS: gl.constexpr, QUERIES: gl.constexpr):
    """(row, its first token, first query, queries, length) of an item; of the last one for those behind it."""
    tile = total // KV_HEADS - 1 - gl.minimum(item, total - 1) // KV_HEADS  # the longest first
    count = 0
    for base in range(0, num_rows, 128):
        at = base + gl.arange(0, 128, _ROWS)
        begin = gl.load(tile_start + at, mask=at < num_rows, other=0)
        count += gl.sum(((begin <= tile) & (at < num_rows)).to(gl.int32), 0)
    row = gl.maximum(count - 1, 0)
    row_start = gl.load(query_start + row)
    first_query = (tile - gl.load(tile_start + row)) * QUERIES
    num_queries = gl.load(query_start + row + 1) - row_start
    return row, row_start, first_query, num_queries, gl.load(seq_lens + row)


@gluon.jit
def _copy(
    at, end, step, kv_desc, ring, line, low, high, kv_index, block_rows, head_rows, head_channels, outside,
    BLOCK: gl.constexpr, PIECE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for tiles `at` to `end` - 1, in pieces that lie in one block each, from stage `step` on. The next step."""
    k_smem, v_smem, full, empty = ring
    WIDTH: gl.constexpr = k_smem.shape[2]
    channel = kv_index * head_channels
    for tile in range(at, end):
        stage = step % STAGES
        k, v, arrived = k_smem.index(stage), v_smem.index(stage), full.index(stage)
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        mbarrier.expect(arrived, 2 * _BN * WIDTH * 2)
        for part in gl.static_range(_BN // PIECE):
            token = tile * _BN + part * PIECE
            is_there = (token < high) & (token + PIECE > low)
            row = gl.load(line + token // BLOCK, mask=is_there, other=0) * block_rows + kv_index * head_rows
            row = gl.where(is_there, row + token % BLOCK, outside)
            if PIECE == _BN:
                tma.async_copy_global_to_shared(kv_desc, [row, channel], arrived, k)
                tma.async_copy_global_to_shared(kv_desc, [row, channel + WIDTH], arrived, v)
            else:
                tma.async_copy_global_to_shared(kv_desc, [row, channel], arrived, k.slice(part * PIECE, PIECE, 0))
                tma.async_copy_global_to_shared(
                    kv_desc, [row, channel + WIDTH], arrived, v.slice(part * PIECE, PIECE, 0)
                )
        step += 1
    return step


@gluon.jit
def produce(
    q_desc, kv_desc, query_start, seq_lens, table, tile_start, counter, words, q_smem, q_full, q_empty, ring, table_row,
    num_rows, reach, block_rows, head_rows, head_channels, outside, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    QUERIES: gl.constexpr, HEAD: gl.constexpr, BLOCK: gl.constexpr, PIECE: gl.constexpr, STAGES: gl.constexpr,
    SEES: gl.constexpr, NARROW: gl.constexpr,
):  # fmt: skip
    """Draw items, (tile, KV head), and copy what they need. `words` tell the consumers about each."""
    total = gl.load(tile_start + num_rows) * KV_HEADS
    item = gl.program_id(0)
    row, row_start, first_query, num_queries, seq_len = _find(
        item, total, query_start, seq_lens, tile_start, num_rows, KV_HEADS, QUERIES
    )
    step, turn = 0, 0
    while item < total:
        kv_index = item % KV_HEADS
        position = seq_len - num_queries + first_query
        low = first_seen(position, reach, SEES)
        high = gl.minimum(seq_len, position + QUERIES)
        begin = low // _BN
        end = gl.maximum((high + _BN - 1) // _BN, begin + 1)
        line = table + row.to(gl.int64) * table_row
        mbarrier.wait(q_empty, (turn & 1) ^ 1)
        turn += 1
        words.index(0).store(gl.full([1], row_start + first_query, gl.int32, _ONE))
        words.index(1).store(gl.full([1], num_queries - first_query, gl.int32, _ONE))
        words.index(2).store(gl.full([1], position, gl.int32, _ONE))
        words.index(3).store(gl.full([1], seq_len, gl.int32, _ONE))
        words.index(4).store(gl.full([1], kv_index, gl.int32, _ONE))
        words.index(5).store(gl.full([1], begin, gl.int32, _ONE))
        words.index(6).store(gl.full([1], end, gl.int32, _ONE))
        barrier()  # Triton has none ahead of an arrival that expects bytes
        mbarrier.expect(q_full, 2 * _LINES * HEAD * 2)
        for part in gl.static_range(2):
            where = [row_start + first_query + part * (QUERIES // 2), kv_index * GROUP, 0]
            tma.async_copy_global_to_shared(q_desc, where, q_full, q_smem.index(part))
        middle = gl.minimum(begin + 1, end)
        step = _copy(
            begin, middle, step, kv_desc, ring, line, low, high, kv_index, block_rows, head_rows, head_channels,
            outside, BLOCK, PIECE, STAGES,
        )  # fmt: skip
        # While the first tile is on its way, find the next item.
        before = gl.atomic_add(counter, 1)
        if before == total - 1:  # the last program to ask
            gl.store(counter, 0)
        item = before + gl.num_programs(0)
        row, row_start, first_query, num_queries, seq_len = _find(
            item, total, query_start, seq_lens, tile_start, num_rows, KV_HEADS, QUERIES
        )
        step = _copy(
            middle, end, step, kv_desc, ring, line, low, high, kv_index, block_rows, head_rows, head_channels,
            outside, BLOCK, PIECE, STAGES,
        )  # fmt: skip
    mbarrier.wait(q_empty, (turn & 1) ^ 1)
    words.index(6).store(gl.full([1], -1, gl.int32, _ONE))
    if NARROW != "":
        words.index(7).store(gl.full([1], step, gl.int32, _ONE))
        barrier()
    mbarrier.arrive(q_full, count=1)
    mbarrier.wait(ring[3].index(step % STAGES), (step // STAGES & 1) ^ 1)
    mbarrier.arrive(ring[2].index(step % STAGES), count=1)


@gluon.jit
def widen(words, staged, ring, NARROW: gl.constexpr):
    """Tiles of 8 bits a number, as they come, to those that are multiplied, until the producer says how many come."""
    STAGED: gl.constexpr = staged[0].shape[0]
    STAGES: gl.constexpr = ring[0].shape[0]
    step = 0
    mbarrier.wait(staged[2].index(0), 0)
    while word(words, 7) != step:
        source, stage = step % STAGED, step % STAGES
        mbarrier.wait(ring[3].index(stage), (step // STAGES & 1) ^ 1)
        widen_tile(staged[0].index(source), ring[0].index(stage), NARROW)
        widen_tile(staged[1].index(source), ring[1].index(stage), NARROW)
        fence_async_shared()
        barrier()
        mbarrier.arrive(ring[2].index(stage), count=1)
        mbarrier.arrive(staged[3].index(source), count=1)
        step += 1
        mbarrier.wait(staged[2].index(step % STAGED), step // STAGED & 1)
    mbarrier.wait(ring[3].index(step % STAGES), (step // STAGES & 1) ^ 1)
    mbarrier.arrive(ring[2].index(step % STAGES), count=1)
