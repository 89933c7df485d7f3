"""Messages: what is asked of an update and what a worker answers, in plain data; and what a session needs of an engine.

Owns words alone. Knows neither torch nor states. Invariant: a field that nobody knows is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a session goes."""

    partial: bool = False  # a subset of the weights may come
    on_running: str = "recompute"
    is_checkpoint_format: bool = True  # names and shapes are a checkpoint's: there is no other form


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which session a move is for."""

    session: str | None = None  # the name that its start gave; None: the one that is open


class Finish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a session ends."""

    weight_version: str | None = None  # None: a number that counts updates
    on_running: str | None = None  # None: as the start said
    session: str | None = None


class Prepared(msgspec.Struct, frozen=True):
    """A worker's word that a session's set is whole."""

    identity: str  # of the weights that it makes: equal for equal ones
    num_tensors: int


class Way(msgspec.Struct, frozen=True):
    """How a message's tensors will come to a worker."""

    waits: bool  # for a peer, or for files
    overwrites: bool  # the old weights may be overwritten as they come


class Received(msgspec.Struct, frozen=True):
    """What one update brought."""

    num_tensors: int
    num_bytes: int
    seconds: float
    overwrites: bool  # the old weights are no longer whole
    backend: str = ""  # by which it came


class UpdateStats(msgspec.Struct, kw_only=True):
    """Counters since the start of the engine."""

    num_updates: int = 0
    num_failed_updates: int = 0
    num_received_tensors: int = 0
    num_received_bytes: int = 0
    receive_seconds: float = 0.0
    update_seconds: float = 0.0  # from start to finish, of those that succeeded
    pause_seconds: float = 0.0  # in which no step could run while weights were applied
    received_by: dict[str, tuple[int, float]] = {}  # backend -> bytes, seconds
    num_kept: int = 0  # running requests at updates
    num_recomputed: int = 0
    num_aborted: int = 0


class Core(Protocol):
    """What a session needs of an engine's core, between two steps."""

    def ask_workers(self, name: str, reply: type[Any], request: Any = None) -> list[Any]:
        """Ask every worker; see EngineCore."""

    def ask_beside(self, name: str, reply: type[Any], request: Any = None) -> list[Any]:
        """Ask every worker from another thread, while steps run."""

    def change_weights(self, apply: Callable[[], bool], identity: str, version: str, running: str) -> tuple[int, str]:
        """Let steps that were issued end, apply, go on with new names; how many requests ran, what became of them."""

    def relabel(self, version: str) -> None:
        """Stamp tokens with `version` from now on. Nothing else changes."""

    def hold_weights(self) -> None:
        """Plan no step until `change_weights` or `break_weights`."""

    def release_weights(self) -> None:
        """Plan steps again: the old weights are whole."""

    def break_weights(self, reason: str) -> None:
        """End all requests: nothing can be computed."""

    def standing(self) -> object:
        """How the engine stands, as it is told behind every move."""


class Gate(Protocol):
    """What an engine's gate knows of its weights (`octavo.sched.pause`)."""

    lost: bool
    lost_because: str
    asleep: set[str]
