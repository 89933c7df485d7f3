"""Operators of layers with states that are made of others, which whoever has none of their own runs one by one."""

from __future__ import annotations

from torch import Tensor

from octavo.ops.gemm import linear
from octavo.ops.norm.groups import normed_heads_gated
from octavo.ops.scan import DeltaNetOperands
from octavo.states.base import LayerStates, StateBackend


def delta_net(backend: StateBackend, own: LayerStates, net: DeltaNetOperands, x: Tensor) -> Tensor:
    """See StateBackend.delta_net."""
    rule = net.rule
    keys, values = rule.num_key_heads * rule.key_size, rule.num_heads * rule.value_size
    parts = 2 * keys + values, values, rule.num_heads, rule.num_heads
    qkv, z, b, a = linear(x, net.project).split(parts, 1)
    found = backend.gated_delta(own, rule, backend.short_conv(own, net.conv, qkv), a, b)
    return normed_heads_gated(found, net.norm, net.eps, z)
