"""Route: one entry of the table of routes."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable

from octavo.serve.http.auth import Access
from octavo.serve.http.exchange import Exchange
from octavo.serve.state import ServeState

Handler = Callable[[ServeState, Exchange], Awaitable[None]]


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """One entry of the table. A path may end in {name}, which stands for the rest of it, slashes included."""

    method: str
    path: str
    handler: Handler
    access: Access = Access.USER
