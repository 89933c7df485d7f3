"""Arrivals: copies into a cache that are ordered, and that a step waits for layer by layer.

Owns the events behind which bytes are there. Does not know what is copied, or who computes. Invariant: what a stream is
given behind `before` runs behind the copies of that layer; no thread waits but in `wait`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch


class Arrivals:
    """Copies of one stream, in the order of their events."""

    def __init__(
        self, begun: torch.cuda.Event | None, events: Sequence[torch.cuda.Event], place_of_layer: Sequence[int]
    ) -> None:
        """begun: behind which the first copy is made. place_of_layer: by a layer's number, its event.

        The last event is behind all copies. No event: all is there.
        """
        self._begun, self._events, self._place_of_layer = begun, events, place_of_layer
        self._num_passed = 0  # events that the computing stream waits for already

    def __bool__(self) -> bool:
        """Whether there is anything to wait for."""
        return bool(self._events)

    def before(self, layer: int) -> None:
        """Let the current stream wait for what layer number `layer` reads."""
        if layer < len(self._place_of_layer):  # those behind keep nothing
            self._pass(self._place_of_layer[layer] + 1)

    def before_all(self) -> None:
        """Let the current stream wait for every copy."""
        self._pass(len(self._events))

    def _pass(self, count: int) -> None:
        if count > self._num_passed:  # an event is behind those before it
            self._num_passed = count
            self._events[count - 1].wait()

    def have_come(self) -> bool:
        """Whether all copies are done."""
        return not self._events or bool(self._events[-1].query())

    def wait(self) -> None:
        """Wait for all copies."""
        if self._events:
            self._events[-1].synchronize()

    @property
    def seconds(self) -> float:
        """That the copies took, once they have come; 0: they were made at once."""
        return self._begun.elapsed_time(self._events[-1]) / 1e3 if self._begun is not None else 0.0


NO_ARRIVALS: Final = Arrivals(None, (), ())
