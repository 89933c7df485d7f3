"""What layers with states are made of, with gradients: short_conv, gated_delta, mamba2, and the gates beside them.

Owns the way forward through the sampler's operators, over sequences that are whole, so that no state and no input has
to be kept, and the way back, which computes the chunks again in plain torch. Invariant: forward is the state backend's
that an engine takes on the device; a sequence's bits depend on that sequence alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.cache.groups import make_groups
from octavo.cache.layout import layout_by_name
from octavo.cache.pool import KVCachePool
from octavo.cache.specs import StateSpec
from octavo.ops import activation
from octavo.ops.norm import groups
from octavo.ops.scan import CHUNK, L2_EPS, ConvOperands, DeltaOperands, Mamba2Operands, decay_of
from octavo.rl.autograd.outside import apply, first_order
from octavo.rl.pack import BLOCK_SIZE, Pack
from octavo.states.base import LayerStates, StateBackend, StateInputs, StateStep, layer_states
from octavo.states.choice import state_backend


class DeltaSizes(NamedTuple):
    """Of a gated delta rule; see DeltaOperands."""

    num_key_heads: int
    num_heads: int
    key_size: int
    value_size: int


class Mamba2Sizes(NamedTuple):
    """Of a Mamba-2 scan; see Mamba2Operands."""

    num_heads: int
    head_size: int
    num_groups: int
    state_size: int
    dt_min: float
    dt_max: float


def short_conv(
    x: Tensor, weight: Tensor, pack: Pack, spec: StateSpec, bias: Tensor | None = None, *, silu: bool = True
) -> Tensor:
    """A causal convolution of each channel: x [tokens, channels] -> the same shape and dtype.

    weight: [channels, 1, width]; bias: [channels]; silu: stands behind it; spec: of the layer, whose inputs have one
    called "conv".
    """
    result: Tensor = apply(_ShortConv, x, weight, bias, pack, spec, silu)
    return result


def gated_delta(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, pack: Pack, spec: StateSpec, sizes: DeltaSizes
) -> Tensor:
    """The gated delta rule: qkv [tokens, channels], behind their convolution; a, b [tokens, heads] -> [tokens, values].

    a_log, dt_bias: [heads]; spec: of the layer, whose states have one called "state".
    """
    result: Tensor = apply(_GatedDelta, qkv, a, b, a_log, dt_bias, pack, spec, sizes)
    return result


def mamba2(
    xbc: Tensor,
    dt: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    pack: Pack,
    spec: StateSpec,
    sizes: Mamba2Sizes,
) -> Tensor:
    """Mamba-2: xbc [tokens, channels], behind their convolution; dt [tokens, heads] -> [tokens, heads * head_size].

    a_log, dt_bias, skip: [heads]; spec: of the layer, whose states have one called "state".
    """
    result: Tensor = apply(_Mamba2, xbc, dt, a_log, dt_bias, skip, pack, spec, sizes)
    return result


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float, num_groups: int, *, gates_first: bool) -> Tensor:
    """The RMS norm of each group of channels of silu(gate) * x, or silu(gate) times that of x: x, gate [tokens, size].

    weight: [size], or [size / num_groups] if the gate comes last. Raises ValueError for a gate of another dtype or
    shape than x's.
    """
    _check_gate("gated_norm", x, gate)
    result: Tensor = apply(_GatedNorm, x, weight, gate, eps, num_groups, gates_first)
    return result


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """sigmoid(gate) * x: both [tokens, size]. Raises ValueError for a gate of another dtype or shape than x's."""
    _check_gate("sigmoid_gated", x, gate)
    result: Tensor = apply(_SigmoidGated, x, gate)
    return result


def sigmoid(x: Tensor) -> Tensor:
    """Of float32, of any shape."""
    result: Tensor = apply(_Sigmoid, x)
    return result


def _check_gate(what: str, x: Tensor, gate: Tensor) -> None:
    """Operators read a gate's bytes as x's."""
    if (gate.dtype, gate.shape) != (x.dtype, x.shape):
        raise ValueError(
            f"octavo.rl's {what}: a gate must be of x's dtype and shape, {x.dtype} {list(x.shape)}, got {gate.dtype} "
            f"{list(gate.shape)}"
        )


