"""WeightUpdates: the session in which a running engine is given new weights, seen from the engine.

Owns the state machine, the version and what is refused in which state. Knows no torch: workers receive and apply, by
messages with names. A session is begun, told of tensors in one call or many, and finished or aborted. Invariants: steps
see all of a session's weights or none; a session that goes wrong is over, and leaves the old weights whole, or, where
they were overwritten, an engine that computes nothing until a whole session has come; a label is never what blocks are
named by: that is a digest of the weights, or a name that comes once.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec

BACKENDS = ("disk", "shm", "gloo", "nccl", "ipc", "local")  # the ways that tensors come
_LOG = logging.getLogger(__name__)
DEFAULT_VERSION = "default"  # before the first update, as other engines call it
ON_RUNNING = ("recompute", "keep_kv", "abort")
HOLD_TIMEOUT = 60.0  # seconds between two messages of a session that holds the steps, or stands in another's way
MAX_VERSION = 256  # characters of a version


class WeightUpdateError(ValueError):
    """An update that cannot be: the message names the value, and what was expected."""


class WeightConflictError(WeightUpdateError):
    """A move that the session's state does not allow."""


class WeightTransferError(WeightUpdateError):
    """The peer failed, or did not answer in time."""


class WeightsBrokenError(ValueError):
    """A request came while the engine has no whole weights."""


ERRORS: dict[str, type[WeightUpdateError]] = {
    "invalid": WeightUpdateError,
    "conflict": WeightConflictError,
    "transfer": WeightTransferError,
}


class State(enum.StrEnum):
    """Where an engine's update is. Whether its weights are whole is the gate's to know."""

    READY = "ready"  # no session
    OPEN = "open"  # a session is open; the old weights serve, if there are any
    HELD = "held"  # a session is open, and has begun to overwrite the old weights: nothing is computed


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a session goes."""

    partial: bool = False  # a subset of the weights may come
    on_running: str = "recompute"
    is_checkpoint_format: bool = True  # names and shapes are a checkpoint's: there is no other form


class Update(msgspec.Struct, frozen=True):
    """Tensors that come now, in this order; what else it says is the transport's to read."""

    names: list[str] = []
    dtype_names: list[str] = []
    shapes: list[list[int]] = []


