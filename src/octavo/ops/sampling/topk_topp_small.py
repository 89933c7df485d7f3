"""The few largest logits on a GPU: listed, or kept as top-k, with min-p before it and top-p after it.

Either costs little more than one read of the logits.

Owns the kernels. The vocabulary is cut into leaves; the k-th largest of their maxima is a bar that at least k entries
reach, and mostly few more. These are gathered, in any order, sorted by (value, lower id first), and cut. Where too many
reach the bar (equal logits), the row is searched for the k-th key instead. Weights are integers, see `ranking`.
Invariant: a row's cut is `octavo.ops.sampling.top_k_top_p_mask_`'s of the row over its divisor.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.sampling.ranking import ID_BITS, IDS, SEARCH_ROOM, key_value, order_of, search_row, value_key, weight_of
from octavo.ops.sampling.truncation import FEW, TruncationRows

_MAX_LEAVES = 256
_ROOM = 256  # entries that are gathered and sorted
_SCAN = 2048
_FEW = tl.constexpr(FEW)


@triton.jit
def _load(logits, ids, divisor, vocab_size):
    """Logits over the divisor; what lies beyond the vocabulary counts as -inf, and so does NaN."""
    x = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
    x = tl.div_rn(x, divisor)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _numbers_of(row, divisors, top_k):
    """(divisor, k, whether the row is cut here)."""
    divisor, k = tl.load(divisors + row), tl.load(top_k + row)
    return divisor, k, (divisor > 0) & (k > 0) & (k <= _FEW)


@triton.jit
def _leaf_maxima(
    logits, logits_row, rows, divisors, top_k, maxima, vocab_size, LEAF: tl.constexpr, LEAVES: tl.constexpr
):
    line, leaf = tl.program_id(0).to(tl.int64), tl.program_id(1)
    divisor, _, is_mine = _numbers_of(tl.load(rows + line), divisors, top_k)
    if is_mine:
        x = tl.load(
            logits + line * logits_row + leaf * LEAF + tl.arange(0, LEAF),
            mask=tl.arange(0, LEAF) < vocab_size - leaf * LEAF,
            other=float("-inf"),
        )
        largest = tl.max(tl.where(x == x, x, float("-inf")), 0)
        tl.store(maxima + line * LEAVES + leaf, tl.div_rn(largest, divisor))  # a quotient grows with what is divided


@triton.jit
def _set_bars(maxima, rows, divisors, top_k, bars, counts, num_leaves, LEAVES: tl.constexpr):
    """Program (line): the k-th largest of the maxima; -inf where there are fewer leaves."""
    line, leaf = tl.program_id(0), tl.arange(0, LEAVES)
    _, k, is_mine = _numbers_of(tl.load(rows + line), divisors, top_k)
    if is_mine:
        found = tl.load(maxima + line * LEAVES + leaf, mask=leaf < num_leaves, other=float("-inf"))
        found = tl.sort(found, descending=True)
        chosen = leaf == tl.minimum(k, LEAVES) - 1
        tl.store(bars + line, tl.max(tl.where(chosen, found, float("-inf")), 0))
        tl.store(counts + line, 0)


@triton.jit
def _gather(
    logits,
    logits_row,
    rows,
    divisors,
    top_k,
    maxima,
    bars,
    counts,
    keys,
    vocab_size,
    LEAF: tl.constexpr,
    LEAVES: tl.constexpr,
    ROOM: tl.constexpr,
    FINITE: tl.constexpr,
):
    """Program (line, leaf): append the keys of entries that reach the bar, as far as there is room.

    FINITE: without those that are -inf, which rows with few allowed tokens are full of.
    """
    line, leaf = tl.program_id(0).to(tl.int64), tl.program_id(1)
    divisor, _, is_mine = _numbers_of(tl.load(rows + line), divisors, top_k)
    bar = tl.load(bars + line)
    if is_mine & (tl.load(maxima + line * LEAVES + leaf) >= bar):
        ids = leaf * LEAF + tl.arange(0, LEAF)
        x = _load(logits + line * logits_row, ids, divisor, vocab_size)
        reaches = ids < vocab_size
        reaches = (reaches & (x > float("-inf")) if FINITE else reaches) & (x >= bar)
        reaches = reaches.to(tl.int32)
        place = tl.atomic_add(counts + line, tl.sum(reaches, 0), sem="relaxed") + tl.cumsum(reaches, 0) - 1
        tl.store(keys + line * SEARCH_ROOM + place, order_of(x, ids), mask=(reaches > 0) & (place < ROOM))


@triton.jit
def _sorted_keys(
    logits, divisor, k, maxima, keys, count, vocab_size, LEAVES: tl.constexpr, ROOM: tl.constexpr, SCAN: tl.constexpr
):
    """The gathered keys of a row in their order, at least the first k; where too many came, exactly k."""
    place = tl.arange(0, ROOM)
    if count > ROOM:
        first = value_key(tl.max(tl.load(maxima + tl.arange(0, LEAVES)), 0)).to(tl.int64) << ID_BITS
        last = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
        last = search_row(logits, divisor, 0.0, k, first, last, keys, vocab_size, False)
        count = 0
        for base in range(0, vocab_size, SCAN):
            ids = base + tl.arange(0, SCAN)
            order = order_of(_load(logits, ids, divisor, vocab_size), ids)
            kept = ((order <= last) & (ids < vocab_size)).to(tl.int32)
            tl.store(keys + count + tl.cumsum(kept, 0) - 1, order, mask=kept > 0)
            count += tl.sum(kept, 0)
        tl.debug_barrier()
    return tl.sort(tl.load(keys + place, mask=place < count, other=0x7FFFFFFFFFFFFFFF)), count


@triton.jit
def _list(
    logits,
    logits_row,
    rows,
    divisors,
    top_k,
    maxima,
    counts,
    keys,
    token_ids,
    vocab_size,
    LEAVES: tl.constexpr,
    ROOM: tl.constexpr,
    SCAN: tl.constexpr,
):
    """Program (line): the ids of the first k keys."""
    line, place = tl.program_id(0).to(tl.int64), tl.arange(0, ROOM)
    divisor, k, _ = _numbers_of(tl.load(rows + line), divisors, top_k)
    order, _ = _sorted_keys(
        logits + line * logits_row,
        divisor,
        k,
        maxima + line * LEAVES,
        keys + line * SEARCH_ROOM,
        tl.load(counts + line),
        vocab_size,
        LEAVES,
        ROOM,
        SCAN,
    )
    tl.store(token_ids + line * k + place, order & IDS, mask=place < k)


@triton.jit
def _cut(
    logits, logits_row, rows, divisors, top_k, top_p, min_p_logs, maxima, counts, keys, last_values, last_ids,
    vocab_size, LEAVES: tl.constexpr, ROOM: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Program (line): the value and the id of the last entry that is kept."""
    line, place = tl.program_id(0).to(tl.int64), tl.arange(0, ROOM)
    row = tl.load(rows + line)
    divisor, k, is_mine = _numbers_of(row, divisors, top_k)
    if is_mine:
        order, count = _sorted_keys(
            logits + line * logits_row,
            divisor,
            k,
            maxima + line * LEAVES,
            keys + line * SEARCH_ROOM,
            tl.load(counts + line),
            vocab_size,
            LEAVES,
            ROOM,
            SCAN,
        )
        x = tl.where(place < count, key_value((order >> ID_BITS).to(tl.uint32)), float("-inf"))
        largest = tl.max(x, 0)
        kept = (place < tl.minimum(k, count)) & (x >= largest + tl.load(min_p_logs + row))
        weight = tl.where(kept, weight_of(x, largest), 0)
        reached = tl.cumsum(weight, 0)
        p = tl.load(top_p + row)
        goal = tl.ceil(p.to(tl.float64) * tl.sum(weight, 0).to(tl.float64)).to(tl.int64)
        if p < 1.0:
            kept = kept & (reached - weight < tl.maximum(goal, 1))
        last = tl.max(tl.where(kept, order, -1), 0)
        if tl.abs(largest) < float("inf"):
            tl.store(last_values + line, key_value((last >> ID_BITS).to(tl.uint32)))
            tl.store(last_ids + line, (last & IDS).to(tl.int32))
        else:  # the row stays as it is
            tl.store(last_values + line, float("-inf"))
            tl.store(last_ids + line, vocab_size)


