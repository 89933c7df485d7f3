"""Prompt lookup on the GPU: one program a row. Its reference implementation is `octavo.ops.lookup`."""

# Kernels are compiled from their source by Triton, whose values mypy does not know.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from octavo.ops.compile.launch import begin_after, chained, launched
from octavo.ops.inputs.tensors import RowTensors

_BLOCK = 1024  # places that a program looks at at once
_MOST = 64  # drafts: one kernel for any number, which follows the batch
_PLACES = 1 << 32  # a key is a run's length, then how far ahead it stands


@launched(triton.jit(do_not_specialize=["num_drafts"]))
def _look_up(
    token_ids,
    total_len,
    rows,
    live,
    width,
    num_drafts,
    PLACES: tl.constexpr,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_after(PDL)
    entry = tl.program_id(0)
    row = tl.load(rows + entry)
    total = tl.load(total_len + row)
    total = tl.where(tl.load(live + entry) != 0, total, 0)
    own = token_ids + row * width
    best = tl.zeros((BLOCK,), tl.int64)
    base = 0
    while base < total - 1:
        at = base + tl.arange(0, BLOCK)
        goes_on = at < total - 1
        length = tl.zeros((BLOCK,), tl.int64)
        for back in range(LONGEST):
            end = tl.load(own + tl.maximum(total - 1 - back, 0))
            token = tl.load(own + at - back, mask=goes_on & (at >= back), other=-1)
            goes_on = goes_on & (token == end)
            length += goes_on.to(tl.int64)
        key = length * PLACES + (PLACES - 1 - at.to(tl.int64))
        best = tl.maximum(best, tl.where(length >= SHORTEST, key, 0))
        base += BLOCK
    found = tl.max(best, axis=0)
    if total > 0:
        last = tl.where(found > 0, PLACES - 1 - found % PLACES, total - 2).to(tl.int32)  # of the run, if there is one
        place = tl.arange(0, MOST)
        inside = (place < num_drafts) & (total + place < width)
        token = tl.load(own + last + 1 + place % (total - 1 - last), mask=inside, other=0)
        tl.store(own + total + place, token, mask=inside)


def look_up_rows(
    table: RowTensors, rows: torch.Tensor, live: torch.Tensor, shortest: int, longest: int, num_drafts: int
) -> None:
    """See `ops.lookup.look_up`."""
    assert num_drafts <= _MOST, "more drafts than a row may have"
    _look_up[(len(rows),)](
        table.token_ids,
        table.total_len,
        rows,
        live.view(torch.uint8),
        table.token_ids.shape[1],
        num_drafts,
        PLACES=_PLACES,
        SHORTEST=shortest,
        LONGEST=longest,
        MOST=_MOST,
        BLOCK=_BLOCK,
        num_warps=4,
        **chained(rows.device),
    )
