"""Embedded tokens and hidden states side by side on a GPU: `embed_beside` of `octavo.ops.embedding.beside`.

Owns the kernel. Invariant: the bits are those of the gather and of `octavo.ops.norm.gpu`'s kernel. It begins when all
before it is done, and so do all kernels behind it, see `octavo.ops.compile.launch`: a drafter's pass begins with it. A
pass behind a draw of drafts has that from the draw.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.compile.launch import begin_whole, chained, end_before, launched, wait_before
from octavo.ops.compile.row_sum import padded_length
from octavo.ops.norm.gpu import inverse_norm

_CHANNELS_PER_WARP = 1024  # moves no bit


@launched(triton.jit)
def _beside(
    ids, table, states, first_norm, second_norm, pick, both, own, scale, eps, states_row, SIZE: tl.constexpr,
    PADDED: tl.constexpr, LEVELS: tl.constexpr, SCALED: tl.constexpr, NORM: tl.constexpr, PICK: tl.constexpr,
    NORMED: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (token, 0): its embedding; (token, 1): its state."""
    if not WHOLE:
        end_before(PDL)
    token, is_state = tl.program_id(0).to(tl.int64), tl.program_id(1) == 1
    channel = tl.arange(0, PADDED)
    inside = channel < SIZE
    if NORM:
        weight = tl.load((second_norm if is_state else first_norm) + channel, mask=inside, other=0.0)
    if WHOLE:
        begin_whole(PDL)
    else:
        wait_before(PDL)
    source = tl.load(pick + token).to(tl.int64) if PICK else token
    dtype = both.dtype.element_ty
    if is_state:
        value = tl.load(states + source * states_row + channel, mask=inside, other=0.0)
        if not NORMED:
            tl.store(own + token * SIZE + channel, value, mask=inside)
        if NORM:
            x = value.to(tl.float32)
            value = (x * inverse_norm(x, eps, SIZE, PADDED, LEVELS) * weight).to(dtype)
        tl.store(both + token * (2 * SIZE) + SIZE + channel, value, mask=inside)
        if NORMED:
            tl.store(own + token * SIZE + channel, value, mask=inside)
    else:
        row = tl.load(ids + source).to(tl.int64)
        value = tl.load(table + row * SIZE + channel, mask=inside, other=0.0).to(dtype)
        if SCALED:
            value = (value.to(tl.float32) * scale).to(dtype)
        if NORM:
            x = value.to(tl.float32)
            value = (x * inverse_norm(x, eps, SIZE, PADDED, LEVELS) * weight).to(dtype)
        tl.store(both + token * (2 * SIZE) + channel, value, mask=inside)


def embed_beside(
    ids: Tensor,
    table: Tensor,
    scale: float,
    states: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    pick: Tensor | None,
    *,
    normed: bool = True,
    behind_draw: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `octavo.ops.embedding.beside.embed_beside`."""
    assert table.is_contiguous() and states.stride(1) == 1, "the table and a state's channels are contiguous"
    num_tokens, size = len(ids) if pick is None else len(pick), states.shape[1]
    assert table.shape[1] == size, "embeddings are as long as states"
    both = torch.empty((num_tokens, 2 * size), dtype=states.dtype, device=states.device)
    own = torch.empty((num_tokens, size), dtype=states.dtype, device=states.device)
    first, second = (both, both) if norms is None else norms
    padded = padded_length(size)
    if num_tokens:
        _beside[(num_tokens, 2)](
            ids, table, states, first, second, ids if pick is None else pick, both, own, scale, eps, states.stride(0),
            SIZE=size, PADDED=padded, LEVELS=padded.bit_length() - 1, SCALED=scale != 1.0, NORM=norms is not None,
            PICK=pick is not None, NORMED=normed, WHOLE=not behind_draw,
            num_warps=min(max(padded // _CHANNELS_PER_WARP, 1), 16), enable_fp_fusion=False, **chained(states.device),
        )  # fmt: skip
    return both, own
