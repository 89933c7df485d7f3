"""Order and weight of logits on a GPU, and the exact place of a cut in a row, by digits of its entries' keys.

Owns what the kernels of `truncate` and `topk_topp_small` share. Keys grow with (falling value, id); weights are
integers (the probability times 2^40, or 1), so no order of additions moves a sum. Invariant: what is searched for is
found exactly, whatever the logits, in as many reads of the row as a key's value has digits, and one for equal values.
"""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import triton
import triton.language as tl

ID_BITS, IDS = tl.constexpr(31), tl.constexpr(2**31 - 1)  # where a key holds its entry's id
_SCAN = tl.constexpr(4096)  # entries of a step where a program reads a whole row
_BINS, _COPIES = tl.constexpr(256), tl.constexpr(8)  # for a digit; copies keep additions to one bin apart
SEARCH_ROOM = tl.constexpr(256 * 8)  # int64 words that a search takes


@triton.jit
def value_key(x):
    """uint32 that grows as the value falls; NaN counts as -inf, and -0 as 0."""
    x = tl.where(x == x, x, float("-inf")) + 0.0
    bits = x.to(tl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)) ^ 0x7FFFFFFF).to(tl.uint32, bitcast=True)


@triton.jit
def key_value(key):
    """The value of a `value_key`."""
    bits = (key ^ 0x7FFFFFFF).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(x, largest):
    """floor(e^(x - largest) * 2^40); the steps of `octavo.ops.activation.exp_reference`."""
    d = tl.maximum(x - largest, -87.0)  # there it is 0 already
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
    scaled = (p.to(tl.int32, bitcast=True) + ((n + 40) << 23)).to(tl.float32, bitcast=True)
    return scaled.to(tl.int64)


@triton.jit
def divide(x, divisor, inverse):
    """x / divisor, rounded once; inverse: 1 / divisor, rounded once.

    |x| lies within 1e-30 .. 1e15, divisor and inverse below 1e15; else it may be anything, for instance NaN. Two steps
    of Newton and Markstein, as in `div_rn`, but without its branch for what is out of range: entries need not wait for
    each other.
    """
    quotient = x * inverse
    quotient = tl.fma(tl.fma(-quotient, divisor, x), inverse, quotient)
    return tl.fma(tl.fma(-quotient, divisor, x), inverse, quotient)


@triton.jit
def order_of(x, ids):
    """Distinct int64 keys that grow with (falling value, id)."""
    return (value_key(x).to(tl.int64) << ID_BITS) | ids.to(tl.int64)


@triton.jit
def first_key(x):
    """The first of the keys that entries of a value may have."""
    return value_key(x).to(tl.int64) << ID_BITS


@triton.jit
def last_key(x):
    """The last of them."""
    return ((value_key(x).to(tl.int64) + 1) << ID_BITS) - 1


@triton.jit
def _load_keys(logits, ids, divisor, vocab_size):
    """Values over the divisor, -inf for NaN, and their keys; none beyond the vocabulary."""
    x = tl.div_rn(tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf")), divisor)
    x = tl.where(x == x, x, float("-inf"))
    return x, tl.where(ids < vocab_size, order_of(x, ids), -1)


@triton.jit
def _narrow(
    logits,
    divisor,
    largest,
    goal,
    low,
    high,
    shift,
    bins,
    vocab_size,
    WEIGHTS: tl.constexpr,
):
    """(goal, low, high) within the bin, 2 ** shift keys, in which the entries from `low` on reach the goal.

    Where they don't by `high`, which lies less than 256 bins away, that twice.
    """
    room, digit = tl.arange(0, SEARCH_ROOM), tl.arange(0, _BINS)
    tl.store(bins + room, tl.zeros((SEARCH_ROOM,), tl.int64))
    tl.debug_barrier()
    largest_x = tl.full((_SCAN,), float("-inf"), tl.float32)
    least_x = tl.full((_SCAN,), float("inf"), tl.float32)
    for base in range(0, vocab_size, _SCAN):
        ids = base + tl.arange(0, _SCAN)
        x, order = _load_keys(logits, ids, divisor, vocab_size)
        inside = (order >= low) & (order <= high)
        if tl.max(inside.to(tl.int32), 0) > 0:
            weight = weight_of(x, largest) if WEIGHTS else tl.full((_SCAN,), 1, tl.int64)
            bin_id = ids // 4 % _COPIES * _BINS + (order >> shift) - (low >> shift)
            tl.atomic_add(bins + bin_id, weight, mask=inside & (weight > 0), sem="relaxed")
            largest_x = tl.maximum(largest_x, tl.where(inside, x, float("-inf")))
            least_x = tl.minimum(least_x, tl.where(inside, x, float("inf")))
    tl.debug_barrier()
    sums = tl.sum(tl.reshape(tl.load(bins + room, cache_modifier=".cg"), (_COPIES, _BINS)), 0)
    tl.debug_barrier()
    index = tl.sum((tl.cumsum(sums, 0) < goal).to(tl.int64), 0)
    goal -= tl.sum(tl.where(digit < index, sums, 0), 0)
    start, end = ((low >> shift) + index) << shift, (((low >> shift) + index + 1) << shift) - 1
    # equal entries need no further digits
    low = tl.maximum(tl.maximum(low, start), first_key(tl.max(largest_x, 0)))
    end = tl.minimum(tl.minimum(high, end), last_key(tl.min(least_x, 0)))
    return goal, tl.where(index < _BINS, low, high), tl.where(index < _BINS, end, high)


@triton.jit
def search_row(logits, divisor, largest, goal, first, last, bins, vocab_size, WEIGHTS: tl.constexpr):
    """The key up to which a row's entries from the key `first` on weigh `goal`; `last` if those up to it weigh less.

    One program's work. bins: `SEARCH_ROOM` int64, which lose what they hold.
    """
    low, high = first, last
    goal = goal.to(tl.int64)
    for place in range(4):
        shift = ID_BITS + 24 - 8 * place
        if (low >> shift) < (high >> shift):
            goal, low, high = _narrow(logits, divisor, largest, goal, low, high, shift, bins, vocab_size, WEIGHTS)
    # what is left is of one value
    if WEIGHTS:
        goal = tl.cdiv(goal, tl.maximum(weight_of(key_value((low >> ID_BITS).to(tl.uint32)), largest), 1))
    found, seen = high, tl.zeros((), tl.int64)
    for base in range(0, vocab_size, _SCAN):
        if seen < goal:
            _, order = _load_keys(logits, base + tl.arange(0, _SCAN), divisor, vocab_size)
            equal = ((order >= low) & (order <= high)).to(tl.int64)
            number = tl.sum(equal, 0)
            if seen + number >= goal:
                found = tl.max(tl.where((equal > 0) & (seen + tl.cumsum(equal, 0) == goal), order, 0), 0)
            seen += number
    return found


@triton.jit
def sum_row(logits, divisor, largest, first, last, vocab_size):
    """The weight of a row's entries with keys from `first` to `last`."""
    total = tl.zeros((_SCAN,), tl.int64)
    for base in range(0, vocab_size, _SCAN):
        x, order = _load_keys(logits, base + tl.arange(0, _SCAN), divisor, vocab_size)
        total += tl.where((order >= first) & (order <= last), weight_of(x, largest), 0)
    return tl.sum(total, 0)
