"""The way back through rotation, head norms and the store of K and V on a GPU: `octavo.ops.rope.qk_norm_rope_store`'s.

Owns the kernel: a program walks over every n-th token, with all heads of q, or all of k and v. Invariant: for one
number of tokens the same from run to run.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.compile.launch import launched

_PROGRAMS = 8  # of a processor
_CHANNELS_PER_WARP = 512


@triton.jit
def _turn_back(
    grad, source, out, norm, cos_sin, valid, eps, of_first, of_second, of_rest,
    HEAD: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr, REST: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Write the gradients of some heads of a token; (sums for the norm's gradient) with what they add to them.

    grad, source, out: [N] pointers to heads; valid: which are there; cos_sin: pointer to the position's row.
    """
    channel, other = tl.arange(0, PADDED_HALF), tl.arange(0, REST)
    half = valid[:, None] & (channel < HALF)[None, :]
    rest_mask = valid[:, None] & (other < HEAD - 2 * HALF)[None, :]
    one, two, three = channel[None, :], HALF + channel[None, :], 2 * HALF + other[None, :]
    turned = tl.load(grad[:, None] + one, mask=half, other=0.0).to(tl.float32)
    other_turned = tl.load(grad[:, None] + two, mask=half, other=0.0).to(tl.float32)
    cosine = tl.load(cos_sin + channel, mask=channel < HALF, other=0.0)[None, :]
    sine = tl.load(cos_sin + HALF + channel, mask=channel < HALF, other=0.0)[None, :]
    first = turned * cosine + other_turned * sine
    second = other_turned * cosine - turned * sine
    rest = tl.zeros((source.shape[0], REST), tl.float32)
    if HEAD > 2 * HALF:
        rest = tl.load(grad[:, None] + three, mask=rest_mask, other=0.0).to(tl.float32)
    if NORM:
        a = tl.load(source[:, None] + one, mask=half, other=0.0).to(tl.float32)
        b = tl.load(source[:, None] + two, mask=half, other=0.0).to(tl.float32)
        squares = tl.sum(a * a + b * b, 1)
        if HEAD > 2 * HALF:
            c = tl.load(source[:, None] + three, mask=rest_mask, other=0.0).to(tl.float32)
            squares += tl.sum(c * c, 1)
        inverse = tl.rsqrt(squares / HEAD + eps)[:, None]
        a, b = a * inverse, b * inverse
        of_first += first * a
        of_second += second * b
        first *= tl.load(norm + channel, mask=channel < HALF, other=0.0).to(tl.float32)[None, :]
        second *= tl.load(norm + HALF + channel, mask=channel < HALF, other=0.0).to(tl.float32)[None, :]
        shared = tl.sum(first * a + second * b, 1)
        if HEAD > 2 * HALF:
            c *= inverse
            of_rest += rest * c
            scale = tl.load(norm + 2 * HALF + other, mask=other < HEAD - 2 * HALF, other=0.0)
            rest *= scale.to(tl.float32)[None, :]
            shared += tl.sum(rest * c, 1)
        shared = (shared / HEAD)[:, None]
        first, second = (first - a * shared) * inverse, (second - b * shared) * inverse
        if HEAD > 2 * HALF:
            rest = (rest - c * shared) * inverse
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out[:, None] + one, first.to(dtype), mask=half)
    tl.store(out[:, None] + two, second.to(dtype), mask=half)
    if HEAD > 2 * HALF:
        tl.store(out[:, None] + three, rest.to(dtype), mask=rest_mask)
    return of_first, of_second, of_rest


