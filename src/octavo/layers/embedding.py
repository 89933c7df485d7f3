"""Embedding and output head, with weights of their own or one weight for both.

Owns the token table and the logits' soft cap. Does not know the vocabulary's meaning. Invariant: a tied pair
stores its weight once, packed for the head's product; the embedding reads rows out of the packed form.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeGuard

import torch

from octavo.checkpoint.arch import Arch
from octavo.layers.base import Layer
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.ops.embedding import embed_rows, gather_rows
from octavo.ops.embedding.beside import embed_beside, project_beside
from octavo.ops.gemm import LinearWeight
from octavo.ops.gemm.fused import fused_linear_sampling, fused_sampling_rows, linear_of_few, normed_logits
from octavo.ops.inputs.tensors import DraftRows
from octavo.ops.sampling import draw
from octavo.ops.sampling.drafts import draw_drafts, draw_drafts_of


class OutputHead(Linear):
    """hidden [rows, size] -> logits [rows, vocab] float32; `soft_cap` c gives c * tanh(logits / c), 0: none."""

    def __init__(
        self, vocab_size: int, size: int, dtype: torch.dtype, *, soft_cap: float = 0.0, divisor: float = 1.0
    ) -> None:
        """`size`: of the hidden state; `divisor`: of the logits, before they are capped."""
        super().__init__(size, vocab_size, dtype, out_dtype=torch.float32)
        self._soft_cap, self._divisor = soft_cap, divisor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of the given rows."""
        logits = super().forward(x)
        if self._divisor != 1.0:
            logits = logits.div_(self._divisor)
        if self._soft_cap:
            logits = logits.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
        return logits

    def of_norm(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """Logits of the given rows, normed."""
        if self._is_changed or self.bias is not None:
            return self.forward(norm.forward(x))
        return normed_logits(x, norm.weight, norm.eps, self.packed)

    def draft_of_norm(self, x: torch.Tensor, norm: RMSNorm, ids: torch.Tensor | None, of: DraftRows) -> torch.Tensor:
        """`ops.sampling.drafts.draw_drafts` of the logits of the given rows, normed."""
        if self._is_changed or self.bias is not None:
            return draw_drafts(self.forward(norm.forward(x)), ids, of)
        return draw_drafts_of(x, norm.weight, norm.eps, self.packed, ids, of)

    def draw(
        self,
        x: torch.Tensor,
        rows: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and failures of the rows of x, as `ops.sampling.draw` has them of their logits."""
        if self._is_changed:
            return draw(self.forward(x), rows, temperatures, seeds, positions)
        return fused_linear_sampling(x, self.packed, rows, temperatures, seeds, positions)

    def fused_sampling_rows(self) -> Collection[int]:
        """The numbers of rows that `draw` takes without writing their logits."""
        return () if self._is_changed else fused_sampling_rows(self.packed)

    @property
    def _is_changed(self) -> bool:
        """Whether logits are more than the product, which is all that a fused draw knows."""
        is_own = type(self).forward is not OutputHead.forward or "forward" in self.__dict__
        return is_own or self._soft_cap != 0.0 or self._divisor != 1.0


class Embedding(Layer):
    """Token ids -> rows of its own table, times `scale` (rounded to the dtype first, as Gemma was trained)."""

    widens_exactly = frozenset({"weight"})
    weight: torch.Tensor  # [vocab, size]

    def __init__(self, vocab_size: int, size: int, dtype: torch.dtype, *, scale: float = 1.0) -> None:
        """`dtype`: of the result."""
        super().__init__()
        self.declare("weight", (vocab_size, size), dtype)
        self._dtype = dtype
        self.scale = torch.tensor(scale, dtype=dtype).item()

    @property
    def table(self) -> torch.Tensor:
        """What rows are gathered from."""
        return self.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [tokens] int64 -> [tokens, size]."""
        return gather_rows(input_ids, self.weight, self._dtype, self.scale)


class TiedEmbedding(Layer):
    """Token ids -> rows of the output head's weight, times `scale`. Has no parameters."""

    head: OutputHead

    def __init__(self, head: OutputHead, dtype: torch.dtype, *, scale: float = 1.0) -> None:
        """`dtype`: of the result."""
        super().__init__()
        self.__dict__["head"] = head  # a reference, not a child: the head's parameters are listed once
        self._dtype = dtype
        self.scale = torch.tensor(scale, dtype=dtype).item()

    @property
    def table(self) -> LinearWeight:
        """What rows are gathered from."""
        return self.head.packed

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [tokens] int64 -> [tokens, size]."""
        return embed_rows(input_ids, self.head.packed, self._dtype, self.scale)


class UnscaledEmbedding(Layer):
    """Token ids -> rows of another embedding's table as they are, whatever its scale. Has no parameters."""

    of: Embedding | TiedEmbedding
    scale = 1.0

    def __init__(self, of: Embedding | TiedEmbedding, dtype: torch.dtype) -> None:
        """`of`: whose table is read, its values of now; `dtype`: of the result."""
        super().__init__()
        self.__dict__["of"] = of  # a reference, not a child: its parameters are listed once
        self._dtype = dtype

    @property
    def table(self) -> torch.Tensor | LinearWeight:
        """What rows are gathered from."""
        return self.of.table

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [tokens] int64 -> [tokens, size]."""
        table = self.table
        if isinstance(table, torch.Tensor):
            return gather_rows(input_ids, table, self._dtype)
        return embed_rows(input_ids, table, self._dtype)


def unscaled(embedding: Embedding | TiedEmbedding, dtype: torch.dtype) -> Layer:
    """The embedding that gives the rows of `embedding`'s table as they are: itself, where it has no scale."""
    return embedding if embedding.scale == 1.0 else UnscaledEmbedding(embedding, dtype)


def embed_with_states(
    embedding: Layer,
    ids: torch.Tensor,
    states: torch.Tensor,
    norms: tuple[RMSNorm, RMSNorm] | None = None,
    pick: torch.Tensor | None = None,
    *,
    normed: bool = True,
    behind_draw: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """([T, 2 * size]: the embedding of ids [T] int64 and states [T, size] side by side; the states by themselves).

    norms: of both, of one eps; None: both stay as they are. pick: [T] int64, places at which ids and states are taken
    from longer ones; None: all. normed: whether the second result is. behind_draw: see `embed_beside`.
    """
    eps, weights = (0.0, None) if norms is None else (norms[0].eps, (norms[0].weight, norms[1].weight))
    if _is_plain(embedding):
        sides = ids, embedding.table, embedding.scale, states, weights, eps, pick
        return embed_beside(*sides, normed=normed, behind_draw=behind_draw)
    if pick is not None:
        ids, states = ids.index_select(0, pick), states.index_select(0, pick)
    embedded: torch.Tensor = embedding.forward(ids)
    if norms is None:
        return torch.cat([embedded, states], dim=-1), states
    h = norms[1].forward(states)
    return torch.cat([norms[0].forward(embedded), h], dim=-1), h if normed else states


def head_and_embedding(arch: Arch, dtype: torch.dtype) -> tuple[OutputHead, Embedding | TiedEmbedding]:
    """Both ends of a model, tied if `arch` says so."""
    soft_cap, divisor = arch.logit_soft_cap, arch.logit_divisor
    head = OutputHead(arch.vocab_size, arch.hidden_size, dtype, soft_cap=soft_cap, divisor=divisor)
    if arch.tied:
        return head, TiedEmbedding(head, dtype, scale=arch.embedding_scale)
    return head, Embedding(arch.vocab_size, arch.hidden_size, dtype, scale=arch.embedding_scale)


def project_with_states(
    embedding: Layer,
    ids: torch.Tensor,
    states: torch.Tensor,
    norms: tuple[RMSNorm, RMSNorm],
    into: Linear,
    pick: torch.Tensor | None = None,
    *,
    normed: bool = True,
    behind_draw: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what `into` gives of the first of `embed_with_states`, the second)."""
    if _is_plain(embedding):
        weights = norms[0].weight, norms[1].weight
        sides = ids, embedding.table, embedding.scale, states, weights, norms[0].eps, into.packed, into.bias, pick
        return project_beside(*sides, normed=normed, behind_draw=behind_draw)
    both, own = embed_with_states(embedding, ids, states, norms, pick, normed=normed, behind_draw=behind_draw)
    return linear_of_few(both, into.packed, into.bias), own


def _is_plain(embedding: Layer) -> TypeGuard[Embedding | TiedEmbedding | UnscaledEmbedding]:
    """Whether operators compute what its forward does: they are given its table alone."""
    return "forward" not in embedding.__dict__ and type(embedding) in (Embedding, TiedEmbedding, UnscaledEmbedding)
