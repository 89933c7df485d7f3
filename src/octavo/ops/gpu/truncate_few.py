"""The few largest logits on a GPU: listed, or kept as top-k, with min-p before it and top-p after it.

A list costs little more than one read of the logits, a cut two and a write.

Owns the kernels. The vocabulary is cut into leaves; the k-th largest of their maxima is a bar that at least k entries
reach, and mostly few more. These are gathered, in any order, sorted by (value, lower id first), and cut. Where too many
reach the bar (equal logits), the k-th key is found by bisection instead. Weights are integers, as in `truncate`.
Invariant: a row's result is `octavo.ops.sample.top_k_top_p_mask_`'s of the row over its temperature.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.gpu.truncate import value_key, weight_of

_MAX_LEAVES = 256
_ROOM = 256  # entries that are gathered and sorted
_SCAN = 2048


@triton.jit
def _scaled(logits, ids, temperature, vocab_size):
    """Logits over the temperature; what lies beyond the vocabulary counts as -inf, and so does NaN."""
    x = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
    x = tl.div_rn(x, temperature)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _order(x, ids):
    """Distinct int64 keys that grow with (falling value, id)."""
    return (value_key(x).to(tl.int64) << 31) | ids.to(tl.int64)


@triton.jit
def _leaf_maxima(logits, logits_row, at, temperatures, maxima, vocab_size, LEAF: tl.constexpr, LEAVES: tl.constexpr):
    line, leaf = tl.program_id(0), tl.program_id(1)
    row = tl.load(at + line)
    x = _scaled(logits + row * logits_row, leaf * LEAF + tl.arange(0, LEAF), tl.load(temperatures + line), vocab_size)
    tl.store(maxima + line * LEAVES + leaf, tl.max(x, 0))


@triton.jit
def _set_bars(maxima, top_k, bars, counts, num_leaves, LEAVES: tl.constexpr):
    """Program (line): the k-th largest of the maxima; -inf where there are fewer leaves."""
    line, leaf = tl.program_id(0), tl.arange(0, LEAVES)
    found = tl.load(maxima + line * LEAVES + leaf, mask=leaf < num_leaves, other=float("-inf"))
    found = tl.sort(found, descending=True)
    chosen = leaf == tl.minimum(tl.load(top_k + line), LEAVES) - 1
    tl.store(bars + line, tl.max(tl.where(chosen, found, float("-inf")), 0))
    tl.store(counts + line, 0)


@triton.jit
def _gather(
    logits, logits_row, at, temperatures, maxima, bars, counts, keys, vocab_size,
    LEAF: tl.constexpr, LEAVES: tl.constexpr, ROOM: tl.constexpr, FINITE: tl.constexpr,
):  # fmt: skip
    """Program (line, leaf): append the keys of entries that reach the bar, as far as there is room.

    FINITE: without those that are -inf, which rows with few allowed tokens are full of.
    """
    line, leaf = tl.program_id(0), tl.program_id(1)
    bar = tl.load(bars + line)
    if tl.load(maxima + line * LEAVES + leaf) >= bar:
        ids = leaf * LEAF + tl.arange(0, LEAF)
        x = _scaled(logits + tl.load(at + line) * logits_row, ids, tl.load(temperatures + line), vocab_size)
        reaches = ids < vocab_size
        reaches = (reaches & (x > float("-inf")) if FINITE else reaches) & (x >= bar)
        reaches = reaches.to(tl.int32)
        place = tl.atomic_add(counts + line, tl.sum(reaches, 0), sem="relaxed") + tl.cumsum(reaches, 0) - 1
        tl.store(keys + line * ROOM + place, _order(x, ids), mask=(reaches > 0) & (place < ROOM))


@triton.jit
def _kth_key(logits, temperature, k, vocab_size, SCAN: tl.constexpr):
    """The k-th key of a row by bisection: 63 bits, a scan of the row for each."""
    key = tl.zeros((), tl.int64)
    for step in range(63):
        below = key | ((tl.full((), 1, tl.int64) << (62 - step)) - 1)  # the largest key with this bit off
        count = tl.zeros((), tl.int64)
        for base in range(0, vocab_size, SCAN):
            ids = base + tl.arange(0, SCAN)
            order = _order(_scaled(logits, ids, temperature, vocab_size), ids)
            count += tl.sum(((order <= below) & (ids < vocab_size)).to(tl.int64), 0)
        key = tl.where(count >= k, key, below + 1)
    return key


@triton.jit
def _sorted_keys(logits, temperature, k, keys, count, vocab_size, ROOM: tl.constexpr, SCAN: tl.constexpr):
    """The gathered keys of a row in their order, at least the first k; where too many came, exactly k."""
    place = tl.arange(0, ROOM)
    if count > ROOM:
        last = _kth_key(logits, temperature, k, vocab_size, SCAN)
        count = 0
        for base in range(0, vocab_size, SCAN):
            ids = base + tl.arange(0, SCAN)
            order = _order(_scaled(logits, ids, temperature, vocab_size), ids)
            kept = ((order <= last) & (ids < vocab_size)).to(tl.int32)
            tl.store(keys + count + tl.cumsum(kept, 0) - 1, order, mask=kept > 0)
            count += tl.sum(kept, 0)
        tl.debug_barrier()
    return tl.sort(tl.load(keys + place, mask=place < count, other=0x7FFFFFFFFFFFFFFF)), count


@triton.jit(do_not_specialize=["k"])
def _list(
    logits, logits_row, at, temperatures, counts, keys, token_ids, k, vocab_size, ROOM: tl.constexpr, SCAN: tl.constexpr
):
    """Program (line): the ids of the first k keys."""
    line, place = tl.program_id(0).to(tl.int64), tl.arange(0, ROOM)
    logits += tl.load(at + line) * logits_row
    count = tl.load(counts + line)
    temperature = tl.load(temperatures + line)
    order, _ = _sorted_keys(logits, temperature, k, keys + line * ROOM, count, vocab_size, ROOM, SCAN)
    tl.store(token_ids + line * k + place, order & 0x7FFFFFFF, mask=place < k)


@triton.jit
def _cut(
    logits, logits_row, at, temperatures, top_k, top_p, min_p_logs, counts, keys, cuts, vocab_size,
    ROOM: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Program (line): the key of the last entry that is kept."""
    line, place = tl.program_id(0), tl.arange(0, ROOM)
    k, temperature = tl.load(top_k + line), tl.load(temperatures + line)
    logits += tl.load(at + line) * logits_row
    order, count = _sorted_keys(
        logits, temperature, k, keys + line * ROOM, tl.load(counts + line), vocab_size, ROOM, SCAN
    )
    x = tl.load(logits + (order & 0x7FFFFFFF), mask=place < count, other=float("-inf"))
    x = tl.div_rn(x, temperature)
    x = tl.where(x == x, x, float("-inf"))
    largest = tl.max(x, 0)
    kept = (place < tl.minimum(k, count)) & (x >= largest + tl.load(min_p_logs + line))
    weight = tl.where(kept, weight_of(x, largest), 0)
    reached = tl.cumsum(weight, 0)
    p = tl.load(top_p + line)
    goal = tl.ceil(p.to(tl.float64) * tl.sum(weight, 0).to(tl.float64)).to(tl.int64)
    if p < 1.0:
        kept = kept & (reached - weight < tl.maximum(goal, 1))
    last = tl.max(tl.where(kept, order, -1), 0)
    # where the largest is not finite the row stays as it is
    tl.store(cuts + line, tl.where(tl.abs(largest) < float("inf"), last, 0x7FFFFFFFFFFFFFFF))