@launched(triton.jit)
def _rope_backward(
    grad_q, grad_states, qkv, grad_qkv, positions, slots, cos_sin, q_norm, k_norm, parts, num_tokens, programs, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD: tl.constexpr, HALF: tl.constexpr,
    PADDED: tl.constexpr, PADDED_HALF: tl.constexpr, REST: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
):  # fmt: skip
    """Program (number, part): tokens number, number + programs, ...; part 0: q, 1: k and v.

    parts: [2, programs, HEAD], a program's sum of the gradient of q_norm or k_norm.
    """
    program, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    TOKEN: tl.constexpr = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD
    if part == 0:
        head = tl.arange(0, HEADS)
        of_first, of_second = tl.zeros((HEADS, PADDED_HALF), tl.float32), tl.zeros((HEADS, PADDED_HALF), tl.float32)
        of_rest = tl.zeros((HEADS, REST), tl.float32)
        for token in range(program, num_tokens, programs):
            table = cos_sin + tl.load(positions + token).to(tl.int64) * (2 * HALF)
            of_first, of_second, of_rest = _turn_back(
                grad_q + (token * NUM_HEADS + head) * HEAD, qkv + token * TOKEN + head * HEAD,
                grad_qkv + token * TOKEN + head * HEAD, q_norm, table, head < NUM_HEADS, eps, of_first, of_second,
                of_rest, HEAD, HALF, PADDED_HALF, REST, Q_NORM,
            )  # fmt: skip
        _store_part(parts + program * HEAD, of_first, of_second, of_rest, HEAD, HALF, Q_NORM)
    else:
        group = tl.arange(0, KV_HEADS)
        channel = tl.arange(0, PADDED)
        inside = (group < NUM_KV_HEADS)[:, None] & (channel < HEAD)[None, :]
        k_first = tl.zeros((KV_HEADS, PADDED_HALF), tl.float32)
        k_second, k_rest = k_first, tl.zeros((KV_HEADS, REST), tl.float32)
        for place in range(program, num_tokens, programs):
            turn = cos_sin + tl.load(positions + place).to(tl.int64) * (2 * HALF)
            stored = grad_states + (tl.load(slots + place).to(tl.int64) * NUM_KV_HEADS + group) * (2 * HEAD)
            heads = place * TOKEN + (NUM_HEADS + group) * HEAD
            k_first, k_second, k_rest = _turn_back(
                stored, qkv + heads, grad_qkv + heads, k_norm, turn, group < NUM_KV_HEADS, eps, k_first,
                k_second, k_rest, HEAD, HALF, PADDED_HALF, REST, K_NORM,
            )  # fmt: skip
            value = tl.load(stored[:, None] + HEAD + channel[None, :], mask=inside, other=0.0)
            into = grad_qkv + heads + NUM_KV_HEADS * HEAD
            tl.store(into[:, None] + channel[None, :], value.to(grad_qkv.dtype.element_ty), mask=inside)
        _store_part(parts + (programs + program) * HEAD, k_first, k_second, k_rest, HEAD, HALF, K_NORM)


@triton.jit
def _store_part(place, of_first, of_second, of_rest, HEAD: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr):
    """The sums over heads."""
    if NORM:
        channel, other = tl.arange(0, of_first.shape[1]), tl.arange(0, of_rest.shape[1])
        tl.store(place + channel, tl.sum(of_first, 0), mask=channel < HALF)
        tl.store(place + HALF + channel, tl.sum(of_second, 0), mask=channel < HALF)
        if HEAD > 2 * HALF:
            tl.store(place + 2 * HALF + other, tl.sum(of_rest, 0), mask=other < HEAD - 2 * HALF)


def rope_backward(
    grad_q: Tensor,
    grad_states: Tensor,
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    processors: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(gradient of qkv, of q_norm, of k_norm), the norms' float32 or None.

    grad_q: [tokens, heads, head_size]; grad_states: [slots, kv_heads, 2 * head_size]; qkv: [tokens, (heads + 2 *
    kv_heads) * head_size], all contiguous; positions, slots: [tokens] int64; cos_sin: [positions, rotary] float32;
    norms: [head_size]. processors: of the device.
    """
    (num_tokens, num_heads, size), num_kv_heads = grad_q.shape, grad_states.shape[1]
    half = cos_sin.shape[1] // 2
    programs = max(1, min(num_tokens, _PROGRAMS * processors))
    grad_qkv = torch.empty_like(qkv)
    parts = torch.empty((2, programs, size), dtype=torch.float32, device=qkv.device)
    _rope_backward[(programs, 2)](
        grad_q.contiguous(), grad_states.contiguous(), qkv, grad_qkv, positions, slots, cos_sin,
        cos_sin if q_norm is None else q_norm, cos_sin if k_norm is None else k_norm, parts, num_tokens, programs, eps,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD=size, HALF=half, PADDED=triton.next_power_of_2(size),
        PADDED_HALF=triton.next_power_of_2(half), REST=triton.next_power_of_2(max(size - 2 * half, 1)),
        HEADS=triton.next_power_of_2(num_heads), KV_HEADS=triton.next_power_of_2(num_kv_heads),
        Q_NORM=q_norm is not None, K_NORM=k_norm is not None,
        num_warps=min(max(triton.next_power_of_2(num_heads * size) // _CHANNELS_PER_WARP, 1), 8),
    )  # fmt: skip
    of_q, of_k = parts.sum(1)
    return grad_qkv, None if q_norm is None else of_q, None if k_norm is None else of_k
