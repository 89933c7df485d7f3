"""Arrivals: copies into a cache that are ordered, and that a step waits for; and gates, at which its layers do.

Owns the events behind which bytes are there. Does not know what is copied, or who computes. Invariants: what a stream
is given behind `before_all` runs behind all copies, and what a graph has behind a layer's gate behind that layer's; no
thread waits but in `wait`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from octavo.ops import captures

_LOG = logging.getLogger(__name__)
_MOST_GATES = (
    8  # what is computed behind the last copy are an eighth of the layers; each costs a step some microseconds
)


class Arrivals:
    """Copies of one load, on one stream."""

    def __init__(self, begun: torch.cuda.Event | None = None, done: torch.cuda.Event | None = None) -> None:
        """begun: behind which the first copy is made. done: behind all copies. None: all is there."""
        self._begun, self._done = begun, done

    def __bool__(self) -> bool:
        """Whether there is anything to wait for."""
        return self._done is not None

    def before_all(self) -> None:
        """Let the current stream wait for every copy."""
        if self._done is not None:
            self._done.wait()

    def have_come(self) -> bool:
        """Whether all copies are done."""
        return self._done is None or bool(self._done.query())

    def wait(self) -> None:
        """Wait for all copies."""
        if self._done is not None:
            self._done.synchronize()

    @property
    def seconds(self) -> float:
        """That the copies took, once they have come; 0: they were made at once."""
        return self._begun.elapsed_time(self._done) / 1e3 if self._begun is not None and self._done is not None else 0.0


NO_ARRIVALS: Final = Arrivals()


class Gates:
    """Events that a graph waits for within, each ahead of some layers; the copies of a load record them.

    Who records them does so before the graph is launched. Until a first load all are open, as they are behind each.
    """

    def __init__(self, num_layers: int, events: Sequence[torch.cuda.Event]) -> None:
        """events: each for as many layers as any, or one less; recorded before. More than layers: some are for none."""
        ends = [num_layers * (place + 1) // len(events) for place in range(len(events))]
        self._ends = list(zip(ends, events, strict=True))
        begins = [0, *ends][: len(events)]
        self._of_first = {begin: event for begin, (end, event) in zip(begins, self._ends, strict=True) if begin < end}

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._of_first)

    def before(self, layer: int) -> None:
        """Let the current stream, or the graph that it captures, wait for what layer number `layer` reads."""
        event = self._of_first.get(layer)
        if event is not None:
            event.wait()

    def in_turn(self, page_of_layer: Sequence[int]) -> Iterator[tuple[int, torch.cuda.Event]]:
        """(pages that have to be there, the event to record then), in order. page_of_layer: of all layers, or more."""
        for end, event in self._ends:
            yield 1 + max(page_of_layer[:end], default=-1), event


NO_GATES: Final = Gates(0, ())


def make_gates(num_layers: int, device: torch.device) -> Gates:
    """Gates for graphs of so many layers, or NO_GATES where a graph of `device` waits for no event from outside."""
    if device.type != "cuda":
        return NO_GATES
    try:
        with torch.cuda.device(device):
            events = [torch.cuda.Event(external=True) for _ in range(min(_MOST_GATES, num_layers))]
            for event in events:  # there is none before its first record
                event.record()
            if _waits_within(events[0], device):
                return Gates(num_layers, events)
    except (TypeError, RuntimeError) as error:  # of a torch or a driver that has none
        _LOG.info("graphs wait for blocks that arrive as a whole: %s", error)
    return NO_GATES


def _waits_within(event: torch.cuda.Event, device: torch.device) -> bool:
    """Whether a graph that waits for `event` can be made, and runs."""
    graph, pool, found = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle(), torch.zeros(1, device=device)
    captures.wait_for_device(device)
    with captures.capturing(), torch.cuda.stream(torch.cuda.Stream(device)):
        graph.capture_begin(pool=pool, capture_error_mode="relaxed")
        try:
            event.wait()
            found.add_(1)
        finally:
            captures.end(graph, pool)
        graph.replay()
    captures.wait_for_device(device)
    return bool(found.item() == 1)
