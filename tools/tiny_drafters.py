"""The drafters of octavo-tiny for training: an EAGLE-3-style head and an MTP module, in float32 master weights.

Owns their shapes, the unrolled forward pass and their checkpoints' names. Knows no data. A chain begins at each
position i: its entry j takes the token at i + 1 + j and predicts the one behind it. Entry 0 knows the target's hidden
state, later ones what the entry before them gave, as in drafting ("training-time test": EAGLE-3, arXiv 2503.01840).
Invariant: a chain sees entries 0 of the positions up to its own, and its own later entries, as a drafter's cache holds
them.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor, nn
from torch.nn import functional

from tiny_model import MLP, RMSNorm, Shape, TinyQwen3, rotate

TAPS = (2, 4, 6)  # an EAGLE-3 head reads the stream behind so many layers


@torch.no_grad()
def watch(model: TinyQwen3, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(taps [B, T, 3 * hidden], hidden [B, T, hidden] behind the last norm, logits) of ids [B, T]."""
    x = model.embed_tokens(ids)
    if torch.is_autocast_enabled(ids.device.type):
        x = x.to(torch.get_autocast_dtype(ids.device.type))
    cos, sin = model.cos[: ids.shape[1]], model.sin[: ids.shape[1]]
    taps = []
    for index, layer in enumerate(model.layers):
        if index in TAPS:
            taps.append(x)
        x = layer(x, cos, sin)
    hidden = model.norm(x)
    return torch.cat(taps, dim=-1), hidden, functional.linear(hidden, model.embed_tokens.weight)


