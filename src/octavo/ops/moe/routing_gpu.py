"""The choice of experts on a GPU, in one launch: `choose_experts` of `octavo.ops.moe.routing`.

Owns the kernel: a row is one warp's. Does not know what the scores are of. Invariant: bits and ids are those that
torch's softmax, topk, gather and divisions give on this device. Its softmax sums lane by lane (element i is lane
i % 32's), then by halves. Its topk takes, of equal scores, those of the lowest ids, and then sorts by a bitonic network
whose order of equal scores is its own; so is the network here, which runs where scores are equal.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from octavo.ops.compile.launch import begin_after, chained, launched

MAX_EXPERTS = 1024  # above, torch's softmax sums otherwise
MAX_RANKS = 32  # above, torch's topk sorts otherwise
_NETWORK = tl.constexpr(32)  # places of the network that sorts up to 32
_LEAST = tl.constexpr(-(1 << 63))
_HIGH = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _exp(x, DEVICE: tl.constexpr):
    """As torch has it; an interpreter knows no library of a device's."""
    if DEVICE:
        result = libdevice.exp(x)
    else:
        result = tl.exp(x)
    return result


@triton.jit
def sigmoid(x, DEVICE: tl.constexpr):
    """`octavo.ops.activation.sigmoid`: a softmax of (x, 0)."""
    most = tl.maximum(x, 0.0)
    own = _exp(x - most, DEVICE)
    return tl.div_rn(own, own + _exp(0.0 - most, DEVICE))


