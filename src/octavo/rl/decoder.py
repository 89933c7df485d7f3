"""An engine's layer in a trainer's hands: the forward of its own class, run on parts with gradients.

Owns what stands in for a norm, a product, an attention and an MLP while a layer's lines run. Does not know lines: they
are the family's own (`octavo.models`), one definition for sampler and trainer. Invariant: a part runs the operator
that the engine's part runs, so its bits are the engine's.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from octavo.checkpoint.arch import Arch
from octavo.layers.attention import Attention
from octavo.layers.base import Layer
from octavo.layers.chain import learn
from octavo.layers.latent_attention import LatentAttention
from octavo.layers.linear import Linear
from octavo.layers.mixers.delta_net import GatedDeltaNet
from octavo.layers.mixers.gated_attention import GatedAttention, HeadGatedAttention
from octavo.layers.mixers.mamba import Mamba2
from octavo.layers.mlp import Mlp
from octavo.layers.moe import MoeMlp
from octavo.layers.norm import RMSNorm
from octavo.layers.recurrent import ShortConvolution
from octavo.rl.autograd.attention import attention
from octavo.rl.autograd.gated import gated
from octavo.rl.autograd.latent import head_linear, latent_rope
from octavo.rl.autograd.linear import linear
from octavo.rl.autograd.moe import moe
from octavo.rl.autograd.norm import norm
from octavo.rl.autograd.recurrent import (
    DeltaSizes,
    Mamba2Sizes,
    gated_delta,
    gated_norm,
    mamba2,
    short_conv,
    sigmoid,
    sigmoid_gated,
)
from octavo.rl.autograd.rope import qk_norm_rope
from octavo.rl.family import LayerPlan, Parameters
from octavo.rl.pack import Pack


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LayerRun:
    """One run of one layer: what its parts compute with beside their input."""

    arch: Arch
    plan: LayerPlan
    weights: Parameters
    norm_offset: float
    cos_sin: Tensor
    backend: str | None
    pack: Pack

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, size] -> the same shape: the lines of the engine's layer."""
        result: Tensor = _Part(self, self.plan.layer, "").forward(x)
        return result


def why_not(layer: nn.Module) -> str:
    """Why an engine's layer cannot be run by parts with gradients; empty if it can."""
    if learn(layer.forward) is None:
        return f"the forward of {type(layer).__name__} is not written in plain lines"
    for module in _own_modules(layer):
        known = isinstance(module, tuple(_PARTS))  # then by a class of its own, whose forward may be another
        if known or any(True for _ in module.parameters(recurse=False)):
            return f"there is no part with gradients for {type(module).__name__}"
    return ""


def _own_modules(layer: nn.Module) -> list[nn.Module]:
    """The layer and what it is made of, without the known parts."""
    found = [layer]
    for child in layer.children():
        found += [] if type(child) in _PARTS else _own_modules(child)
    return found


class _Part:
    """A layer, whose attributes are parts as well and whose methods are run on them."""

    def __init__(self, run: LayerRun, layer: nn.Module, path: str) -> None:
        """`path`: of the part in its layer."""
        self.run, self.layer, self.path = run, layer, path

    def __getattr__(self, name: str) -> Any:
        """What the engine's layer has of that name; a method keeps gradients, or is refused."""
        value = getattr(self.layer, name)
        if isinstance(value, nn.Module):
            part = _PARTS.get(type(value), _Part)
            return part(self.run, value, f"{self.path}.{name}" if self.path else name)
        if isinstance(value, types.MethodType):
            return functools.partial(_keeping_gradients, types.MethodType(value.__func__, self), name)
        return value

    def __call__(self, x: Tensor) -> Tensor:
        """`forward`."""
        return self.forward(x)

    def forward(self, x: Tensor) -> Tensor:
        """The forward of the layer's own class."""
        result: Tensor = type(self.layer).forward(self, x)
        return result

    def product(self, x: Tensor, name: str) -> Tensor:
        """The product with the weights called `name`."""
        run, biases = self.run, None
        weights = run.weights.rows(f"{name}.weight")
        if f"{name}.bias" in run.weights:
            layer = cast(Layer, run.plan.layer.get_submodule(name))
            biases = run.weights.biases(f"{name}.bias", layer, len(weights))
        return linear(x, weights, biases)


def _keeping_gradients(method: Callable[[Tensor], Tensor], name: str, x: Tensor) -> Tensor:
    result = method(x)
    if x.requires_grad and torch.is_grad_enabled() and not result.requires_grad:
        raise ValueError(f"{name} of a layer loses gradients: it calls an operator of the engine by itself")
    return result


