"""Top-k, top-p and min-p on a GPU: the last entry that each row keeps, from two reads of its logits, without a sort.

Owns the kernels. A survey counts a row's entries in equal steps of value, over the range of a sample but for its
largest, and finds the row's maximum. Counts times the weight of a bin's middle say near which rank a cut lies, mostly
to 100 places. The second read sums what is surely kept, exactly, and lists the entries of the ranks around; among these
the cut is found exactly, or, where the guess was wrong or too many entries are equal, by a search of the row.
Invariant: a row's cut is `octavo.ops.sampling.top_k_top_p_mask_`'s of the row over its divisor, whatever was guessed.
Nothing waits for the device.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.compile.launch import begin_after, chained
from octavo.ops.sampling.ranking import (
    ID_BITS,
    IDS,
    SEARCH_ROOM,
    divide,
    first_key,
    key_value,
    last_key,
    order_of,
    search_row,
    sum_row,
    value_key,
    weight_of,
)
from octavo.ops.sampling.truncation import FEW, TruncationRows

_SURVEY_TILE, _TILE = 1024, 256
_PROGRAMS = 2112  # how many programs of one warp a launch should have
_FEW = tl.constexpr(FEW)
_BINS = tl.constexpr(64)  # of a survey
_SAMPLES = tl.constexpr(2)  # tiles of a row that set the range of its bins
_OUTLIERS = tl.constexpr(3)  # of a sample that lie above its bins
_MARGIN = tl.constexpr(448)  # ranks that are listed on each side of a guess
_ROOM = SEARCH_ROOM  # entries of a list: of top-k's guess and of top-p's
_KEEP_ALL = tl.constexpr(2**63 - 1)  # a key after all others
_LOWEST = tl.constexpr(-3.4028234663852886e38)  # -inf is kept or not: it stays what it is
# What the programs of a row leave each other. In words of 64 bits: weights before top-p's guess and before the end of
# top-k's, the maximum's key. In words of 32 bits: entries listed and before top-k's guess, the weight in bin 0 and
# its end, a bin's width, four bounds, the bins.
_MASS_P, _MASS_K, _LARGEST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_LISTED, _BEFORE_K, _TOP_MASS = tl.constexpr(6), tl.constexpr(7), tl.constexpr(8)
_HIGHEST, _WIDTH, _BOUNDS, _COUNTS = tl.constexpr(9), tl.constexpr(10), tl.constexpr(12), tl.constexpr(16)
_WORDS = tl.constexpr(16 + 64)


@triton.jit
def _search_list(order, weight, goal):
    """The first key up to which a list's entries weigh at least `goal`, which they do together."""
    low = tl.min(tl.where(weight > 0, order, 0x7FFFFFFFFFFFFFFF), 0)
    last = tl.max(tl.where(weight > 0, order, 0), 0)
    while (low >> ID_BITS) < (last >> ID_BITS):  # whole values first
        middle = (((low >> ID_BITS) + (last >> ID_BITS)) >> 1 << ID_BITS) + IDS
        reaches = tl.sum(tl.where(order <= middle, weight, 0), 0) >= goal
        last = tl.where(reaches, middle, last)
        low = tl.where(reaches, low, middle + 1)
    inside = (weight > 0) & (order >= low) & (order <= last)
    low = tl.min(tl.where(inside, order, 0x7FFFFFFFFFFFFFFF), 0)
    last = tl.max(tl.where(inside, order, 0), 0)
    while low < last:  # among equal values
        middle = low + ((last - low) >> 1)
        reaches = tl.sum(tl.where(order <= middle, weight, 0), 0) >= goal
        last = tl.where(reaches, middle, last)
        low = tl.where(reaches, low, middle + 1)
    return last


@triton.jit
def _divisor_of(row, divisors, top_k):
    """(divisor, whether the row is cut here)."""
    divisor, k = tl.load(divisors + row), tl.load(top_k + row)
    return divisor, (divisor > 0) & ((k <= 0) | (k > _FEW))


