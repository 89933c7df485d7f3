"""attention: the sampler's attention over a pack's rows, with gradients.

Forward is a backend over the paged cache. Backward computes scores again, in tiles of queries against the keys that
they may see, in float32: nothing as large as [tokens, tokens] exists, and of a forward q, K and V are kept alone.
Invariant: the mathematics of backward is the forward's: scale, soft cap, slopes, mask, then a user's mods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.attention.mods import NO_MODS, at_work
from octavo.attention.reference import apply_mods
from octavo.cache.specs import AttentionSpec
from octavo.rl.autograd.outside import apply, first_order, outside_autocast
from octavo.rl.pack import Pack

_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 26}  # scores of a tile


def attention(q: Tensor, states: Tensor, pack: Pack, spec: AttentionSpec, backend: str | None = None) -> Tensor:
    """Attention of each token to its own sequence: q [tokens, heads, head_size] -> the same shape.

    states: [slots, kv_heads, 2 * head_size], K then V by the pack's slots, of q's dtype, as `qk_norm_rope` gives them;
    spec: what a query sees, mods included; backend: by name, None: the one that an engine takes by itself. Raises
    ValueError for a latent spec or sinks, and in backward for a mod that would need a gradient of its own.
    """
    if spec.value_size or spec.sinks:
        raise ValueError(f"octavo.rl.attention has no {'latent attention' if spec.value_size else 'sinks'} yet")
    result: Tensor = apply(_Attention, q, states, pack, spec, backend)
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    @outside_autocast
    def forward(ctx: Any, q: Tensor, states: Tensor, pack: Pack, spec: AttentionSpec, backend: str | None) -> Tensor:
        ctx.save_for_backward(q, states)
        ctx.facts = pack, spec
        return pack.attend(q.detach().contiguous(), states.detach(), spec, backend)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, states = ctx.saved_tensors
        pack, spec = ctx.facts
        grad_q, grad_states = torch.empty_like(q), torch.zeros_like(states)
        for row, place in enumerate(pack.places):
            slots = slice(place.slot, place.slot + place.length)
            own = states[slots].float()
            of_keys = torch.zeros_like(own)
            at_once = max(1, _AT_ONCE[q.device.type] // (spec.num_heads * place.length))
            for begin in range(0, place.length, at_once):
                end = min(begin + at_once, place.length)
                first, last = _seen(spec, begin, end, place.length)
                some = slice(place.token + begin, place.token + end)
                of_query, of_seen = _tile_backward(
                    q[some].float(),
                    own[first:last],
                    grad[some].float(),
                    _bias(pack, spec, row, begin, end, first, last),
                )
                grad_q[some] = of_query.to(q.dtype)
                of_keys[first:last] += of_seen
            grad_states[slots] = of_keys.to(states.dtype)
        return grad_q, grad_states, None, None, None


def _seen(spec: AttentionSpec, begin: int, end: int, length: int) -> tuple[int, int]:
    """The keys that queries begin .. end - 1 may see, as a range."""
    if not (spec.causal and spec.mods.causal):
        return 0, length
    first = max(0, begin + 1 - spec.window) if spec.window else 0
    return max(first, begin // spec.chunk * spec.chunk) if spec.chunk else first, end


def _bias(
    pack: Pack, spec: AttentionSpec, row: int, begin: int, end: int, first: int, last: int
) -> Callable[[Tensor], Tensor]:
    """What becomes of raw products [kv_heads, group, queries, keys] of a tile: scores, -inf where hidden."""
    position = torch.arange(begin, end, device=pack.device)
    column = torch.arange(first, last, device=pack.device)
    distance = position[:, None] - column
    hidden = distance < 0 if spec.causal and spec.mods.causal else torch.zeros_like(distance, dtype=torch.bool)
    if spec.window:
        hidden = hidden | (distance >= spec.window) | (distance <= -spec.window)
    if spec.chunk:
        hidden = hidden | (position[:, None] // spec.chunk != column // spec.chunk)

    def scores(products: Tensor) -> Tensor:
        result = products * spec.scale
        if spec.soft_cap:
            result = spec.soft_cap * torch.tanh(result / spec.soft_cap)
        if spec.alibi_slopes:
            slopes = torch.tensor(spec.alibi_slopes, device=result.device).view(*result.shape[:2], 1, 1)
            result = result - slopes * distance
        if spec.mods is not NO_MODS:
            with at_work(spec.mods, pack.tables):
                result = apply_mods(spec.mods, pack.inputs.rows)(result, row, position, column)
        return result.masked_fill(hidden, float("-inf"))

    return scores


def _tile_backward(q: Tensor, states: Tensor, grad: Tensor, bias: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """(gradient of q [queries, heads, size], of states [keys, kv_heads, 2 * size]) of a tile, all float32."""
    kv_heads, size = states.shape[1], q.shape[2]
    keys, values = states.transpose(0, 1).split(size, dim=2)  # [kv_heads, keys, size]
    shape = (kv_heads, -1, size)
    queries, own = (x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3) for x in (q, grad))  # kv_heads, group, queries
    flat, own_flat = queries.reshape(shape), own.reshape(shape)
    products = (flat @ keys.transpose(1, 2)).view(*queries.shape[:3], -1)
    with torch.enable_grad():
        raw = products.requires_grad_()
        scores = bias(raw)
    _refuse_learned(scores, raw)
    changed = scores.detach()
    blind = (changed == float("-inf")).all(-1, keepdim=True)  # a query that sees nothing gives 0
    weights = changed.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    weights_flat = weights.flatten(1, 2)
    of_values = weights_flat.transpose(1, 2) @ own_flat
    of_weights = (own_flat @ values.transpose(1, 2)).view_as(weights)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
    (of_products,) = torch.autograd.grad(scores, raw, of_scores)
    of_flat = of_products.flatten(1, 2)
    of_queries = (of_flat @ keys).view(queries.shape).permute(2, 0, 1, 3).flatten(1, 2)
    of_keys = of_flat.transpose(1, 2) @ flat
    return of_queries, torch.cat((of_keys, of_values), dim=2).transpose(0, 1)


def _refuse_learned(scores: Tensor, raw: Tensor) -> None:
    """Raises ValueError where a mod has learned parts: their gradient would be lost in silence."""
    waiting, seen = [scores.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", raw) is not raw:
            raise ValueError("an attention mod reads a tensor that requires a gradient, which octavo.rl does not give")
        waiting += [following for following, _ in node.next_functions]
