"""Draws of drafts: of each row's logits, with a part of the noise of the target's own draw, written behind its tokens.

Owns the operator: one kernel on a GPU, for one row one with its head; else the draw and the write one by one. Knows
rows, and no drafter. Invariant: a draft is the maximum under the order (score, then lower id of the target), wherever
its logit stands.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.gemm import LinearWeight
from octavo.ops.gemm.fused import normed_logits
from octavo.ops.inputs.tensors import DraftRows
from octavo.ops.sampling import draw


def draw_drafts(logits: Tensor, ids: Tensor | None, of: DraftRows) -> Tensor:
    """Drafts of the rows [R] int64, which are written.

    logits: [R, places] float32; ids: [places] int64, the target's id of each place; None: the places themselves.
    """
    if logits.is_cuda:
        from octavo.ops.sampling import drafts_gpu

        return drafts_gpu.draw_drafts(logits, ids, of)
    return draw_drafts_composed(logits, ids, of)


def draw_drafts_of(
    x: Tensor, norm: Tensor, eps: float, weight: LinearWeight, ids: Tensor | None, of: DraftRows
) -> Tensor:
    """`draw_drafts` of the logits that a head's weight [places, K] gives of the `rms_norm` of x [R, K]."""
    if x.is_cuda:
        from octavo.ops.sampling import drafts_head

        if drafts_head.serves(x, weight.storage, of):
            return drafts_head.draw(x, norm, eps, weight.storage, ids, of)
    return draw_drafts(normed_logits(x, norm, eps, weight), ids, of)


def draw_drafts_composed(logits: Tensor, ids: Tensor | None, of: DraftRows) -> Tensor:
    """`draw_drafts` as separate operators, any device."""
    if ids is not None:  # noise is of the target's ids
        every = logits.new_full((len(logits), of.vocab_size), -torch.inf)
        logits = every.index_copy_(1, ids, logits)
    rows, table = of.rows, of.table
    positions = table.total_len.index_select(0, rows).to(torch.int64) + of.place
    drafts, _ = draw(logits.contiguous(), rows, of.temperatures * of.noise, of.seeds, positions)
    sample_of, lengths = of.live
    width = table.token_ids.shape[1]
    inside = (sample_of >= 0) & (lengths > 0) & (positions < width)
    # what is not to be written goes to a cell that it has, of the null row where the row has no place left
    cells = torch.where(inside, rows * width + positions, table.token_ids.numel() - 1)
    table.token_ids.view(-1).index_put_((cells,), torch.where(inside, drafts.to(torch.int32), 0))
    return drafts
