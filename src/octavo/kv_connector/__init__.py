"""Connectors: who brings blocks from elsewhere, and takes them there.

Owns the protocol that a scheduler speaks, what a transfer is, and NO_CONNECTOR, which moves nothing. Knows neither a
scheduler nor where bytes lie. Invariant: a connector touches the blocks of a transfer between `allocated` or `finished`
and its report in `take_results`, or a `cancel` that returned True, and at no other time.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from octavo.request.request import Request


class Later(enum.Enum):
    """The type of LATER."""

    LATER = "later"


LATER: Final = Later.LATER  # what `match` says while it does not know


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Blocks that are filled from elsewhere (a load), or read for somebody else (a save)."""

    number: int  # its name; no two transfers share one
    request: Request
    start: int  # first token that moves
    end: int  # behind the last one
    blocks: tuple[tuple[int, ...], ...]  # per cache group, by logical index; null blocks do not move


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TransferResults:
    """What has ended since results were taken last. Each transfer ends once."""

    done: Sequence[int] = ()  # numbers of transfers
    failed: Mapping[int, frozenset[int]] = dataclasses.field(default_factory=dict)  # load -> its bad blocks; none: all


NO_RESULTS = TransferResults()


class Connector(Protocol):
    """The scheduler's half of a connector. All calls come from the thread that schedules, and none may wait long."""

    def match(self, request: Request, num_local: int) -> int | Later:
        """How many tokens behind the first `num_local` can be loaded; 0: none; LATER: ask again in a later step.

        Without side effects: it may be asked again, and its answer may be not used. `request.block_hashes` names all
        full blocks of the known tokens.
        """

    def allocated(self, load: Transfer) -> None:
        """Load. Nobody else writes or reads these blocks from now on, steps that were issued before included."""

    def finished(self, save: Transfer) -> bool:
        """A request has ended and its blocks are complete: whether they are kept until the save is reported."""

    def cancel(self, number: int, *, force: bool) -> bool:
        """Stop a transfer. True: it touches no block from now on, and will not be reported. False: it goes on.

        force: its time is over. A connector that cannot stop it otherwise closes the connection that it runs over.
        """

    def take_results(self) -> TransferResults:
        """What has ended since the last call, with its bytes where every later step reads them."""

    def wait(self, seconds: float) -> None:
        """Return when there may be results, or `match` may say more, and after `seconds` at the latest."""


class _NoConnector:
    """Moves nothing."""

    def match(self, request: Request, num_local: int) -> int | Later:
        """See Connector."""
        return 0

    def allocated(self, load: Transfer) -> None:
        """See Connector."""
        raise AssertionError("nothing was offered")

    def finished(self, save: Transfer) -> bool:
        """See Connector."""
        return False

    def cancel(self, number: int, *, force: bool) -> bool:
        """See Connector."""
        return True

    def take_results(self) -> TransferResults:
        """See Connector."""
        return NO_RESULTS

    def wait(self, seconds: float) -> None:
        """See Connector."""


NO_CONNECTOR: Final[Connector] = _NoConnector()