class _NormPart(_Part):
    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.run.weights.needed(f"{self.path}.weight"), self.layer.eps, self.run.norm_offset)  # type: ignore[arg-type]


class _LinearPart(_Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.path)


class _QkvPart(_Part):
    """Each head's channels in the operators' order."""

    def forward(self, x: Tensor) -> Tensor:
        joined, rope, spec = self.product(x, self.path), self.run.plan.rope, self.run.plan.attention
        if not rope.interleaved:
            return joined
        size = rope.rotary_size or spec.head_size
        head = [*range(0, size, 2), *range(1, size, 2), *range(size, spec.head_size)]
        heads, count = joined.unflatten(1, (-1, spec.head_size)), spec.num_heads + spec.num_kv_heads
        turned = heads[:, :count, torch.tensor(head, device=x.device)]
        return torch.cat((turned, heads[:, count:]), dim=1).flatten(1)


class _AttentionPart(_Part):
    """K and V of a run lie in a cache of its own, from `rope_and_store` to `attend`."""

    states: Tensor

    def __init__(self, run: LayerRun, layer: nn.Module, path: str) -> None:
        super().__init__(run, layer, path)
        self.spec = run.plan.attention
        self.qkv = _QkvPart(run, layer.get_submodule("qkv"), f"{path}.qkv")

    def rope_and_store(self, qkv: Tensor) -> Tensor:
        run, weights = self.run, self.run.weights
        q_norm, k_norm = (weights.one(f"{self.path}.{name}") for name in ("q_norm", "k_norm"))
        q, self.states = qk_norm_rope(
            qkv, run.pack, run.cos_sin, self.spec, q_norm, k_norm, run.arch.norm_eps, run.norm_offset
        )
        return q

    def attend(self, q: Tensor) -> Tensor:
        return attention(q, self.states, self.run.pack, self.spec, self.run.backend).flatten(1)


class _GatedAttentionPart(_AttentionPart):
    """A checkpoint has each head's query and gate beside each other."""

    def forward(self, x: Tensor) -> Tensor:
        """The lines of the engine's, whose product's rows are in another order."""
        joined, heads, size = self.product(x, f"{self.path}.qkv"), self.spec.num_heads, self.spec.head_size
        queries, gates = joined[:, : 2 * heads * size].unflatten(1, (heads, 2, size)).unbind(2)
        qkv = torch.cat((queries.flatten(1), joined[:, 2 * heads * size :]), dim=1)
        return sigmoid_gated(self.attend(self.rope_and_store(qkv)), gates.flatten(1))

    @property
    def out(self) -> _Part:
        return _LinearPart(self.run, self.layer.get_submodule("output"), f"{self.path}.output")


class _HeadGatedPart(_AttentionPart):
    def weigh(self, seen: Tensor, gates: Tensor) -> Tensor:
        return sigmoid_gated(seen, gates)

    @property
    def out(self) -> _Part:
        return _LinearPart(self.run, self.layer.get_submodule("output"), f"{self.path}.output")


class _ShortConvPart(_Part):
    """Of a layer that mixes by its convolution alone; a delta net's is its part's own."""

    def mix(self, x: Tensor) -> Tensor:
        run, weights, conv = self.run, self.run.weights, cast(ShortConvolution, self.layer)
        weight, bias = weights.needed(f"{self.path}.weight"), weights.one(f"{self.path}.bias")
        return short_conv(x, weight, run.pack, run.plan.state, bias, silu=conv.silu)


class _DeltaNetPart(_Part):
    """The operators that an engine's one operator is made of (`octavo.states.composed`)."""

    def forward(self, x: Tensor) -> Tensor:
        run, weights, net = self.run, self.run.weights, cast(GatedDeltaNet, self.layer)
        facts, pack, spec = run.arch.delta, run.pack, run.plan.state
        assert facts is not None, "layers with a delta net need its facts"
        sizes = DeltaSizes(facts.num_key_heads, facts.num_value_heads, facts.key_size, facts.value_size)
        joined = self.product(x, f"{self.path}.project")
        order = net.row_order
        joined = joined if order is None else joined[:, torch.tensor(order, device=x.device)]
        qkv, z, b, a = joined.split(net.parts, 1)
        qkv = short_conv(qkv, weights.needed(f"{self.path}.conv.weight"), pack, spec)
        a_log, dt_bias = (weights.needed(f"{self.path}.rule.{name}") for name in ("A_log", "dt_bias"))
        found = gated_delta(qkv, a, b, a_log, dt_bias, pack, spec, sizes)
        weight = weights.needed(f"{self.path}.norm")
        return gated_norm(found, weight, z, run.arch.norm_eps, sizes.num_heads, gates_first=False)


