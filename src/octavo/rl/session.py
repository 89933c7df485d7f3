"""WeightUpdates: the session in which a running engine is given new weights, seen from the engine.

Owns the state machine, the version and what is refused in which state. Knows no torch: workers receive and apply, by
messages with names. A session is begun, told of tensors in one call or many, and finished or aborted. Invariants: steps
see all of a session's weights or none; a session that goes wrong is over, and leaves the old weights whole, or, where
they were overwritten, an engine that computes nothing until a whole session has come; a label is never what blocks are
named by: that is a digest of the weights, or a name that comes once.
"""

from __future__ import annotations

import collections
import enum
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from octavo.rl.messages import Core, Finish, Gate, Prepared, Received, Session, Start, UpdateStats, Way
from octavo.rl.moves import Moves, Waiting

BACKENDS = ("disk", "shm", "gloo", "nccl", "ipc", "local")  # the ways that tensors come
_LOG = logging.getLogger(__name__)
_End = TypeVar("_End", Start, Finish)
DEFAULT_VERSION = "default"  # before the first update, as other engines call it
ON_RUNNING = ("recompute", "keep_kv", "abort")
HOLD_TIMEOUT = 60.0  # seconds between two messages of a session that holds the steps, or stands in another's way
_LOOK_SECONDS = 1.0  # between two looks at whether a trainer is there
_NUM_OVER = 16  # sessions whose end is remembered
MAX_VERSION = MAX_SESSION = 256  # characters of a version, and of a session's name


class WeightUpdateError(ValueError):
    """An update that cannot be: the message names the value, and what was expected."""


class WeightConflictError(WeightUpdateError):
    """A move that the session's state does not allow."""


class WeightTransferError(WeightUpdateError):
    """The peer failed, or did not answer in time."""


class WeightCutError(WeightConflictError, WeightTransferError):
    """A wait for a peer was cut short, by another move."""


class WeightsBrokenError(ValueError):
    """A request came while the engine has no whole weights."""


ERRORS: dict[str, type[WeightUpdateError]] = {
    "invalid": WeightUpdateError,
    "conflict": WeightConflictError,
    "transfer": WeightTransferError,
    "cut": WeightCutError,
}


class State(enum.StrEnum):
    """Where an engine's update is. Whether its weights are whole is the gate's to know."""

    READY = "ready"  # no session
    OPEN = "open"  # a session is open; the old weights serve, if there are any
    HELD = "held"  # a session is open, and has begun to overwrite the old weights: nothing is computed


