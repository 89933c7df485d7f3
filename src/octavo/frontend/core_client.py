"""CoreClient: a core as a frontend sees it, wherever it runs.

Owns the protocol that both members keep to: `octavo.frontend.in_process.InProcessClient`, whose owner steps the core
and takes the updates, and `octavo.serve.engine.client.EngineClient`, which is told them by an engine process. Both take
the same messages. Invariant: whatever enters through `add` is told with a finish reason exactly once, unless it is
aborted or the core is lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Protocol

from octavo.frontend.messages import Add, EngineStats
from octavo.request.updates import RequestUpdate


class CoreClient(Protocol):
    """Sequences in; their updates come to whoever owns the client."""

    @property
    def stats(self) -> EngineStats:
        """The core's figures: of this moment, or the last that were told."""

    def add(self, request: Add) -> None:
        """Queue a checked request. Raises RuntimeError if the core is lost, ParameterError if it is too large."""

    def abort(self, sequence_ids: list[str]) -> None:
        """End sequences as soon as possible, in any state, without an update. Unknown ids are ignored."""

    def take_untold(self, sequence_ids: Iterable[str]) -> list[RequestUpdate]:
        """What sequences with `coalesce_updates` have that no update told, as far as it is known on this side."""

    def call(self, name: str, payload: bytes = b"") -> Future[bytes]:
        """Ask the core between two steps; see EngineCore.call. The answer may be there when this returns."""
