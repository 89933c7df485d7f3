"""Connectors: who brings blocks from elsewhere, and takes them there.

Owns the protocol that a scheduler speaks, what a transfer is, and NO_CONNECTOR, which moves nothing. Knows neither a
scheduler nor where bytes lie. The other half of a connector lives beside the cache (`octavo.kv_connector.worker`).
Invariant: a connector touches the blocks of a transfer between `allocated`, `computed` or `finished` and its report in
`take_results`, or a `cancel` that returned True, and at no other time.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

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
    blocks: tuple[tuple[int, ...], ...]  # per cache group its entries' in order; null blocks do not move
    names: tuple[bytes, ...] = ()  # of the full blocks of the smallest size, from the first token on
    version: str = ""  # of the weights


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TransferResults:
    """What has ended since results were taken last. Each transfer ends once."""

    done: Sequence[int] = ()  # numbers of transfers
    failed: Mapping[int, frozenset[int]] = dataclasses.field(default_factory=dict)  # load -> its bad blocks; none: all
    # load -> blocks that were not there any more, none: all; whatever the policy says of failures, they are computed
    missed: Mapping[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    # load that is done -> blocks of which only what its request reads is there: nobody else may find them
    partial: Mapping[int, frozenset[int]] = dataclasses.field(default_factory=dict)

    refusal: str = ""  # why the blocks of somebody else cannot be taken, until a setting changes; empty: nothing new


NO_RESULTS = TransferResults()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ConnectorStats:
    """Counters since the start, of both halves."""

    num_saved_blocks: int = 0
    num_loaded_blocks: int = 0
    saved_bytes: int = 0
    loaded_bytes: int = 0
    save_seconds: float = 0.0  # in which there was one, from its order to its end; several at once count once
    load_seconds: float = 0.0
    num_evicted_blocks: int = 0
    stored_bytes: int = 0  # now, as far as it is known
    num_errors: int = 0  # of a store, a disk or a connector's own code; a transfer that failed is one
    num_late_lookups: int = 0  # requests that were computed since a store did not say in time what it has


NO_STATS = ConnectorStats()


class Connector(Protocol):
    """The scheduler's half of a connector. All calls come from the thread that schedules, and none may wait long."""

    saves_running: bool  # `computed` is asked of requests that run
    save_unit: int  # tokens: it saves whole multiples of it
    has_own_names: bool  # what it finds it finds by tokens, or names of its own, and not by `request.block_hashes`
    offers: bool  # its saves wait for somebody else, who may never come

    def match(self, request: Request, num_local: int) -> int | Later:
        """How many tokens behind the first `num_local` can be loaded; 0: none; LATER: ask again in a later step.

        Without side effects: it may be asked again, and its answer may be not used. `request.block_hashes` names
        full blocks of the known tokens: all, but for the last where a drafter's entries follow from next tokens, too.
        """

    def shorter(self, request: Request, num_local: int, end: int) -> int:
        """Of what `match` found, at most `end` tokens are wanted: how many can be loaded, all in all.

        From `num_local` to `end`: a group may not have what is read behind any of them.
        """

    def allocated(self, load: Transfer) -> None:
        """Load. Nobody else writes or reads these blocks from now on, steps that were issued before included."""

    def allocated_now(self, load: Transfer) -> bool:
        """As `allocated`, with nobody else computing and all steps done: the next step waits for it, on the device.

        True: nothing of it can fail any more, and it will not be reported. False: nothing was begun.
        """

    def loads_no_more(self, request: Request) -> None:
        """`request` runs, or has ended: what has not been loaded for it will not be. May be told again."""

    def release(self, transfer_ids: Sequence[str]) -> int:
        """Nobody will fetch what is, or is going to be, on offer under these ids: how many offers end.

        Who reads one at this moment reads it to the end.
        """

    def computed(self, save: Transfer) -> bool:
        """These tokens of a request that goes on are complete: whether they are kept until the save is reported."""

    def ending(self, save: Transfer) -> dict[str, Any] | None:
        """A request has ended; steps may still touch its blocks.

        What its answer says of where its blocks are to be had; None: nothing.
        """

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

    def reset(self) -> bool:
        """Forget what is stored, as far as it is this engine's own; False: it could not."""

    def stats(self) -> ConnectorStats:
        """The figures of this moment."""

    def close(self) -> None:
        """The engine ends: nothing is asked any more."""


class SilentConnector:
    """Moves nothing: what a connector leaves out, it takes from here."""

    saves_running = False
    save_unit = 1
    has_own_names = False
    offers = False

    def match(self, request: Request, num_local: int) -> int | Later:
        """See Connector."""
        return 0

    def shorter(self, request: Request, num_local: int, end: int) -> int:
        """See Connector."""
        return end

    def allocated(self, load: Transfer) -> None:
        """See Connector."""
        raise AssertionError("nothing was offered")

    def allocated_now(self, load: Transfer) -> bool:
        """See Connector."""
        return False

    def loads_no_more(self, request: Request) -> None:
        """See Connector."""

    def release(self, transfer_ids: Sequence[str]) -> int:
        """See Connector."""
        return 0

    def computed(self, save: Transfer) -> bool:
        """See Connector."""
        return False

    def ending(self, save: Transfer) -> dict[str, Any] | None:
        """See Connector."""
        return None

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

    def reset(self) -> bool:
        """See Connector."""
        return True

    def stats(self) -> ConnectorStats:
        """See Connector."""
        return NO_STATS

    def close(self) -> None:
        """See Connector."""


NO_CONNECTOR: Final[Connector] = SilentConnector()
