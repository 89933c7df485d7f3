"""Draws of drafts on a GPU: `draw_drafts` of `octavo.ops.sampling.drafts`.

Owns the kernel. Its scratch memory is that of draws, see `octavo.ops.sampling.gpu`: one launch at a time may use it.
Invariant: scores have the bits of a draw's; how a vocabulary is split moves nothing.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.compile.launch import begin_whole, chained, launched, ready_before
from octavo.ops.inputs.tensors import DraftRows
from octavo.ops.sampling.gpu import SCRATCH
from octavo.ops.sampling.noise import gumbel, stream_key, uniform_words

_TILE, _WARPS = 512, 4  # entries of a step of a program: they move no token
_PROGRAMS = 2112  # how many programs a launch should have, as a draw's
_MAX_SPLITS = 128


@triton.jit
def _noise_of(ids, at, num_places, low, high, amount, MAPPED: tl.constexpr):
    """(the target's ids of places, their noise)."""
    token = tl.load(ids + at, mask=at < num_places, other=0).to(tl.int32) if MAPPED else at
    return token, gumbel(uniform_words(low, high, token.to(tl.uint32))) * amount


@launched(triton.jit(do_not_specialize=["splits", "place"]))
def _draw_drafts(
    logits, logits_row, ids, rows, sample_of, lengths, token_ids, total_len, temperatures, seeds, drafts, values, codes,
    arrived, noise, num_places, share, splits, width, place, MAPPED: tl.constexpr, SPLIT: tl.constexpr,
    TILE: tl.constexpr, MAX_SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (line, split): the best of `share` entries; the last program of a line takes the best of them.

    All but the logits is there before: the first pass began whole, behind the commit. So the noise of the first tile is
    ready when the logits are. It begins whole itself: so the next pass need not, and its weights are on their way.
    """
    line, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + line)
    total = tl.load(total_len + row)
    live = (tl.load(sample_of + line) >= 0) & (tl.load(lengths + line) > 0)
    temperature = tl.load(temperatures + row) * noise
    low, high = stream_key(tl.load(seeds + row), total.to(tl.int64) + place)
    greedy = temperature == 0.0
    inverse = tl.where(greedy, 1.0, tl.div_rn(1.0, tl.where(greedy, 1.0, temperature)))
    amount = tl.where(greedy, 0.0, 1.0)
    start = split * share
    at = start + tl.arange(0, TILE)
    token, own_noise = _noise_of(ids, at, num_places, low, high, amount, MAPPED)
    own_noise = ready_before(own_noise, PDL)
    best, best_id = tl.full((TILE,), float("-inf"), tl.float32), tl.full((TILE,), 0, tl.int32)
    logits += line * logits_row
    begin_whole(PDL)
    for index in range(tl.cdiv(tl.minimum(share, num_places - start), TILE)):
        if index > 0:
            at += TILE
            token, own_noise = _noise_of(ids, at, num_places, low, high, amount, MAPPED)
        x = tl.load(logits + at, mask=at < num_places, other=float("-inf"))
        score = tl.fma(x, inverse, own_noise)
        score = tl.where(x == x, score, float("-inf"))
        better = (score > best) | ((score == best) & (token < best_id))
        best_id = tl.where(better, token, best_id)
        best = tl.where(better, score, best)
    top = tl.max(best, 0)
    winner = tl.min(tl.where(best == top, best_id, 2147483647), 0)
    is_last = True
    if SPLIT:
        part = (line * splits).to(tl.int32) + split
        tl.store(values + part, top)
        tl.store(codes + part, winner)
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived + line, 1, sem="acq_rel", scope="gpu") == splits - 1
    if is_last:
        if SPLIT:
            each = tl.arange(0, MAX_SPLITS)
            there = each < splits
            value = tl.load(values + line * splits + each, mask=there, other=float("-inf"), cache_modifier=".cg")
            code = tl.load(codes + line * splits + each, mask=there, other=0, cache_modifier=".cg")
            top = tl.max(value, 0)
            winner = tl.min(tl.where(value == top, code, 2147483647), 0)
            tl.store(arrived + line, 0)
        winner = tl.where(top > float("-inf"), winner, 0)
        tl.store(drafts + line, winner.to(tl.int64))
        inside = live & (total + place < width)
        tl.store(token_ids + row * width + total + place, winner, mask=inside)


def draw_drafts(logits: Tensor, ids: Tensor | None, of: DraftRows) -> Tensor:
    """See `octavo.ops.sampling.drafts.draw_drafts`."""
    (num_rows, num_places), scratch, table = logits.shape, SCRATCH.of(logits.device), of.table
    assert logits.stride(1) == 1 and (ids is None or len(ids) == num_places), "each place has an id"
    drafts = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    tiles = triton.cdiv(num_places, _TILE)
    per_split = triton.cdiv(tiles, max(1, min(_PROGRAMS // max(num_rows, 1), _MAX_SPLITS, tiles)))
    splits = triton.cdiv(tiles, per_split)
    if num_rows:
        _draw_drafts[(num_rows, splits)](
            logits, logits.stride(0), of.rows if ids is None else ids, of.rows, *of.live, table.token_ids,
            table.total_len, of.temperatures, of.seeds, drafts, scratch.values, scratch.codes, scratch.arrived,
            float(of.noise), num_places, per_split * _TILE, splits, table.token_ids.shape[1], of.place,
            MAPPED=ids is not None, SPLIT=splits > 1, TILE=_TILE, MAX_SPLITS=_MAX_SPLITS, num_warps=_WARPS,
            enable_fp_fusion=False, **chained(logits.device),
        )  # fmt: skip
    return drafts
