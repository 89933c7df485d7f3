"""attention: the sampler's attention over a pack's rows, with gradients.

Forward is a backend over the paged cache. Backward computes scores again, in tiles of queries against the keys that
they may see, in float32: nothing as large as [tokens, tokens] exists, and of a forward q, K and V are kept alone.
Invariant: the mathematics of backward is the forward's: scale, soft cap, slopes, mask, a user's mods, then sinks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.attention.base import NO_TENSORS, LayerTensors, mask_spec_of
from octavo.attention.mods import NO_MODS, at_work
from octavo.attention.reference import apply_mods
from octavo.cache.specs import AttentionSpec
from octavo.rl.autograd.outside import apply, first_order
from octavo.rl.pack import Pack

_AT_ONCE = {"cpu": 1 << 22, "cuda": 1 << 26}  # scores of a tile
_MAX_QUERIES = 256  # of a tile: what lies behind them is not computed


def attention(
    q: Tensor,
    states: Tensor,
    pack: Pack,
    spec: AttentionSpec,
    backend: str | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of each token to its own sequence: q [tokens, heads, head_size] -> [tokens, heads, values].

    states: by the pack's slots, of q's dtype: [slots, kv_heads, 2 * head_size], K then V, as `qk_norm_rope` gives them,
    and `values` is head_size; or of a latent spec [slots, 1, head_size], as `latent_rope` gives them, and `values` is
    value_size. spec: what a query sees, mods included; backend: by name, None: the one that an engine takes by itself;
    sinks: [heads], for a spec that has them. Raises ValueError for sinks that do not fit, and in backward for a mod
    that would need a gradient of its own.
    """
    if spec.sinks != (sinks is not None) or (sinks is not None and sinks.shape != (spec.num_heads,)):
        found = "none" if sinks is None else str(list(sinks.shape))
        raise ValueError(f"sinks must be {[spec.num_heads] if spec.sinks else 'left out'} for this spec, got {found}")
    result: Tensor = apply(_Attention, q, states, pack, spec, backend, sinks)
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        states: Tensor,
        pack: Pack,
        spec: AttentionSpec,
        backend: str | None,
        sinks: Tensor | None,
    ) -> Tensor:
        ctx.facts = pack, spec
        layer = NO_TENSORS if sinks is None else LayerTensors(sinks=sinks.detach().float().contiguous())
        q = q.contiguous()
        out = pack.attend(q.detach(), states.detach(), spec, backend, layer)
        ctx.save_for_backward(q, states, sinks, out if _by_kernels(q, spec) else None)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, states, sinks, out = ctx.saved_tensors
        pack, spec = ctx.facts
        if out is not None:
            return _backward_gpu(q, states, sinks, grad, out, pack, spec)
        grad_q, grad_states = torch.empty_like(q), torch.zeros_like(states)
        of_sinks = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float32)
        for row, place in enumerate(pack.places):
            slots = slice(place.slot, place.slot + place.length)
            own = states[slots].float()
            of_keys = torch.zeros_like(own)
            at_once = min(_MAX_QUERIES, max(1, _AT_ONCE[q.device.type] // (spec.num_heads * place.length)))
            for begin in range(0, place.length, at_once):
                end = min(begin + at_once, place.length)
                first, last = _seen(spec, begin, end, place.length)
                some = slice(place.token + begin, place.token + end)
                tile = _Tile(pack, spec, row, begin, end, first, last)
                of_query, of_seen = _tile_backward(
                    q[some].float(), own[first:last], grad[some].float(), tile, sinks, of_sinks
                )
                grad_q[some] = of_query.to(q.dtype)
                of_keys[first:last] += of_seen
            grad_states[slots] = of_keys.to(states.dtype)
        return grad_q, grad_states, None, None, None, None if of_sinks is None else of_sinks.to(sinks.dtype)


def _by_kernels(q: Tensor, spec: AttentionSpec) -> bool:
    """Whether a GPU's kernels go back."""
    if not q.is_cuda:
        return False
    from octavo.ops.backward.attention import serves  # needs triton

    return serves(q, spec.value_size, has_mods=spec.mods is not NO_MODS)


def _backward_gpu(
    q: Tensor, states: Tensor, sinks: Tensor | None, grad: Tensor, out: Tensor, pack: Pack, spec: AttentionSpec
) -> tuple[Tensor | None, ...]:
    from octavo.ops.backward.attention import attention_backward  # needs triton

    wide = None if sinks is None else sinks.float().contiguous()
    grad_q, grad_states, of_sinks = attention_backward(
        q, states, grad, out, pack.rows, mask_spec_of(spec), alibi_slopes=spec.alibi_slopes, sinks=wide
    )
    of_sinks = None if sinks is None or of_sinks is None else of_sinks.to(sinks.dtype)
    return grad_q, grad_states, None, None, None, of_sinks


def _seen(spec: AttentionSpec, begin: int, end: int, length: int) -> tuple[int, int]:
    """The keys that queries begin .. end - 1 may see, as a range."""
    if not (spec.causal and spec.mods.causal):
        return 0, length
    first = max(0, begin + 1 - spec.window) if spec.window else 0
    return max(first, begin // spec.chunk * spec.chunk) if spec.chunk else first, end


class _Tile(NamedTuple):
    """Queries begin .. end - 1 of a row, and the keys first .. last - 1 that they may see."""

    pack: Pack
    spec: AttentionSpec
    row: int
    begin: int
    end: int
    first: int
    last: int

    def scores(self, products: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Of raw products [kv_heads, group, queries, keys], which are overwritten: scores, -inf where hidden.

        And the way back, from a gradient of the scores, overwritten as well, to that of the products.
        """
        spec, pack = self.spec, self.pack
        result, slope, changed, raw = products.mul_(spec.scale), None, None, None
        position = torch.arange(self.begin, self.end, device=pack.device)
        column = torch.arange(self.first, self.last, device=pack.device)
        if spec.soft_cap:
            share = result.div_(spec.soft_cap).tanh_()
            slope, result = 1 - share.square(), share.mul_(spec.soft_cap)
        if spec.alibi_slopes:
            slopes = torch.tensor(spec.alibi_slopes, device=result.device).view(*result.shape[:2], 1, 1)
            result.sub_(slopes * (position[:, None] - column))
        if spec.mods is not NO_MODS:
            raw = result.requires_grad_()
            with torch.enable_grad(), at_work(spec.mods, pack.tables):
                changed = apply_mods(spec.mods, pack.inputs.rows)(raw, self.row, position, column)
            _refuse_learned(changed, raw)
            result = changed.detach().clone()
        self._hide(result, position, column)

        def back(grad: Tensor) -> Tensor:
            if changed is not None and raw is not None:
                (grad,) = torch.autograd.grad(changed, raw, grad)
            return (grad if slope is None else grad.mul_(slope)).mul_(spec.scale)

        return result, back

    def _hide(self, scores: Tensor, position: Tensor, column: Tensor) -> None:
        """Set what the spec hides to -inf, in place."""
        spec = self.spec
        causal = spec.causal and spec.mods.causal
        if causal and not (spec.window or spec.chunk):  # then every query sees what is before the tile
            distance = position[:, None] - column[self.begin - self.first :]
            scores[..., self.begin - self.first :].masked_fill_(distance < 0, float("-inf"))
            return
        distance = position[:, None] - column
        hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
        if spec.window:
            hidden |= (distance >= spec.window) | (distance <= -spec.window)
        if spec.chunk:
            hidden |= position[:, None] // spec.chunk != column // spec.chunk
        scores.masked_fill_(hidden, float("-inf"))


def _tile_backward(
    q: Tensor, states: Tensor, grad: Tensor, tile: _Tile, sinks: Tensor | None, of_sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(gradient of q [queries, heads, size], of states [keys, kv_heads, channels]) of a tile, all float32.

    The gradient of sinks [heads] is added to `of_sinks`.
    """
    kv_heads, size = states.shape[1], q.shape[2]
    by_head = states.transpose(0, 1)  # [kv_heads, keys, channels]
    latent = tile.spec.value_size  # then values are the first channels of keys
    keys, values = (by_head, by_head[..., :latent]) if latent else by_head.split(size, dim=2)
    queries, own = (x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3) for x in (q, grad))  # kv_heads, group, queries
    flat, own_flat = (x.reshape(kv_heads, -1, x.shape[3]) for x in (queries, own))
    products = (flat @ keys.transpose(1, 2)).view(*queries.shape[:3], -1)
    scores, back = tile.scores(products)
    if sinks is not None:
        sink = sinks.float().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
        joined = torch.cat((scores, sink), dim=-1).softmax(-1)
        weights, of_sink = joined[..., :-1], joined[..., -1:]
    elif tile.spec.mods is NO_MODS:
        weights = scores.softmax(-1)
    else:
        blind = (scores == float("-inf")).all(-1, keepdim=True)  # a query that sees nothing gives 0
        weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    of_values = weights.flatten(1, 2).transpose(1, 2) @ own_flat
    of_scores = (own_flat @ values.transpose(1, 2)).view_as(weights)
    shared = torch.linalg.vecdot(weights, of_scores)[..., None]
    if of_sinks is not None:
        of_sinks -= (of_sink * shared).sum((2, 3)).flatten()
    of_flat = back(of_scores.sub_(shared).mul_(weights)).flatten(1, 2)
    of_queries = (of_flat @ keys).view(queries.shape).permute(2, 0, 1, 3).flatten(1, 2)
    of_keys = of_flat.transpose(1, 2) @ flat
    if latent:
        of_keys[..., :latent] += of_values
        return of_queries, of_keys.transpose(0, 1)
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
