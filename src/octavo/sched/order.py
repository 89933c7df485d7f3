"""The order in which requests are served.

Owns the policies. Knows no queue. Invariant: a request's place among others never changes while it waits or runs, so
that queues stay sorted; it depends on the requests' priorities and the order of their arrival, and on no clock.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.request.request import Request

Order = tuple[int, int]
OrderOf = Callable[[Request], Order]


def order_of(policy: str, priority_aging: int = 0) -> OrderOf:
    """A key to sort requests by; the smallest is served first.

    Args:
        policy: "fcfs", or "priority": a lower number runs first.
        priority_aging: how many later arrivals make up for one step of priority: who is one worse than the newcomers
            is overtaken by so many of them at most, who is two worse by twice as many. That is what raising each
            waiting request by a step after every so many arrivals would give. 0: never, so that requests can starve.

    """
    if policy == "fcfs":
        return lambda request: (0, request.arrival)
    if priority_aging:
        return lambda request: (request.priority * priority_aging + request.arrival, request.arrival)
    return lambda request: (request.priority, request.arrival)
