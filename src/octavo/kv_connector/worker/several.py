"""The worker's half of `multi`: each child is asked by its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.kv_connector.worker import NO_WORKER_CONNECTOR, WorkerConnector
from octavo.ops.arrivals import Arrivals


class SeveralWorkers:
    """The worker's halves of several connectors. Children are asked one by one, but for what a step asks."""

    begin = NO_WORKER_CONNECTOR.begin
    begin_now = NO_WORKER_CONNECTOR.begin_now
    take = NO_WORKER_CONNECTOR.take
    cancel = NO_WORKER_CONNECTOR.cancel
    wait = NO_WORKER_CONNECTOR.wait
    reset = NO_WORKER_CONNECTOR.reset
    stats = NO_WORKER_CONNECTOR.stats

    def __init__(self, children: Sequence[WorkerConnector]) -> None:
        """In the order in which the scheduler's halves are."""
        self._children = children

    def of(self, place: int, name: str, *args: Any) -> Any:
        """What the child at `place` has under `name`."""
        return getattr(self._children[place], name)(*args)

    def arrivals(self, number: int) -> Arrivals:
        """See WorkerConnector. One child at most has some."""
        found = (child.arrivals(number) for child in self._children)
        return next(filter(None, found), NO_WORKER_CONNECTOR.arrivals(number))

    def close(self) -> None:
        """See WorkerConnector. May be called after the children's own."""
        for child in self._children:
            child.close()
