"""Drawing tokens and log-probabilities on a GPU: kernels behind `octavo.ops.sampling`.

Owns the launches and the kernels' scratch memory. Invariants: a draw is a maximum under the total order (score, then
lower id), so how a vocabulary is split moves nothing; sums run over leaves of `LEAF` entries from the vocabulary's
start, each one tree, then one tree over the leaves, whatever the number of rows. Nothing waits for the device.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.compile.launch import begin_after, chained, end_before, launched, ready_before, wait_before
from octavo.ops.compile.row_sum import padded_length, row_sums
from octavo.ops.compile.stream_scratch import StreamScratch
from octavo.ops.sampling.noise import gumbel, gumbel_bound, natural_log, stream_key, uniform_words
from octavo.ops.sampling.topk_topp_small import likeliest
from octavo.ops.sampling.truncation import TruncationRows
from octavo.ops.sampling.truncation_gpu import is_hidden, last_kept

LEAF = 4096  # vocabulary entries of a partial sum: part of the canonical order
# Entries of a step of a drawing program, and its warps: for few rows, for many. They move no token.
_FEW_ROWS, _FEW, _MANY = 4, (2048, 8), (512, 1)
_READY_ROWS = 8  # at most, of `_draw_ready`: each of its programs stays for one tile
_PROGRAMS = 2112  # how many programs a launch should have
_MAX_SPLITS = 128
_NAN_BIT = 1 << 30  # in a part's code, beside its token id


@dataclasses.dataclass(frozen=True, slots=True)
class DrawScratch:
    """What the programs of one row leave for the last of them. One launch at a time may use it.

    Invariant: between launches `arrived` is zero.
    """

    values: Tensor  # [parts] float32
    codes: Tensor  # [parts] int32: token id, with a bit for NaN
    arrived: Tensor  # [rows] int32


def _make_scratch(device: torch.device) -> DrawScratch:
    """For launches of any size."""
    parts = _PROGRAMS + _MAX_SPLITS
    return DrawScratch(
        torch.empty(parts, dtype=torch.float32, device=device),
        torch.empty(parts, dtype=torch.int32, device=device),
        torch.zeros(parts, dtype=torch.int32, device=device),
    )


SCRATCH = StreamScratch(_make_scratch)


@triton.jit
def _larger_or_nan(left, right):
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _settle(
    line,
    split,
    splits,
    best,
    code,
    values,
    codes,
    arrived,
    tokens,
    failed,
    MAX_SPLITS: tl.constexpr,
    NAN_BIT: tl.constexpr,
):
    """What a program has found of a line; the last of them takes the best."""
    part = (line * splits).to(tl.int32) + split
    tl.store(values + part, best)
    tl.store(codes + part, code)
    tl.debug_barrier()
    if tl.atomic_add(arrived + line, 1, sem="acq_rel", scope="gpu") == splits - 1:
        each = tl.arange(0, MAX_SPLITS)
        there = each < splits
        value = tl.load(values + line * splits + each, mask=there, other=float("-inf"), cache_modifier=".cg")
        all_codes = tl.load(codes + line * splits + each, mask=there, other=0, cache_modifier=".cg")
        top = tl.max(value, 0)
        lowest = tl.min(tl.where(value == top, all_codes & (NAN_BIT - 1), 2147483647), 0)
        tl.store(tokens + line, tl.where(top > float("-inf"), lowest, 0).to(tl.int64))
        tl.store(failed + line, (tl.max(all_codes, 0) >= NAN_BIT).to(tl.uint8))
        tl.store(arrived + line, 0)


@launched(triton.jit(do_not_specialize=["splits", "ahead"]))
def _draw(
    logits, logits_row, rows, temperatures, seeds, positions, divisors, last_values, last_ids, tokens, failed, values,
    codes, arrived, vocab_size, share, splits, ahead, INDEXED: tl.constexpr, CUT: tl.constexpr, SPLIT: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, MAX_SPLITS: tl.constexpr, NAN_BIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (line, split): the winner of `share` entries; the last program of a line takes the best of them.

    A first pass finds for each tile a bound on what its scores can be. Exact scores are then computed in the tile with
    the largest bound, the next largest, and so on, until no bound reaches the best score. CUT: rows with a divisor are
    divided, and hide what comes after their last entry; bounds make do with a product and allow for its error, which is
    that of the largest entry's or less where noise can make up for the distance.
    """
    begin_after(PDL)
    line, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + line) if INDEXED else line
    temperature = tl.load(temperatures + row)
    low, high = stream_key(tl.load(seeds + row), tl.load(positions + line).to(tl.int64) + ahead)
    greedy = temperature == 0.0
    inverse = tl.where(greedy, 1.0, tl.div_rn(1.0, tl.where(greedy, 1.0, temperature)))
    amount = tl.where(greedy, 0.0, 1.0)
    rough = inverse
    if CUT:
        divisor, last_id = tl.load(divisors + row), tl.load(last_ids + line)
        error = tl.where(divisor > 0, 1e-6, 0.0)
        last_value = tl.where(divisor > 0, tl.load(last_values + line), float("-inf"))
        divisor = tl.where(divisor > 0, divisor, 1.0)
        rough *= tl.div_rn(1.0, divisor)
        least = last_value * divisor
        least -= tl.abs(least) * 1e-6  # what is below is hidden
    lane, tile = tl.arange(0, TILE), tl.arange(0, TILES)
    start = split * share
    offset = low + start.to(tl.uint32)  # what turns lanes into a tile's ids plus the key's low half
    logits += line * logits_row + lane
    bounds = tl.full((TILES,), float("-inf"), tl.float32)
    for index in range(tl.cdiv(tl.minimum(share, vocab_size - start), TILE)):
        base = start + index * TILE
        x = tl.load(logits + base, mask=lane < vocab_size - base, other=float("-inf"))
        largest, is_wanted = 0.0, True
        if CUT:
            largest = tl.reduce(x, 0, _larger_or_nan)
            is_wanted = not largest < least
            x = tl.where(x < least, float("-inf"), x)
        if is_wanted:
            words = uniform_words(offset, high, lane.to(tl.uint32))
            bound = tl.reduce(tl.fma(x, rough, gumbel_bound(words, amount)), 0, _larger_or_nan)
            if CUT:
                bound += error * (tl.abs(largest * rough) + 30.0)
            bounds = tl.where(tile == index, tl.where(bound == bound, bound, float("inf")), bounds)
        offset += TILE
    best = tl.full((), float("-inf"), tl.float32)
    code = tl.zeros((), tl.int32)
    bound = tl.max(bounds, 0)
    while (bound >= best) & (bound > float("-inf")):
        index = tl.min(tl.where(bounds == bound, tile, TILES), 0)
        base = start + index * TILE
        x = tl.load(logits + base, mask=lane < vocab_size - base, other=float("-inf"))
        if CUT:
            x = tl.div_rn(x, divisor)
            x = tl.where(is_hidden(x, base + lane, last_value, last_id), float("-inf"), x)
        words = uniform_words(low + base.to(tl.uint32), high, lane.to(tl.uint32))
        score = tl.fma(x, inverse, gumbel(words) * amount)
        score = tl.where(x == x, score, float("-inf"))
        top = tl.max(score, 0)
        winner = base + tl.min(tl.where(score == top, lane, TILE), 0)
        better = (top > best) | ((top == best) & (winner < (code & (NAN_BIT - 1))) & (top > float("-inf")))
        code = (code & NAN_BIT) | tl.where(better, winner, code & (NAN_BIT - 1))
        code = code | tl.max((x != x).to(tl.int32), 0) * NAN_BIT
        best = tl.maximum(best, top)
        bounds = tl.where(tile == index, float("-inf"), bounds)
        bound = tl.max(bounds, 0)
    if SPLIT:
        _settle(line, split, splits, best, code, values, codes, arrived, tokens, failed, MAX_SPLITS, NAN_BIT)
    else:
        tl.store(tokens + line, (code & (NAN_BIT - 1)).to(tl.int64))
        tl.store(failed + line, (code >= NAN_BIT).to(tl.uint8))