def _of_pack(pack: Pack, spec: StateSpec, dtype: torch.dtype) -> tuple[StateBackend, LayerStates]:
    """An engine's operators, and a layer of it whose rows are the pack's sequences, all of which begin.

    Their tables name null blocks alone, to which nothing is written: nobody goes on from what a sequence leaves. Made
    for each call: a backend remembers where operands lie, and a trainer's move.
    """
    kept = make_groups((spec,), BLOCK_SIZE, dtype.itemsize)
    pool = KVCachePool(kept, num_blocks=1, dtype=dtype, device=pack.device, layout=layout_by_name("BLHNC"))
    longest, rows = pack.longest, len(pack.lengths)
    columns = [max(group.num_blocks(longest + spec.chunk), 1) for group in kept]
    tables = [torch.zeros(rows, count, dtype=torch.int32, device=pack.device) for count in columns]
    step, backend, inputs = StateStep(), state_backend(pack.device), pack.inputs
    assert inputs.rows is not None, "a pack's sequences are rows"
    step.prepare(
        StateInputs(
            max_query_len=longest,
            max_seq_len=longest,
            rows=inputs.rows,
            query_start=inputs.query_start,
            seq_lens=inputs.seq_lens,
            positions=pack.positions,
        )
    )
    return backend, layer_states((spec,), pool, tables, step, backend)[0]


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, pack: Pack, spec: StateSpec, silu: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.facts = pack, silu
        backend, own = _of_pack(pack, spec, x.dtype)
        added = None if bias is None else bias.detach().float().contiguous()
        operands = ConvOperands(weight.detach().float().squeeze(1).t().contiguous(), added, silu)
        return backend.short_conv(own, operands, x.detach())

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = [each for each in ctx.saved_tensors if each is not None]
        wide = [each.detach().float().requires_grad_() for each in saved]
        with torch.enable_grad():
            result = convolved(wide[0], wide[1], ctx.facts[0], *wide[2:], silu=ctx.facts[1])
        found = torch.autograd.grad(result, wide, grad.float())
        own: list[Tensor | None] = [each.to(one.dtype) for each, one in zip(found, saved, strict=True)]
        return *own, *[None] * (6 - len(own))


class _GatedDelta(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        pack: Pack,
        spec: StateSpec,
        sizes: DeltaSizes,
    ) -> Tensor:
        ctx.save_for_backward(qkv, a, b, a_log, dt_bias)
        ctx.facts = pack, sizes
        backend, own = _of_pack(pack, spec, qkv.dtype)
        operands = DeltaOperands(*sizes, decay_of(a_log.detach().float()), dt_bias.detach().float().contiguous())
        return backend.gated_delta(own, operands, qkv.detach(), a.detach(), b.detach())

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_by_recomputing(delta_rule, ctx, grad), None, None, None


class _Mamba2(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        xbc: Tensor,
        dt: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        skip: Tensor,
        pack: Pack,
        spec: StateSpec,
        sizes: Mamba2Sizes,
    ) -> Tensor:
        ctx.save_for_backward(xbc, dt, a_log, dt_bias, skip)
        ctx.facts = pack, sizes
        backend, own = _of_pack(pack, spec, xbc.dtype)
        bias, through = (each.detach().float().contiguous() for each in (dt_bias, skip))
        operands = Mamba2Operands(*sizes[:4], decay_of(a_log.detach().float()), bias, through, *sizes[4:])
        return backend.mamba2(own, operands, xbc.detach(), dt.detach())

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_by_recomputing(state_space, ctx, grad), None, None, None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, gate: Tensor, eps: float, num_groups: int, gates_first: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, gate)
        ctx.facts = eps, num_groups, gates_first
        own, wide, by = x.detach(), weight.detach().float().contiguous(), gate.detach()
        if gates_first:
            return groups.group_norm(own, wide, num_groups, eps, by)
        return groups.normed_heads_gated(own, wide, eps, by)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_by_recomputing(normed_and_gated, ctx, grad), None, None, None


def _by_recomputing(compute: Callable[..., Tensor], ctx: Any, grad: Tensor) -> list[Tensor]:
    """Gradients of what a function saved, by the same mathematics in plain torch."""
    # chunks summed in float32 lose 8e-6 of a gradient; many a GPU has little float64
    dtype = torch.float32 if grad.is_cuda else torch.float64
    saved = ctx.saved_tensors  # once: checkpointing computes them for one look
    wide = [each.detach().to(dtype).requires_grad_() for each in saved]
    with torch.enable_grad():
        result = compute(*wide, *ctx.facts)
    found = torch.autograd.grad(result, wide, grad.to(dtype))
    return [own.to(each.dtype) for own, each in zip(found, saved, strict=True)]


class _SigmoidGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return activation.gated_by(x.detach(), gate.detach(), "sigmoid")

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        own, share = grad.float(), gate.float().sigmoid()
        return (own * share).to(x.dtype), (own * x.float() * share * (1 - share)).to(gate.dtype)


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = activation.sigmoid(x.detach())
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (share,) = ctx.saved_tensors
        return grad * share * (1 - share)


# The same mathematics in plain torch, of any dtype, with gradients of their own.


def convolved(x: Tensor, weight: Tensor, pack: Pack, bias: Tensor | None = None, *, silu: bool = True) -> Tensor:
    """What `short_conv` computes: x [tokens, channels], weight [channels, 1, width], bias [channels]."""
    width, total = weight.shape[2], torch.zeros_like(x)
    at = torch.arange(len(x), device=x.device)
    for back in range(width):
        seen = (pack.positions >= back)[:, None]
        total = total + torch.where(seen, x[(at - back).clamp(min=0)], 0.0) * weight[:, 0, width - 1 - back]
    total = total if bias is None else total + bias
    return torch.nn.functional.silu(total) if silu else total


