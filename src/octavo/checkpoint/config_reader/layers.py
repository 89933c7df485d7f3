"""What each layer's attention sees, and how many positions there are.

Owns windows, layers whose heads do not turn, and the fields that place them. Rotary embeddings are read by `rope`.
Invariant: a window that never cuts is no window.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.checkpoint.arch import LayerKind, Rope
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
    turning = _turning(fields, family, num_layers)
    sliding = _sliding(fields, family, turning)
    if family.unturned == "full" and not fields.is_null("sliding_window"):
        turning = sliding
    window = fields.integer("sliding_window", 1, 1 << 31, 4096) if any(sliding) else 0
    ropes = {
        (is_sliding, turns): read_rope(fields, family, is_sliding, trained, rotary_head) if turns else Rope(kind="none")
        for is_sliding, turns in set(zip(sliding, turning, strict=True))
    }
    max_position = max(positions_of(rope, family, trained) for rope in ropes.values())
    if max_position > MAX_POSITION:
        fields.refuse("max_position_embeddings", trained, f"{max_position} when scaled, over {MAX_POSITION}")
    window = 0 if window >= max_position else window  # a window that never cuts is no window
    kinds = {own: LayerKind(window=window * own[0], rope=rope) for own, rope in ropes.items()}
    dynamic = any(rope.kind == "dynamic" for rope in ropes.values())
    layers = tuple(kinds[own] for own in zip(sliding, turning, strict=True))
    return Seen(layers, max_position, trained if dynamic else 0)


def _turning(fields: Fields, family: Family, num_layers: int) -> list[bool]:
    """Per layer, whether its heads turn at all, as far as windows have no say in it."""
    if family.unturned != "field":
        return [True] * num_layers
    period = fields.integer("no_rope_layer_interval", 1, 1 << 20, 4)
    turning = fields.get("no_rope_layers", [int((layer + 1) % period != 0) for layer in range(num_layers)])
    marks = turning if isinstance(turning, list) else []
    if len(marks) < num_layers or any(type(turns) is not int or turns not in (0, 1) for turns in marks):
        fields.refuse("no_rope_layers", turning, f"{num_layers} of 0 and 1 are needed")
    return [turns == 1 for turns in marks[:num_layers]]


def _sliding(fields: Fields, family: Family, turning: list[bool]) -> list[bool]:
    """Per layer, whether its attention is windowed."""
    num_layers = len(turning)
    windowed = family.sliding != "none" and (not family.window_flag or fields.flag("use_sliding_window", False))
    if fields.is_null("sliding_window"):
        windowed = False
    types = fields.get("layer_types")
    asked = LAYER_TYPES[1] in types if isinstance(types, list) else family.sliding == "pattern"
    if fields.is_null("sliding_window") and asked:
        fields.refuse("sliding_window", None, "some layers have a window: say how many tokens it holds")
    if types is not None:
        known = LAYER_TYPES if windowed else LAYER_TYPES[:1]
        if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
            fields.refuse("layer_types", types, f"{num_layers} of {', '.join(known)} are needed")
        return [kind == LAYER_TYPES[1] for kind in types]
    if not windowed:
        return [False] * num_layers
    if family.sliding == "unturned":
        return [not turns for turns in turning]
    if family.sliding == "upper":
        first = fields.integer("max_window_layers", 0, 1 << 20, 28)
        return [layer >= first for layer in range(num_layers)]
    if family.sliding == "pattern":
        period = fields.integer("sliding_window_pattern", 1, 1 << 20, fields.get("_sliding_window_pattern", 6))
        return [(layer + 1) % period != 0 for layer in range(num_layers)]
    return [True] * num_layers