@triton.jit
def _write(logits, logits_row, at, temperatures, cuts, vocab_size, BLOCK: tl.constexpr):
    line = tl.program_id(0)
    logits += tl.load(at + line) * logits_row
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + ids, mask=ids < vocab_size, other=0.0)
    x = tl.div_rn(x, tl.load(temperatures + line))
    hidden = _order(x, ids) > tl.load(cuts + line)
    tl.store(logits + ids, tl.where(hidden, float("-inf"), x), mask=ids < vocab_size)


def _gather_keys(
    logits: Tensor, at: Tensor, temperatures: Tensor, top_k: Tensor, *, finite: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(number of gathered keys of each line, the keys, room for one number of each line)."""
    num_rows, vocab_size = len(at), logits.shape[1]
    leaf = max(16, triton.next_power_of_2(triton.cdiv(vocab_size, _MAX_LEAVES)))
    leaves = triton.cdiv(vocab_size, leaf)
    floats = torch.empty(num_rows * (_MAX_LEAVES + 1), dtype=torch.float32, device=logits.device)
    maxima, bars = floats[num_rows:], floats[:num_rows]
    counts = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    words = torch.empty(num_rows * (_ROOM + 1), dtype=torch.int64, device=logits.device)
    row = (logits, logits.stride(0), at, temperatures)
    warps = 4 if leaf >= 512 else 1
    _leaf_maxima[(num_rows, leaves)](
        *row, maxima, vocab_size, LEAF=leaf, LEAVES=_MAX_LEAVES, num_warps=warps, enable_fp_fusion=False
    )
    _set_bars[(num_rows,)](maxima, top_k, bars, counts, leaves, LEAVES=_MAX_LEAVES, num_warps=4)
    _gather[(num_rows, leaves)](
        *row, maxima, bars, counts, words[num_rows:], vocab_size, LEAF=leaf, LEAVES=_MAX_LEAVES, ROOM=_ROOM,
        FINITE=finite, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return counts, words[num_rows:], words[:num_rows]


def likeliest(logits: Tensor, k: int) -> Tensor:
    """The ids of the k largest logits of each row, [rows, k] int64, most likely first; 1 <= k <= _ROOM / 4."""
    assert 1 <= k <= _ROOM // 4, "as many keys fit, with room to spare"
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty((num_rows, k), dtype=torch.int64, device=logits.device)
    if num_rows:
        at, ones = torch.arange(num_rows, device=logits.device), torch.ones(num_rows, device=logits.device)
        counts, keys, _ = _gather_keys(logits, at, ones, torch.full_like(at, k), finite=False)
        _list[(num_rows,)](
            logits, logits.stride(0), at, ones, counts, keys, token_ids, k, vocab_size, ROOM=_ROOM, SCAN=_SCAN,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return token_ids


def truncate_few_(
    logits: Tensor, at: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> None:
    """See `octavo.ops.sample.truncate_`; every top_k lies in 1 .. _ROOM / 4."""
    num_rows, vocab_size = len(at), logits.shape[1]
    if not num_rows:
        return
    counts, keys, cuts = _gather_keys(logits, at, temperatures, top_k, finite=True)
    row = (logits, logits.stride(0), at, temperatures)
    _cut[(num_rows,)](
        *row, top_k, top_p, min_p.log(), counts, keys, cuts, vocab_size, ROOM=_ROOM, SCAN=_SCAN, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    _write[(num_rows, triton.cdiv(vocab_size, 1024))](
        *row, cuts, vocab_size, BLOCK=1024, num_warps=4, enable_fp_fusion=False
    )
