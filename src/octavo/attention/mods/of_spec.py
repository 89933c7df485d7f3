"""A layer's AttentionSpec as AttentionMods, for backends that know nothing else.

Owns the translation. Knows no kernel. Invariant: the mods do what the spec's words say, in their order: the model's
cap, its slopes, then the user's mods.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.attention.mods import NO_MODS, AttentionMods, and_
from octavo.attention.mods.factories import alibi, chunked, sliding_window, soft_cap
from octavo.cache.specs import AttentionSpec


def mods_of_spec(spec: AttentionSpec, device: torch.device) -> AttentionMods:
    """Everything that a spec says about masks and scores. Slopes are put on `device`."""
    parts = [NO_MODS if spec.causal else AttentionMods(causal=False, name="both ways")]
    if spec.window:
        parts.append(sliding_window(spec.window) if spec.causal else _near(spec.window))
    if spec.chunk:
        parts.append(chunked(spec.chunk) if spec.causal else _uncausal(chunked(spec.chunk)))
    if spec.soft_cap:
        parts.append(soft_cap(spec.soft_cap))
    if spec.alibi_slopes:
        parts.append(alibi(torch.tensor(spec.alibi_slopes, dtype=torch.float32, device=device)))
    whole = and_(*(part for part in parts if part.mask_mod or part.score_mod), spec.mods)
    return whole if spec.causal and spec.mods.causal else _uncausal(whole)


def _uncausal(mods: AttentionMods) -> AttentionMods:
    return AttentionMods(
        mask_mod=mods.mask_mod,
        score_mod=mods.score_mod,
        causal=False,
        some=mods.some,
        every=mods.every,
        fields=mods.fields,
        name=mods.name,
    )


def _near(window: int) -> AttentionMods:
    """Keys less than `window` away, on both sides."""

    def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (q_idx - kv_idx < window) & (kv_idx - q_idx < window)

    def some(b: Tensor, q_first: Tensor, q_last: Tensor, kv_first: Tensor, kv_last: Tensor) -> Tensor:
        return (q_first - kv_last < window) & (kv_first - q_last < window)

    def every(b: Tensor, q_first: Tensor, q_last: Tensor, kv_first: Tensor, kv_last: Tensor) -> Tensor:
        return (q_last - kv_first < window) & (kv_last - q_first < window)

    return AttentionMods(mask_mod=near, causal=False, some=some, every=every, name=f"within {window}")
