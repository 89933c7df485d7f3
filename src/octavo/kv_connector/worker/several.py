"""The worker's half of `multi`: each child is asked by its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.kv_connector.worker import NO_WORKER_CONNECTOR, WorkerConnector


class SeveralWorkers:
    """The worker's halves of several connectors. All but `of` is never asked: children are asked one by one."""

    begin = NO_WORKER_CONNECTOR.begin
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

    def close(self) -> None:
        """See WorkerConnector. May be called after the children's own."""
        for child in self._children:
            child.close()
