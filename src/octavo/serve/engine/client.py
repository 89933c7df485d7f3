"""EngineClient: a core in an engine process, as the front end sees it: spawned, watched, restarted.

Owns the child process, the socket to it, the calls that wait for an answer, the watchdog and the policy of restarts.
Knows nothing of requests: messages pass through. Lives on one event loop. Invariant: at most one engine process
exists, it is reaped when it ends, and each of its lives is reported to the listener as one `engine_up` at most and
exactly one `engine_down`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, cast

import octavo
from octavo.config.engine_config import EngineConfig
from octavo.frontend.messages import (
    PROTOCOL,
    WITHDRAWN,
    Abort,
    Add,
    BadFrameError,
    Call,
    CallDone,
    EngineInfo,
    EngineStats,
    Failed,
    FrameReader,
    Heartbeat,
    Ready,
    Start,
    Stop,
    ToEngine,
    Updates,
    Withdraw,
    decode_from_engine,
    encode,
)
from octavo.request.sampling_params import ParameterError
from octavo.request.updates import RequestUpdate
from octavo.serve.engine.given_weights import GivenWeights
from octavo.serve.engine.refusals import CallWithdrawnError, EngineDeadError

_LOG = logging.getLogger(__name__)

DEFAULT_COMMAND = (sys.executable, "-m", "octavo.serve.engine.process")
_BUFFER_BYTES = 4 << 20
_ADVICE = "start the server again to serve what is there now"
_STOP_SECONDS = 3.0  # for an engine that was asked to stop


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Supervision:
    """When an engine counts as hung, and how it is restarted. Seconds."""

    check_interval: float = 0.25
    heartbeat_deadline: float = 5.0  # without a heartbeat: stopped, or its interpreter is stuck
    step_deadline: float = 30.0  # work to do, and the loop stands still
    load_deadline: float = 1800.0  # from the start of the process to Ready
    first_delay: float = 1.0  # before a restart; doubles with each failure in the window
    max_delay: float = 30.0
    max_failures: int = 5  # within the window that no requests explain: then the engine stays down
    failure_window: float = 600.0


class Listener(Protocol):
    """Whom an EngineClient tells what happens. All calls are made on the event loop."""

    def engine_up(self, info: EngineInfo) -> None:
        """The engine takes requests."""

    def engine_updates(self, message: Updates) -> None:
        """A step's results."""

    def explains_failure(self) -> bool:
        """Whether requests are why a ready engine failed, which was not killed from outside. `engine_down` follows."""

    def engine_down(self, reason: str, *, final: bool, is_users: bool) -> None:
        """The engine is gone, with all that it was doing. `final`: it will not be restarted."""


