"""Scales of a quantized cache that a checkpoint brings: `k_scale` and `v_scale` beside a layer's attention.

Owns the names under which tools write them, their checks and the way to their layers. Does not know which cache uses
them. A stored K times the scale is K. One number serves all KV heads of a layer; one per KV head is finer. Invariant: a
layer has both scales or none; for latent attention, whose cache has no V, the scale of K is both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

import torch
from torch import nn

from octavo.checkpoint.safetensors import DTYPES, Checkpoint
from octavo.config.quoted import plain

# Scales of queries and of probabilities belong to kernels that compute in float8; ours do not.
_NAME = re.compile(r"(?:.*\.)?layers\.([0-9]{1,6})\.self_attn\.(?:attn\.|[qkv]_proj\.)?(k|v|q|prob)_scale")


def scale_names(names: Iterable[str]) -> dict[str, tuple[int, str]]:
    """Those of `names` that are scales: name -> (layer, "k", "v", "q" or "prob")."""
    matches = {name: _NAME.fullmatch(name) for name in names}
    return {name: (int(match[1]), match[2]) for name, match in matches.items() if match}


def give_stored_scales(model: nn.Module, checkpoint: Checkpoint, device: torch.device) -> None:
    """Set `stored_scales` of each attention layer that the checkpoint has them for, [num_kv_heads] float32 each.

    Raises ValueError for a shape that does not fit, for a scale that is not a positive number, and for one of K without
    one of V or the other way round.
    """
    scales_of = scale_names(checkpoint.entries)
    if not scales_of:
        return
    from octavo.layers.attention import Attention
    from octavo.layers.latent_attention import LatentAttention

    layers = {layer.index: layer for layer in model.modules() if isinstance(layer, Attention | LatentAttention)}
    found: dict[int, dict[str, torch.Tensor]] = {}
    for name, (index, kind) in scales_of.items():
        if index in layers and kind in ("k", "v"):
            found.setdefault(index, {})[kind] = _read(checkpoint, name, layers[index].spec.num_kv_heads)
    for index, scales in found.items():
        if layers[index].spec.value_size:
            scales["v"] = scales.setdefault("k", scales.get("v", torch.empty(0)))
        if len(scales) < 2:
            there = next(iter(scales))
            raise ValueError(f"layer {index} of the checkpoint has a {there}_scale, but not its {_OTHER[there]}_scale")
        layers[index].stored_scales = scales["k"].to(device), scales["v"].to(device)


_OTHER = {"k": "v", "v": "k"}


def _read(checkpoint: Checkpoint, name: str, num_kv_heads: int) -> torch.Tensor:
    entry = checkpoint.entries[name]
    if entry.dtype not in DTYPES:
        raise ValueError(f"{plain(name)}: expected one of {', '.join(DTYPES)}, found {entry.dtype}")
    if math.prod(entry.shape) not in (1, num_kv_heads):
        raise ValueError(
            f"{plain(name)}: expected one scale or one for each of {num_kv_heads} KV heads, found {entry.shape}"
        )
    scale = torch.empty(entry.shape, dtype=torch.float32)
    checkpoint.read(name, scale)
    if not bool((scale.isfinite() & (scale > 0)).all()):
        raise ValueError(f"{plain(name)}: scales are positive numbers, found {scale.flatten().tolist()}")
    return scale.flatten().expand(num_kv_heads).contiguous()
