"""Layouts: where the bytes of a token's K and V lie.

Owns the physical orders of the logical axes [layer, block, head, token, channel] and the views over one backing
buffer. A channel axis holds K then V of one head. Does not know who owns a block or which backend reads it. Invariant:
every layer's view is [block, head, token, channel] with a contiguous channel axis, whatever the layout.
"""

from __future__ import annotations

import dataclasses
import math

import torch

_AXES = "LBHNC"


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """A physical order of the logical axes, outermost first, named by their letters."""

    name: str

    def strides(self, shape: tuple[int, int, int, int, int]) -> tuple[int, ...]:
        """Element strides of the logical axes for logical sizes `shape` = (L, B, H, N, C)."""
        strides, step = [0] * 5, 1
        for letter in reversed(self.name):
            axis = _AXES.index(letter)
            strides[axis] = step
            step *= shape[axis]
        return tuple(strides)

    def view(self, buffer: torch.Tensor, shape: tuple[int, int, int, int, int]) -> torch.Tensor:
        """The logical view [L, B, H, N, C] of a flat `buffer` with exactly as many elements."""
        assert buffer.numel() == math.prod(shape), f"a buffer of {buffer.numel()} elements cannot be viewed as {shape}"
        return buffer.as_strided(shape, self.strides(shape))


LAYOUTS = {name: Layout(name) for name in ("LBHNC", "LBNHC", "BLHNC", "BLNHC")}
_ALIASES = {"HND": "LBHNC", "NHD": "LBNHC"}


def layout_by_name(name: str) -> Layout:
    """The layout called `name` or aliased so. Raises ValueError naming the known ones."""
    layout = LAYOUTS.get(_ALIASES.get(name, name))
    if layout is None:
        raise ValueError(f"unknown cache layout {name!r}: known are {', '.join([*LAYOUTS, *_ALIASES])}")
    return layout