@triton.jit
def _softmax(logits, values, EXPERTS: tl.constexpr, PADDED: tl.constexpr, DEVICE: tl.constexpr):
    """values: those at `logits`, -inf beyond."""
    LANES: tl.constexpr = 32 if PADDED > 32 else PADDED
    most = tl.max(values, 0)
    lane = tl.arange(0, LANES)
    sums = tl.zeros((LANES,), tl.float32)
    for first in tl.static_range(0, PADDED, LANES):
        own = tl.load(logits + first + lane, mask=first + lane < EXPERTS, other=float("-inf"))
        sums += _exp(own - most, DEVICE)
    for _ in tl.static_range(_log2(LANES)):
        sums = tl.sum(tl.reshape(sums, (2, sums.shape[0] // 2)), 0)
    return tl.div_rn(_exp(values - most, DEVICE), tl.zeros((PADDED,), tl.float32) + tl.sum(sums, 0))


@triton.constexpr_function
def _log2(number):
    return number.bit_length() - 1


@triton.jit
def _order(value):
    """An int32 that orders float32 values as torch's topk does: NaN is the largest."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(value == value, bits ^ ((bits >> 31) & _HIGH), _HIGH)


@triton.jit
def _keyed(value, place):
    """One number that orders by value, then by the lower place."""
    return (_order(value).to(tl.int64) << 32) | (place ^ _HIGH).to(tl.int64)


@triton.jit
def _value_of(key):
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & _HIGH)).to(tl.float32, bitcast=True)


@triton.jit
def _place_of(key):
    return (key & 0xFFFFFFFF).to(tl.int32) ^ _HIGH


@triton.jit
def _within_best_groups(
    choice,
    expert,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    SCORED: tl.constexpr,
):
    """`choice` with -inf outside of the row's best groups, each as good as the sum of its SCORED best."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    group_at = tl.arange(0, PADDED)
    groups = tl.full((PADDED,), _LEAST, tl.int64)
    for group in tl.static_range(GROUPS):
        left = tl.where(expert // SIZE == group, _keyed(choice, expert), _LEAST)
        best = tl.max(left, 0)
        score = _value_of(best)
        for _ in tl.static_range(SCORED - 1):
            left = tl.where(left == best, _LEAST, left)
            best = tl.max(left, 0)
            score = score + _value_of(best)
        groups = tl.where(group_at == group, _keyed(score, group_at), groups)
    kept = tl.zeros((PADDED,), tl.int1)
    for _ in tl.static_range(KEPT):
        best = tl.max(groups, 0)
        kept = kept | (expert // SIZE == _place_of(best))
        groups = tl.where(groups == best, _LEAST, groups)
    return tl.where(kept, choice, float("-inf"))


@triton.jit
def _compare(key, score, value, valid, LEVEL: tl.constexpr, STEP: tl.constexpr):
    """One step of a bitonic network for 2 ** 5 places, the best first, those that are not valid last."""
    place = tl.arange(0, _NETWORK)
    other = place ^ (1 << STEP)
    key2, score2, value2 = tl.gather(key, other, 0), tl.gather(score, other, 0), tl.gather(value, other, 0)
    valid2 = tl.gather(valid.to(tl.int32), other, 0) != 0
    above = ((value != value) & (value2 == value2)) | (value > value2)
    below = ((value2 != value2) & (value == value)) | (value2 > value)
    is_first = (place & (1 << STEP)) == 0
    is_ordered = tl.where(is_first, (above & valid) | (valid2 == 0), (below & valid2) | (valid == 0))
    if LEVEL < 5:
        swaps = is_ordered == ((place & (1 << LEVEL)) != 0)
    else:
        swaps = is_ordered == 0
    key, score = tl.where(swaps, key2, key), tl.where(swaps, score2, score)
    return key, score, tl.where(swaps, value2, value), tl.where(swaps, valid2, valid)


@triton.jit
def _sorted(key, score, RANKS: tl.constexpr):
    """The RANKS chosen, of which some are equal, as torch's topk leaves them. key, score: [_NETWORK], best first."""
    place = tl.arange(0, _NETWORK)
    order, expert = (key >> 32).to(tl.int32), _place_of(key)
    valid = place < RANKS
    least = tl.min(tl.where(valid, order, _HIGH), 0)
    # it lists those above the least by id, then the least by id
    slot = tl.where(valid, ((order == least).to(tl.int32) << 16) | expert, place + (_HIGH - _NETWORK))
    goal = tl.sum((slot[None, :] < slot[:, None]).to(tl.int32), 1)
    here = goal[None, :] == place[:, None]
    at = tl.sum(tl.where(here, place[None, :], 0), 1)
    key, score = tl.gather(key, at, 0), tl.gather(score, at, 0)
    value = _value_of(key)
    for level in tl.static_range(1, 6):
        for step in tl.static_range(level):
            key, score, value, valid = _compare(key, score, value, valid, level, level - 1 - step)
    return key, score


@launched(triton.jit)
def _choose(
    logits, correction, weights, experts, scale, added, EXPERTS: tl.constexpr, PADDED: tl.constexpr,
    RANKS: tl.constexpr, SIGMOID: tl.constexpr, CORRECTED: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
    SCORED: tl.constexpr, NORMED: tl.constexpr, ADDED: tl.constexpr, SHARED: tl.constexpr,
    DEVICE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program is a row's. logits [tokens, EXPERTS] -> weights float32 and experts int32, [tokens, RANKS].

    SHARED: 1: experts have one more rank, the number EXPERTS; else 0.
    """
    begin_after(PDL)
    row = tl.program_id(0).to(tl.int64)
    logits += row * EXPERTS
    expert = tl.arange(0, PADDED)
    there = expert < EXPERTS
    values = tl.load(logits + expert, mask=there, other=float("-inf"))
    if SIGMOID:
        scores = sigmoid(values, DEVICE)
    else:
        scores = _softmax(logits, values, EXPERTS, PADDED, DEVICE)
    choice = scores
    if CORRECTED:
        choice = scores + tl.load(correction + expert, mask=there, other=0.0)
    if GROUPS > 1:
        choice = _within_best_groups(choice, expert, EXPERTS, PADDED, GROUPS, KEPT, SCORED)
    left = tl.where(there, _keyed(choice, expert), _LEAST)
    place = tl.arange(0, _NETWORK)
    key, score = tl.full((_NETWORK,), _LEAST, tl.int64), tl.zeros((_NETWORK,), tl.float32)
    equal, before = False, float("inf")
    for rank in tl.static_range(RANKS):
        best = tl.max(left, 0)
        own = _value_of(best)
        if rank > 0:
            equal = equal | (own == before)
        before = own
        if CORRECTED:  # the weight is the score without
            own = tl.sum(tl.where(left == best, scores, 0.0), 0)
        left = tl.where(left == best, _LEAST, left)
        key, score = tl.where(place == rank, best, key), tl.where(place == rank, own, score)
    if equal:
        key, score = _sorted(key, score, RANKS)
    if NORMED:
        total = tl.sum(tl.where(place == 0, score, 0.0), 0)
        for rank in tl.static_range(1, RANKS):  # a fixed order of summation
            total += tl.sum(tl.where(place == rank, score, 0.0), 0)
        if ADDED:
            total += added
        score = tl.div_rn(score, tl.zeros((_NETWORK,), tl.float32) + total)
    tl.store(weights + row * RANKS + place, score * scale, mask=place < RANKS)
    chosen = tl.where(place < RANKS, _place_of(key), EXPERTS)
    tl.store(experts + row * (RANKS + SHARED) + place, chosen, mask=place < RANKS + SHARED)


def serves(num_experts: int, ranks: int) -> bool:
    """Whether the kernel knows torch's orders of so many."""
    return num_experts <= MAX_EXPERTS and ranks <= MAX_RANKS


def choose_experts(
    logits: Tensor,
    correction: Tensor | None,
    *,
    ranks: int,
    sigmoid: bool,
    groups: tuple[int, int, int],
    normed: bool,
    added: float,
    scale: float,
    shared: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `octavo.ops.moe.routing.choose_experts`; ids are int32.

    groups: how many there are, how many are kept, and the sum of how many experts scores one.
    """
    tokens, num_experts = logits.shape
    assert logits.is_contiguous(), "rows of scores lie one after another"
    weights = torch.empty((tokens, ranks), dtype=torch.float32, device=logits.device)
    experts = torch.empty((tokens, ranks + shared), dtype=torch.int32, device=logits.device)
    if tokens:
        _choose[(tokens,)](
            logits, correction, weights, experts, float(scale), float(added), EXPERTS=num_experts,
            PADDED=triton.next_power_of_2(num_experts), RANKS=ranks, SIGMOID=sigmoid, CORRECTED=correction is not None,
            GROUPS=groups[0], KEPT=groups[1], SCORED=groups[2], NORMED=normed, ADDED=added != 0.0,
            SHARED=int(shared), DEVICE=logits.is_cuda, num_warps=1, enable_fp_fusion=False, **chained(logits.device),
        )  # fmt: skip
    return weights, experts
