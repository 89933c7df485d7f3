"""A decoder layer's forward in plain lines, by operators with gradients.

Owns one function for each kind of layer that the engine has. Does not know names of parameters in a trainer's model.
Invariant: the lines are those of the engine's layer, operator for operator, so their bits are the engine's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from octavo.checkpoint.arch import Arch
from octavo.layers.standard import Standard
from octavo.models.olmo3 import Olmo3Layer
from octavo.rl.autograd.attention import attention
from octavo.rl.autograd.gated import gated
from octavo.rl.autograd.linear import linear
from octavo.rl.autograd.moe import moe
from octavo.rl.autograd.norm import add, norm
from octavo.rl.autograd.rope import qk_norm_rope
from octavo.rl.family import LayerPlan, Parameters
from octavo.rl.pack import Pack


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LayerRun:
    """What a layer's lines are given beside its input."""

    arch: Arch
    plan: LayerPlan
    weights: Parameters
    norm_offset: float
    cos_sin: Tensor
    backend: str | None

    def norm(self, x: Tensor, path: str) -> Tensor:
        """The layer's norm called `path`; x itself where it has none."""
        weight = self.weights.one(path)
        return x if weight is None else norm(x, weight, self.arch.norm_eps, self.norm_offset)

    def project(self, x: Tensor, name: str) -> Tensor:
        """The product with the weights called `name`."""
        weights = self.weights.rows(f"{name}.weight")
        return linear(x, weights, self.weights.biases(f"{name}.bias", len(weights)))

    def qkv(self, x: Tensor) -> Tensor:
        """q, k and v side by side, each head's channels in the operators' order."""
        joined, rope, spec = self.project(x, "attention.qkv"), self.plan.rope, self.plan.spec
        if not rope.interleaved:
            return joined
        size = rope.rotary_size or spec.head_size
        head = [*range(0, size, 2), *range(1, size, 2), *range(size, spec.head_size)]
        heads, count = joined.unflatten(1, (-1, spec.head_size)), spec.num_heads + spec.num_kv_heads
        turned = heads[:, :count, torch.tensor(head, device=x.device)]
        return torch.cat((turned, heads[:, count:]), dim=1).flatten(1)

    def attend(self, qkv: Tensor, pack: Pack) -> Tensor:
        """What the heads saw, through the output projection."""
        q_norm, k_norm = (self.weights.one(f"attention.{name}") for name in ("q_norm", "k_norm"))
        q, states = qk_norm_rope(
            qkv, pack, self.cos_sin, self.plan.spec, q_norm, k_norm, self.arch.norm_eps, self.norm_offset
        )
        return self.project(attention(q, states, pack, self.plan.spec, self.backend).flatten(1), "attention.output")

    def mlp(self, x: Tensor) -> Tensor:
        """The MLP, or the experts in its place."""
        if not self.plan.routed:
            return self.project(gated(self.project(x, "mlp.gate_up"), self.arch.activation), "mlp.down")
        assert self.arch.moe is not None, "layers with experts need their facts"
        gate_up, down = (self.weights.named(f"mlp.experts.{name}") for name in ("gate_up_proj", "down_proj"))
        return moe(x, self.weights.needed("mlp.router.weight"), gate_up, down, self.arch.moe, self.arch.activation)


def _decoder_layer(run: LayerRun, x: Tensor, pack: Pack) -> Tensor:
    """Norms before both halves, and in some families behind them."""
    attended = run.attend(run.qkv(run.norm(x, "input_norm.weight")), pack)
    x = add(run.norm(attended, "attention_norm.weight"), x)
    return add(run.norm(run.mlp(run.norm(x, "mlp_norm.weight")), "mlp_out_norm.weight"), x)


def _olmo3_layer(run: LayerRun, x: Tensor, pack: Pack) -> Tensor:
    """Norms behind both halves, and of q and k over all their heads."""
    kv_size = run.plan.spec.num_kv_heads * run.plan.spec.head_size
    q, k, v = run.qkv(x).split((run.plan.spec.num_heads * run.plan.spec.head_size, kv_size, kv_size), dim=1)
    qkv = torch.cat((run.norm(q, "q_norm.weight"), run.norm(k, "k_norm.weight"), v), dim=1)
    x = add(x, run.norm(run.attend(qkv, pack), "attention_norm.weight"))
    return add(x, run.norm(run.mlp(x), "mlp_norm.weight"))


Lines: TypeAlias = Callable[[LayerRun, Tensor, Pack], Tensor]
LINES: dict[type, Lines] = {Standard: _decoder_layer, Olmo3Layer: _olmo3_layer}
