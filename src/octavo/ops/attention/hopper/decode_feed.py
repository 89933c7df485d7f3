"""What feeds `decode_kernel` beside it: one warp that copies K and V, and one that turns a step's heads.

Owns how a program finds its (row, KV head)s, what it tells the warps that compute, and the order in which tiles and
heads come. Does not know what is computed. Invariant: what arrives in shared memory is what the cache holds once the
step's K and V are stored, and Q as `octavo.ops.rope.qk_norm_rope_store` leaves it.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton.language as tl
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from octavo.ops.attention.hopper.narrow_tiles import narrowed
from octavo.ops.attention.paged_kernels import scales_of
from octavo.ops.attention.paged_workload import BN, first_seen, leaf_of, leaf_start
from octavo.ops.rope.heads import rope_heads, rotated_halves

_LINES, _PIECE = 8, 16
TILE, LINES = gl.constexpr(BN), gl.constexpr(_LINES)  # tokens and lines of a tile; lines: queries x heads of a KV head
PIECE, PIECES = gl.constexpr(_PIECE), gl.constexpr(BN // _PIECE)  # tokens of a piece: divides every block size
TURNS = gl.constexpr(2)  # (row, head)s that the consumer is told of ahead
# What the producer tells of each; of the last two words, what is to be done, and nothing more to come.
WORDS = gl.constexpr(12)
WHOLE, FOLDED, LEFT, END = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(3)
_ONE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton renamed it


@gluon.jit
def _copy_pieces(start, pieces, k, v, arrived, WIDTH: gl.constexpr, BLOCK: gl.constexpr):
    """Ask for the pieces of a tile that may be read; the others arrive at once."""
    piece_desc, line, low, high, channel, head_row, block_rows = pieces
    for part in gl.static_range(PIECES):
        token = start + part * PIECE
        if (token < high) & (token + PIECE > low):
            mbarrier.expect(arrived, 2 * PIECE * WIDTH * 2)
            row = gl.load(line + token // BLOCK) * block_rows + head_row + token % BLOCK
            tma.async_copy_global_to_shared(piece_desc, [row, channel], arrived, k.slice(part * PIECE, PIECE, 0))
            piece = v.slice(part * PIECE, PIECE, 0)
            tma.async_copy_global_to_shared(piece_desc, [row, channel + WIDTH], arrived, piece)
        else:
            mbarrier.arrive(arrived, count=1)


@gluon.jit
def _copy(
    start,
    step,
    descs,
    ring,
    line,
    low,
    high,
    kv_index,
    block_rows,
    head_rows,
    head_channels,
    WIDTH: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Ask for the tile at `start`: whole, or those of its pieces that may be read. A stage has an arrival of each."""
    k_smem, v_smem, full, empty = ring
    stage = step % STAGES
    k, v, arrived = k_smem.index(stage), v_smem.index(stage), full.index(stage)
    channel, head_row = kv_index * head_channels, kv_index * head_rows
    mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
    pieces = descs[1], line, low, high, channel, head_row, block_rows
    if BLOCK % TILE == 0:
        if (start + TILE <= high) & (start >= low):
            mbarrier.expect(arrived, 2 * TILE * WIDTH * 2)
            mbarrier.arrive(arrived, count=PIECES - 1)
            row = gl.load(line + start // BLOCK) * block_rows + head_row + start % BLOCK
            tma.async_copy_global_to_shared(descs[0], [row, channel], arrived, k)
            tma.async_copy_global_to_shared(descs[0], [row, channel + WIDTH], arrived, v)
        else:
            _copy_pieces(start, pieces, k, v, arrived, WIDTH, BLOCK)
    else:
        _copy_pieces(start, pieces, k, v, arrived, WIDTH, BLOCK)
    return step + 1


@gluon.jit
def _find(
    index,
    division,
    query_start,
    seq_lens,
    leaf_base,
    short,
    reach,
    KV_HEADS: gl.constexpr,
    SEES: gl.constexpr,
):
    """(row, KV head, row's first token, queries, length, leaves, those of rows before, the part's first and end).

    index: of the (row, head)s that the division gives this program, in the order of `attend_rows`; the last one's for
    those behind it, and anything if there is none.
    """
    start_pair, start_leaf, end_pair, end_leaf, count = division
    index = gl.minimum(index, count - 1)
    pair = gl.maximum(start_pair + gl.where(index <= 0, count, index) - 1, 0)
    row = pair // KV_HEADS
    row_start, row_end, seq_len = gl.load(query_start + row), gl.load(query_start + row + 1), gl.load(seq_lens + row)
    row_base = gl.load(leaf_base + row)
    num_queries = row_end - row_start
    leaves = leaf_of(seq_len - 1) - leaf_of(first_seen(seq_len - num_queries, reach, SEES)) + 1
    leaves = gl.where((num_queries > 0) & (num_queries <= short), gl.where(seq_len > 0, leaves, 1), 0)
    begin = gl.where(pair == start_pair, start_leaf, 0)
    stop = gl.minimum(gl.where(pair == end_pair, end_leaf, leaves), leaves)
    return row, pair % KV_HEADS, row_start, num_queries, seq_len, leaves, row_base, begin, stop


@gluon.jit
def _division(work):
    """This program's part: the (row, head) and the leaf of its start and of its end, and how many (row, head)s."""
    part = work + gl.program_id(0) * 2
    start_pair, start_leaf, end_pair, end_leaf = gl.load(part), gl.load(part + 1), gl.load(part + 2), gl.load(part + 3)
    return start_pair, start_leaf, end_pair, end_leaf, end_pair - start_pair + (end_leaf > 0).to(gl.int32)


@gluon.jit
def _tell(words, index, value):
    words.index(index).store(gl.full([1], value, gl.int32, _ONE))


@gluon.jit
def produce(
    q_desc, descs, query_start, seq_lens, table, work, leaf_base, words, q_smem, q_full, q_empty, ring, table_row,
    short, reach, capacity, fold_limit, block_rows, head_rows, head_channels, KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, HEAD: gl.constexpr, WIDTH: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
    SEES: gl.constexpr, ROTATES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Find what the division gives this program, tell the consumer, and copy it.

    The division and the lengths are constants of a forward pass, see `octavo.ops.compile.launch`. No K and V is read
    before the wait, not even of tokens that are old to their row: another row of the step may be writing them. Where it
    is this kernel that stores the step's, old ones are read at once, and a row's newest once they are stored.
    """
    division = _division(work)
    step, turn = 0, 0
    found = _find(0, division, query_start, seq_lens, leaf_base, short, reach, KV_HEADS, SEES)
    if PDL and not ROTATES:
        tl.extra.cuda.gdc_wait()
    for index in range(division[4]):
        row, kv_index, row_start, num_queries, seq_len, leaves, row_base, begin_leaf, stop_leaf = found
        found = _find(index + 1, division, query_start, seq_lens, leaf_base, short, reach, KV_HEADS, SEES)
        if begin_leaf < stop_leaf:
            low = first_seen(seq_len - num_queries, reach, SEES)
            row_leaf = leaf_of(low)
            begin = gl.maximum(leaf_start(row_leaf + begin_leaf), low // TILE * TILE)
            end = gl.minimum(leaf_start(row_leaf + stop_leaf), seq_len)
            line = table + row.to(gl.int64) * table_row
            is_left = (leaves > fold_limit) & (row_base + leaves <= capacity)
            is_split = stop_leaf - begin_leaf < leaves
            slot = turn % TURNS
            told = slot * WORDS
            mbarrier.wait(q_empty.index(slot), (turn // TURNS & 1) ^ 1)
            _tell(words, told + 0, row_start)
            _tell(words, told + 1, num_queries)
            _tell(words, told + 2, seq_len)
            _tell(words, told + 3, kv_index)
            _tell(words, told + 4, begin)
            _tell(words, told + 5, end)
            _tell(words, told + 6, row_base * KV_HEADS + kv_index * leaves - row_leaf)
            _tell(words, told + 7, gl.where(is_left, LEFT, gl.where(is_split, FOLDED, WHOLE)))
            _tell(words, told + 8, leaves)
            _tell(words, told + 9, stop_leaf - begin_leaf)
            _tell(words, told + 10, row * KV_HEADS + kv_index)
            _tell(words, told + 11, low)
            if ROTATES:
                mbarrier.arrive(q_full.index(slot), count=1)
            else:
                mbarrier.expect(q_full.index(slot), LINES * HEAD * 2)
                where = [row_start, kv_index * GROUP, 0]
                tma.async_copy_global_to_shared(q_desc, where, q_full.index(slot), q_smem.index(slot))
            turn += 1
            for start in range(begin, end, TILE):
                if ROTATES and start + TILE >= seq_len:
                    mbarrier.wait(q_full.index(slot), (turn - 1) // TURNS & 1)
                step = _copy(
                    start,
                    step,
                    descs,
                    ring,
                    line,
                    low,
                    seq_len,
                    kv_index,
                    block_rows,
                    head_rows,
                    head_channels,
                    WIDTH,
                    BLOCK,
                    STAGES,
                )
    slot = turn % TURNS
    mbarrier.wait(q_empty.index(slot), (turn // TURNS & 1) ^ 1)
    _tell(words, slot * WORDS + 7, END)
    mbarrier.arrive(q_full.index(slot), count=1 + ROTATES)


@constexpr_function
def _doublings(lines):
    return (_LINES // lines).bit_length() - 1


@constexpr_function
def _halves(lines, half):
    """The layout of halves of heads [lines, half] in a warp."""
    each = min(8, lines * half // 32)
    lanes = half // each
    return gl.BlockedLayout([max(1, lines * lanes // 32), each], [32 // lanes, lanes], [1, 1], [1, 0])


@gluon.jit
def rotate(
    rotation, scales, query_start, seq_lens, work, leaf_base, q_smem, q_full, q_empty, short, reach,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD: gl.constexpr, BLOCK: gl.constexpr, SEES: gl.constexpr,
    NARROW: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Q of each (row, KV head) for the consumer; K and V of the newest token, if it is in this program's part."""
    source, positions, cos_sin, q_norm, k_norm, slots, kv, source_token, kv_block, kv_head, kv_token, eps = rotation
    HALF: gl.constexpr = HEAD // 2
    LEVELS: gl.constexpr = HALF.bit_length() - 1
    NORM: gl.constexpr = q_norm is not None
    QS: gl.constexpr = _halves(GROUP, HALF)
    KS: gl.constexpr = _halves(1, HALF)
    of_q, of_k = gl.arange(0, HALF, gl.SliceLayout(0, QS))[None, :], gl.arange(0, HALF, gl.SliceLayout(0, KS))[None, :]
    head = gl.arange(0, GROUP, gl.SliceLayout(1, QS))[:, None]
    of_v = gl.arange(0, HEAD, gl.BlockedLayout([HEAD // 32], [32], [1], [0]))
    q_weights, k_weights = (of_q, of_q), (of_k, of_k)
    if NORM:
        q_weights = (gl.load(q_norm + of_q), gl.load(q_norm + HALF + of_q))
        k_weights = (gl.load(k_norm + of_k), gl.load(k_norm + HALF + of_k))
    division = _division(work)
    turn = 0
    found = _find(0, division, query_start, seq_lens, leaf_base, short, reach, KV_HEADS, SEES)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for index in range(division[4]):
        _, kv_index, row_start, _, _, leaves, _, begin_leaf, stop_leaf = found
        found = _find(index + 1, division, query_start, seq_lens, leaf_base, short, reach, KV_HEADS, SEES)
        if begin_leaf < stop_leaf:
            token = row_start.to(gl.int64)
            of_token = source + token * source_token
            angles, slot = cos_sin + gl.load(positions + token).to(gl.int64) * HEAD, gl.load(slots + token).to(gl.int64)
            at = of_token + (kv_index * GROUP + head) * HEAD + of_q
            low, high = gl.load(at), gl.load(at + HALF)
            at = of_token + (KV_HEADS * GROUP + kv_index) * HEAD
            k_low, k_high = gl.load(at + of_k), gl.load(at + HALF + of_k)
            value = gl.load(at + KV_HEADS * HEAD + of_v)
            cosine, sine = gl.load(angles + of_q), gl.load(angles + HALF + of_q)
            k_cosine, k_sine = gl.load(angles + of_k), gl.load(angles + HALF + of_k)
            q = rope_heads(low, high, q_weights, cosine, sine, eps, LEVELS, NORM)
            if (stop_leaf == leaves) & (slot >= 0):
                k_low, k_high = rotated_halves(k_low, k_high, k_weights, k_cosine, k_sine, eps, LEVELS, NORM)
                stored = kv + (slot // BLOCK * kv_block + kv_index * kv_head + slot % BLOCK * kv_token)
                key_scale, _cap, value_scale = scales_of(*scales, kv_index, 1.0, 1.0, False)
                gl.store(stored + of_k, narrowed(k_low, key_scale, NARROW))
                gl.store(stored + HALF + of_k, narrowed(k_high, key_scale, NARROW))
                gl.store(stored + HEAD + of_v, narrowed(value, value_scale, NARROW))
                gl.inline_asm_elementwise("fence.proxy.async.global; // $0", "=r", [], gl.int32, False, 1)
            for _doubling in gl.static_range(_doublings(GROUP)):  # the other lines of a tile are zeros
                q = gl.reshape(gl.permute(gl.join(q, gl.zeros_like(q)), (2, 0, 1)), [2 * q.shape[0], HEAD])
            at = turn % TURNS
            mbarrier.wait(q_empty.index(at), (turn // TURNS & 1) ^ 1)
            q_smem.index(at).store(q)
            barrier()
            mbarrier.arrive(q_full.index(at), count=1)
            turn += 1
