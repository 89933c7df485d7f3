"""What a quantized cache holds: the rounding of K and V, in plain torch.

Owns `quantize` and the write by slots, the oracle of every fused store. Does not know layers or blocks' owners.
Invariant: an element depends on its own value and its head's scale only; NaN stays NaN in float8, and is 0 in int8.
"""

from __future__ import annotations

import torch

LIMITS = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # the largest magnitude of each quantized type

_DTYPES = {"fp8": torch.float8_e4m3fn}  # the others go by torch's names


def cache_dtype(name: str) -> torch.dtype:
    """Of the elements of a cache, by its name as a setting."""
    found: torch.dtype = _DTYPES.get(name) or getattr(torch, name)
    return found


def quantize(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """x [tokens, heads, channels] as a cache of `dtype` keeps it: divided by scale [heads] (None: 1), cut, rounded.

    A dtype that is not quantized is a plain conversion.
    """
    if dtype not in LIMITS:
        return x.to(dtype)
    x = x.float() if scale is None else x.float() / scale[:, None]
    x = x.clamp(-LIMITS[dtype], LIMITS[dtype])
    return (x.round().nan_to_num(0.0) if dtype == torch.int8 else x).to(dtype)


def store(kv: torch.Tensor, states: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write states [tokens, heads, channels], of kv's dtype, to kv [blocks, heads, block_size, channels] by slot.

    slot_mapping: [tokens] int64, block * block_size + offset; -1 writes nothing.
    """
    if kv.dtype == torch.float8_e4m3fn:  # torch indexes no float8
        kv, states = kv.view(torch.uint8), states.view(torch.uint8)
    written = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[written]
    kv[slots // kv.shape[2], :, slots % kv.shape[2]] = states[written]
