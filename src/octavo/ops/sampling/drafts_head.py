"""A drafter's last norm, its head and a draw in one kernel: `draw_drafts_of` of `octavo.ops.sampling.drafts`.

Owns that kernel, of one row of bfloat16: a head's weights stream as in `octavo.ops.gemm.gemv`, and what a program
computes of logits it compares at once; none are written. Its scratch memory is that of draws, see
`octavo.ops.sampling.gpu`. Does not know layers. Invariant: the draft is that of `normed_logits` and
`octavo.ops.sampling.drafts_gpu`: logits have their bits, and how a vocabulary is split moves nothing.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from octavo.ops import leaving
from octavo.ops.compile.launch import begin_whole, chained, launched, ready_before
from octavo.ops.gemm import gemv
from octavo.ops.gemm.gemv import ask, normed_by, spread
from octavo.ops.gemm.gpu import is_reproducible
from octavo.ops.inputs.tensors import DraftRows
from octavo.ops.sampling.gpu import SCRATCH
from octavo.ops.sampling.noise import gumbel, stream_key, uniform_words

_MAX_PROGRAMS = 512  # whose bests one program compares


@gluon.jit
def _noise_of(token, low, high, amount):
    return gumbel(uniform_words(low, high, token.to(gl.uint32))) * amount


@launched(gluon.jit(do_not_specialize=["place"]))
def _product_and_draw(
    x, norm, weight, ids, rows, sample_of, lengths, token_ids, total_len, temperatures, seeds, drafts, values, codes,
    arrived, eps, noise, width, place, N: gl.constexpr, K: gl.constexpr, LEVELS: gl.constexpr, BN: gl.constexpr,
    PART: gl.constexpr, STAGES: gl.constexpr, MAPPED: gl.constexpr, BESTS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Every so many groups of BN channels; the last program takes the best of all.

    It begins whole, as `drafts_gpu._draw_drafts` does: what is read ahead of the wait was written before the pass.
    """
    dtype: gl.constexpr = weight.dtype.element_ty
    PARTS: gl.constexpr = K // PART
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PART, PART // 8], [4, 1], [1, 0])
    wide: gl.constexpr = spread(K, 4)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    sums: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])
    line: gl.constexpr = gl.SliceLayout(1, sums)
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, sums, 2)
    first, stride = gl.program_id(0) * BN, gl.num_programs(0) * BN
    groups = (N - first + stride - 1) // stride
    # The ring is filled.
    at = weight + gl.arange(0, BN, gl.SliceLayout(1, lines))[:, None].to(gl.int64) * K
    at += gl.arange(0, PART, gl.SliceLayout(0, lines))[None, :]
    ring = gl.allocate_shared_memory(dtype, [STAGES, BN, PART], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    for early in gl.static_range(STAGES - 1):
        ask(ring, at, early, first, stride, N, K, PART, STAGES, False)
        async_copy.commit_group()
    normed = gl.allocate_shared_memory(dtype, [1, 1, K], plain)
    k = gl.arange(0, K, gl.SliceLayout(0, wide))[None, :]
    scale = gl.load(norm + k)
    row = gl.load(rows)
    total_tokens = gl.load(total_len + row)
    live = (gl.load(sample_of) >= 0) & (gl.load(lengths) > 0)
    temperature = gl.load(temperatures + row) * noise
    low, high = stream_key(gl.load(seeds + row), total_tokens.to(gl.int64) + place)
    greedy = temperature == 0.0
    inverse = gl.where(greedy, 1.0, tl.div_rn(1.0, gl.where(greedy, 1.0, temperature)))
    amount = gl.where(greedy, 0.0, 1.0)
    channel = first + gl.arange(0, BN, line)
    token = gl.load(ids + channel).to(gl.int32) if MAPPED else channel
    own_noise = ready_before(_noise_of(token, low, high, amount), PDL)
    best = gl.full([BN, 8], float("-inf"), gl.float32, sums)
    best_id = gl.zeros([BN, 8], gl.int32, sums)
    begin_whole(PDL)
    # The row is there.
    normed.index(0).store(normed_by(x, k, scale, eps, K, LEVELS, 4).to(dtype))
    parts = normed._reinterpret(dtype, [PARTS, 1, PART], plain)
    for group in range(groups):
        if group > 0:
            channel += stride
            token = gl.load(ids + channel).to(gl.int32) if MAPPED else channel
            own_noise = _noise_of(token, low, high, amount)
        total = gl.zeros([BN, 8], gl.float32, sums)
        for part in range(PARTS):
            step = group * PARTS + part
            async_copy.wait_group(STAGES - 2)
            tl.debug_barrier()
            if step + (STAGES - 1) < groups * PARTS:
                ask(ring, at, step + (STAGES - 1), first, stride, N, K, PART, STAGES, False)
            async_copy.commit_group()
            b = parts.index(part).permute((1, 0)).load(right)
            b = gl.broadcast(b, gl.zeros([PART, 8], dtype, right))[0]
            total = mma_v2(ring.index(step % STAGES).load(left), b, total)
        score = gl.fma(total, inverse, own_noise[:, None])
        score = gl.where(total == total, score, float("-inf"))
        better = (score > best) | ((score == best) & (token[:, None] < best_id))
        best_id = gl.where(better, token[:, None], best_id)
        best = gl.where(better, score, best)
    top = gl.max(gl.max(best, 1), 0)
    winner = gl.min(gl.min(gl.where(best == top, best_id, 2147483647), 1), 0)
    gl.store(values + gl.program_id(0), top)
    gl.store(codes + gl.program_id(0), winner)
    tl.debug_barrier()
    if gl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == gl.num_programs(0) - 1:
        each = gl.arange(0, BESTS, gl.BlockedLayout([1], [32], [4], [0]))
        there = each < gl.num_programs(0)
        value = gl.load(values + each, mask=there, other=float("-inf"), cache_modifier=".cg")
        code = gl.load(codes + each, mask=there, other=0, cache_modifier=".cg")
        top = gl.max(value, 0)
        winner = gl.min(gl.where(value == top, code, 2147483647), 0)
        winner = gl.where(top > float("-inf"), winner, 0)
        gl.store(arrived, 0)
        gl.store(drafts, winner.to(gl.int64))
        if live & (total_tokens + place < width):
            gl.store(token_ids + row * width + total_tokens + place, winner)


def _tile(x: Tensor, weight: Tensor) -> gemv.Tile | None:
    """As a head's in float32: programs of four warps, whose weights stream."""
    tile = gemv.tile_for(*weight.shape, True, False, gemv.num_processors(x.device), True)
    is_plain = tile is not None and tile.stages and tile.warps == 4 and tile.programs <= _MAX_PROGRAMS
    return tile if is_plain else None


def serves(x: Tensor, weight: Tensor, of: DraftRows) -> bool:
    """Whether `draw` runs these: one row, by a head whose channels are a power of two."""
    num_rows, k = x.shape
    if num_rows != 1 or k & (k - 1) or not is_reproducible() or len(of.rows) != 1:
        return False
    return gemv.serves(x, weight, None, None, normed=True, out_dtype=torch.float32) and _tile(x, weight) is not None


def draw(x: Tensor, norm: Tensor, eps: float, weight: Tensor, ids: Tensor | None, of: DraftRows) -> Tensor:
    """See `octavo.ops.sampling.drafts.draw_drafts_of`."""
    (n, k), scratch, tile = weight.shape, SCRATCH.of(x.device), _tile(x, weight)
    assert tile is not None and (ids is None or len(ids) == n), "each channel has an id; ask `serves` first"
    leaving.let_leave(weight)  # the layer's weights stay in the L2 for the next draft
    drafts = torch.empty(1, dtype=torch.int64, device=x.device)
    _product_and_draw[(tile.programs,)](
        x, norm, weight, of.rows if ids is None else ids, of.rows, *of.live, of.table.token_ids, of.table.total_len,
        of.temperatures, of.seeds, drafts, scratch.values, scratch.codes, scratch.arrived, eps, float(of.noise),
        of.table.token_ids.shape[1], of.place, N=n, K=k, LEVELS=k.bit_length() - 1, BN=tile.channels, PART=tile.part,
        STAGES=tile.stages, MAPPED=ids is not None, BESTS=_MAX_PROGRAMS, num_warps=4, enable_fp_fusion=False,
        **chained(x.device),
    )  # fmt: skip
    return drafts
