"""The model of octavo-tiny-hybrid for training: a plain Qwen3.5 decoder, three layers of a gated delta net to one of
attention, in float32 master weights.

Owns the shape and the forward pass; the delta rule is computed chunk by chunk, as matrix products (arXiv 2412.06464).
Knows no data and no files. Invariant: with the exported weights its logits are those of `Qwen3_5ForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tiny_model import Layer, RMSNorm, Shape, rotary_table, rotate

CHUNK = 64
NORM_OFFSET = 1.0  # a norm's weight is a distance from one
_ADDED = ("o_proj.weight", "out_proj.weight", "down_proj.weight")  # what a half of a layer ends with


@dataclass(frozen=True)
class HybridShape(Shape):
    """The model's dimensions, in the words of a Qwen3.5 configuration."""

    layers: int = 8
    period: int = 4  # every so many layers one attends
    rotary_share: float = 0.25
    key_heads: int = 2
    value_heads: int = 4
    linear_dim: int = 64  # of a head of the delta net, of keys and values
    kernel: int = 4
    ff: int = 512


class GatedNorm(nn.Module):
    """Root-mean-square normalisation of each head, times silu of a gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return wide * self.weight * functional.silu(gate.float())


class GatedAttention(nn.Module):
    """Causal grouped-query attention with normalised queries and keys, whose result is gated."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, 2 * wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.eps, NORM_OFFSET)
        self.k_norm = RMSNorm(shape.head_dim, shape.eps, NORM_OFFSET)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        split = (batch, length, -1, self.shape.head_dim)
        q, gate = self.q_proj(x).view(batch, length, self.shape.heads, -1).chunk(2, dim=-1)
        q = rotate(self.q_norm(q).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(split)).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(split).transpose(1, 2)
        group = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        gated = seen.transpose(1, 2).reshape(batch, length, -1) * gate.reshape(batch, length, -1).sigmoid()
        out: Tensor = self.o_proj(gated)
        return out


def inverse(lower: Tensor) -> Tensor:
    """Of I + lower [..., chunk, chunk], strictly lower triangular: blocks of the diagonal, each pair made one."""
    size = lower.shape[-1]
    found, at = torch.eye(size, device=lower.device, dtype=lower.dtype) - lower * _below(size, 1, lower.device), 2
    while at < size:
        found = found - found @ (lower * _below(size, at, lower.device)) @ found
        at *= 2
    return found


def _below(size: int, block: int, device: torch.device) -> Tensor:
    """A mask of the lower left quarter of each block of 2 * block on the diagonal."""
    number = torch.arange(size, device=device) // block
    return ((number[:, None] == number + 1) & (number % 2 == 0)).float()


class Scan(torch.autograd.Function):
    """States ahead of each chunk, [heads, chunks, d, e], of state[i + 1] = step[i] @ state[i] + gain[i], from zeros."""

    @staticmethod
    def forward(ctx: Any, step: Tensor, gain: Tensor) -> Tensor:
        states = [torch.zeros_like(gain[:, 0])]
        for i in range(step.shape[1] - 1):
            states.append(torch.baddbmm(gain[:, i], step[:, i], states[-1]))
        found = torch.stack(states, 1)
        ctx.save_for_backward(step, found)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        step, states = ctx.saved_tensors
        last = step.shape[1] - 1
        found = [torch.zeros_like(gradient[:, last])]
        for i in range(last - 1, -1, -1):
            own = gradient[:, i + 1]
            ahead = own if i == last - 1 else torch.baddbmm(own, step[:, i + 1].mT, found[-1])
            found.append(ahead)
        of_gain = torch.stack(found[::-1], 1)
        return of_gain @ states.mT, of_gain


