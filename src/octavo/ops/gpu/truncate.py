"""Top-k, top-p and min-p on a GPU: `top_k_top_p_mask_` of `octavo.ops.sample`, without a sort.

Owns the kernels. The last entry that is kept is found by its value's bits, 11 or 10 at a time: the weights of the
entries that share the bits found so far are summed per value of the next bits, and the sum that reaches the target
names them. Weights are integers (1 for top-k, the probability times 2^40 for top-p), so no order of additions moves a
result. Equal values are kept from the lowest id on. Nothing waits for the device.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BINS = 2048
_DIGITS = ((21, 11), (10, 11), (0, 10))  # (shift, bits) of a key's digits, first to last
_TILE = 1024
_PROGRAMS = 2048


@triton.jit
def value_key(x):
    """uint32 that grows as the value falls; NaN counts as -inf, and -0 as 0."""
    x = tl.where(x == x, x, float("-inf")) + 0.0
    bits = x.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) ^ 0x7FFFFFFF).to(tl.uint32, bitcast=True)


@triton.jit
def weight_of(x, largest):
    """floor(e^(x - largest) * 2^40), 0 below e^-87; the steps of `octavo.ops.activation.exp_reference`."""
    distance = x - largest
    d = tl.maximum(distance, -87.0)
    shifted = d * 1.44269504088896341 + 12582912.0
    n = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    nf = shifted - 12582912.0
    r = d - nf * 0.693359375
    r = r - nf * -2.12194440e-4
    p = r * 1.9875691500e-4 + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    p = p * (r * r) + r
    p = p + 1.0
    half = n >> 1
    p = p * ((half + 127) << 23).to(tl.float32, bitcast=True)
    p = p * ((n - half + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(distance >= -87.0, (p * 1099511627776.0).to(tl.int64), 0)


@triton.jit
def _sum_digits(
    logits, logits_row, largest, active, found, bins, vocab_size, share,
    TOP_P: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr, FIRST: tl.constexpr, BINS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Add the weights of entries whose leading bits are `found` to the bin of their next digit."""
    line = tl.program_id(0).to(tl.int64)
    if tl.load(active + line) != 0:
        top = tl.load(largest + line)
        prefix = tl.load(found + line).to(tl.uint32)
        start = tl.program_id(1) * share
        for base in range(start, tl.minimum(start + share, vocab_size), TILE):
            ids = base + tl.arange(0, TILE)
            inside = ids < vocab_size
            x = tl.load(logits + line * logits_row + ids, mask=inside, other=float("-inf"))
            key = value_key(x)
            if TOP_P:
                weight = weight_of(x, top)
            else:
                weight = tl.full((TILE,), 1, tl.int64)
            counted = inside & (weight > 0)
            if not FIRST:
                counted = counted & ((key >> (SHIFT + BITS)) == prefix)
            digit = ((key >> SHIFT) & ((1 << BITS) - 1)).to(tl.int32)
            tl.atomic_add(bins + line * BINS + digit, weight, mask=counted, sem="relaxed")