class Finish(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a session ends."""

    weight_version: str | None = None  # None: a number that counts updates
    on_running: str | None = None  # None: as the start said


class Prepared(msgspec.Struct, frozen=True):
    """A worker's word that a session's set is whole."""

    identity: str  # of the weights that it makes: equal for equal ones
    num_tensors: int


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

    def change_weights(self, apply: Callable[[], object], identity: str, version: str, on_running: str) -> int:
        """Let steps that were issued end, apply, and go on with new names; how many requests ran."""

    def relabel(self, version: str) -> None:
        """Stamp tokens with `version` from now on. Nothing else changes."""

    def hold_weights(self) -> None:
        """Plan no step until `change_weights` or `break_weights`."""

    def break_weights(self, reason: str) -> None:
        """End all requests: nothing can be computed."""


class Gate(Protocol):
    """What an engine's gate knows of its weights (`octavo.sched.pause`)."""

    lost: bool
    lost_because: str
    asleep: set[str]


class WeightUpdates:
    """One engine's sessions. Its methods are called between two steps, with messages as `calls` decodes them."""

    def __init__(
        self, core: Core, gate: Gate, clock: Callable[[], float] = time.monotonic, *, hold_timeout: float = HOLD_TIMEOUT
    ) -> None:
        """No session."""
        self._core, self._gate, self._clock = core, gate, clock
        self.state, self.version, self.stats = State.READY, DEFAULT_VERSION, UpdateStats()
        self._identity = ""  # of the weights that are being applied
        self._start, self._began, self._last, self._hold_timeout = Start(), 0.0, 0.0, hold_timeout

    def calls(self) -> dict[str, Callable[[bytes], bytes]]:
        """What a core answers by name: an Answer each, whatever goes wrong."""
        return {
            "init_weight_transfer_engine": self._answering(self._init, dict[str, Any]),
            "shutdown_weight_transfer_engine": self._answering(lambda _: self._shutdown()),
            "start_weight_update": self._answering(self._open, Start),
            "update_weights": self._answering(self._receive, dict[str, Any]),
            "finish_weight_update": self._answering(self._finish, Finish),
            "abort_weight_update": self._answering(lambda _: self._abort()),
            "update_weight_version": self._answering(self._set_version, str),
            "weight_checksums": self._answering(lambda _: self._checksums()),
            "weight_values": self._answering(self._values, tuple[str, int]),
            "weight_state": self._answering(lambda _: self._describe()),
        }

    @property
    def is_open(self) -> bool:
        """Whether a session is open."""
        return self.state in (State.OPEN, State.HELD)

    @property
    def expires_in(self) -> float | None:
        """Seconds until a session that holds the steps is given up, if nothing is heard of it; None: there is none."""
        return max(0.0, self._last + self._hold_timeout - self._clock()) if self.state is State.HELD else None

    def expire(self) -> None:
        """Give up a session that holds the steps, and of which nothing was heard for `hold_timeout` seconds."""
        if self.state is State.HELD and not self.expires_in:
            self._fail(f"nothing was heard of it for {self._hold_timeout:g} s")

    def _answering(self, move: Callable[[Any], Any], request: Any = None) -> Callable[[bytes], bytes]:
        def answer(payload: bytes) -> bytes:
            try:
                self.expire()
                told = msgspec.msgpack.decode(payload or b"\xc0", type=request or Any)
                return msgspec.msgpack.encode({"result": move(told)})
            except (ValueError, OSError) as error:
                kinds = (kind for kind, known in reversed(ERRORS.items()) if isinstance(error, known))
                return msgspec.msgpack.encode({"error": next(kinds, "invalid"), "text": str(error)})

        return answer

    def _init(self, info: dict[str, Any]) -> dict[str, Any]:
        self._make_room("init_weight_transfer_engine")
        workers = self._core.ask_workers("weights_init", dict[str, Any], info)
        _LOG.info("a sender of weights was met: %s", workers)
        return {"workers": workers}

    def _shutdown(self) -> None:
        if self.is_open:
            self._abort()
        self._core.ask_workers("weights_shutdown", type(None))

    def _open(self, start: Start) -> None:
        self._make_room("start_weight_update")
        _check_on_running(start.on_running)
        if not start.is_checkpoint_format:
            raise WeightUpdateError("is_checkpoint_format must be true: names and shapes are those of a checkpoint")
        if "weights" in self._gate.asleep:
            raise WeightConflictError('the memory of the weights sleeps: call wake_up(tags=["weights"]) first')
        if self._gate.lost and start.partial:
            raise WeightConflictError(f"partial=True needs whole weights: {self._gate.lost_because}")
        self._core.ask_workers("weights_start", type(None), start.partial)
        _LOG.info("an update of the weights begins: %s; weights %r serve", start, self.version)
        self._start, self._began = start, self._clock()
        self._last = self._began
        self.state = State.OPEN

    def _receive(self, info: dict[str, Any]) -> dict[str, Any]:
        self._need_open("update_weights")
        try:
            received = self._core.ask_workers("weights_update", Received, info)
        except Exception as error:
            self._fail(str(error))
            raise
        finally:
            self._last = self._clock()
        if self.state is State.OPEN and any(each.overwrites for each in received):
            self.state = State.HELD
            self._core.hold_weights()
        self.stats.num_received_tensors += received[0].num_tensors
        self.stats.num_received_bytes += sum(each.num_bytes for each in received)
        seconds = max(each.seconds for each in received)
        self.stats.receive_seconds += seconds
        before = self.stats.received_by.get(received[0].backend, (0, 0.0))
        num_bytes = sum(each.num_bytes for each in received)
        self.stats.received_by[received[0].backend] = before[0] + num_bytes, before[1] + seconds
        return {"num_tensors": received[0].num_tensors, "num_bytes": received[0].num_bytes}

    def _finish(self, finish: Finish) -> dict[str, Any]:
        self._need_open("finish_weight_update")
        on_running = finish.on_running or self._start.on_running
        version = str(self.stats.num_updates + 1) if finish.weight_version is None else finish.weight_version
        _check_on_running(on_running)
        _check_version(version)
        try:
            prepared: list[Prepared] = self._core.ask_workers("weights_prepare", Prepared)
        except Exception as error:
            self._fail(str(error))
            raise
        paused = self._clock()
        try:
            self._identity = " ".join(each.identity for each in prepared)
            count = self._core.change_weights(self._apply, self._identity, version, on_running)
        except Exception as error:
            self._fail(str(error), overwritten=True)
            raise
        self.state, self.version = State.READY, version
        stats, now = self.stats, self._clock()
        stats.num_updates += 1
        stats.update_seconds += now - self._began
        stats.pause_seconds += now - paused
        name = {"recompute": "num_recomputed", "keep_kv": "num_kept", "abort": "num_aborted"}[on_running]
        setattr(stats, name, getattr(stats, name) + count)
        _LOG.info(
            "weights %r serve: %d tensors, %.3f s from the start of the update, %.3f s of them without steps; "
            "requests that ran: %d, on_running=%s",
            version,
            prepared[0].num_tensors,
            now - self._began,
            now - paused,
            count,
            on_running,
        )
        return {"weight_version": version, "num_tensors": prepared[0].num_tensors}

    def _apply(self) -> None:
        self._core.ask_workers("weights_apply", type(None), self._identity)

    def _abort(self) -> None:
        self._need_open("abort_weight_update")
        self._fail("the update was aborted")

    def _fail(self, reason: str, *, overwritten: bool = False) -> None:
        """The session is over: roll back, or break."""
        whole = all(self._core.ask_workers("weights_abort", bool)) and not overwritten
        self.stats.num_failed_updates += 1
        self.state = State.READY
        _LOG.warning(
            "an update of the weights failed, weights %r %s: %s",
            self.version,
            "serve on" if whole else "are no longer whole",
            reason,
        )
        if not whole:
            self._core.break_weights(
                f"an update had overwritten some weights when it failed: send all of them ({reason})"
            )

    def _set_version(self, version: str) -> None:
        _check_version(version)
        self._refuse_if_open("update_weight_version")
        self.version = version
        self._core.relabel(version)

    def _checksums(self) -> dict[str, Any]:
        self._need_whole("weight_checksums")
        found: list[dict[str, Any]] = self._core.ask_workers("weights_checksums", dict[str, Any])
        return {**found[0], "weight_version": self.version}

    def _values(self, asked: tuple[str, int]) -> list[Any]:
        self._need_whole("weight_values")
        found: list[list[Any]] = self._core.ask_workers("weights_values", list[Any], asked)
        return found[0]

    def _need_whole(self, move: str) -> None:
        if "weights" in self._gate.asleep:
            raise WeightConflictError(f"{move}: the memory of the weights sleeps")
        if self._gate.lost or self.state is State.HELD:
            raise WeightConflictError(f"{move}: {self._gate.lost_because or 'an update is overwriting the weights'}")

    def _describe(self) -> dict[str, Any]:
        age = self._clock() - self._began if self.is_open else 0.0
        return {
            "state": self.state,
            "weight_version": self.version,
            "age": age,
            "lost_because": self._gate.lost_because,
        } | {"stats": msgspec.structs.asdict(self.stats)}

    def _make_room(self, move: str) -> None:
        """Raise WeightConflictError while an update is open, unless nothing was heard of it for long: it is over."""
        if self.state is State.OPEN and self._clock() - self._last > self._hold_timeout:
            self._fail(f"nothing was heard of it for {self._hold_timeout:g} s")
        self._refuse_if_open(move)

    def _refuse_if_open(self, move: str) -> None:
        if self.is_open:
            age = self._clock() - self._began
            raise WeightConflictError(
                f"{move} is not possible while an update is open, for {age:.1f} s by now: finish or abort it first"
            )

    def _need_open(self, move: str) -> None:
        if not self.is_open:
            raise WeightConflictError(f"{move} needs an open update, and there is none: start one first")


def result_of(answer: bytes) -> Any:
    """What a call of WeightUpdates answered. Raises the WeightUpdateError that it tells of."""
    told: Mapping[str, Any] = msgspec.msgpack.decode(answer)
    if "error" in told:
        raise ERRORS[told["error"]](told["text"])
    return told["result"]


def _check_version(version: str) -> None:
    if not 1 <= len(version) <= MAX_VERSION:
        raise WeightUpdateError(f"weight_version must have 1 to {MAX_VERSION} characters, got {len(version)}")


def _check_on_running(on_running: str) -> None:
    if on_running not in ON_RUNNING:
        raise WeightUpdateError(f"on_running must be one of {', '.join(ON_RUNNING)}, got {on_running[:50]!r}")
