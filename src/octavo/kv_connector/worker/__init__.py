"""The worker's half of connectors: it moves the bytes, beside the steps.

Owns the protocol that a worker speaks, and NO_WORKER_CONNECTOR, which moves nothing. What is known of an order before
it is given: all steps that touch its blocks are done, and no later one touches them before it is reported. So nothing
here waits for a step, no step waits here, and bytes lie where later steps read them before a report is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from octavo.kv_connector import ConnectorStats
from octavo.ops.arrivals import NO_ARRIVALS, Arrivals

if TYPE_CHECKING:
    from octavo.kv_connector.orders import Order, Report


class WorkerConnector(Protocol):
    """One worker's half. All calls come from the thread that gives orders; none but `wait` takes long."""

    def begin(self, order: Order) -> None:
        """Begin an order."""

    def begin_now(self, order: Order) -> bool:
        """Begin a load, so that nothing of it can fail any more; a step waits for its `arrivals`. Does not wait.

        False: nothing was begun.
        """

    def arrivals(self, number: int) -> Arrivals:
        """What a step waits for of a load that was begun so."""

    def take(self) -> Sequence[Report]:
        """What has ended since the last call."""

    def cancel(self, number: int) -> bool:
        """Stop an order. True: it touches no block from now on, and is not reported."""

    def wait(self, seconds: float) -> None:
        """Return when an order has ended, and after `seconds` at the latest."""

    def reset(self) -> bool:
        """Forget what is stored, as far as it is this engine's own; False: it could not."""

    def stats(self) -> ConnectorStats:
        """The figures of this moment."""

    def close(self) -> None:
        """Stop. No order is begun any more."""


class _NoWorkerConnector:
    """Moves nothing."""

    def begin(self, order: Order) -> None:
        """See WorkerConnector."""
        raise AssertionError("an engine without a connector gives no orders")

    def begin_now(self, order: Order) -> bool:
        """See WorkerConnector."""
        return False

    def arrivals(self, number: int) -> Arrivals:
        """See WorkerConnector."""
        return NO_ARRIVALS

    def take(self) -> Sequence[Report]:
        """See WorkerConnector."""
        return ()

    def cancel(self, number: int) -> bool:
        """See WorkerConnector."""
        return True

    def wait(self, seconds: float) -> None:
        """See WorkerConnector."""

    def reset(self) -> bool:
        """See WorkerConnector."""
        return True

    def stats(self) -> ConnectorStats:
        """See WorkerConnector."""
        return ConnectorStats()

    def close(self) -> None:
        """See WorkerConnector."""


NO_WORKER_CONNECTOR: Final[WorkerConnector] = _NoWorkerConnector()