@triton.jit
def _pick_digit(
    active, found, target, ties, top_p, bins,
    TOP_P: tl.constexpr, BITS: tl.constexpr, FIRST: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Append the digit whose bin reaches the target; take what lies before it off the target. Clears the bins.

    ties: the weight of the bin, after the last digit that of all entries of the value.
    """
    line = tl.program_id(0).to(tl.int64)
    if tl.load(active + line) != 0:
        bin_id = tl.arange(0, BINS)
        sums = tl.load(bins + line * BINS + bin_id)
        reached = tl.cumsum(sums, 0)
        goal = tl.load(target + line)
        if TOP_P and FIRST:
            total = tl.sum(sums, 0)
            goal = tl.ceil(tl.load(top_p + line).to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            goal = tl.maximum(goal, 1)
        digit = tl.minimum(tl.sum((reached < goal).to(tl.int32), 0), (1 << BITS) - 1)
        before = tl.sum(tl.where(bin_id < digit, sums, 0), 0)
        prefix = tl.load(found + line)
        tl.store(found + line, (prefix << BITS) | digit)
        tl.store(target + line, goal - before)
        tl.store(ties + line, tl.sum(tl.where(bin_id == digit, sums, 0), 0))
        tl.store(bins + line * BINS + bin_id, tl.zeros((BINS,), tl.int64))


@triton.jit
def _mask(
    logits, logits_row, largest, active, found, target, ties, vocab_size, share,
    TOP_P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Hide what comes after the value found, and those of its entries that are not needed to reach the target."""
    line = tl.program_id(0).to(tl.int64)
    if tl.load(active + line) != 0:
        logits += line * logits_row
        last = tl.load(found + line).to(tl.uint32)
        top = tl.load(largest + line)
        needed, weight_of_all = tl.load(target + line), tl.load(ties + line)
        start = tl.program_id(1) * share
        seen = tl.zeros((), tl.int64)  # weight of equal entries before a tile
        if needed < weight_of_all:
            # Others may be hiding such entries meanwhile, but only behind enough that stay.
            for base in range(0, start, TILE):
                ids = base + tl.arange(0, TILE)
                x = tl.load(logits + ids, mask=ids < vocab_size, other=float("nan"))
                seen += tl.sum((value_key(x) == last).to(tl.int64), 0)
        for base in range(start, tl.minimum(start + share, vocab_size), TILE):
            ids = base + tl.arange(0, TILE)
            inside = ids < vocab_size
            x = tl.load(logits + ids, mask=inside, other=float("-inf"))
            key = value_key(x)
            equal = inside & (key == last)
            hidden = key > last
            if needed < weight_of_all:
                weight = weight_of(x, top) if TOP_P else tl.full((TILE,), 1, tl.int64)
                count = equal.to(tl.int64)
                before = seen + tl.cumsum(count, 0) - count
                hidden = hidden | (equal & (before * weight >= needed))
                seen += tl.sum(count, 0)
            tl.store(logits + ids, float("-inf"), mask=inside & hidden)


@triton.jit
def _mask_below(logits, logits_row, bars, vocab_size, BLOCK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bar = tl.load(bars + line)
    x = tl.load(logits + line * logits_row + ids, mask=ids < vocab_size, other=0.0)
    tl.store(logits + line * logits_row + ids, float("-inf"), mask=(ids < vocab_size) & (x < bar))


def top_k_top_p_mask_(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """See `octavo.ops.sample.top_k_top_p_mask_`. Rows with NaN stay as they are."""
    num_rows, vocab_size = logits.shape
    if not num_rows:
        return
    largest = logits.amax(dim=1)
    finite = largest.isfinite()
    bars = torch.where(finite & (min_p > 0), largest + min_p.log(), float("-inf"))
    _mask_below[(num_rows, triton.cdiv(vocab_size, _TILE))](logits, logits.stride(0), bars, vocab_size, BLOCK=_TILE)
    _keep_prefix(logits, largest, finite & (top_k > 0) & (top_k < vocab_size), top_k, top_p, by_weight=False)
    _keep_prefix(logits, largest, finite & (top_p < 1), top_k, top_p, by_weight=True)


def _keep_prefix(
    logits: Tensor, largest: Tensor, wanted: Tensor, top_k: Tensor, top_p: Tensor, *, by_weight: bool
) -> None:
    num_rows, vocab_size = logits.shape
    tiles = triton.cdiv(vocab_size, _TILE)
    share = triton.cdiv(tiles, max(1, min(_PROGRAMS // num_rows, tiles))) * _TILE
    grid = (num_rows, triton.cdiv(vocab_size, share))
    active, target = wanted.to(torch.int32), top_k.clone()
    found, ties = torch.zeros_like(target), torch.zeros_like(target)
    bins = torch.zeros((num_rows, _BINS), dtype=torch.int64, device=logits.device)
    for place, (shift, bits) in enumerate(_DIGITS):
        _sum_digits[grid](
            logits, logits.stride(0), largest, active, found, bins, vocab_size, share, TOP_P=by_weight, SHIFT=shift,
            BITS=bits, FIRST=place == 0, BINS=_BINS, TILE=_TILE, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        _pick_digit[(num_rows,)](
            active, found, target, ties, top_p, bins, TOP_P=by_weight, BITS=bits, FIRST=place == 0, BINS=_BINS,
            num_warps=4,
        )  # fmt: skip
    _mask[grid](
        logits, logits.stride(0), largest, active, found, target, ties, vocab_size, share, TOP_P=by_weight, TILE=_TILE,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