@triton.jit
def _survey(
    logits,
    logits_row,
    rows,
    divisors,
    top_k,
    sums,
    ints,
    floats,
    vocab_size,
    share,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (line, split): counts of entries by value, and their maximum.

    Bin 0 is above the sample but for its outliers, with its sum of e^(x - the bin's end); the last one is below the
    sample. Values are multiplied by 1 / divisor here: near enough for a guess.
    """
    begin_after(PDL)
    line, lane = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    divisor, is_mine = _divisor_of(tl.load(rows + line), divisors, top_k)
    if is_mine:
        logits += line * logits_row
        sums += line * (_WORDS // 2)
        ints += line * _WORDS
        floats += line * _WORDS
        inverse = tl.div_rn(1.0, divisor)
        peaks, least = tl.full((TILE,), float("-inf"), tl.float32), float("inf")
        for piece in range(_SAMPLES):
            ids = lane // 64 * (vocab_size // (TILE // 64)) + piece * 64 + lane % 64  # from all of the vocabulary
            x = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
            peaks = tl.maximum(peaks, tl.where(x == x, x, float("-inf")))
            least = tl.minimum(least, tl.min(tl.where(x > float("-inf"), x, float("inf")), 0))
        peaks = tl.max(tl.reshape(peaks, (TILE // 32, 32), can_reorder=True), 0)
        peaks = tl.sort(peaks, descending=True)
        sampled = tl.max(tl.where(tl.arange(0, 32) == _OUTLIERS, peaks, float("-inf")), 0)
        sampled = tl.where(tl.abs(sampled) < float("inf"), sampled, 3e38)  # no sample: everything lies below
        highest, best = sampled * inverse, float("-inf")
        lowest = tl.maximum(least * inverse, highest - 28.0)  # a weight below it is nothing
        width = tl.minimum(tl.maximum((highest - lowest) / (_BINS - 2), 1e-30), 1.0)
        steps = inverse / width
        counts = tl.zeros((_BINS,), tl.int32)
        mass = tl.zeros((TILE,), tl.float32)
        start = tl.program_id(1) * share
        ahead = tl.load(logits + start + lane, mask=lane < vocab_size - start, other=float("-inf"))
        for base in range(start, tl.minimum(start + share, vocab_size), TILE):
            x = tl.where(ahead == ahead, ahead, float("-inf"))
            left = vocab_size - base - TILE
            ahead = tl.load(logits + base + TILE + lane, mask=lane < left, other=float("-inf"))
            best = tl.maximum(best, tl.max(x, 0))
            place = (sampled - x) * steps + 1.0
            mass += tl.where(place < 1.0, tl.exp((1.0 - place) * width), 0.0)
            counts += tl.histogram(tl.minimum(tl.maximum(place, 0.0), _BINS - 1.0).to(tl.int32), _BINS)
        largest = 0xFFFFFFFF - value_key(best).to(tl.int64)
        tl.atomic_max(sums + _LARGEST, largest, sem="relaxed")
        tl.atomic_add(floats + _TOP_MASS, tl.sum(mass, 0), sem="relaxed")
        tl.atomic_add(ints + _COUNTS + tl.arange(0, _BINS), counts, mask=counts > 0, sem="relaxed")
        if tl.program_id(1) == 0:
            tl.store(floats + _HIGHEST, highest)
            tl.store(floats + _WIDTH, width)


@triton.jit
def _value_near(rank, counts, before, highest, width, ABOVE: tl.constexpr):
    """About the value of a rank; in the first and the last bin, and beyond, the edge on the side that is asked for."""
    place = tl.arange(0, _BINS)
    here = (before < rank) & (before + counts >= rank)
    into = (place - 1).to(tl.float32) + (rank - before) / counts
    value = highest - width * tl.sum(tl.where(here, into, 0.0), 0)
    index = tl.sum((before + counts < rank).to(tl.int32), 0)
    first = float("inf") if ABOVE else highest
    last = highest - (_BINS - 2) * width if ABOVE else float("-inf")
    return tl.where(index == 0, first, tl.where(index >= _BINS - 1, last, value))


@triton.jit
def _guess(ints, floats, k, p, bar):
    """Values that the ends of top-k and top-p lie between: (above, below) of the one, (above, below) of the other."""
    place = tl.arange(0, _BINS)
    counts = tl.load(ints + _COUNTS + place).to(tl.float32)
    highest, width = tl.load(floats + _HIGHEST), tl.load(floats + _WIDTH)
    before = tl.cumsum(counts, 0) - counts
    rank = k.to(tl.float32)
    above_k = _value_near(rank - _MARGIN, counts, before, highest, width, True)
    below_k = _value_near(rank + _MARGIN, counts, before, highest, width, False)
    # what min-p and top-k leave of each bin
    upper = highest - (place - 1).to(tl.float32) * width
    left = counts * tl.minimum(tl.maximum((upper - bar) / width, 0.0), 1.0)
    left = tl.minimum(left, tl.maximum(rank - before, 0.0))
    mass = left * tl.exp(width * (0.5 - place.to(tl.float32)))
    mass = tl.where(place == 0, tl.load(floats + _TOP_MASS) * left / tl.maximum(counts, 1.0), mass)
    mass = tl.where(place == _BINS - 1, 0.0, mass)  # next to nothing, beside many -inf
    reached = tl.cumsum(mass, 0)
    goal = p * tl.sum(mass, 0)
    index = tl.minimum(tl.sum((reached < goal).to(tl.int32), 0), _BINS - 1)
    into = tl.minimum(tl.maximum((goal - reached + mass) / tl.maximum(mass, 1e-30), 0.0), 1.0)
    rank = tl.sum(tl.where(place == index, before + left * into, 0.0), 0)
    above_p = _value_near(rank - _MARGIN, counts, before, highest, width, True)
    below_p = _value_near(rank + _MARGIN, counts, before, highest, width, False)
    return above_k, below_k, above_p, below_p


@triton.jit
def _gather(
    logits, logits_row, rows, divisors, top_k, top_p, min_p_logs, sums, ints, floats, keys, vocab_size,
    share, TILE: tl.constexpr, FUSED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (line, split): sums of what is surely kept; what lies near the guessed ends goes to the row's list."""
    begin_after(PDL)
    line, lane = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    row = tl.load(rows + line)
    divisor, is_mine = _divisor_of(row, divisors, top_k)
    if is_mine:
        logits += line * logits_row
        sums += line * (_WORDS // 2)
        ints += line * _WORDS
        floats += line * _WORDS
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        largest = tl.div_rn(key_value((0xFFFFFFFF - tl.load(sums + _LARGEST)).to(tl.uint32)), divisor)
        bar = tl.maximum(largest + tl.load(min_p_logs + row), _LOWEST)
        few = (k > 0) & (k < vocab_size)
        above_k, below_k, above_p, below_p = _guess(ints, floats, tl.where(few, k, vocab_size), p, bar)
        above_k = tl.where(few, above_k, float("-inf"))
        above_p, below_p = tl.where(p < 1.0, above_p, float("inf")), tl.where(p < 1.0, below_p, float("inf"))
        if tl.program_id(1) == 0:
            tl.store(floats + _BOUNDS, above_k)
            tl.store(floats + _BOUNDS + 1, below_k)
            tl.store(floats + _BOUNDS + 2, above_p)
            tl.store(floats + _BOUNDS + 3, below_p)
        # below it is nothing of interest: not in a list, nor of a weight that is needed
        least = tl.where(few, below_k, tl.where(p < 1.0, largest - 28.0, float("inf")))
        least = tl.maximum(tl.minimum(least, below_p), bar) * divisor
        least -= tl.abs(least) * 1e-6
        floor_k, floor_p = tl.maximum(above_k, bar), tl.maximum(above_p, bar)
        below_k, below_p = tl.maximum(below_k, bar), tl.maximum(below_p, bar)
        whole = floor_k == _LOWEST
        inverse = tl.div_rn(1.0, divisor)
        tame = (tl.abs(largest) < 1e15) & (tl.abs(least) < 1e15) & (divisor < 1e15) & (inverse < 1e15)
        mass_p, mass_k = tl.zeros((TILE,), tl.int64), tl.zeros((TILE,), tl.int64)
        before_k = tl.zeros((TILE,), tl.int32)
        start = tl.program_id(1) * share
        ahead = tl.load(logits + start + lane, mask=lane < vocab_size - start, other=float("-inf"))
        for base in range(start, tl.minimum(start + share, vocab_size), TILE):
            x = ahead
            left = vocab_size - base - TILE
            ahead = tl.load(logits + base + TILE + lane, mask=lane < left, other=float("-inf"))
            if tl.max(x, 0) >= least:
                if FUSED & tame & (tl.min(tl.abs(x), 0) > 1e-30):
                    x = divide(x, divisor, inverse)
                else:
                    x = tl.div_rn(x, divisor)
                sure_p = x >= floor_p  # NaN is nowhere
                listed = (x >= below_p) & (x < floor_p)
                if few:
                    sure_k = x >= floor_k
                    before_k += sure_k.to(tl.int32)
                    listed = listed | (x >= below_k) & (x < floor_k)
                if p < 1.0:
                    weight = weight_of(x, largest)
                    mass_p += tl.where(sure_p, weight, 0)
                    if whole:
                        mass_k += weight
                    else:
                        mass_k += tl.where(x >= floor_k, weight, 0)
                if tl.max(listed.to(tl.int32), 0) > 0:
                    place = tl.atomic_add(ints + _LISTED + tl.zeros_like(lane), 1, mask=listed, sem="relaxed")
                    key = order_of(x, base + lane)
                    tl.store(keys + line * SEARCH_ROOM + place, key, mask=listed & (place < _ROOM))
        tl.atomic_add(sums + _MASS_P, tl.sum(mass_p, 0), sem="relaxed")
        tl.atomic_add(sums + _MASS_K, tl.sum(mass_k, 0), sem="relaxed")
        tl.atomic_add(ints + _BEFORE_K, tl.sum(before_k, 0), sem="relaxed")


@triton.jit
def _settle(
    logits, logits_row, rows, divisors, top_k, top_p, min_p_logs, sums, ints, floats, keys, last_values,
    last_ids, vocab_size, PDL: tl.constexpr,
):  # fmt: skip
    """Program (line): the value and the id of the last entry that is kept."""
    begin_after(PDL)
    line, place = tl.program_id(0).to(tl.int64), tl.arange(0, _ROOM)
    row = tl.load(rows + line)
    divisor, is_mine = _divisor_of(row, divisors, top_k)
    if is_mine:
        logits += line * logits_row
        sums += line * (_WORDS // 2)
        ints += line * _WORDS
        floats += line * _WORDS + _BOUNDS
        keys += line * SEARCH_ROOM
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        largest = tl.div_rn(key_value((0xFFFFFFFF - tl.load(sums + _LARGEST)).to(tl.uint32)), divisor)
        last = tl.full((), _KEEP_ALL, tl.int64)
        if tl.abs(largest) < float("inf"):  # else the row keeps all
            bar = tl.maximum(largest + tl.load(min_p_logs + row), _LOWEST)
            top, last = first_key(largest), last_key(bar)
            listed = tl.load(ints + _LISTED)
            fits = listed <= _ROOM
            order = tl.load(keys + place, mask=place < listed, other=_KEEP_ALL)
            x = key_value((order >> ID_BITS).to(tl.uint32))
            total = tl.load(sums + _MASS_K)
            if (k > 0) & (k < vocab_size):
                above, below = tl.load(floats), tl.load(floats + 1)
                inside = (x < above) & (x >= tl.maximum(below, bar))
                before = last_key(tl.maximum(above, bar))  # what is up to it was summed
                need, count = k - tl.load(ints + _BEFORE_K), tl.sum(inside.to(tl.int64), 0)
                if fits & (need > 0) & ((need <= count) | (below <= bar)):
                    if need <= count:
                        last = _search_list(order, inside.to(tl.int64), need)
                    total += tl.sum(tl.where(inside & (order <= last), weight_of(x, largest), 0), 0)
                else:
                    goal, first = tl.where(need > 0, need, k), tl.where(need > 0, before + 1, top)
                    last = tl.where(need > 0, last, before)
                    last = search_row(logits, divisor, largest, goal, first, last, keys, vocab_size, False)
                    total = sum_row(logits, divisor, largest, top, last, vocab_size)
            if p < 1.0:
                above, below = tl.load(floats + 2), tl.load(floats + 3)
                inside = (x < above) & (x >= tl.maximum(below, bar)) & (order <= last)
                weight = tl.where(inside, weight_of(x, largest), 0)
                before = last_key(tl.maximum(above, bar))
                goal = tl.maximum(tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)
                need = goal - tl.load(sums + _MASS_P)
                is_beyond = (need > 0) & (before < last)
                if fits & is_beyond & (need <= tl.sum(weight, 0)):
                    last = _search_list(order, weight, need)
                else:
                    goal, first = tl.where(is_beyond, need, goal), tl.where(is_beyond, before + 1, top)
                    last = tl.where(is_beyond, last, tl.minimum(before, last))
                    last = search_row(logits, divisor, largest, goal, first, last, keys, vocab_size, True)
        tl.store(last_values + line, key_value((last >> ID_BITS).to(tl.uint32)))
        tl.store(last_ids + line, (last & IDS).to(tl.int32))


def apply_topk_topp(
    logits: Tensor, rows: Tensor, truncation: TruncationRows, min_p_logs: Tensor, last: tuple[Tensor, Tensor]
) -> None:
    """Fill `last`, see `truncation_gpu.last_kept`, of the rows that `topk_topp_small` does not cut."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    ints = torch.zeros(num_rows * _WORDS.value, dtype=torch.int32, device=device)
    scratch = (ints.view(torch.int64), ints, ints.view(torch.float32))
    keys = torch.empty(num_rows * SEARCH_ROOM.value, dtype=torch.int64, device=device)
    row = (logits, logits.stride(0), rows, truncation.divisors, truncation.top_k)
    options = chained(device)
    grid, share = _divide_rows(num_rows, vocab_size, _SURVEY_TILE)
    _survey[grid](*row, *scratch, vocab_size, share, TILE=_SURVEY_TILE, num_warps=1, **options)
    grid, share = _divide_rows(num_rows, vocab_size, _TILE)
    _gather[grid](
        *row,
        truncation.top_p,
        min_p_logs,
        *scratch,
        keys,
        vocab_size,
        share,
        TILE=_TILE,
        FUSED=logits.is_cuda,
        num_warps=1,
        enable_fp_fusion=False,
        **options,
    )
    _settle[(num_rows,)](
        *row,
        truncation.top_p,
        min_p_logs,
        *scratch,
        keys,
        *last,
        vocab_size,
        num_warps=16,
        enable_fp_fusion=False,
        **options,
    )


def _divide_rows(num_rows: int, vocab_size: int, tile: int) -> tuple[tuple[int, int], int]:
    """The grid of programs over rows and their shares, and how many entries a share has."""
    tiles = triton.cdiv(vocab_size, tile)
    per_split = triton.cdiv(tiles, max(1, min(_PROGRAMS // num_rows, tiles)))
    return (num_rows, triton.cdiv(tiles, per_split)), per_split * tile
