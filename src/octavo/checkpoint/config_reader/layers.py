"""What each layer's attention sees, and how many positions there are.

Owns windows and the fields that place them. Rotary embeddings are read by `rope`. Invariant: a window that never cuts
is no window.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.checkpoint.arch import LayerKind
from octavo.checkpoint.config_reader.families import Family
from octavo.checkpoint.config_reader.fields import Fields
from octavo.checkpoint.config_reader.rope import LAYER_TYPES, MAX_POSITION, positions_of, read_rope


class Seen(NamedTuple):
    """What the layers see."""

    layers: tuple[LayerKind, ...]
    max_position: int  # that the rotary embeddings cover
    default_length: int  # see Arch


def read_layers(fields: Fields, family: Family, rotary_head: int) -> Seen:
    """rotary_head: see `read_rope`."""
    num_layers = fields.integer("num_hidden_layers", 1, 1024)
    trained = fields.integer("max_position_embeddings", 1, MAX_POSITION)
    sliding = _sliding(fields, family, num_layers)
    window = fields.integer("sliding_window", 1, 1 << 31, 4096) if any(sliding) else 0
    ropes = {is_sliding: read_rope(fields, family, is_sliding, trained, rotary_head) for is_sliding in set(sliding)}
    max_position = max(positions_of(rope, family, trained) for rope in ropes.values())
    if max_position > MAX_POSITION:
        fields.refuse("max_position_embeddings", trained, f"{max_position} when scaled, over {MAX_POSITION}")
    window = 0 if window >= max_position else window  # a window that never cuts is no window
    kinds = {is_sliding: LayerKind(window=window * is_sliding, rope=rope) for is_sliding, rope in ropes.items()}
    dynamic = any(rope.kind == "dynamic" for rope in ropes.values())
    return Seen(tuple(kinds[is_sliding] for is_sliding in sliding), max_position, trained if dynamic else 0)


def _sliding(fields: Fields, family: Family, num_layers: int) -> list[bool]:
    """Per layer, whether its attention is windowed."""
    windowed = family.sliding != "none" and (not family.window_flag or fields.flag("use_sliding_window", False))
    if "sliding_window" in fields.values and fields.values["sliding_window"] is None:
        windowed = False
    types = fields.get("layer_types")
    if types is not None:
        known = LAYER_TYPES if windowed else LAYER_TYPES[:1]
        if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
            fields.refuse("layer_types", types, f"{num_layers} of {', '.join(known)} are needed")
        return [kind == LAYER_TYPES[1] for kind in types]
    if not windowed:
        return [False] * num_layers
    if family.sliding == "upper":
        first = fields.integer("max_window_layers", 0, 1 << 20, 28)
        return [layer >= first for layer in range(num_layers)]
    if family.sliding == "pattern":
        period = fields.get("sliding_window_pattern", fields.get("_sliding_window_pattern", 6))
        if type(period) is not int or period < 1:
            fields.refuse("sliding_window_pattern", period, "a positive integer is needed")
        return [(layer + 1) % period != 0 for layer in range(num_layers)]
    return [True] * num_layers
