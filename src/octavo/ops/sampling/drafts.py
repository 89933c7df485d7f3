"""Draws of drafts: of each row's logits, with a part of the noise of the target's own draw, written behind its tokens.

Owns the operator: one kernel on a GPU, else the draw and the write one by one. Knows rows, and no drafter. Invariant: a
draft is the maximum under the order (score, then lower id of the target), wherever its logit stands.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.inputs.tensors import RowTensors
from octavo.ops.sampling import draw


def draw_drafts(
    logits: Tensor,
    ids: Tensor | None,
    vocab_size: int,
    rows: Tensor,
    live: tuple[Tensor, Tensor],
    table: RowTensors,
    place: int,
    temperatures: Tensor,
    seeds: Tensor,
    noise: float,
) -> Tensor:
    """Drafts number `place` of the rows [R] int64, which are written where a row is live and has room for them.

    logits: [R, places] float32; ids: [places] int64, the target's id of each place, of `vocab_size`; None: the places
    themselves. rows: [R] int64; live: (sample_of, lengths) of the step, [R] int32: a row is live if it sampled and is
    no padding. temperatures, seeds: tables of all rows; noise: what part of the temperature counts, 0: the likeliest
    token is taken.
    """
    if logits.is_cuda:
        from octavo.ops.sampling import drafts_gpu

        return drafts_gpu.draw_drafts(logits, ids, rows, live, table, place, temperatures, seeds, noise)
    return draw_drafts_composed(logits, ids, vocab_size, rows, live, table, place, temperatures, seeds, noise)


def draw_drafts_composed(
    logits: Tensor,
    ids: Tensor | None,
    vocab_size: int,
    rows: Tensor,
    live: tuple[Tensor, Tensor],
    table: RowTensors,
    place: int,
    temperatures: Tensor,
    seeds: Tensor,
    noise: float,
) -> Tensor:
    """`draw_drafts` as separate operators, any device."""
    if ids is not None:  # noise is of the target's ids
        every = logits.new_full((len(logits), vocab_size), -torch.inf)
        logits = every.index_copy_(1, ids, logits)
    positions = table.total_len.index_select(0, rows).to(torch.int64) + place
    drafts, _ = draw(logits.contiguous(), rows, temperatures * noise, seeds, positions)
    sample_of, lengths = live
    width = table.token_ids.shape[1]
    inside = (sample_of >= 0) & (lengths > 0) & (positions < width)
    # what is not to be written goes to a cell that it has, of the null row where the row has no place left
    cells = torch.where(inside, rows * width + positions, table.token_ids.numel() - 1)
    table.token_ids.view(-1).index_put_((cells,), torch.where(inside, drafts.to(torch.int32), 0))
    return drafts
