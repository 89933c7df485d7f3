"""The model of octavo-tiny for training: a plain Qwen3 decoder in float32 master weights.

Owns the shape and the forward pass. Knows no data and no files. Invariant: with the exported weights its logits are
those of `Qwen3ForCausalLM`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The model's dimensions, in the words of a Qwen3 configuration."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 7
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    ff: int = 768
    context: int = 2048
    rope_theta: float = 10_000.0
    eps: float = 1e-6


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, computed in float32; what it multiplies by is `offset` and its weight."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), 1.0 - offset))
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (self.offset + self.weight)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in the half-split layout; x is (batch, heads, length, head_dim).

    Of the first channels, as many as cos and sin have together.
    """
    size = 2 * cos.shape[-1]
    left, right = x[..., :size].float().chunk(2, dim=-1)
    turned = torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1).to(x.dtype)
    return torch.cat([turned, x[..., size:]], dim=-1)


def rotary_table(shape: Shape, size: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, for `size` channels of a head."""
    powers = torch.arange(0, size, 2, dtype=torch.float32) / size
    angles = torch.outer(torch.arange(shape.context).float(), shape.rope_theta**-powers)
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    """Causal grouped-query attention with normalised queries and keys."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = (batch, length, -1, self.shape.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(split)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(split)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(split).transpose(1, 2)
        group = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class MLP(nn.Module):
    """The gated feed-forward layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ff, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ff, bias=False)
        self.down_proj = nn.Linear(shape.ff, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A decoder layer; dropout acts on what each half adds to the residual stream."""

    def __init__(self, shape: Shape, dropout: float, norm_offset: float = 0.0, **mixer: nn.Module) -> None:
        """mixer: what mixes the tokens, by its name; it comes first where weights are drawn."""
        super().__init__()
        for name, module in mixer.items():
            self.add_module(name, module)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden, shape.eps, norm_offset)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.eps, norm_offset)
        self.dropout = dropout

    def ended(self, x: Tensor, added: Tensor) -> Tensor:
        """What the layer gives, whose first half adds `added`."""
        x = x + functional.dropout(added, self.dropout, self.training)
        return x + functional.dropout(self.mlp(self.post_attention_layernorm(x)), self.dropout, self.training)


class Block(Layer):
    """One decoder layer with attention."""

    def __init__(self, shape: Shape, dropout: float) -> None:
        super().__init__(shape, dropout, self_attn=Attention(shape))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.ended(x, self.self_attn(self.input_layernorm(x), cos, sin))


class TinyQwen3(nn.Module):
    """Qwen3 with tied embeddings; its parameter names after `model.` are the Hugging Face ones."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape, dropout) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.eps)
        for name, table in zip(("cos", "sin"), rotary_table(shape, shape.head_dim), strict=True):
            self.register_buffer(name, table, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                depth = 2 * shape.layers if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
                nn.init.normal_(weight, std=0.02 if "embed" in name else (weight.shape[1] * depth) ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        if torch.is_autocast_enabled(ids.device.type):
            x = x.to(torch.get_autocast_dtype(ids.device.type))
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.norm(x), self.embed_tokens.weight)

    def loss(self, ids: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        logits = self(ids).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
