"""The end of a drafter's one layer: output product, sum, norm, gated MLP and sum, as the target's own layers run it.

Owns how a head's parts become the operator's operands. Does not know what stands before. Invariant: the bits are those
of the parts one by one.
"""

from __future__ import annotations

import torch

from octavo.layers.attention import Attention
from octavo.layers.mlp import Mlp
from octavo.layers.norm import RMSNorm
from octavo.layers.standard import Tail
from octavo.ops.decoder import PostOperands, post_attention


def end_of(attention: Attention, norm: RMSNorm, mlp: Mlp) -> PostOperands:
    """Of a head whose weights are final."""
    tail = Tail(mixer=None, output=attention.output, mixer_norm=None, mlp_norm=norm, mlp=mlp, mlp_out_norm=None)
    return tail.operands()


def leave(end: PostOperands, attended: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
    """The stream [T, size] behind the layer, of what attention gave [T, channels] and the stream before it."""
    x, residual = post_attention(end, attended, stream)
    return x if residual is None else x + residual
