"""Operators of layers with states that are made of others, which whoever has none of their own runs one by one."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.activation import gated_activation
from octavo.ops.gemm import linear
from octavo.ops.norm import rms_norm
from octavo.ops.scan import DeltaNetOperands
from octavo.states.base import LayerStates, StateBackend


def delta_net(backend: StateBackend, own: LayerStates, net: DeltaNetOperands, x: Tensor) -> Tensor:
    """See StateBackend.delta_net."""
    rule = net.rule
    keys, values = rule.num_key_heads * rule.key_size, rule.num_heads * rule.value_size
    parts = 2 * keys + values, values, rule.num_heads, rule.num_heads
    qkv, z, b, a = linear(x, net.project).split(parts, 1)
    found = backend.gated_delta(own, rule, backend.short_conv(own, net.conv, qkv), a, b)
    normed = rms_norm(found.view(-1, rule.value_size), net.norm, net.eps).view_as(found)
    return gated_activation(torch.cat((z, normed), 1), "silu")
