"""The reference implementations of a chunk: plain loops in float32, over places or over channels, all rows at once.

Owns the formulas in the order that `octavo.ops.scan` promises. Arguments are chunks [N, C, ...]: what C consecutive
tokens from a border on bring, of N rows. A row may lack its last places; what stands there changes no place before it.
Tensors that are kept come as they are kept, rounded to the model's type; sums are float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.activation import exp_reference
from octavo.ops.scan import ConvOperands, DeltaOperands, Mamba1Operands, Mamba2Operands, dot, silu


def convolve(conv: ConvOperands, window: Tensor) -> Tensor:
    """window [T, width, channels]: each token's inputs, the oldest first -> [T, channels] float32."""
    total = window.new_zeros(len(window), window.shape[2], dtype=torch.float32)
    if conv.bias is not None:
        total = total + conv.bias
    for j in range(window.shape[1]):
        total = total + window[:, j].float() * conv.weight[j]
    return silu(total) if conv.silu else total


def cumulate(steps: Tensor, known: Tensor, is_new: Tensor) -> Tensor:
    """Sums of `steps` from a chunk's begin to each place; `known` where the place was computed before.

    steps, known [N, C, heads] float32; is_new [N, C].
    """
    total, found = steps.new_zeros(steps.shape[0], steps.shape[2]), []
    for place in range(steps.shape[1]):
        total = torch.where(is_new[:, place, None], total + steps[:, place], known[:, place])
        found.append(total)
    return torch.stack(found, 1)


def _of_state(state: Tensor, vectors: Tensor) -> Tensor:
    """The products of vectors [N, C, H, K] with states [N, H, K, V] -> [N, C, H, V]: a chain over K."""
    total = torch.zeros_like(vectors[..., :1] * state[:, None, :, 0])
    for index in range(state.shape[2]):
        total = total + vectors[..., index, None] * state[:, None, :, index]
    return total


def _left(total: Tensor) -> Tensor:
    """What is left at place t of what came at place i, [N, t, i, heads]; 0 where i is behind t."""
    place = torch.arange(total.shape[1], device=total.device)
    seen = (place[:, None] >= place)[None, :, :, None]
    difference = (total[:, :, None] - total[:, None]).masked_fill(~seen, 0.0)
    return torch.where(seen, exp_reference(difference), 0.0)


def _advance(state: Tensor, total: Tensor, weights: Tensor, values: Tensor) -> Tensor:
    """The state behind a whole chunk: what is left of it, and of each place's weights [N, C, H, K] times its values."""
    new = exp_reference(total[:, -1])[..., None, None] * state
    left = exp_reference(total[:, -1:] - total)
    for place in range(values.shape[1]):
        weight = left[:, place, :, None] * weights[:, place]
        new = new + weight[..., None] * values[:, place, :, None]
    return new


def delta_chunk(
    rule: DeltaOperands,
    state: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    update: Tensor,
    total: Tensor,
    rate: Tensor,
    is_new: Tensor,
) -> tuple[Tensor, Tensor]:
    """A chunk of the gated delta rule: (results, updates), both [N, C, H, V], results float32.

    state [N, H, K, V] float32; query [N, C, key heads, K] float32; key [N, C, key heads, K]; value [N, C, H, V];
    update: those known, of the model's type; total [N, C, H]: summed g; rate [N, C, H]; is_new [N, C].

    An update is what a place adds to the state, u_t = b_t (v_t - exp(G_t) S' k_t - sum over i < t of
    exp(G_t - G_i) (k_t . k_i) u_i), where S is the state at the border: forward substitution, so that each place
    needs the places before it alone.
    """
    group = rule.num_heads // rule.num_key_heads
    keys = key.float()
    left, begun = _left(total), exp_reference(total)[..., None]
    between = (left * _each_head(dot(keys[:, :, None], keys[:, None]), group))[..., None]
    seen = (left * _each_head(dot(query[:, :, None], keys[:, None]), group))[..., None]
    rest = value.float() - begun * _of_state(state, _each_head(keys, group, 2))
    result = begun * _of_state(state, _each_head(query, group, 2))
    updates = []
    for place in range(value.shape[1]):
        own = (rate[:, place, :, None] * rest[:, place]).to(update.dtype)
        own = torch.where(is_new[:, place, None, None], own, update[:, place])
        updates.append(own)
        own = own.float()[:, None]
        rest = torch.cat((rest[:, : place + 1], rest[:, place + 1 :] - between[:, place + 1 :, place] * own), 1)
        result = torch.cat((result[:, :place], result[:, place:] + seen[:, place:, place] * own), 1)
    return result, torch.stack(updates, 1)


def delta_advance(rule: DeltaOperands, state: Tensor, key: Tensor, update: Tensor, total: Tensor) -> Tensor:
    """The state [N, H, K, V] behind a whole chunk; arguments as `delta_chunk`'s, all of the updates known."""
    keys = _each_head(key.float(), rule.num_heads // rule.num_key_heads, 2)
    return _advance(state, total, keys, update.float())


def mamba2_chunk(
    scan: Mamba2Operands, state: Tensor, c: Tensor, x: Tensor, b: Tensor, total: Tensor, dt: Tensor
) -> Tensor:
    """A chunk of Mamba-2: results [N, C, H, P] float32.

    state [N, H, S, P] float32; c [N, C, groups, S] float32; x [N, C, H, P]; b [N, C, groups, S]; total [N, C, H]: the
    summed dt * decay; dt [N, C, H].
    """
    group = scan.num_heads // scan.num_groups
    weight = _left(total) * _each_head(dot(c[:, :, None], b.float()[:, None]), group) * dt[:, None]
    result = exp_reference(total)[..., None] * _of_state(state, _each_head(c, group, 2))
    values = x.float()
    for place in range(x.shape[1]):
        own = weight[:, place:, place, :, None] * values[:, None, place]
        result = torch.cat((result[:, :place], result[:, place:] + own), 1)
    return result + scan.skip[:, None] * values


def mamba2_advance(scan: Mamba2Operands, state: Tensor, x: Tensor, b: Tensor, total: Tensor, dt: Tensor) -> Tensor:
    """The state [N, H, S, P] behind a whole chunk; arguments as `mamba2_chunk`'s."""
    weights = dt[..., None] * _each_head(b.float(), scan.num_heads // scan.num_groups, 2)
    return _advance(state, total, weights, x.float())


def mamba1_chunk(
    scan: Mamba1Operands, state: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """A chunk of Mamba-1: (results [N, C, channels] float32, the state behind it). The recurrence is the order.

    state [N, S, channels] float32; x [N, C, channels]; dt [N, C, channels] float32, behind its softplus; b and c
    [N, C, S], c float32.
    """
    results = []
    for place in range(x.shape[1]):
        step, value = dt[:, place], x[:, place].float()
        gained = step * value
        result = torch.zeros_like(step)
        rows = []
        for index in range(state.shape[1]):
            left = exp_reference(step * scan.decay[index]) * state[:, index]
            rows.append(left + gained * b[:, place, index, None].float())
            result = result + rows[-1] * c[:, place, index, None]
        state = torch.stack(rows, 1)
        results.append(result + scan.skip * value)
    return torch.stack(results, 1), state


def _each_head(x: Tensor, group: int, axis: int = -1) -> Tensor:
    """Heads of keys, each for `group` heads of values."""
    return x.repeat_interleave(group, axis)