def delta_rule(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, pack: Pack, sizes: DeltaSizes
) -> Tensor:
    """What `gated_delta` computes, chunk by chunk of all sequences at once."""
    num_keys, heads, key_size, value_size = sizes
    q, k, v = qkv.split((num_keys * key_size, num_keys * key_size, heads * value_size), 1)
    q, k = (_unit(each.unflatten(1, (-1, key_size))) for each in (q, k))
    q, k = (each.repeat_interleave(heads // num_keys, 1) for each in (q * key_size**-0.5, k))
    decay = -a_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    spread = _Spread(pack)
    given = [spread(each) for each in (q, k, v.unflatten(1, (-1, value_size)), decay, b.sigmoid())]
    state, found = qkv.new_zeros(len(pack.lengths), heads, key_size, value_size), []
    for chunk in zip(*(each.split(CHUNK, 2) for each in given), strict=True):
        result, state = _delta_chunk(state, *chunk)
        found.append(result)
    return spread.back(torch.cat(found, 2)).flatten(1)


def state_space(
    xbc: Tensor, dt: Tensor, a_log: Tensor, dt_bias: Tensor, skip: Tensor, pack: Pack, sizes: Mamba2Sizes
) -> Tensor:
    """What `mamba2` computes, chunk by chunk of all sequences at once."""
    heads, size, num_groups, states, dt_min, dt_max = sizes
    x, b, c = xbc.split((heads * size, num_groups * states, num_groups * states), 1)
    x, spread = x.unflatten(1, (-1, size)), _Spread(pack)
    b, c = (each.unflatten(1, (-1, states)).repeat_interleave(heads // num_groups, 1) for each in (b, c))
    step = torch.nn.functional.softplus(dt + dt_bias).clamp(dt_min, dt_max)
    given = [spread(each) for each in (x * step[..., None], b, c, -a_log.exp() * step)]
    state, found = xbc.new_zeros(len(pack.lengths), heads, states, size), []
    for chunk in zip(*(each.split(CHUNK, 2) for each in given), strict=True):
        result, state = _mamba2_chunk(state, *chunk)
        found.append(result)
    return (spread.back(torch.cat(found, 2)) + skip[:, None] * x).flatten(1)


class _Spread:
    """Sequences side by side: [tokens, heads, ...] <-> [sequences, heads, length, ...], zeros behind each."""

    def __init__(self, pack: Pack) -> None:
        self._count, device = len(pack.lengths), pack.positions.device
        counts = torch.tensor(pack.lengths, device=device)
        self._at = torch.arange(self._count, device=device).repeat_interleave(counts), pack.positions
        self._length = -(-pack.longest // CHUNK) * CHUNK

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.new_zeros(self._count, self._length, *x.shape[1:]).index_put(self._at, x)
        return rows.transpose(1, 2)

    def back(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)[self._at]


def normed_and_gated(x: Tensor, weight: Tensor, gate: Tensor, eps: float, num_groups: int, gates_first: bool) -> Tensor:
    """What `gated_norm` computes."""
    by = torch.nn.functional.silu(gate)
    own = (by * x if gates_first else x).unflatten(1, (num_groups, -1))
    normed = own * torch.rsqrt(own.square().mean(-1, keepdim=True) + eps)
    if gates_first:
        return normed.flatten(1) * weight
    return by * (normed * weight).flatten(1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _delta_chunk(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """(results, the next state) of a chunk: state [N, H, K, V]; q, k, v [N, H, C, ...]; decay, rate [N, H, C].

    The updates solve a triangular system: each place's needs those before it.
    """
    total = decay.cumsum(2)
    left = _left(total)
    begun = total.exp()[..., None]
    right = rate[..., None] * (v - begun * (k @ state))
    between = rate[..., None] * left * (k @ k.mT)
    update = torch.linalg.solve_triangular(between, right, upper=False, unitriangular=True)
    result = begun * (q @ state) + (left * (q @ k.mT)) @ update
    rest = (total[..., -1:] - total).exp()[..., None]
    return result, total[..., -1, None, None].exp() * state + (rest * k).mT @ update


def _left(total: Tensor) -> Tensor:
    """What is left at each place of what came at those before it: total [N, H, C], summed logarithms."""
    seen = torch.ones(total.shape[2], total.shape[2], dtype=torch.bool, device=total.device).tril()
    return (total[..., :, None] - total[..., None, :]).masked_fill(~seen, 0.0).exp() * seen


def _mamba2_chunk(state: Tensor, x: Tensor, b: Tensor, c: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """(results, the next state) of a chunk: state [N, H, S, P]; x [N, H, C, P], times dt; b, c [N, H, C, S]."""
    total = decay.cumsum(2)
    result = total.exp()[..., None] * (c @ state) + (_left(total) * (c @ b.mT)) @ x
    rest = (total[..., -1:] - total).exp()[..., None]
    return result, total[..., -1, None, None].exp() * state + (rest * b).mT @ x
