"""head_linear and latent_rope: what latent attention makes of its projections, with gradients.

Owns the way back through one product a head and through the pass that fills the cache. Invariants: a head's product is
the sampler's chain over K; a token's state is its own row's, by `octavo.ops.latent`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.ops.gemm.head_linear import head_linear as head_linear_operator
from octavo.ops.latent import latent_rope_store
from octavo.ops.latent.state import LatentState
from octavo.rl.autograd.norm import norm_backward, norm_weight
from octavo.rl.autograd.outside import apply, first_order
from octavo.rl.autograd.packed_weights import packed_heads, rounded
from octavo.rl.autograd.rope import turn_back
from octavo.rl.pack import Pack, cache_view


def head_linear(x: Tensor, weight: Tensor, rows: slice, *, transposed: bool = False) -> Tensor:
    """One product a head: x [tokens, heads, K] -> [tokens, heads, N] of x's dtype.

    weight: [heads * size, C]; a head's matrix is `rows` of its `size` rows, [N, K], or that matrix transposed. Raises
    ValueError for shapes that do not fit.
    """
    heads = x.shape[1]
    if len(weight) % heads:
        raise ValueError(f"a weight of {heads} heads must have a multiple of {heads} rows, got {len(weight)}")
    size = len(range(*rows.indices(len(weight) // heads))) if transposed else weight.shape[1]
    if size != x.shape[2]:
        raise ValueError(f"a head's matrix must be [N, {x.shape[2]}] for rows of {x.shape[2]}, got [N, {size}]")
    result: Tensor = apply(_HeadLinear, x, weight, rows, transposed)
    return result


def latent_rope(
    query: Tensor,
    state: Tensor,
    weight: Tensor,
    pack: Pack,
    cos_sin: Tensor,
    eps: float,
    *,
    interleaved: bool,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(turned queries [tokens, heads, rope], states by slot [slots, 1, latent + rope]).

    query: [tokens, heads, rope]; state: [tokens, latent + rope], of which the first are normed by weight [latent] and
    the others turned; cos_sin: `octavo.ops.rope.rope_table` of `rope` channels, long enough for the pack.
    """
    if len(cos_sin) < pack.longest:
        raise ValueError(f"a sequence of {pack.longest} tokens is longer than the {len(cos_sin)} rotary positions")
    rotated, states = apply(_LatentRope, query, state, weight, cos_sin, pack, eps, interleaved, offset)
    return rotated, states


class _HeadLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: slice, transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.facts = rows, transposed
        heads = packed_heads(weight, x.dtype, x.shape[1], rows, transposed=transposed)
        head_rows = len(range(*rows.indices(len(weight) // x.shape[1])))
        out = x.new_empty(*x.shape[:2], weight.shape[1] if transposed else head_rows)
        return head_linear_operator(x.detach(), heads, out)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, transposed = ctx.facts
        grad_x = grad_weight = None
        wide = torch.promote_types(grad.dtype, x.dtype)
        own, inputs = grad.to(wide).transpose(0, 1), x.to(wide).transpose(0, 1)  # [heads, tokens, ...]
        if ctx.needs_input_grad[0]:
            matrices = rounded(weight, x.dtype).to(wide).unflatten(0, (x.shape[1], -1))[:, rows]
            grad_x = (own @ (matrices.transpose(1, 2) if transposed else matrices)).transpose(0, 1).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight)
            first, second = (inputs, own) if transposed else (own, inputs)
            grad_weight.unflatten(0, (x.shape[1], -1))[:, rows] = (first.transpose(1, 2) @ second).to(weight.dtype)
        return grad_x, grad_weight, None, None


class _LatentRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        state: Tensor,
        weight: Tensor,
        cos_sin: Tensor,
        pack: Pack,
        eps: float,
        interleaved: bool,
        offset: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(state, weight, cos_sin)
        ctx.facts = pack, eps, interleaved, offset
        states, rotated = pack.new_states(1, state.shape[1], state.dtype), torch.empty_like(query)
        made = LatentState(cos_sin, norm_weight(weight, offset), eps, interleaved)
        latent_rope_store(made, query.detach(), state.detach(), pack.positions, rotated, cache_view(states), pack.slots)
        return rotated, states

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_rotated: Tensor, grad_states: Tensor) -> tuple[Tensor | None, ...]:
        state, weight, cos_sin = ctx.saved_tensors
        pack, eps, interleaved, offset = ctx.facts
        rows, size = cos_sin[pack.positions], len(weight)
        of_states = grad_states[pack.slots]  # [tokens, 1, latent + rope]
        own, of_weight = norm_backward(of_states[:, 0, :size], state[:, :size], norm_weight(weight, offset), eps)
        of_query, of_key = (
            _as_projected(turn_back(grad.float(), rows), interleaved).to(state.dtype)
            for grad in (grad_rotated, of_states[..., size:])
        )
        of_state = torch.cat((own, of_key[:, 0]), dim=1)
        return of_query, of_state, of_weight.to(weight.dtype), None, None, None, None, None


def _as_projected(grad: Tensor, interleaved: bool) -> Tensor:
    """A gradient of channels as the projection gives them, of one whose pairs lie as halves."""
    return torch.stack(grad.chunk(2, dim=-1), dim=-1).flatten(-2) if interleaved else grad
