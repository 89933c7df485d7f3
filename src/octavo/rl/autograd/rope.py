"""qk_norm_rope: from a projection to turned queries and a filled cache, with gradients.

Owns the way back through rotation and head norms. Invariant: forward is `octavo.ops.rope.qk_norm_rope_store`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.cache.specs import AttentionSpec
from octavo.ops.rope import qk_norm_rope_store
from octavo.rl.autograd.norm import norm_backward, norm_weight
from octavo.rl.autograd.outside import apply, first_order, num_processors
from octavo.rl.pack import Pack, cache_view


def qk_norm_rope(
    qkv: Tensor,
    pack: Pack,
    cos_sin: Tensor,
    spec: AttentionSpec,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(q [tokens, heads, head_size], K and V by slot [slots, kv_heads, 2 * head_size]) of a projection.

    qkv: [tokens, (heads + 2 * kv_heads) * head_size]; cos_sin: `octavo.ops.rope.rope_table`, long enough for the pack;
    q_norm, k_norm: [head_size], norms of each head with `eps` and `offset`, or None. What `attention` takes.
    """
    if len(cos_sin) < pack.longest:
        raise ValueError(f"a sequence of {pack.longest} tokens is longer than the {len(cos_sin)} rotary positions")
    q, states = apply(_QkNormRope, qkv, q_norm, k_norm, cos_sin, pack, spec, eps, offset)
    return q, states


class _QkNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cos_sin: Tensor,
        pack: Pack,
        spec: AttentionSpec,
        eps: float,
        offset: float,
    ) -> tuple[Tensor, Tensor]:
        qkv = qkv.contiguous()
        ctx.save_for_backward(qkv, q_norm, k_norm, cos_sin)
        ctx.facts = pack, spec, eps, offset
        states = pack.new_states(spec.num_kv_heads, 2 * spec.head_size, qkv.dtype)
        first, second = (None if each is None else norm_weight(each, offset) for each in (q_norm, k_norm))
        q = qk_norm_rope_store(
            qkv,
            pack.positions,
            cos_sin,
            first,
            second,
            eps,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            cache_view(states),
            pack.slots,
        )
        return q, states

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_q: Tensor, grad_states: Tensor) -> tuple[Tensor | None, ...]:
        saved = qkv, q_norm, k_norm, cos_sin = ctx.saved_tensors  # once: checkpointing computes them for one look
        pack, spec, eps, offset = ctx.facts
        if qkv.is_cuda:
            return _backward_gpu(grad_q, grad_states, saved, ctx.facts)
        heads = qkv.unflatten(1, (-1, spec.head_size))
        counts = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        q, k, _ = heads.split(counts, dim=1)
        grad_k, grad_v = grad_states[pack.slots].split(spec.head_size, dim=2)
        rows, grads, of_norms = cos_sin[pack.positions], [], []
        for grad, x, weight in ((grad_q, q, q_norm), (grad_k, k, k_norm)):
            own, of_norm = turn_back(grad.float(), rows), None
            if weight is not None:
                own, of_norm = norm_backward(own, x, norm_weight(weight, offset), eps)
                of_norm = of_norm.to(weight.dtype)
            grads.append(own.to(qkv.dtype))
            of_norms.append(of_norm)
        joined = torch.cat((*grads, grad_v.to(qkv.dtype)), dim=1).flatten(1)
        return joined, *of_norms, None, None, None, None, None


def _backward_gpu(grad_q: Tensor, grad_states: Tensor, saved: Any, facts: Any) -> tuple[Tensor | None, ...]:
    from octavo.ops.backward.rope import rope_backward  # needs triton

    qkv, q_norm, k_norm, cos_sin = saved
    pack, _, eps, offset = facts
    wide_q, wide_k = (None if each is None else norm_weight(each, offset) for each in (q_norm, k_norm))
    grad, of_q, of_k = rope_backward(
        grad_q,
        grad_states,
        qkv,
        pack.positions,
        pack.slots,
        cos_sin,
        wide_q,
        wide_k,
        eps,
        num_processors(qkv.device),
    )
    of_norms = (
        None if norm is None or own is None else own.to(norm.dtype) for norm, own in ((q_norm, of_q), (k_norm, of_k))
    )
    return grad, *of_norms, None, None, None, None, None


def turn_back(grad: Tensor, cos_sin: Tensor) -> Tensor:
    """The rotation's transpose: grad [tokens, heads, head_size] float32, cos_sin [tokens, rotary]."""
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    first, second, rest = grad[..., :half], grad[..., half : 2 * half], grad[..., 2 * half :]
    return torch.cat((first * cos + second * sin, second * cos - first * sin, rest), dim=-1)
