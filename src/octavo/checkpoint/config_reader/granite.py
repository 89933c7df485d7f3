"""Granite's config.json: a Llama whose embeddings, scores, logits and what each layer adds are multiplied.

Owns those four fields. Invariant: the stream is counted in units of the residual multiplier, so sums with it are plain
ones and the layers Llama's; epsilons are divided by its square, so norms give what they gave.
"""

from __future__ import annotations

import dataclasses

from octavo.checkpoint.arch import Arch
from octavo.checkpoint.config_reader.checkpoint import read_fields
from octavo.checkpoint.config_reader.families import Family
from octavo.checkpoint.config_reader.fields import Fields


def read_granite(fields: Fields, family: Family, *, null_scale: bool = False) -> Arch:
    """The facts of a Granite. Raises ValueError, one line, for what Octavo does not run.

    null_scale: an `attention_multiplier` of null is the scale of plain attention, as transformers computes then.
    """
    arch = read_fields(fields, family)
    residual = _factor(fields, "residual_multiplier")
    return dataclasses.replace(
        arch,
        norm_eps=arch.norm_eps / residual**2,
        stream_unit=residual,
        embedding_scale=_factor(fields, "embedding_multiplier") / residual,
        attention_scale=_factor(fields, "attention_multiplier", arch.attention_scale if null_scale else None),
        logit_divisor=_factor(fields, "logits_scaling"),
    )


def _factor(fields: Fields, name: str, null: float | None = None) -> float:
    return fields.number(name, 1e-6, 1e6, 1.0, null=null)
