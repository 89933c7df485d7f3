"""What a drafter of one layer begins with: embedded tokens and hidden states side by side, each normed or not.

Owns the operator: one kernel on a GPU, for one row one with the product behind it; else the operators one by one. Knows
no drafters. Invariant: all ways give the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.embedding import embed_rows, gather_rows
from octavo.ops.gemm import LinearWeight
from octavo.ops.gemm.fused import linear_of_few
from octavo.ops.norm import rms_norm


def embed_beside(
    ids: Tensor,
    table: Tensor | LinearWeight,
    scale: float,
    states: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    pick: Tensor | None = None,
    *,
    normed: bool = True,
    behind_draw: bool = False,
) -> tuple[Tensor, Tensor]:
    """([T, 2 * size]: the embedding of `ids`, and `states`, side by side; the states by themselves [T, size]).

    ids: [T] int64; table: as `gather_rows`' or `embed_rows`', of rows [size]; states: [T, size]. norms: weights [size]
    float32 of RMS norms of both; None: both stay as they are. pick: [T] int64, places at which ids and states are taken
    from longer ones; None: all. normed: whether the second result is; else it is as it was. behind_draw: whether a draw
    of drafts was launched since anything that later kernels read early, see `octavo.ops.compile.launch`.
    """
    if states.is_cuda:
        from octavo.ops.embedding import beside_gpu

        plain = table.storage if isinstance(table, LinearWeight) else table
        return beside_gpu.embed_beside(
            ids, plain, scale, states, norms, eps, pick, normed=normed, behind_draw=behind_draw
        )
    return embed_beside_composed(ids, table, scale, states, norms, eps, pick, normed=normed)


def project_beside(
    ids: Tensor,
    table: Tensor | LinearWeight,
    scale: float,
    states: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    weight: LinearWeight,
    bias: Tensor | None,
    pick: Tensor | None = None,
    *,
    normed: bool = True,
    behind_draw: bool = False,
) -> tuple[Tensor, Tensor]:
    """(`linear` of the first that `embed_beside` gives, by weight [N, 2 * size]; the second)."""
    if states.is_cuda and norms is not None and bias is None:
        from octavo.ops.embedding import beside_gemv

        plain = table.storage if isinstance(table, LinearWeight) else table
        if beside_gemv.serves(len(ids if pick is None else pick), plain, scale, states, weight.storage):
            given = ids, plain, states, norms, eps, weight.storage, pick
            return beside_gemv.project(*given, normed=normed, behind_draw=behind_draw)
    both, own = embed_beside(ids, table, scale, states, norms, eps, pick, normed=normed, behind_draw=behind_draw)
    return linear_of_few(both, weight, bias), own


def embed_beside_composed(
    ids: Tensor,
    table: Tensor | LinearWeight,
    scale: float,
    states: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    pick: Tensor | None = None,
    *,
    normed: bool = True,
) -> tuple[Tensor, Tensor]:
    """`embed_beside` as separate operators, any device."""
    if pick is not None:
        ids, states = ids.index_select(0, pick), states.index_select(0, pick)
    if isinstance(table, LinearWeight):
        embedded = embed_rows(ids, table, states.dtype, scale)
    else:
        embedded = gather_rows(ids, table, states.dtype, scale)
    if norms is None:
        return torch.cat([embedded, states], dim=-1), states
    h = rms_norm(states, norms[1], eps)
    return torch.cat([rms_norm(embedded, norms[0], eps), h], dim=-1), h if normed else states