@launched(triton.jit(do_not_specialize=["splits", "ahead"]))
def _draw_ready(
    logits, logits_row, rows, temperatures, seeds, positions, tokens, failed, values, codes, arrived, vocab_size,
    splits, ahead, TILE: tl.constexpr, MAX_SPLITS: tl.constexpr, NAN_BIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_draw` of few lines, in programs of one tile whose noise is ready when the logits are."""
    end_before(PDL)
    line, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + line)
    temperature = tl.load(temperatures + row)
    low, high = stream_key(tl.load(seeds + row), tl.load(positions + line).to(tl.int64) + ahead)
    greedy = temperature == 0.0
    inverse = tl.where(greedy, 1.0, tl.div_rn(1.0, tl.where(greedy, 1.0, temperature)))
    at = split * TILE + tl.arange(0, TILE)
    noise = gumbel(uniform_words(low, high, at.to(tl.uint32))) * tl.where(greedy, 0.0, 1.0)
    noise = ready_before(noise, PDL)
    logits += line * logits_row
    wait_before(PDL)
    x = tl.load(logits + at, mask=at < vocab_size, other=float("-inf"))
    score = tl.fma(x, inverse, noise)
    score = tl.where(x == x, score, float("-inf"))
    best = tl.max(score, 0)
    winner = tl.min(tl.where(score == best, at, NAN_BIT - 1), 0)
    code = winner | tl.max((x != x).to(tl.int32), 0) * NAN_BIT
    _settle(line, split, splits, best, code, values, codes, arrived, tokens, failed, MAX_SPLITS, NAN_BIT)


def _room_for(tiles: int) -> int:
    """A power of four, so that few kernels are compiled."""
    return next(room for room in (8, 32, 128, 512, 2048, 8192) if tiles <= room)


def draw(
    logits: Tensor,
    rows: Tensor | None,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    truncation: TruncationRows | None = None,
    ahead: int = 0,
    *,
    ready: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `octavo.ops.sampling.draw`; rows None: the tables are of the logits' own rows, without cuts."""
    num_rows, vocab_size = logits.shape
    scratch = SCRATCH.of(logits.device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    failed = torch.empty(num_rows, dtype=torch.uint8, device=logits.device)
    if not num_rows:
        return tokens, failed
    if ready and rows is not None and truncation is None and num_rows <= _READY_ROWS:
        (tile, warps), splits = _FEW, triton.cdiv(vocab_size, _FEW[0])
        if splits <= _MAX_SPLITS:
            _draw_ready[(num_rows, splits)](
                logits, logits.stride(0), rows, temperatures, seeds, positions, tokens, failed, scratch.values,
                scratch.codes, scratch.arrived, vocab_size, splits, ahead, TILE=tile, MAX_SPLITS=_MAX_SPLITS,
                NAN_BIT=_NAN_BIT, num_warps=warps, enable_fp_fusion=False, **chained(logits.device),
            )  # fmt: skip
            return tokens, failed
    tile, warps = _FEW if num_rows <= _FEW_ROWS else _MANY
    tiles = triton.cdiv(vocab_size, tile)
    per_split = triton.cdiv(tiles, max(1, min(_PROGRAMS // num_rows, _MAX_SPLITS, tiles)))
    splits = triton.cdiv(tiles, per_split)
    cut = (temperatures, temperatures, temperatures)
    if rows is not None and truncation is not None:
        cut = (truncation.divisors, *last_kept(logits, rows, truncation))
    _draw[(num_rows, splits)](
        logits, logits.stride(0), tokens if rows is None else rows, temperatures, seeds, positions, *cut, tokens,
        failed, scratch.values, scratch.codes, scratch.arrived, vocab_size, per_split * tile, splits, ahead,
        INDEXED=rows is not None, CUT=truncation is not None, SPLIT=splits > 1, TILE=tile, TILES=_room_for(per_split),
        MAX_SPLITS=_MAX_SPLITS, NAN_BIT=_NAN_BIT, num_warps=warps, enable_fp_fusion=False, **chained(logits.device),
    )  # fmt: skip
    return tokens, failed


@triton.jit
def _exp_from(x, largest):
    """e ^ (x - largest), where largest is finite; else e ^ x."""
    return tl.exp(x - tl.where(tl.abs(largest) < float("inf"), largest, 0.0))


@launched(triton.jit)
def _leaf_sums(
    logits,
    logits_row,
    token_ids,
    leaf_max,
    leaf_sum,
    leaf_rank,
    vocab_size,
    num_leaves,
    RANK: tl.constexpr,
    LEAF: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Program (line, leaf): its maximum, its sum of exponentials, how many entries exceed the line's token."""
    line, leaf = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += line * logits_row
    ids = leaf * LEAF + tl.arange(0, LEAF)
    x = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
    largest = tl.max(x, 0)
    at = line * num_leaves + leaf
    tl.store(leaf_max + at, largest)
    total = row_sums(tl.reshape(_exp_from(x, largest), (1, LEAF)), LEVELS)
    tl.store(leaf_sum + at, tl.sum(total, 0))  # a sum of one
    if RANK:
        chosen = tl.load(logits + tl.load(token_ids + line))
        tl.store(leaf_rank + at, tl.sum((x > chosen).to(tl.int32), 0))


@launched(triton.jit)
def _fold_leaves(
    logits,
    logits_row,
    token_ids,
    leaf_max,
    leaf_sum,
    leaf_rank,
    out_max,
    out_log_sum,
    out_logprob,
    out_rank,
    num_leaves,
    RANK: tl.constexpr,
    LEAVES: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """Program (line): all leaves of a row."""
    line = tl.program_id(0).to(tl.int64)
    leaf = tl.arange(0, LEAVES)
    there = leaf < num_leaves
    maxima = tl.load(leaf_max + line * num_leaves + leaf, mask=there, other=float("-inf"))
    sums = tl.load(leaf_sum + line * num_leaves + leaf, mask=there, other=0.0)
    largest = tl.max(maxima, 0)
    shift = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)
    relative = tl.where(tl.abs(maxima) < float("inf"), maxima, 0.0) - shift
    terms = tl.where(sums == 0.0, 0.0, sums * tl.exp(relative))
    total = tl.sum(row_sums(tl.reshape(terms, (1, LEAVES)), LEVELS), 0)  # a sum of one
    log_sum = natural_log(total)
    log_sum = tl.where((total > 0.0) & (total < float("inf")), log_sum, tl.log(total))
    tl.store(out_max + line, largest)
    tl.store(out_log_sum + line, log_sum)
    if RANK:
        chosen = tl.load(logits + line * logits_row + tl.load(token_ids + line))
        tl.store(out_logprob + line, chosen - shift - log_sum)
        ranks = tl.load(leaf_rank + line * num_leaves + leaf, mask=there, other=0)
        tl.store(out_rank + line, 1 + tl.sum(ranks, 0).to(tl.int64))


def _row_stats(logits: Tensor, token_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(max, log of the sum of e^(x - max), log-probability and rank of the token) of each row."""
    num_rows, vocab_size = logits.shape
    leaves = triton.cdiv(vocab_size, LEAF)
    padded, rank = padded_length(leaves), token_ids is not None
    parts = torch.empty((3, max(num_rows * leaves, 1)), dtype=torch.float32, device=logits.device)
    floats = torch.empty((3, num_rows), dtype=torch.float32, device=logits.device)
    ranks = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        arguments = (logits, logits.stride(0), ranks if token_ids is None else token_ids, *parts[:2])
        leaf_rank = parts[2].view(torch.int32)
        _leaf_sums[(num_rows, leaves)](
            *arguments,
            leaf_rank,
            vocab_size,
            leaves,
            RANK=rank,
            LEAF=LEAF,
            LEVELS=LEAF.bit_length() - 1,
            num_warps=4,
            enable_fp_fusion=False,
        )
        _fold_leaves[(num_rows,)](
            *arguments,
            leaf_rank,
            *floats,
            ranks,
            leaves,
            RANK=rank,
            LEAVES=padded,
            LEVELS=padded.bit_length() - 1,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return floats[0], floats[1], floats[2], ranks


def logprob_stats(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `octavo.ops.sampling.logprob_stats`."""
    largest, log_sum, _, _ = _row_stats(logits, None)
    return largest, torch.where(largest.isfinite(), largest, 0.0) + log_sum


def token_stats(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """See `octavo.ops.sampling.token_stats`."""
    largest, log_sum, logprobs, _ = _row_stats(logits, token_ids)
    return logprobs, torch.where(largest.isfinite(), largest, 0.0) + log_sum


def token_logprobs(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """See `octavo.ops.sampling.token_logprobs`."""
    _, _, logprobs, ranks = _row_stats(logits, token_ids)
    return logprobs, ranks


@launched(triton.jit)
def _order_keys(logits, logits_row, keys, vocab_size, BLOCK: tl.constexpr):
    """Distinct int64 keys in the order of (value, lower id first); NaN counts as -inf."""
    line = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + line * logits_row + ids, mask=ids < vocab_size, other=0.0)
    x = tl.where(x == x, x, float("-inf")) + 0.0  # no -0.0
    bits = x.to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    key = (key << 32) | (0xFFFFFFFF - ids.to(tl.int64))
    tl.store(keys + line * vocab_size + ids, key, mask=ids < vocab_size)


def top_logprobs(logits: Tensor, k: int, *, few: bool) -> tuple[Tensor, Tensor]:
    """See `octavo.ops.sampling.top_logprobs`. few: `likeliest` takes so many."""
    num_rows, vocab_size = logits.shape
    if few:
        token_ids = likeliest(logits, k)
    else:
        keys = torch.empty((num_rows, vocab_size), dtype=torch.int64, device=logits.device)
        if num_rows:
            grid = (num_rows, triton.cdiv(vocab_size, 1024))
            _order_keys[grid](logits, logits.stride(0), keys, vocab_size, BLOCK=1024)
        token_ids = 0xFFFFFFFF - (keys.topk(k, dim=1).values & 0xFFFFFFFF)
    largest, log_sum, _, _ = _row_stats(logits, None)
    shift = torch.where(largest.isfinite(), largest, 0.0)
    return token_ids, logits.gather(1, token_ids) - shift[:, None] - log_sum[:, None]