def _gather_keys(
    row: tuple[Tensor | int, ...], num_rows: int, vocab_size: int, device: torch.device, *, finite: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(maxima of leaves, number of gathered keys, the keys) of lines; row: logits, stride, rows, divisors, top_k."""
    leaf = max(16, triton.next_power_of_2(triton.cdiv(vocab_size, _MAX_LEAVES)))
    leaves = triton.cdiv(vocab_size, leaf)
    floats = torch.empty(num_rows * (_MAX_LEAVES + 1), dtype=torch.float32, device=device)
    maxima, bars = floats[num_rows:], floats[:num_rows]
    counts = torch.empty(num_rows, dtype=torch.int32, device=device)
    keys = torch.empty(num_rows * SEARCH_ROOM.value, dtype=torch.int64, device=device)
    warps = 4 if leaf >= 512 else 1
    _leaf_maxima[(num_rows, leaves)](*row, maxima, vocab_size, LEAF=leaf, LEAVES=_MAX_LEAVES, num_warps=warps)
    _set_bars[(num_rows,)](maxima, *row[2:], bars, counts, leaves, LEAVES=_MAX_LEAVES, num_warps=4)
    _gather[(num_rows, leaves)](
        *row,
        maxima,
        bars,
        counts,
        keys,
        vocab_size,
        LEAF=leaf,
        LEAVES=_MAX_LEAVES,
        ROOM=_ROOM,
        FINITE=finite,
        num_warps=warps,
        enable_fp_fusion=False,
    )
    return maxima, counts, keys


def likeliest(logits: Tensor, k: int) -> Tensor:
    """The ids of the k largest logits of each row, [rows, k] int64, most likely first; 1 <= k <= _ROOM / 4."""
    assert 1 <= k <= _ROOM // 4, "as many keys fit, with room to spare"
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty((num_rows, k), dtype=torch.int64, device=logits.device)
    if num_rows:
        rows, ones = torch.arange(num_rows, device=logits.device), torch.ones(num_rows, device=logits.device)
        row = (logits, logits.stride(0), rows, ones, torch.full_like(rows, k))
        gathered = _gather_keys(row, num_rows, vocab_size, logits.device, finite=False)
        _list[(num_rows,)](
            *row,
            *gathered,
            token_ids,
            vocab_size,
            LEAVES=_MAX_LEAVES,
            ROOM=_ROOM,
            SCAN=_SCAN,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return token_ids


def apply_topk_topp_small(
    logits: Tensor, rows: Tensor, truncation: TruncationRows, min_p_logs: Tensor, last: tuple[Tensor, Tensor]
) -> None:
    """Fill `last`, see `octavo.ops.sampling.truncation_gpu.last_kept`, of the rows whose top_k lies in 1 .. FEW."""
    num_rows, vocab_size = logits.shape
    row = (logits, logits.stride(0), rows, truncation.divisors, truncation.top_k)
    gathered = _gather_keys(row, num_rows, vocab_size, logits.device, finite=True)
    _cut[(num_rows,)](
        *row,
        truncation.top_p,
        min_p_logs,
        *gathered,
        *last,
        vocab_size,
        LEAVES=_MAX_LEAVES,
        ROOM=_ROOM,
        SCAN=_SCAN,
        num_warps=4,
        enable_fp_fusion=False,
    )