class DraftAttention(nn.Module):
    """Causal grouped-query attention over chains; `norms`: RMS norms on the heads of q and k, as Qwen3's."""

    def __init__(self, shape: Shape, in_size: int, *, norms: bool) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(in_size, wide, bias=False)
        self.k_proj = nn.Linear(in_size, narrow, bias=False)
        self.v_proj = nn.Linear(in_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)
        if norms:
            self.q_norm = RMSNorm(shape.head_dim, shape.eps)
            self.k_norm = RMSNorm(shape.head_dim, shape.eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, each [B, heads, T, head_dim], of x [B, T, in_size]."""
        split = (x.shape[0], x.shape[1], -1, self.shape.head_dim)
        q, k, v = (each(x).view(split) for each in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q.transpose(1, 2), cos, sin), rotate(k.transpose(1, 2), cos, sin)
        group = self.shape.heads // self.shape.kv_heads
        return q, k.repeat_interleave(group, dim=1), v.transpose(1, 2).repeat_interleave(group, dim=1)

    def forward(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """What chains see: of entries 0 those up to their own position, of later ones their own. [B, T, hidden]"""
        length, scale = q.shape[2], self.shape.head_dim**-0.5
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        scores = [(q @ keys[0].mT).float().masked_fill(later, float("-inf"))]
        scores += [(q * key).float().sum(-1, keepdim=True) for key in keys[1:]]
        share = torch.softmax(torch.cat(scores, dim=-1) * scale, dim=-1).to(q.dtype)
        seen = share[..., :length] @ values[0]
        for index, value in enumerate(values[1:]):
            seen = seen + share[..., length + index, None] * value
        out: Tensor = self.o_proj(seen.transpose(1, 2).flatten(2))
        return out


class Drafter(nn.Module, abc.ABC):
    """What both have: an entry of a token and a hidden state, a decoder layer, a last norm, logits."""

    cos: Tensor
    sin: Tensor

    def __init__(self, target: TinyQwen3, in_size: int, *, norms: bool) -> None:
        super().__init__()
        shape = self.shape = target.shape
        self.__dict__["target"] = target  # a reference: its weights are not trained
        self.attention = DraftAttention(shape, in_size, norms=norms)
        self.mlp = MLP(shape)
        self.attention_norm, self.mlp_norm = RMSNorm(in_size // 2, shape.eps), RMSNorm(shape.hidden, shape.eps)
        self.token_norm, self.hidden_norm = RMSNorm(shape.hidden, shape.eps), RMSNorm(shape.hidden, shape.eps)
        self.norm = RMSNorm(shape.hidden, shape.eps)

    @abc.abstractmethod
    def begin(self, taps: Tensor, hidden: Tensor) -> Tensor:
        """What entries 0 know of the target, [B, T, hidden]."""

    @abc.abstractmethod
    def enter(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(what attention projects, the residual stream) of embedded tokens and hidden states, both [B, T, hidden]."""

    @abc.abstractmethod
    def leave(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        """(what the next entry knows, logits [B, T, draft vocabulary]) of what the layer gave."""

    def unroll(self, ids: Tensor, taps: Tensor, hidden: Tensor, steps: int) -> list[Tensor]:
        """Logits of entries 0 .. steps - 1 of the chains of all positions but the last `steps`.

        ids [B, W], taps and hidden: of the same tokens.
        """
        length = ids.shape[1] - steps
        state = self.begin(taps[:, :length], hidden[:, :length])
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found = []
        for step in range(steps):
            tokens = self.target.embed_tokens(ids[:, step + 1 : step + 1 + length]).to(state.dtype)
            projected, stream = self.enter(tokens, state)
            places = slice(step, step + length)
            q, k, v = self.attention.project(projected, self.target.cos[places], self.target.sin[places])
            keys.append(k)
            values.append(v)
            stream = stream + self.attention(q, keys, values)
            state, logits = self.leave(stream + self.mlp(self.mlp_norm(stream)))
            found.append(logits)
        return found


class Eagle3Head(Drafter):
    """EAGLE-3's: three taps through `fc`, token and state side by side into the layer, a reduced vocabulary."""

    def __init__(self, target: TinyQwen3, draft_ids: Tensor) -> None:
        """draft_ids: [draft vocabulary] ascending, the target's ids."""
        super().__init__(target, 2 * target.shape.hidden, norms=False)
        self.attention_norm = nn.Identity()  # type: ignore[assignment]
        size = target.shape.hidden
        self.fc = nn.Linear(len(TAPS) * size, size, bias=False)
        self.lm_head = nn.Linear(size, len(draft_ids), bias=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        initialize(self)
        with torch.no_grad():
            self.lm_head.weight.copy_(target.embed_tokens.weight[draft_ids])

    def begin(self, taps: Tensor, hidden: Tensor) -> Tensor:
        out: Tensor = self.fc(taps)
        return out

    def enter(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([self.token_norm(tokens), self.hidden_norm(hidden)], dim=-1), hidden

    def leave(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        return stream, self.lm_head(self.norm(stream))

    def checkpoint(self) -> dict[str, Tensor]:
        """As published EAGLE-3 heads call their weights, with the map of their vocabulary."""
        named = {
            "fc.weight": self.fc.weight,
            "lm_head.weight": self.lm_head.weight,
            "norm.weight": self.norm.weight,
            "midlayer.input_layernorm.weight": self.token_norm.weight,
            "midlayer.hidden_norm.weight": self.hidden_norm.weight,
            **layer_weights("midlayer.", self),
        }
        ids = self.get_buffer("draft_ids").cpu()
        known = torch.zeros(self.shape.vocab, dtype=torch.bool)
        known[ids] = True
        return {**named, "d2t": ids - torch.arange(len(ids)), "t2d": known}


class MtpModule(Drafter):
    """DeepSeek-V3's: token and state, each normed, through one product into a layer of the target's own kind."""

    def __init__(self, target: TinyQwen3) -> None:
        super().__init__(target, 2 * target.shape.hidden, norms=True)
        size = target.shape.hidden
        self.attention = DraftAttention(target.shape, size, norms=True)
        self.attention_norm = RMSNorm(size, target.shape.eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        initialize(self)

    def begin(self, taps: Tensor, hidden: Tensor) -> Tensor:
        return hidden

    def enter(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        stream = self.eh_proj(torch.cat([self.token_norm(tokens), self.hidden_norm(hidden)], dim=-1))
        return self.attention_norm(stream), stream

    def leave(self, stream: Tensor) -> tuple[Tensor, Tensor]:
        state = self.norm(stream)
        return state, functional.linear(state, self.target.embed_tokens.weight)

    def checkpoint(self) -> dict[str, Tensor]:
        """As DeepSeek's checkpoints call a layer behind the last one; embedding and head are the target's."""
        layer = f"model.layers.{self.shape.layers}."
        return {
            layer + "enorm.weight": self.token_norm.weight,
            layer + "hnorm.weight": self.hidden_norm.weight,
            layer + "eh_proj.weight": self.eh_proj.weight,
            layer + "input_layernorm.weight": self.attention_norm.weight,
            layer + "shared_head.norm.weight": self.norm.weight,
            **layer_weights(layer, self),
        }


def layer_weights(prefix: str, drafter: Drafter) -> dict[str, Tensor]:
    """Of the decoder layer, but for the norms in front of it."""
    parts = {"self_attn.": drafter.attention, "mlp.": drafter.mlp, "post_attention_layernorm.": drafter.mlp_norm}
    return {prefix + part + name: value for part, own in parts.items() for name, value in own.state_dict().items()}


def initialize(drafter: Drafter) -> None:
    """Normal weights whose products keep their inputs' size; what joins the stream begins small."""
    for name, weight in drafter.named_parameters():
        if weight.dim() == 2:
            depth = 2 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1
            nn.init.normal_(weight, std=(weight.shape[1] * depth) ** -0.5)
