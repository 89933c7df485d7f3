"""Config.json of Command R and Command A: an epsilon of layer norms, and what logits are multiplied by.

Owns those fields and what of theirs is refused. Invariant: logits are divided by the inverse of `logit_scale`.
"""

from __future__ import annotations

import dataclasses

from octavo.checkpoint.arch import Arch
from octavo.checkpoint.config_reader.checkpoint import read_fields
from octavo.checkpoint.config_reader.families import Family
from octavo.checkpoint.config_reader.fields import Fields


def read_cohere(fields: Fields, family: Family) -> Arch:
    """The facts of a Command R. Raises ValueError, one line, for what Octavo does not run."""
    fields.only("use_qk_norm", False)
    return _with_own_fields(fields, read_fields(fields, family))


def read_cohere2(fields: Fields, family: Family) -> Arch:
    """The facts of a Command R7B or A, whose layers turn where they have a window: without its size none does."""
    if fields.is_null("sliding_window"):
        fields.refuse("sliding_window", None, "say how many tokens a window holds")
    return _with_own_fields(fields, read_fields(fields, family))


def _with_own_fields(fields: Fields, arch: Arch) -> Arch:
    return dataclasses.replace(
        arch,
        norm_eps=fields.number("layer_norm_eps", 1e-12, 1.0, 1e-5),
        logit_divisor=1.0 / fields.number("logit_scale", 1e-6, 1e6, 0.0625),
    )