class _Life(asyncio.Protocol):
    """One engine process and the socket to it."""

    def __init__(self, client: EngineClient, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.ready = False
        self.failure: Failed | None = None
        self.transport: asyncio.WriteTransport | None = None
        self.connecting: asyncio.Task[None] | None = None  # kept: the loop holds tasks weakly
        self._client = client
        self._frames = FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)  # uvloop's are of no class of asyncio's

    def data_received(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            self._client._take(self, frame)

    def connection_lost(self, exc: Exception | None) -> None:
        self._client._end(self, "")


class EngineClient:
    """A CoreClient that spawns an engine process and keeps one running; its listener is told the updates."""

    def __init__(
        self,
        config: EngineConfig,
        listener: Listener,
        *,
        command: Sequence[str] | None = None,
        supervision: Supervision | None = None,
        changes: Callable[[], str] = str,
    ) -> None:
        """`command`: another engine that speaks the same messages; it is given the socket's and our numbers.

        `changes`: what keeps an engine from being the one that was asked for; asked before one is started again and
        when one is ready. If it says something, the engine stays down.
        """
        self.num_restarts = 0
        self.stats, self.weights = EngineStats(), GivenWeights()
        self.last_heartbeat = time.monotonic()
        self._config, self._listener = config, listener
        self._command = tuple(command or DEFAULT_COMMAND)
        self._rules = supervision or Supervision()
        self._changes = changes
        self._life: _Life | None = None
        self._successor: asyncio.Task[None] | None = None  # reaps the last process, then starts the next
        self._watchdog: asyncio.Task[None] | None = None
        self._failures: list[float] = []
        self._unexplained: list[float] = []  # of them, those that count against the machine
        self._started_at = self._checked_at = self._moved_at = time.monotonic()
        self._num_turns = -1
        self._closing = False
        self._outbox = bytearray()
        self._answers: dict[int, Future[bytes]] = {}  # of calls that wait
        self._num_calls = 0

    @property
    def step_age(self) -> float:
        """Seconds since the engine's loop last moved, or had nothing to do."""
        return time.monotonic() - self._moved_at

    def start(self) -> None:
        """Spawn the engine. It reports itself through the listener."""
        self._watchdog = asyncio.create_task(self._watch(), name="octavo-watchdog")
        self._spawn()

    def add(self, request: Add) -> None:
        """Send a request; it is lost if the engine is down. Raises ParameterError for one that is too large."""
        try:
            self.send(request)
        except BadFrameError as error:
            raise ParameterError("prompt", f"prompt and parameters are too large: {error}", "too_large") from None

    def abort(self, sequence_ids: list[str]) -> None:
        """End sequences, without an update."""
        self.send(Abort(sequence_ids))

    def take_untold(self, sequence_ids: Iterable[str]) -> list[RequestUpdate]:
        """Nothing: what no update told is not known here."""
        return []

    def call(self, name: str, payload: bytes = b"") -> Future[bytes]:
        """Ask the core between two steps. Raises BadFrameError for a payload that is too large.

        The answer fails with EngineDeadError if the engine is down or goes away, with ValueError for a name or a
        payload that the core cannot use, with RuntimeError for what else goes wrong there.
        """
        answer = Future[bytes]()
        if self._life is None or not self._life.ready:
            answer.set_exception(EngineDeadError("the engine is down"))
            return answer
        self._num_calls += 1
        self.send(Call(self._num_calls, name, payload))
        self._answers[self._num_calls] = answer
        return answer

    def withdraw(self, answer: Future[bytes]) -> None:
        """Nobody waits for a call's answer: if it has not begun, or waits for a trainer, it fails, withdrawn."""
        for call_id, known in self._answers.items():
            if known is answer:
                self.send(Withdraw(call_id))
                return

    def send(self, message: ToEngine) -> None:
        """Queue a message; those of one turn of the event loop go out together. Lost if the engine is down.

        Raises BadFrameError if the message is too long.
        """
        frame = encode(message)
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox += frame

    async def close(self) -> None:
        """Ask the engine to stop, and see to it that it does. One that still loads has nothing to finish."""
        self._closing = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        life = self._life
        if life is not None:
            if life.ready:
                self.send(Stop())
                self._flush()
                deadline = time.monotonic() + _STOP_SECONDS
                while life.process.poll() is None and time.monotonic() < deadline:
                    await asyncio.sleep(0.01)
            self._end(life, "closed")
        elif self._successor is not None:
            self._successor.cancel()
        if self._successor is not None:
            await asyncio.wait([self._successor])

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, bytearray()
        life = self._life
        if life is not None and life.transport is not None and outbox:
            life.transport.write(outbox)

    def _spawn(self) -> None:
        """Start the process and connect. Done on the loop's own thread: the child dies with its parent's thread."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(end is theirs)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                end.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        with contextlib.ExitStack() as closed_on_failure, theirs:
            closed_on_failure.callback(ours.close)
            process = subprocess.Popen(
                [*self._command, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=child_environment(),
                stdout=sys.stderr.fileno() if _has_stderr() else subprocess.DEVNULL,
            )
            closed_on_failure.pop_all()
        self._started_at = self.last_heartbeat = self._checked_at = self._moved_at = time.monotonic()
        self._num_turns = -1
        self.stats = EngineStats()
        self._life = life = _Life(self, process)
        life.connecting = asyncio.create_task(self._connect(life, ours), name="octavo-engine-connect")

    async def _connect(self, life: _Life, ours: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_unix_connection(lambda: life, sock=ours)
        except OSError as error:
            ours.close()
            self._end(life, f"no connection to the engine: {error.strerror}")
            return
        if self._life is life:
            known = self.weights
            start = Start(_given(self._config), known.num_updates, known.lost_version)
            self._outbox[:0] = encode(start)
            self._flush()
        elif life.transport is not None:
            life.transport.abort()

    def _take(self, life: _Life, frame: bytes | None) -> None:
        """One frame of the engine. What cannot be read may have been a token: such an engine is replaced."""
        if self._life is not life:
            return
        try:
            message = decode_from_engine(frame)
        except BadFrameError as error:
            self._end(life, f"the engine sent a bad frame: {error}")
            return
        if isinstance(message, Updates):
            self._listener.engine_updates(message)
        elif isinstance(message, Heartbeat):
            now = self.last_heartbeat = time.monotonic()
            if message.num_turns != self._num_turns or not message.busy:
                self._num_turns, self._moved_at = message.num_turns, now
            self.stats = message.stats
            self.weights.heard(message.stats)
        elif isinstance(message, CallDone):
            self._answer(message)
        elif isinstance(message, Ready):
            if message.protocol != PROTOCOL:
                self._end(life, f"the engine speaks protocol {message.protocol}, not {PROTOCOL}")
                return
            if changed := self._changes():
                self._end(life, f"{changed} ({_ADVICE})", final=True)
                return
            life.ready = True
            if self.num_restarts:
                _LOG.warning("the engine is back (start %d of this server)", self.num_restarts + 1)
            self.last_heartbeat = self._moved_at = time.monotonic()
            self._listener.engine_up(message.info)
        else:
            life.failure = message

    def _answer(self, message: CallDone) -> None:
        answer = self._answers.pop(message.call_id, None)
        if answer is None or not answer.set_running_or_notify_cancel():
            return
        if message.error == WITHDRAWN:
            answer.set_exception(CallWithdrawnError("who asked has left"))
        elif message.error:
            answer.set_exception((ValueError if message.is_users else RuntimeError)(message.error))
        else:
            answer.set_result(message.result)

    def _end(self, life: _Life, reason: str, *, hangs: bool = False, final: bool = False) -> None:
        """The end of a life, whatever it came from: kill, reap, tell, plan the next one."""
        if self._life is not life:
            return
        self._life = None
        self._outbox.clear()
        if hangs:
            _ask_for_stacks(life.process)
        if life.transport is not None:
            life.transport.abort()
        code = _kill(life.process)
        failure = life.failure
        from_outside = not hangs and failure is None and code in (-signal.SIGKILL, -signal.SIGTERM)
        explained = life.ready and not from_outside and self._listener.explains_failure()
        if failure is not None:
            reason = failure.text
        elif not reason:
            reason = _describe_exit(code)
        never_worked = failure is not None and not life.ready and self.num_restarts == 0
        is_users = failure is not None and failure.is_users
        self._go_down(reason, life, final=final or never_worked, is_users=is_users, explained=explained)

    def _go_down(
        self, reason: str, life: _Life | None, *, final: bool = False, is_users: bool = False, explained: bool = False
    ) -> None:
        """Count a failure, and plan the next life if there is to be one. explained: by requests."""
        now, rules = time.monotonic(), self._rules
        self._failures = [t for t in self._failures if now - t < rules.failure_window] + [now]
        if not explained:
            self._unexplained = [t for t in self._unexplained if now - t < rules.failure_window] + [now]
        final = final or self._closing or len(self._unexplained) >= rules.max_failures
        if not self._closing:
            level = logging.INFO if is_users else logging.ERROR  # a user's mistake is told once, by who exits
            _LOG.log(level, "the engine is down: %s%s", reason, " (not restarted)" if final else "")
        if final and self._watchdog is not None:
            self._watchdog.cancel()
        delay = min(rules.first_delay * 2 ** (len(self._failures) - 1), rules.max_delay)
        self._successor = asyncio.create_task(self._succeed(life, None if final else delay), name="octavo-restart")
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if answer.set_running_or_notify_cancel():
                answer.set_exception(EngineDeadError(f"the engine went away: {reason}"))
        self.weights.gone(was_asked=self._closing)
        self._listener.engine_down(reason, final=final, is_users=is_users)
        self.stats = EngineStats()

    async def _succeed(self, life: _Life | None, delay: float | None) -> None:
        """Wait until the old process is reaped (freeing its memory may take a while), then start a new one."""
        while life is not None and life.process.poll() is None:
            await asyncio.sleep(0.01)
        if delay is None:
            return
        await asyncio.sleep(delay)
        if changed := await asyncio.to_thread(self._changes):
            self._go_down(f"it is not started again: {changed} ({_ADVICE})", None, final=True)
            return
        self.num_restarts += 1
        try:
            self._spawn()
        except OSError as error:
            self._go_down(f"the engine process cannot be started: {error.strerror}", None)

    async def _watch(self) -> None:
        """Kill an engine that neither works nor ends."""
        rules = self._rules
        while True:
            await asyncio.sleep(rules.check_interval)
            now = time.monotonic()
            lag, self._checked_at = now - self._checked_at - rules.check_interval, now
            if lag > rules.check_interval:  # this process stood still: what the engine said meanwhile is not read yet
                self.last_heartbeat += lag
                self._moved_at += lag
            life = self._life
            if life is None:
                continue
            if not life.ready:
                if now - self._started_at > rules.load_deadline:
                    self._end(life, f"the engine did not load within {rules.load_deadline:g} s")
            elif now - self.last_heartbeat > rules.heartbeat_deadline:
                self._end(life, f"no heartbeat of the engine for {rules.heartbeat_deadline:g} s", hangs=True)
            elif now - self._moved_at > rules.step_deadline:
                self._end(life, f"a step of the engine took more than {rules.step_deadline:g} s", hangs=True)


def child_environment() -> dict[str, str]:
    """The environment of a child that is to import this very octavo, however this process found it.

    Octavo's own variables stay here: settings go by message, and keys are none of the child's business.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OCTAVO_")}
    root = str(Path(octavo.__file__).resolve().parents[1])
    if not root.endswith("-packages"):  # an installed package is found anyway; its neighbours must not come first
        paths = [root, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return environment


def _given(config: EngineConfig) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    plain = dataclasses.asdict(EngineConfig())
    return {name: value for name, value in dataclasses.asdict(config).items() if value != plain[name]}


def _ask_for_stacks(process: subprocess.Popen[bytes]) -> None:
    """Let a hanging engine write to stderr where its threads are, if it still can."""
    with contextlib.suppress(OSError):
        process.send_signal(signal.SIGUSR1)
    time.sleep(0.05)


def _kill(process: subprocess.Popen[bytes]) -> int | None:
    """Make sure that the process ends. Its exit code, if it has ended by now."""
    if process.poll() is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.05)
    return process.returncode


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "the engine process closed its socket"
    if code < 0:
        try:
            return f"the engine process was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"the engine process was killed by signal {-code}"
    return f"the engine process exited with code {code}"


def _has_stderr() -> bool:
    try:
        return sys.stderr.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False
