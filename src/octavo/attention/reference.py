"""The reference backend: eager float32 attention on any device.

Owns nothing but the request fields; `octavo.ops.attention.paged_attention_eager` does the work, row by row. It is the
oracle of every other backend, made to be obviously right and not to be fast: a user's mods are called for each
(head, query, key), in logical positions. Invariant: a row's result depends on its own queries, keys and values only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from octavo.attention.base import NO_SETUP, Capability, LayerTensors, Setup, mask_spec_of
from octavo.attention.frame import BackendFrame
from octavo.attention.mods import NO_MODS, AttentionMods, at_work
from octavo.cache.specs import AttentionSpec
from octavo.ops.attention import ChangeScores, paged_attention_eager


class ReferenceBackend(BackendFrame):
    """An AttentionBackend that takes every AttentionSpec."""

    name = "reference"
    capability = Capability(
        devices=("cpu", "cuda"),
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        chunk=True,
        alibi=True,
        sinks=True,
        non_causal=True,
        latent=True,
        mods=True,
        cache_dtypes=(torch.float8_e4m3fn, torch.int8, torch.float32, torch.bfloat16, torch.float16),
    )

    def __init__(
        self, specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device, setup: Setup = NO_SETUP
    ) -> None:
        """See BackendFrame."""
        super().__init__(specs, dtype, device, setup)
        self._fields = setup.fields

    def attend(
        self, q: torch.Tensor, kv: torch.Tensor, spec: AttentionSpec, out: torch.Tensor, layer: LayerTensors
    ) -> None:
        """See BackendFrame."""
        mods, mask_spec = spec.mods, mask_spec_of(spec)
        with at_work(mods, self._fields):
            paged_attention_eager(
                q,
                kv,
                *self.inputs.live,
                out,
                mask_spec=dataclasses.replace(mask_spec, causal=mask_spec.causal and mods.causal),
                value_size=spec.value_size,
                alibi_slopes=spec.alibi_slopes,
                sinks=layer.sinks,
                key_scale=layer.key_scale,
                value_scale=layer.value_scale,
                change=None if mods is NO_MODS else apply_mods(mods, self.inputs.rows),
            )


def apply_mods(mods: AttentionMods, rows: torch.Tensor | None) -> ChangeScores:
    """What mods do to scores, for `paged_attention_eager`. rows: the table row of each row that a call may name."""

    def call(score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        if mods.score_mod is not None:
            score = mods.score_mod(score, b, h, q, kv)
        return torch.where(mods.visible(b, h, q, kv), score, float("-inf"))

    # each level takes one axis away, so that the mods see scalars, as they do in a kernel
    per_key = torch.vmap(call, (0, None, None, None, 0))
    per_query = torch.vmap(per_key, (0, None, None, 0, None))
    per_head = torch.vmap(per_query, (0, None, 0, None, None))

    def change(scores: torch.Tensor, row: int, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        b = torch.tensor(row, device=scores.device) if rows is None else rows[row]
        heads = torch.arange(scores.shape[0] * scores.shape[1], device=scores.device)
        changed: torch.Tensor = per_head(scores.flatten(0, 1), b, heads, positions, columns)
        return changed.view_as(scores)

    return change
