"""A drafter's layers among the engine's, where they are the last ones.

Owns their numbers in a pass. Knows neither rows nor drafts. Invariant: a pass of a drafter, or of one module of
several, sees its own layers alone, numbered from 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from octavo.attention.base import ForwardContext, LayerContext


class OwnLayers:
    """Gives each pass its layers. The engine's are the same ones in every step."""

    def __init__(self, num_layers: Sequence[int]) -> None:
        """num_layers: of each module, in order."""
        self._num_layers = num_layers
        self._all: Sequence[LayerContext] = ()  # the engine's
        self._own: list[Sequence[LayerContext]] = []  # of these each module's

    def of(self, context: ForwardContext, module: int = 0) -> ForwardContext:
        """`context`, of all of the engine's layers, for a pass of that module."""
        if context.layers is not self._all:
            first, self._all, self._own = len(context.layers) - sum(self._num_layers), context.layers, []
            for count in self._num_layers:
                self._own.append(context.layers[first : first + count])
                first += count
        return dataclasses.replace(context, layers=self._own[module])
