"""Rotary embeddings, from either of Hugging Face's two forms, and how many positions they cover.

Owns `rope_parameters`, `rope_scaling` and what older files say beside them. Computes no angle. Invariant: what is let
through, `octavo.ops.rope` turns by transformers' formulas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from octavo.checkpoint.arch import Rope
from octavo.checkpoint.config_reader.families import Family
from octavo.checkpoint.config_reader.fields import Fields

LAYER_TYPES = ("full_attention", "sliding_attention")
MAX_POSITION = 1 << 24
_KINDS = ("default", "linear", "proportional", "dynamic", "llama3", "yarn", "longrope")
_OLD_NAMES = {"su": "longrope"}


def read_rope(fields: Fields, family: Family, is_sliding: bool, trained: int, rotary_head: int) -> Rope:
    """The rotary embedding of the full or of the sliding layers.

    trained: max_position_embeddings; rotary_head: channels of a head, or of its part that is there to turn.
    """
    inner, default_theta = _values(fields, family, is_sliding)
    kind = inner.get("rope_type", inner.get("type", "default"))
    kind = {**_OLD_NAMES, **family.old_ropes}.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in _KINDS:
        fields.refuse("rope_type", kind, f"known are {', '.join(_KINDS)}")
    facts: dict[str, Any] = {
        "kind": kind,
        "theta": inner.number("rope_theta", 1.0, 1e15, default_theta),
        "interleaved": family.interleaved or (family.latent and fields.flag("rope_interleave", True)),
    }
    if kind == "proportional":
        share = _share(fields, inner)
        factor = inner.number("factor", 1e-3, 1e6, 1.0)
        return Rope(**facts, factor=factor, num_turning=int(share * rotary_head // 2))
    facts["rotary_size"] = _rotary_size(fields, inner, family, rotary_head)
    if kind == "default":
        return Rope(**facts)
    original = inner.integer("original_max_position_embeddings", 1, MAX_POSITION, trained, null=trained)
    inferred = trained / original if kind in ("yarn", "longrope") else None
    facts["factor"] = factor = inner.number("factor", 1e-3, 1e6, inferred, null=inferred)
    if kind == "linear":
        return Rope(**facts)
    if kind == "dynamic":  # stretched beyond what it was trained for
        return Rope(**facts, original_max_position=trained)
    facts["original_max_position"] = original
    if kind == "yarn":
        return Rope(**facts, **_yarn(inner, factor))
    if kind == "longrope":
        return Rope(**facts, **_longrope(inner, factor, original, (facts["rotary_size"] or rotary_head) // 2))
    low, high = (inner.number(name, 1e-6, 1e6) for name in ("low_freq_factor", "high_freq_factor"))
    if low >= high:
        fields.refuse("high_freq_factor", high, f"it must be greater than low_freq_factor={low:g}")
    return Rope(**facts, low_freq_factor=low, high_freq_factor=high)


def positions_of(rope: Rope, family: Family, trained: int) -> int:
    """Positions that a rotary embedding covers, where max_position_embeddings is `trained`."""
    if rope.kind == "yarn":
        return max(trained, int(rope.original_max_position * rope.factor))
    if rope.kind == "dynamic" or (rope.kind == "linear" and not family.gemma):  # Gemma's config counts the factor in
        return max(trained, int(trained * rope.factor))
    return trained


def yarn_mscale(factor: float, mscale: float) -> float:
    """What YaRN multiplies by where `factor` stretches."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _values(fields: Fields, family: Family, is_sliding: bool) -> tuple[Fields, float]:
    """The fields of one kind of layer's rotary embedding, and its theta where they do not say."""
    given = fields.mapping("rope_parameters")
    nested = any(isinstance(value, Mapping) for value in given.values())
    if family.full_scaling and given and not nested:
        fields.refuse("rope_parameters", given, "full_attention and sliding_attention are needed, an object each")
    values = dict(Fields(given, fields.where).mapping(LAYER_TYPES[is_sliding]) if nested else given)
    if not (family.full_scaling and is_sliding):
        values.update(fields.mapping("rope_scaling"))
    if fields.get("original_max_position_embeddings") is not None:
        values["original_max_position_embeddings"] = fields.get("original_max_position_embeddings")
    name = family.local_theta if is_sliding else "rope_theta"
    usual = 1e4 if family.gemma and is_sliding else family.theta
    return Fields(values, fields.where), fields.values.get(name, usual)


def _share(fields: Fields, inner: Fields) -> float:
    """Of a head's channels, that which turns."""
    whole = fields.number("partial_rotary_factor", 1e-3, 1.0, 1.0, null=1.0)
    return inner.number("partial_rotary_factor", 1e-3, 1.0, whole, null=1.0)


def _rotary_size(fields: Fields, inner: Fields, family: Family, head_size: int) -> int:
    """Channels that turn; 0: all."""
    share = _share(fields, inner)
    if share == 1.0:
        return 0
    size = int(head_size * share)
    if family.latent or size % 2 or not size:
        why = "of a head's channels an even number can turn, and of latent heads all"
        fields.refuse("partial_rotary_factor", share, why)
    return size


def _yarn(fields: Fields, factor: float) -> dict[str, Any]:
    """The ends of YaRN's ramp, in rotations, and what cos and sin are multiplied by."""
    fast, slow = (fields.get(name) or usual for name, usual in (("beta_fast", 32), ("beta_slow", 1)))
    fields = Fields({**fields.values, "beta_fast": fast, "beta_slow": slow}, fields.where)
    fast, slow = (fields.number(name, 1e-6, 1e6) for name in ("beta_fast", "beta_slow"))
    if fast <= slow:
        fields.refuse("beta_fast", fast, f"it must be greater than beta_slow={slow:g}")
    amplitude = yarn_mscale(factor, 1.0)
    if fields.get("mscale") and fields.get("mscale_all_dim"):
        own, shared = (fields.number(name, 0, 1e3) for name in ("mscale", "mscale_all_dim"))
        amplitude = yarn_mscale(factor, own) / yarn_mscale(factor, shared)
    return {
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": fields.flag("truncate", True),
        "amplitude": fields.number("attention_factor", 1e-6, 1e3, amplitude, null=amplitude),
    }


def _longrope(fields: Fields, factor: float, original: int, num_pairs: int) -> dict[str, Any]:
    """A factor per pair of channels for at most `original` tokens, one for more (LongRoPE, arXiv 2402.13753)."""
    amplitude = 1.0 if factor <= 1 or original <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return {
        "short_factors": fields.numbers("short_factor", num_pairs, 1e-6, 1e6),
        "long_factors": fields.numbers("long_factor", num_pairs, 1e-6, 1e6),
        "amplitude": fields.number("attention_factor", 1e-6, 1e3, amplitude, null=amplitude),
    }
