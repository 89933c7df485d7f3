"""Graphs of an engine on a CPU: what they hold is issued again at each replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from octavo.device.graphs import EAGER, GraphKey, GraphPool, Issue
from octavo.ops.arrivals import NO_ARRIVALS, NO_GATES, Arrivals, Gates


class _Issued:
    """In place of a CUDA graph."""

    def __init__(self, runner: Any, key: GraphKey) -> None:
        self._runner, self._key = runner, key
        self.output = torch.empty(0)

    def replay(self) -> None:
        self.output = self._runner._record(self._key)


class EagerGraphs(GraphPool):
    """Issues in place of each replay what the graph would hold, padded alike; counts them."""

    def __init__(self, runner: Any, keys: list[GraphKey], gates: Gates = NO_GATES) -> None:
        super().__init__(keys, gates)
        self.replayed: list[GraphKey] = []
        self._runner = runner

    def capture_first(self, issue: Issue, rehearse: Callable[[GraphKey], object], *_: object, **__: object) -> None:
        for keys in (self._mixed, self._decode):
            rehearse(keys[0])  # once: it has no effect

    def missing_keys(self) -> list[GraphKey]:
        return []

    @property
    def replayed_kinds(self) -> set[tuple[bool, bool]]:
        """Of what was replayed: whether it decodes, and gives logits."""
        return {(key.is_decode, key.gives_logits) for key in self.replayed}

    def has(self, key: GraphKey, issue: Any) -> bool:
        return key is not EAGER

    def replay(self, key: GraphKey, arrivals: Arrivals = NO_ARRIVALS) -> torch.Tensor:
        self.replayed.append(key)
        issued = _Issued(self._runner, key)
        self._graphs[key] = issued, issued.output  # type: ignore[assignment]
        super().replay(key, arrivals)
        return issued.output
