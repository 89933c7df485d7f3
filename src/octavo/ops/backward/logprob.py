"""Entropies of rows of logits, and the way back from log-probabilities to logits, on a GPU: each in one pass.

Owns the kernels. Logits are what a draw made of them (divided, capped, cut); the way back ends at the head's product.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.compile.launch import launched

_BLOCK, _WARPS = 4096, 8


@launched(triton.jit)
def _entropies(logits, sums, out, logits_row, vocab_size, BLOCK: tl.constexpr):
    """Program: a row."""
    row = tl.program_id(0).to(tl.int64)
    log_sum = tl.load(sums + row)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    weights = tl.zeros((BLOCK,), tl.float32)  # their sum is 1, but for the rounding of log_sum
    for begin in range(0, vocab_size, BLOCK):
        x = tl.load(logits + row * logits_row + begin + lane, mask=lane < vocab_size - begin, other=float("-inf"))
        log = x - log_sum
        weight = tl.exp(log)
        weights += weight
        total += tl.where(x == float("-inf"), 0.0, weight * log)
    scale = tl.sum(weights, 0)
    tl.store(out + row, tl.maximum(tl.log(scale) - tl.sum(total, 0) / scale, 0.0))


def entropies(logits: Tensor, sums: Tensor) -> Tensor:
    """[rows] float32, of logits [rows, vocab] float32; sums: [rows], the logarithms of their sums of exponentials."""
    out = torch.empty_like(sums)
    if len(logits):
        _entropies[(len(logits),)](logits, sums, out, logits.stride(0), logits.shape[1], BLOCK=_BLOCK, num_warps=_WARPS)
    return out


@launched(triton.jit)
def _logprob_backward(
    logits, ids, grads, entropy_grads, entropy, sums, out, logits_row, vocab_size, temperature, share_scale, divisor,
    GRAD: tl.constexpr, ENTROPY: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, block): the gradient of the head's product."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < vocab_size
    x = tl.load(logits + row * logits_row + lane, mask=inside, other=float("-inf"))
    log = x - tl.load(sums + row)
    weight = tl.exp(log)
    result = tl.zeros((BLOCK,), tl.float32)
    if ENTROPY:
        known = tl.where(x == float("-inf"), 0.0, log)
        result -= tl.load(entropy_grads + row) * weight * (known + tl.load(entropy + row))
    if GRAD:
        token = tl.load(ids + row)
        chosen = tl.load(logits + row * logits_row + token)
        grad = tl.where(chosen == float("-inf"), 0.0, tl.load(grads + row))  # it could not be drawn
        result += grad * (tl.where(lane == token, 1.0, 0.0) - weight)
    result /= temperature
    if CAPPED:
        share = x * share_scale
        result *= tl.where(x == float("-inf"), 0.0, 1.0 - share * share)
    tl.store(out + row * vocab_size + lane, (result / divisor).to(out.dtype.element_ty), mask=inside)


def logprob_backward(
    logits: Tensor,
    ids: Tensor,
    grad: Tensor | None,
    entropy_grad: Tensor | None,
    entropy: Tensor,
    sums: Tensor,
    dtype: torch.dtype,
    *,
    temperature: float,
    soft_cap: float,
    divisor: float,
) -> Tensor:
    """The gradient [rows, vocab] in `dtype` of what logits [rows, vocab] float32 were made of.

    ids: [rows] int64; grad, entropy_grad: of log-probabilities and entropies, [rows] float32, or None; sums: see
    `entropies`. A product p became cap * tanh(p / divisor / cap) / temperature.
    """
    out = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    if len(logits):
        _logprob_backward[(len(logits), triton.cdiv(logits.shape[1], _BLOCK))](
            logits, ids, sums if grad is None else grad, sums if entropy_grad is None else entropy_grad, entropy, sums,
            out, logits.stride(0), logits.shape[1], temperature, temperature / soft_cap if soft_cap else 0.0, divisor,
            GRAD=grad is not None, ENTROPY=entropy_grad is not None, CAPPED=soft_cap > 0, BLOCK=_BLOCK,
            num_warps=_WARPS,
        )  # fmt: skip
    return out