class GatedDeltaNet(nn.Module):
    """A state per head that forgets by a gate and learns by the delta rule, behind a short convolution."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        self.shape = shape
        keys, values = shape.key_heads * shape.linear_dim, shape.value_heads * shape.linear_dim
        self.in_proj_qkv = nn.Linear(shape.hidden, 2 * keys + values, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden, values, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden, shape.value_heads, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden, shape.value_heads, bias=False)
        channels = 2 * keys + values
        self.conv1d = nn.Conv1d(channels, channels, shape.kernel, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.empty(shape.value_heads).uniform_(1, 16).log())
        steps = torch.exp(torch.empty(shape.value_heads).uniform_(-6.9, -2.3))  # of time: a thousandth to a tenth
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))
        self.norm = GatedNorm(shape.linear_dim, shape.eps)
        self.out_proj = nn.Linear(values, shape.hidden, bias=False)

    def convolved(self, x: Tensor) -> Tensor:
        """x (batch, length, channels): each channel over its last `kernel` values, then silu; float32."""
        weight, count = self.conv1d.weight[:, 0], self.shape.kernel
        padded, length = functional.pad(x.float(), (0, 0, count - 1, 0)), x.shape[1]
        total = padded[:, :length] * weight[:, 0]
        for i in range(1, count):
            total = total + padded[:, i : i + length] * weight[:, i]
        return functional.silu(total)

    def chunks(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What the scan takes (step, gain), what it is read with (reading, local), and the output's gate."""
        shape = self.shape
        keys = shape.key_heads * shape.linear_dim
        mixed, gate, b, a = self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        with torch.autocast(x.device.type, enabled=False):
            q, k, v = self.convolved(mixed).split((keys, keys, shape.value_heads * shape.linear_dim), dim=-1)
            q, k = (self.heads(each, shape.key_heads) for each in (q, k))
            q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
            decay = -self.A_log.exp() * functional.softplus(a.float() + self.dt_bias)
            total = self.heads(decay, shape.value_heads).cumsum(-2)
            beta, v = self.heads(b.float().sigmoid(), shape.value_heads), self.heads(v, shape.value_heads)
            found = delta_chunks(q * shape.linear_dim**-0.5, k, v, beta, total)
        return *found, gate

    def heads(self, x: Tensor, count: int) -> Tensor:
        """x (batch, length, count * dim) -> (batch * value heads, chunks, CHUNK, dim)."""
        batch, length, _ = x.shape
        each = x.reshape(batch, length // CHUNK, CHUNK, count, -1).permute(0, 3, 1, 2, 4)
        return each.repeat_interleave(self.shape.value_heads // count, dim=1).flatten(0, 1)

    def read(self, states: Tensor, reading: Tensor, local: Tensor, gate: Tensor) -> Tensor:
        """The layer's result from the states ahead of the chunks."""
        batch, length, size = gate.shape
        with torch.autocast(gate.device.type, enabled=False):
            seen = (reading @ states + local).unflatten(0, (batch, -1)).permute(0, 2, 3, 1, 4)
            seen = seen.reshape(batch, length, self.shape.value_heads, -1)
            normed = self.norm(seen, gate.view(seen.shape))
        out: Tensor = self.out_proj(normed.reshape(batch, length, size).to(gate.dtype))
        return out

    def forward(self, x: Tensor) -> Tensor:
        step, gain, *rest = self.chunks(x)
        return self.read(Scan.apply(step, gain), *rest)  # type: ignore[no-untyped-call]


def delta_chunks(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(step, gain, reading, local) of chunks of (heads, chunks, CHUNK, dim); total: the decays' sums in a chunk."""
    at = torch.arange(CHUNK, device=q.device)
    apart = (total - total.mT).masked_fill(at[:, None] < at, float("-inf")).exp()
    lower = beta * (k @ k.mT) * apart * (at[:, None] > at)
    with torch.no_grad():
        solved = inverse(lower)
    solved = 2 * solved - solved @ (solved + lower @ solved)  # the same, and the gradient of an inverse
    values, reads = solved @ (beta * v), solved @ (beta * total.exp() * k)
    local = q @ k.mT * apart
    last = total[..., -1:, :]
    kept = k * (last - total).exp()
    step = torch.eye(k.shape[-1], device=k.device) * last.exp() - kept.mT @ reads
    return step, kept.mT @ values, q * total.exp() - local @ reads, local @ values


class Block(Layer):
    """One decoder layer."""

    def __init__(self, shape: HybridShape, *, attends: bool, dropout: float) -> None:
        mixer = {"self_attn": GatedAttention(shape)} if attends else {"linear_attn": GatedDeltaNet(shape)}
        super().__init__(shape, dropout, NORM_OFFSET, **mixer)
        self.attends = attends

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.ended(x, self.self_attn(self.input_layernorm(x), cos, sin))

    def begun(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.linear_attn.chunks(self.input_layernorm(x))

    def read(self, x: Tensor, states: Tensor, reading: Tensor, local: Tensor, gate: Tensor) -> Tensor:
        return self.ended(x, self.linear_attn.read(states, reading, local, gate))


class TinyHybrid(nn.Module):
    """Qwen3.5 with tied embeddings; its parameter names after `model.` are the Hugging Face ones."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: HybridShape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        attends = [(layer + 1) % shape.period == 0 for layer in range(shape.layers)]
        self.layers = nn.ModuleList(Block(shape, attends=own, dropout=dropout) for own in attends)
        self.norm = RMSNorm(shape.hidden, shape.eps, NORM_OFFSET)
        table = rotary_table(shape, int(shape.head_dim * shape.rotary_share))
        for name, angles in zip(("cos", "sin"), table, strict=True):
            self.register_buffer(name, angles, persistent=False)
        self.compiled: dict[str, Callable[..., Any]] = {}
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                depth = 2 * shape.layers if name.endswith(_ADDED) else 1
                nn.init.normal_(weight, std=0.02 if "embed" in name else (weight.shape[1] * depth) ** -0.5)

    def compile_parts(self) -> None:
        """Compile what training runs, but for the scan, whose steps are single products."""
        parts: dict[str, Callable[..., Any]] = {
            "attend": Block.attend,
            "begun": Block.begun,
            "read": Block.read,
            "head": _head_loss,
        }
        self.compiled = {name: torch.compile(part, dynamic=False) for name, part in parts.items()}

    def _part(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        return self.compiled.get(name, own) if self.training else own

    def hidden(self, ids: Tensor) -> Tensor:
        """Hidden states after the last norm; a length that is no multiple of CHUNK is filled up."""
        length = ids.shape[1]
        ids = functional.pad(ids, (0, -length % CHUNK))
        x = self.embed_tokens(ids)
        if torch.is_autocast_enabled(ids.device.type):
            x = x.to(torch.get_autocast_dtype(ids.device.type))
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            assert isinstance(layer, Block)
            if layer.attends:
                x = self._part("attend", Block.attend)(layer, x, cos, sin)
            else:
                step, gain, *rest = self._part("begun", Block.begun)(layer, x)
                states = Scan.apply(step, gain)  # type: ignore[no-untyped-call]
                x = self._part("read", Block.read)(layer, x, states, *rest)
        found: Tensor = self.norm(x)[:, :length]
        return found

    def forward(self, ids: Tensor) -> Tensor:
        return functional.linear(self.hidden(ids), self.embed_tokens.weight)

    def loss(self, ids: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        found: Tensor = self._part("head", _head_loss)(self.hidden(ids), self.embed_tokens.weight, targets, reduction)
        return found


def _head_loss(hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str) -> Tensor:
    logits = functional.linear(hidden, weight).float()
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
