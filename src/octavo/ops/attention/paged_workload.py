"""Leaves, and how the short rows of a batch divide among a fixed number of programs, found on the device.

Owns where leaves begin (part of the canonical order of `octavo.ops.attention.paged`) and the division, which
`attend_rows` in `paged_kernels` follows. Does not know what attention computes. Invariant: the division moves
work, never bits, so its constants are free; its launch depends on no length, so that a graph captured once is balanced
for any lengths.

The work is a line: rows one after another, in a row its KV heads, in a head its leaves; a leaf is as long as the tiles
of it that are read, a (row, head) has FIXED more. Program g of G takes the leaves that begin in the g-th of G equal
parts. `work` holds G + 1 starts (row * KV heads + head, leaf), then for each row the leaves of the rows before it,
which is where its partial results lie, then how many rows `merge` has to fold, and which. Rows that would lie beyond
`capacity` leaves are not split, and cheap ones only where programs would idle.

Long rows need no division: `count_tiles` numbers their tiles without gaps, and programs draw them.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment, attr-defined"
from __future__ import annotations

import triton
import triton.language as tl

from octavo.ops.compile.launch import begin_after, launched

FIRST_LEAF, FIRST_TOKENS, LEAF = 256, 1024, 512  # tokens of a leaf, before so many tokens and behind them
BN = 64  # tokens per step of the online softmax; all of the above are multiples
EVERYTHING, WINDOW, CHUNK = 0, 1, 2  # what a query sees: all, the last `reach` tokens, its own chunk of `reach` tokens
_FIRST_LEAF, _FIRST_TOKENS, _LEAF = tl.constexpr(FIRST_LEAF), tl.constexpr(FIRST_TOKENS), tl.constexpr(LEAF)
_FIRST_LEAVES, _BN = tl.constexpr(FIRST_TOKENS // FIRST_LEAF), tl.constexpr(BN)
_EVERYTHING, _CHUNK = tl.constexpr(EVERYTHING), tl.constexpr(CHUNK)


def count_leaves(num_tokens: int) -> int:
    """Leaves of so many first tokens."""
    return -(-min(num_tokens, FIRST_TOKENS) // FIRST_LEAF) + -(-max(num_tokens - FIRST_TOKENS, 0) // LEAF)


@triton.jit
def leaf_of(token):
    """The leaf of a token: short ones first, where few rows of few tokens have to occupy a whole device."""
    return tl.minimum(token, _FIRST_TOKENS) // _FIRST_LEAF + tl.maximum(token - _FIRST_TOKENS, 0) // _LEAF


@triton.jit
def leaf_start(leaf):
    """The first token of a leaf."""
    return tl.minimum(leaf, _FIRST_LEAVES) * _FIRST_LEAF + tl.maximum(leaf - _FIRST_LEAVES, 0) * _LEAF


@triton.jit
def first_seen(position, reach, SEES: tl.constexpr):
    """The first token that a query at `position` sees."""
    if SEES == _EVERYTHING:
        return position * 0
    if SEES == _CHUNK:
        return tl.maximum(position, 0) // reach * reach
    return tl.maximum(position - reach + 1, 0)


@triton.jit
def row_extent(query_start, seq_lens, row, inside, short, reach, SEES: tl.constexpr):
    """(length, first token read, leaves) of a row of at most `short` queries; no leaves for others.

    A row of length 0 has one empty leaf: its queries become 0.
    """
    num_queries = tl.load(query_start + row + 1, mask=inside, other=0) - tl.load(
        query_start + row, mask=inside, other=0
    )
    seq_len = tl.load(seq_lens + row, mask=inside, other=0)
    low = first_seen(seq_len - num_queries, reach, SEES)
    leaves = tl.where(seq_len > 0, leaf_of(seq_len - 1) - leaf_of(low) + 1, 1)
    return seq_len, low, tl.where((num_queries > 0) & (num_queries <= short), leaves, 0)


@triton.jit
def _cost(seq_len, low, leaves, FIXED: tl.constexpr):
    return tl.where(leaves > 0, tl.cdiv(seq_len, _BN) - low // _BN + FIXED, 0)


@launched(triton.jit(do_not_specialize=["num_rows", "short", "reach", "programs", "capacity", "fold_limit"]))
def divide(
    query_start, seq_lens, work, num_rows, short, reach, programs, capacity, fold_limit, KV_HEADS: tl.constexpr,
    SEES: tl.constexpr, FIXED: tl.constexpr, SPLIT: tl.constexpr, SPARSE: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (programs + 1), one for each start. The last one writes the rest.

    A (row, head) of a cost of up to SPLIT stays whole, unless a program's part is smaller than SPARSE.
    """
    begin_after(PDL)
    program = tl.program_id(0)
    is_end = program == programs
    total = 0
    for base in range(0, num_rows, ROWS):
        row = base + tl.arange(0, ROWS)
        seq_len, low, leaves = row_extent(query_start, seq_lens, row, row < num_rows, short, reach, SEES)
        total += tl.sum(_cost(seq_len, low, leaves, FIXED), 0)
    place = total.to(tl.int64) * KV_HEADS * program // programs
    row_index, before, cost_sum, leaf_sum, folded = 0, 0, 0, 0, 0
    for base in range(0, num_rows, ROWS):
        row = base + tl.arange(0, ROWS)
        seq_len, low, leaves = row_extent(query_start, seq_lens, row, row < num_rows, short, reach, SEES)
        cost = _cost(seq_len, low, leaves, FIXED)
        end = (cost_sum + tl.cumsum(cost, 0)).to(tl.int64) * KV_HEADS
        passed = (row < num_rows) & (end < place + tl.where(is_end, 0, 1))
        row_index += tl.sum(passed.to(tl.int32), 0)
        before += tl.sum(tl.where(passed, cost, 0), 0)
        leaf_end = leaf_sum + tl.cumsum(leaves, 0)
        if is_end:
            rest = work + (programs + 1) * 2
            tl.store(rest + row, leaf_end - leaves, mask=row < num_rows)
            is_long = ((leaves > fold_limit) & (leaf_end <= capacity)).to(tl.int32)
            tl.store(rest + num_rows + folded + tl.cumsum(is_long, 0), row, mask=is_long > 0)
            folded += tl.sum(is_long, 0)
        cost_sum += tl.sum(cost, 0)
        leaf_sum += tl.sum(leaves, 0)
    if is_end:
        tl.store(work + (programs + 1) * 2 + num_rows, folded)

    there = (row_index < num_rows) & (total > 0)
    seq_len, low, leaves = row_extent(query_start, seq_lens, row_index, there, short, reach, SEES)
    leaf_end = leaves
    for base in range(0, row_index, ROWS):
        row = base + tl.arange(0, ROWS)
        _, _, others = row_extent(query_start, seq_lens, row, row < row_index, short, reach, SEES)
        leaf_end += tl.sum(others, 0)
    cost = tl.maximum(tl.cdiv(seq_len, _BN) - low // _BN + FIXED, 1)
    inside = place - before.to(tl.int64) * KV_HEADS
    pair = row_index * KV_HEADS + (inside // cost).to(tl.int32)
    inside = (inside % cost).to(tl.int32)
    token = (low // _BN + tl.maximum(inside - FIXED, 0)) * _BN  # the leaf that begins here or later is the first
    leaf = tl.maximum(leaf_of(tl.maximum(token - 1, 0)) + 1 - leaf_of(low), 1)
    leaf = tl.where(inside == 0, 0, leaf)
    is_whole = (leaf_end > capacity) | ((cost <= SPLIT) & (total * KV_HEADS >= SPARSE * programs))
    is_next = (leaf >= leaves) | ((leaf > 0) & is_whole)
    pair = tl.where(is_next, pair + 1, pair)
    leaf = tl.where(is_next, 0, leaf)
    pair = tl.where(is_end, (row_index + 1) * KV_HEADS, tl.where(there, pair, num_rows * KV_HEADS))
    tl.store(work + program * 2, pair)
    tl.store(work + program * 2 + 1, tl.where(is_end, 0, leaf))


@launched(triton.jit(do_not_specialize=["num_rows", "short"]))
def count_tiles(query_start, tile_start, num_rows, short, QUERIES: tl.constexpr, ROWS: tl.constexpr):
    """Grid: (1). tile_start: [num_rows + 1], tiles of QUERIES queries that the rows before each have, and all together.

    Rows of at most `short` queries have none.
    """
    total = 0
    for base in range(0, num_rows, ROWS):
        row = base + tl.arange(0, ROWS)
        inside = row < num_rows
        begin = tl.load(query_start + row, mask=inside, other=0)
        num_queries = tl.load(query_start + row + 1, mask=inside, other=0) - begin
        tiles = tl.where(inside & (num_queries > short), tl.cdiv(num_queries, QUERIES), 0)
        tl.store(tile_start + row, total + tl.cumsum(tiles, 0) - tiles, mask=inside)
        total += tl.sum(tiles, 0)
    tl.store(tile_start + num_rows, total)
