"""GivenWeights: what a server's engines were given, over their lives, and whether the one that is there lacks it.

Owns what heartbeats told of updates, and the refusal where weights went away with their engine. Knows neither processes
nor HTTP. Invariants: an engine that comes behind one that had been given weights generates nothing until a whole update
has come; the checkpoint's own weights are not lost, since every engine begins with them.
"""

from __future__ import annotations

import logging

from octavo.frontend.messages import EngineStats
from octavo.request.outputs import WEIGHTS_DISCARDED
from octavo.serve.engine.refusals import EngineDeadError, EngineHaltedError, WeightsLostError, lost_weights

_LOG = logging.getLogger(__name__)
LOST = "weights_lost"  # the code of what is refused


class GivenWeights:
    """One server's. All of it is used on one event loop."""

    def __init__(self) -> None:
        """No engine was given anything."""
        self.lost_version = ""  # the label of weights that are gone with their engine; "": none are
        self.num_lost = 0  # times that some were
        self.num_updates = 0  # of engines that are gone
        self._told = EngineStats()  # by the engine that is there
        self._at_checkpoint = 0  # the update of that engine which brought the checkpoint's own weights back

    def heard(self, stats: EngineStats) -> None:
        """A heartbeat came."""
        self._told = stats
        if stats.num_weight_updates:  # no engine without whole weights takes a part
            self.lost_version = ""

    def came_from_checkpoint(self, version: str) -> None:
        """The update that was just finished, as `version`, has brought the files that every engine begins with."""
        if self._told.weights_version == version:
            self._at_checkpoint = self._told.num_weight_updates

    def gone(self, *, was_asked: bool = False) -> None:
        """The engine is gone. was_asked: its server stops, and nobody misses what it had."""
        told, self._told = self._told, EngineStats()
        self.num_updates += told.num_weight_updates
        if not was_asked and told.num_weight_updates not in (0, self._at_checkpoint):
            self.lost_version = told.weights_version
            self.num_lost += 1
            _LOG.error("%s; requests are refused until then", lost_weights(self.lost_version))
        self._at_checkpoint = 0

    @property
    def are_whole(self) -> bool:
        """Whether the engine that is there has weights to serve, as of its last heartbeat."""
        return not (self.lost_version or self._told.weights_lost_because)

    def check_lost(self) -> None:
        """Raise EngineHaltedError where weights went away with their engine."""
        if self.lost_version:
            raise EngineHaltedError(lost_weights(self.lost_version), LOST)

    def check(self) -> None:
        """The same; and where they were discarded, or half overwritten, within the engine that is there."""
        self.check_lost()
        if self._told.weights_lost_because:
            raise EngineHaltedError(self._told.weights_lost_because, WEIGHTS_DISCARDED)

    def failure(self, reason: str, *, final: bool) -> EngineDeadError:
        """What a stream ends with whose engine has gone. final: there is no other one."""
        if self.lost_version and not final:
            return WeightsLostError(lost_weights(self.lost_version))
        return EngineDeadError(f"the engine went away: {reason}")

    def figures(self) -> dict[str, float]:
        """For the metrics."""
        return {"num_weights_lost": self.num_lost, "weights_missing": bool(self.lost_version)}
