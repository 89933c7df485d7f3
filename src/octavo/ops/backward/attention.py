"""The way back through attention on a GPU: which tiles, and the two launches of `attention_kernels`.

Owns what is served and the choice of tiles. First the queries' kernel, which leaves the logarithms of their sums, then
the keys'. Does not know packs. Invariant: see `attention_kernels`.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import torch
import triton
from torch import Tensor

from octavo.ops.attention.mask_spec import MaskSpec
from octavo.ops.backward.attention_kernels import backward_of_keys, backward_of_queries
from octavo.ops.backward.rows import Rows

MAX_HEAD_SIZE = 256
_LOG2_E = math.log2(math.e)
_EVERYTHING, _WINDOW, _CHUNK = 0, 1, 2


@dataclasses.dataclass(frozen=True, slots=True)
class Tile:
    """Queries and keys at a time, and how a program is compiled."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclasses.dataclass(frozen=True, slots=True)
class Tiles:
    """Of both launches."""

    of_queries: Tile
    of_keys: Tile


def tiles_for(padded: int, dtype: torch.dtype) -> Tiles:
    """For heads of so many channels."""
    if dtype == torch.float32:
        return Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))
    if padded > 128:
        return Tiles(Tile(64, 32, 8, 2), Tile(32, 64, 8, 2))
    if padded == 128:
        return Tiles(Tile(128, 64, 8, 2), Tile(64, 128, 8, 2))
    return Tiles(Tile(128, 64, 4, 3), Tile(64, 128, 8, 3))


def serves(q: Tensor, value_size: int, *, has_mods: bool) -> bool:
    """Whether the kernels compute these gradients: 16-bit heads that a GPU has, without mods or latent states."""
    is_plain = not value_size and not has_mods and q.shape[2] <= MAX_HEAD_SIZE
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and is_plain


def attention_backward(
    q: Tensor,
    states: Tensor,
    grad: Tensor,
    out: Tensor,
    rows: Rows,
    mask_spec: MaskSpec,
    *,
    alibi_slopes: tuple[float, ...] = (),
    sinks: Tensor | None = None,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(gradient of q, of states, of sinks or None) of attention of each row to itself.

    q, grad, out (of the forward): [tokens, heads, head_size]; states: [slots, kv_heads, 2 * head_size], K then V. All
    contiguous, of one float dtype. sinks: [heads] float32. tiles: other ones than the table's.
    """
    assert q.is_contiguous() and states.is_contiguous() and out.is_contiguous(), "tensors are whole"
    grad = grad.contiguous()
    (num_tokens, num_heads, size), num_kv_heads = q.shape, states.shape[1]
    padded = max(16, triton.next_power_of_2(size))
    tiles = tiles or tiles_for(padded, q.dtype)
    grad_q, grad_states = torch.empty_like(q), torch.empty_like(states)
    grad_states[: rows.first_slot].zero_()  # no row's
    log_sums, deltas = torch.empty(2, num_heads, num_tokens, dtype=torch.float32, device=q.device)
    slopes = _slopes(alibi_slopes, q.device) if alibi_slopes else log_sums
    score, cap = mask_spec.scale * _LOG2_E, 0.0
    if mask_spec.soft_cap:
        score, cap = mask_spec.soft_cap * _LOG2_E, 2.0 * _LOG2_E * mask_spec.scale / mask_spec.soft_cap
    fixed = {
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "HEAD": size,
        "PADDED": padded,
        "SEES": _WINDOW if mask_spec.window else _CHUNK if mask_spec.chunk else _EVERYTHING,
        "CAUSAL": mask_spec.causal,
        "SOFT_CAP": mask_spec.soft_cap > 0,
        "SLOPES": bool(alibi_slopes),
        "PRECISION": "ieee",
    }
    numbers = (num_tokens, mask_spec.reach, mask_spec.scale, score, cap)
    tile = tiles.of_queries
    places = rows.tiles(tile.queries, last_first=True)
    backward_of_queries[(num_heads, len(places))](
        q, states, grad, out, grad_q, log_sums, deltas, places, rows.token, rows.slot, rows.length, slopes,
        log_sums if sinks is None else sinks, *numbers, BM=tile.queries, BN=tile.keys, STAGES=tile.stages,
        SINKS=sinks is not None, num_warps=tile.warps, **fixed,
    )  # fmt: skip
    tile = tiles.of_keys
    places = rows.tiles(tile.keys, last_first=False)
    backward_of_keys[(num_kv_heads, len(places))](
        q, states, grad, grad_states, log_sums, deltas, places, rows.token, rows.slot, rows.length, rows.room, slopes,
        *numbers, BM=tile.queries, BN=tile.keys, STAGES=tile.stages, num_warps=tile.warps, **fixed,
    )  # fmt: skip
    if sinks is None:
        return grad_q, grad_states, None
    shares = torch.exp2(sinks[:, None] * _LOG2_E - log_sums)
    return grad_q, grad_states, -(shares * deltas).sum(1)


@functools.cache
def _slopes(alibi_slopes: tuple[float, ...], device: torch.device) -> Tensor:
    """As a tensor that stays."""
    return torch.tensor(alibi_slopes, dtype=torch.float32, device=device)
