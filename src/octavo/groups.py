"""Cache groups: which layers share a block table.

Owns CacheGroup and the rule that deals a model's layers into groups. A group's layers see the same tokens (all, or a
sliding window), so one block table serves them. All groups draw from one pool: a block holds one block's K and V for as
many layers as the largest group has, and block id b means the same bytes to every group. Does not know who owns which
block. Invariant: every attention layer is in exactly one group.
"""

from __future__ import annotations

import dataclasses

from octavo.arch import Arch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CacheGroup:
    """Layers that share one block table. `layers[s]` uses the s-th layer slot of a block."""

    kind: str  # full | sliding
    window: int  # tokens that a query sees, itself included; 0 for full
    block_size: int  # tokens per manager block
    layers: tuple[int, ...]
    tokens_per_state: int = 1  # tokens that one stored state stands for: more than 1 in compressed caches
    zero_fresh_blocks: bool = False  # for operators that read bytes that nobody has written


def make_groups(arch: Arch, block_size: int) -> tuple[CacheGroup, ...]:
    """Deal the layers of `arch` into groups, full attention first.

    Layers of equal window form a class. The smallest class sets the group size (so that few layer slots of a block
    stay empty) unless the largest class is at most half as large again: then one group per class wastes less.
    Layers of a class are dealt round robin.
    """
    classes: dict[int, list[int]] = {}
    for layer, facts in enumerate(arch.layers):
        classes.setdefault(facts.window, []).append(layer)
    smallest, largest = min(map(len, classes.values())), max(map(len, classes.values()))
    size = largest if largest * 2 <= smallest * 3 else smallest
    groups = []
    for window in sorted(classes):
        layers = classes[window]
        num_groups = -(-len(layers) // size)
        for first in range(num_groups):
            kind = "sliding" if window else "full"
            members = tuple(layers[first::num_groups])
            groups.append(CacheGroup(kind=kind, window=window, block_size=block_size, layers=members))
    return tuple(groups)