class WeightUpdates:
    """One engine's sessions. Its methods are called between two steps, with messages as `calls` decodes them."""

    def __init__(
        self, core: Core, gate: Gate, clock: Callable[[], float] = time.monotonic, *, hold_timeout: float = HOLD_TIMEOUT
    ) -> None:
        """No session."""
        self._core, self._gate, self._clock = core, gate, clock
        self.state, self.version, self.stats = State.READY, DEFAULT_VERSION, UpdateStats()
        self.num_past = 0  # updates of engines that this one stands for: a number is no label of two sets of weights
        self._identity = ""  # of the weights that are being applied
        self._start, self._began, self._last, self._hold_timeout = Start(), 0.0, 0.0, hold_timeout
        self._session, self._looked = "", 0.0  # the name of the session that is open, or was; the last look at its peer
        self._is_told = False  # of tensors: until then nobody knows who sends them
        self._met, self._is_others = "", False  # the group of who was met; whether that one has not begun the session
        self._over: collections.OrderedDict[str, str] = collections.OrderedDict()  # sessions -> how they ended
        self._finished: str | None = None  # the last session that was
        self.moves = Moves(self._answer, self._cut)

    def calls(self) -> dict[str, Callable[[bytes], Future[bytes]]]:
        """What a core answers by name: an Answer each, whatever goes wrong; behind a move that waits, or at once."""
        return {
            "init_weight_transfer_engine": self._answering(self._init, dict[str, Any], after=self._before_init),
            "shutdown_weight_transfer_engine": self._answering(lambda _: self._shutdown(), after=self._before_shutdown),
            "start_weight_update": self._answering(self._open, Start, after=lambda _: not self.is_open),
            "update_weights": self._answering(
                self._receive, dict[str, Any], after=lambda info: not self.is_open or info.get("start") is None
            ),
            "finish_weight_update": self._answering(self._finish, Finish, after=lambda _: True),
            "abort_weight_update": self._answer_abort,
            "update_weight_version": self._answering(self._set_version, str),
            "weight_checksums": self._answering(lambda _: self._checksums()),
            "weight_values": self._answering(self._values, tuple[str, int]),
            "weight_state": self._answering(lambda _: self._describe()),
        }

    @property
    def is_open(self) -> bool:
        """Whether a session is open."""
        return self.state is not State.READY

    @property
    def expires_in(self) -> float | None:
        """Seconds until a session that holds the steps is given up, if nothing is heard of it; None: there is none."""
        if self.state is not State.HELD or self.moves.is_busy:  # a receive has a deadline of its own
            return None
        return min(max(0.0, self._last + self._hold_timeout - self._clock()), _LOOK_SECONDS)

    def expire(self) -> None:
        """Give up a session that nobody can end: its trainer has gone, or holds the steps and was silent for long."""
        if not self.is_open or self.moves.is_busy:
            return
        now = self._clock()
        if self.state is State.HELD and now >= self._last + self._hold_timeout:
            self._fail(f"nothing was heard of it for {self._hold_timeout:g} s")
        elif self._is_told and now >= self._looked + _LOOK_SECONDS:  # else it has nothing, and may be another's
            self._look()

    def give_up_if_gone(self) -> None:
        """Give up a session whose trainer has gone, for who needs the room: one that was told of nothing, too."""
        if self.state is State.OPEN and not self.moves.is_busy:
            self._look()

    def _look(self) -> None:
        self._looked = self._clock()
        if not self._is_others and any(self._core.ask_workers("weights_peer_is_gone", bool)):
            self._fail("its trainer has gone: the connection to it was closed, and tensors are missing")

    def _answering(
        self, move: Callable[[Any], Any], request: Any = None, *, after: Callable[[Any], bool] | None = None
    ) -> Callable[[bytes], Future[bytes]]:
        """`after`: whether it waits for a move that waits, as told; None: it does not."""

        def answer(payload: bytes) -> Future[bytes]:
            def read_and_move() -> Any:
                self.expire()
                return move(read())

            def read() -> Any:
                return msgspec.msgpack.decode(payload or (b"\x80" if request else b"\xc0"), type=request or Any)

            try:
                waits = after is not None and self.moves.is_busy and after(read())
            except ValueError:  # it is told so by the move itself
                waits = False
            return self.moves.line_up(read_and_move) if waits else self.moves.do(read_and_move)

        return answer

    def _answer(self, move: Callable[[], Any]) -> bytes:
        """What came of a move, as a core's answer, and how the engine stands then."""
        try:
            came = {"result": move()}
        except (ValueError, OSError) as error:
            kinds = (kind for kind, known in reversed(ERRORS.items()) if isinstance(error, known))
            came = {"error": next(kinds, "invalid"), "text": str(error)}
        return msgspec.msgpack.encode({**came, "standing": self._core.standing()})

    def _cut(self, number: int, reason: str) -> None:
        """End the wait of a move that waits."""
        self._core.ask_beside("weights_cut", type(None), (number, reason))

    def _before_init(self, info: dict[str, Any]) -> bool:
        """Whether it comes behind what waits: another meeting gives way to it."""
        if not self.is_open:
            self.moves.cut("another init_weight_transfer_engine came")
        return not self.is_open

    def _answer_abort(self, payload: bytes) -> Future[bytes]:
        """An abort comes behind what waits, which it cuts short: a receive of the session, or a meeting."""
        cut: list[str] = []  # the session; of a meeting an empty name

        def before(which: Session) -> bool:
            if self.is_open or which.session is not None:  # who names one that is not open cuts no one else's wait
                self._need_open("abort_weight_update", which.session)
            self.moves.cut("abort_weight_update came")
            cut.append(self._session if self.is_open else "")
            return True

        def abort(which: Session) -> None:
            if not cut or cut == [self._finished]:  # it came to its end before the cut
                self._need_open("abort_weight_update", which.session)
            if self.is_open and cut != [""]:  # what began behind the meeting is another one's
                self._fail("the update was aborted")

        return self._answering(abort, Session, after=before)(payload)

    def _before_shutdown(self, _: None) -> bool:
        self.moves.cut("shutdown_weight_transfer_engine came")
        return True

    def _init(self, info: dict[str, Any]) -> Waiting:
        self._make_room("init_weight_transfer_engine")
        workers = yield lambda number: self._core.ask_beside("weights_init", dict[str, Any], (number, info))
        self._met = workers[0].get("group", "")
        _LOG.info("a sender of weights was met: %s", workers)
        return {"workers": workers}

    def _shutdown(self) -> None:
        if self.is_open:
            self._fail("shutdown_weight_transfer_engine came")
        self._core.ask_workers("weights_shutdown", type(None))

    def _open(self, start: Start, name: object = None) -> dict[str, str]:
        self._make_room("start_weight_update")
        _check_on_running(start.on_running)
        if not start.is_checkpoint_format:
            raise WeightUpdateError("is_checkpoint_format must be true: names and shapes are those of a checkpoint")
        if "weights" in self._gate.asleep:
            raise WeightConflictError('the memory of the weights sleeps: call wake_up(tags=["weights"]) first')
        if self._gate.lost and start.partial:
            raise WeightConflictError(f"partial=True needs whole weights: {self._gate.lost_because}")
        if name is not None and not (isinstance(name, str) and len(name) <= MAX_SESSION):
            raise WeightUpdateError(f"session must be text of up to {MAX_SESSION} characters, got {repr(name)[:50]}")
        self._core.ask_workers("weights_start", type(None), start.partial)
        _LOG.info("an update of the weights begins: %s; weights %r serve", start, self.version)
        self._start, self._began = start, self._clock()
        self._last = self._looked = self._began
        self._is_told = self._is_others = False
        self.state, self._session = State.OPEN, name or secrets.token_hex(8)
        return {"session": self._session}

    def _receive(self, info: dict[str, Any]) -> Waiting:
        start = _end_of(info, "start", Start)  # of an update that begins with these tensors
        if start is None:
            self._need_open("update_weights", info.get("session"))
        else:
            if self.is_open and not self._is_told and self._met and self._met == _group_of(info):
                self._is_others = True  # who was met begins its own now
            self._open(start, info.get("session"))
        try:
            finish = _end_of(info, "finish", Finish)  # of one that ends with them
            if finish is not None:  # no tensor has to travel for what is refused behind all of them
                _check_finish(finish)
            self._is_told = True
            ways = self._core.ask_workers("weights_expect", Way, info)
            if self.state is State.OPEN and any(way.overwrites for way in ways):
                self.state = State.HELD
                self._core.hold_weights()
            if any(way.waits for way in ways):
                received = yield lambda number: self._core.ask_beside("weights_update", Received, (number, info))
            else:
                received = self._core.ask_workers("weights_update", Received, (0, info))
        except Exception as error:
            self._fail(str(error))
            raise
        finally:
            self._last = self._clock()
        if self.state is State.HELD and not any(each.overwrites for each in received):
            self.state = State.OPEN
            self._core.release_weights()
        self.stats.num_received_tensors += received[0].num_tensors
        num_bytes, seconds = sum(each.num_bytes for each in received), max(each.seconds for each in received)
        self.stats.num_received_bytes += num_bytes
        self.stats.receive_seconds += seconds
        before = self.stats.received_by.get(received[0].backend, (0, 0.0))
        self.stats.received_by[received[0].backend] = before[0] + num_bytes, before[1] + seconds
        came = {"num_tensors": received[0].num_tensors, "num_bytes": received[0].num_bytes}
        try:
            return came if finish is None else came | self._finish(finish)
        except WeightUpdateError as error:
            if self.is_open:
                self._fail(str(error))
            raise

    def _finish(self, finish: Finish) -> dict[str, Any]:
        self._need_open("finish_weight_update", finish.session)
        on_running = finish.on_running or self._start.on_running
        number = self.num_past + self.stats.num_updates + 1
        version = str(number) if finish.weight_version is None else finish.weight_version
        _check_finish(finish)
        try:
            prepared: list[Prepared] = self._core.ask_workers("weights_prepare", Prepared)
        except Exception as error:
            self._fail(str(error))
            raise
        paused = self._clock()
        try:
            self._identity = " ".join(each.identity for each in prepared)
            count, on_running = self._core.change_weights(self._apply, self._identity, version, on_running)
        except Exception as error:
            self._fail(str(error), overwritten=True)
            raise
        self.state, self.version, self._finished = State.READY, version, self._session
        self._remember(f"it was finished, as {version!r}")
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

    def _apply(self) -> bool:
        return any(self._core.ask_workers("weights_apply", bool, self._identity))

    def _fail(self, reason: str, *, overwritten: bool = False) -> None:
        """The session is over: roll back, or break."""
        whole = all(self._core.ask_workers("weights_abort", bool)) and not overwritten
        self.stats.num_failed_updates += 1
        self.state = State.READY
        self._remember(reason)
        _LOG.warning(
            "an update of the weights failed, weights %r %s: %s",
            self.version,
            "serve on" if whole else "are no longer whole",
            reason,
        )
        if whole:
            self._core.release_weights()
        else:
            why = f"an update had overwritten some weights when it failed: send all of them ({reason})"
            self._core.break_weights(why)

    def _set_version(self, version: str) -> None:
        check_version(version)
        self._make_room("update_weight_version")
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
            "waits_for_trainer": self.moves.is_busy,
        } | {"stats": msgspec.structs.asdict(self.stats)}

    def _make_room(self, move: str) -> None:
        """Raise WeightConflictError while an update is open, unless nothing was heard of it for long: it is over."""
        self.give_up_if_gone()
        if self.state is State.OPEN and not self.moves.is_busy and self._clock() - self._last > self._hold_timeout:
            self._fail(f"nothing was heard of it for {self._hold_timeout:g} s")
        self._refuse_if_open(move)

    def _refuse_if_open(self, move: str) -> None:
        if self.is_open:
            age = self._clock() - self._began
            raise WeightConflictError(
                f"{move} is not possible while an update is open, for {age:.1f} s by now: finish or abort it first"
                f"{self._when_it_ends()}"
            )

    def _when_it_ends(self) -> str:
        if self.moves.is_busy:
            return "; its tensors are on their way now"
        rest = max(0.0, self._last + self._hold_timeout - self._clock())
        return (
            f"; it makes room by itself in {rest:.1f} s, once nothing was heard of it for {self._hold_timeout:g} s"
            " (session_timeout of weight_transfer_config), or when its trainer goes while tensors are missing"
        )

    def _need_open(self, move: str, session: object = None) -> None:
        """Raise WeightConflictError unless a session is open, and the one that the move is for, if that is said."""
        if not self.is_open and session is None:
            last = next(reversed(self._over.values()), "")
            why = f" (the last one is over: {last})" if last else ""
            raise WeightConflictError(f"{move} needs an open update, and there is none: start one first{why}")
        if session is not None and not (self.is_open and session == self._session):
            how = self._over.get(str(session), "it is none of this engine's last ones")
            raise WeightConflictError(f"{move}: session {str(session)[:64]!r} is not open: {how}")

    def _remember(self, how: str) -> None:
        """How the session ended."""
        self._over[self._session] = how
        while len(self._over) > _NUM_OVER:
            self._over.popitem(last=False)


