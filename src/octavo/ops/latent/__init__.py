"""Latent attention's pass from projections to the cache: norm of the state, rotation of its key and of the queries.

Owns that one pass. Does not know layers, requests or block tables: a token has a position and a slot. Invariant: a
token's results depend on its own rows, its position and its slot only; slot -1 writes nothing.
"""

from __future__ import annotations

import torch

from octavo.ops.cache_write.quantize import LIMITS, quantize, store
from octavo.ops.latent.state import LatentState
from octavo.ops.norm import rms_norm


def latent_rope_store(
    layer: LatentState,
    query: torch.Tensor,
    state: torch.Tensor,
    positions: torch.Tensor,
    rotated: torch.Tensor,
    kv: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Rotate `query` into `rotated`, both [tokens, heads, rope]; norm and rotate `state`, write it to the cache.

    state: [tokens, latent + rope], the key's channels last; positions: [tokens] int64; kv: [blocks, 1, block_size,
    latent + rope] of state's dtype, or quantized by the key's scale; slot_mapping: [tokens] int64, block * block_size +
    offset, -1 writes nothing. A rotated pair is laid out as its first halves, then its second: queries and keys alike,
    so that their products are what any other order gives. Arithmetic is float32, rounded once.
    """
    if query.is_cuda and (kv.dtype == state.dtype or kv.dtype in LIMITS):
        from octavo.ops.latent import gpu as latent  # needs triton

        latent.latent_rope_store(layer, query, state, positions, rotated, kv, slot_mapping)
        return
    latent_rope_store_reference(layer, query, state, positions, rotated, kv, slot_mapping)


def latent_rope_store_reference(
    layer: LatentState,
    query: torch.Tensor,
    state: torch.Tensor,
    positions: torch.Tensor,
    rotated: torch.Tensor,
    kv: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """The reference implementation of `latent_rope_store` in plain torch."""
    latent_size = layer.weight.shape[0]
    rows = layer.cos_sin[positions]
    rotated.copy_(_rotate(query.float(), rows[:, None], layer.interleaved))
    normed = rms_norm(state[:, :latent_size], layer.weight, layer.eps)
    key = _rotate(state[:, latent_size:].float(), rows, layer.interleaved).to(state.dtype)
    states = torch.cat((normed, key), dim=-1)[:, None]
    store(kv, quantize(states, kv.dtype, layer.key_scale), slot_mapping)


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [..., rope] float32 rotated by cos_sin [..., rope]: cosines, then sines."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
