"""What a layer of latent attention makes of its states: plain data of `octavo.ops.latent`, on a CPU or a GPU."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class LatentState:
    """What a layer makes of its states."""

    cos_sin: torch.Tensor  # `rope_table` of rotary size rope
    weight: torch.Tensor  # [latent] float32, of the RMS norm
    eps: float
    interleaved: bool  # channels 2i and 2i + 1 turn together
    key_scale: torch.Tensor | None = None  # [1] float32, of a quantized cache