def result_of(answer: bytes) -> Any:
    """What a call of WeightUpdates answered. Raises the WeightUpdateError that it tells of."""
    told: Mapping[str, Any] = msgspec.msgpack.decode(answer)
    if "error" in told:
        raise ERRORS[told["error"]](told["text"])
    return told["result"]


def _check_finish(finish: Finish) -> None:
    if finish.on_running is not None:
        _check_on_running(finish.on_running)
    check_version(finish.weight_version)


def _end_of(info: Mapping[str, Any], name: str, kind: type[_End]) -> _End | None:
    """What a message with tensors says of an update's start, or of its finish; None: nothing."""
    try:
        return msgspec.convert(info.get(name), kind | None)
    except msgspec.ValidationError as error:
        raise WeightUpdateError(f"{name}: {error}") from None


def _group_of(info: Mapping[str, Any]) -> object:
    """By which group a message's tensors come, if it says so."""
    update_info = info.get("update_info", info)
    return update_info.get("group") if isinstance(update_info, Mapping) else None


def check_version(version: object) -> None:
    """Raise WeightUpdateError for what is no label; None is for a number that counts updates."""
    if version is None:
        return
    if not isinstance(version, str):
        raise WeightUpdateError(f"weight_version must be text, got {type(version).__name__}")
    if not version.isprintable():
        raise WeightUpdateError(f"weight_version must have characters that can be printed, got {version[:50]!a}")
    if not 1 <= len(version) <= MAX_VERSION:
        raise WeightUpdateError(f"weight_version must have 1 to {MAX_VERSION} characters, got {len(version)}")


def _check_on_running(on_running: str) -> None:
    if on_running not in ON_RUNNING:
        raise WeightUpdateError(f"on_running must be one of {', '.join(ON_RUNNING)}, got {on_running[:50]!r}")