class _Mamba2Part(_Part):
    """The lines of the engine's, with gradients."""

    def forward(self, x: Tensor) -> Tensor:
        run, weights, net = self.run, self.run.weights, cast(Mamba2, self.layer)
        facts, pack, spec = net.facts, run.pack, run.plan.state
        assert facts.norm == "gated" and facts.in_scale == 1.0 and not facts.scales, "Falcon-H1 is refused by name"
        z, xbc, dt = self.product(x, f"{self.path}.project").split(net.parts, 1)
        bias = weights.one(f"{self.path}.conv.bias")
        xbc = short_conv(xbc, weights.needed(f"{self.path}.conv.weight"), pack, spec, bias)
        a_log, dt_bias, skip = (weights.needed(f"{self.path}.scan.{name}") for name in ("A_log", "dt_bias", "D"))
        heads, states = facts.num_heads, facts.state_size
        sizes = Mamba2Sizes(heads, facts.inner_size // heads, facts.num_groups, states, *facts.step_limit)
        found = mamba2(xbc, dt, a_log, dt_bias, skip, pack, spec, sizes)
        weight = weights.needed(f"{self.path}.norm.weight")
        return gated_norm(found, weight, z, facts.eps, facts.num_groups, gates_first=True)


class _LatentPart(_Part):
    """The states of a run lie in a cache of its own, from `absorb_and_store` to `attend`."""

    states: Tensor

    def __init__(self, run: LayerRun, layer: nn.Module, path: str) -> None:
        super().__init__(run, layer, path)
        latent = run.arch.latent
        assert latent is not None, "latent attention needs its facts"
        self.latent = latent

    def absorb_and_store(self, down: Tensor) -> Tensor:
        run, latent, num_heads = self.run, self.latent, self.run.arch.num_heads
        state_size = latent.latent_size + latent.rope_size
        first, state = down.split((down.shape[1] - state_size, state_size), dim=1)
        if latent.query_size:
            first = self.query_up(self.query_norm(first))
        query = first.unflatten(1, (num_heads, -1))
        norm_weight, rope = run.weights.needed(f"{self.path}.state_norm.weight"), run.plan.rope
        rotated, self.states = latent_rope(
            query[..., latent.nope_size :],
            state,
            norm_weight,
            run.pack,
            run.cos_sin,
            self.state_norm.eps,
            interleaved=rope.interleaved,
            offset=run.norm_offset,
        )
        absorbed = head_linear(query[..., : latent.nope_size], self.expand, slice(0, latent.nope_size), transposed=True)
        return torch.cat((absorbed, rotated), dim=2)

    def attend(self, q: Tensor) -> Tensor:
        return attention(q, self.states, self.run.pack, self.run.plan.attention, self.run.backend)

    def values_of(self, seen: Tensor) -> Tensor:
        return head_linear(seen, self.expand, slice(self.latent.nope_size, None)).flatten(1)

    @property
    def expand(self) -> Tensor:
        """[heads * (nope + value), latent], the trainer's."""
        return self.run.weights.needed(f"{self.path}.expand")


class _MlpPart(_Part):
    def forward(self, x: Tensor) -> Tensor:
        inner = gated(self.product(x, f"{self.path}.gate_up"), self.run.arch.activation)
        return self.product(inner, f"{self.path}.down")


class _MoePart(_Part):
    def forward(self, x: Tensor) -> Tensor:
        weights, arch = self.run.weights, self.run.arch
        assert arch.moe is not None, "layers with experts need their facts"
        gate_up, down = map(weights.named, weights.experts)
        return moe(
            x,
            weights.needed(f"{self.path}.router.weight"),
            gate_up,
            down,
            arch.moe,
            arch.activation,
            weights.one(f"{self.path}.correction"),
            self._shared_of(x) if arch.moe.num_shared else None,
        )

    def _shared_of(self, x: Tensor) -> Tensor:
        """What the experts that every token meets make of x, weighted by its gate if there is one."""
        result: Tensor = self.shared(x)
        if cast(MoeMlp, self.layer).shared_gate is None:
            return result
        weights = self.run.weights.rows(f"{self.path}.shared_gate.weight")
        return sigmoid(linear(x, weights, out_dtype=torch.float32)) * result


_PARTS: dict[type[nn.Module], type[_Part]] = {
    RMSNorm: _NormPart,
    ShortConvolution: _ShortConvPart,
    Linear: _LinearPart,
    Attention: _AttentionPart,
    GatedAttention: _GatedAttentionPart,
    GatedDeltaNet: _DeltaNetPart,
    HeadGatedAttention: _HeadGatedPart,
    LatentAttention: _LatentPart,
    Mamba2: _Mamba2Part,
    Mlp: _MlpPart,
    MoeMlp: _MoePart,
}
