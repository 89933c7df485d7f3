"""The engine process: an EngineCore behind a socket.

Owns the loop of steps, the reader thread that feeds the core's inbox, the heartbeat thread, and the exits. Knows no
text and no HTTP; tests run another core in the same loop. Invariant: whatever the front end sends, only the
request that it is about can fail; the process never outlives the front end, and waits without spinning while there is
nothing to do.

Run as `python -m octavo.serve.engine.process FD PARENT`: a connected stream socket, and the process to die with.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NoReturn

import msgspec

from octavo.config.engine_config import EngineConfig, load_config
from octavo.config.quoted import describe
from octavo.engine import EngineCore
from octavo.frontend.in_process import InProcessClient
from octavo.frontend.messages import (
    MAX_TEXT,
    PROTOCOL,
    WITHDRAWN,
    Abort,
    Add,
    BadFrameError,
    Call,
    CallDone,
    EngineInfo,
    Failed,
    FrameReader,
    FromEngine,
    Heartbeat,
    Ready,
    Start,
    Stop,
    ToEngine,
    Updates,
    Withdraw,
    decode_to_engine,
    encode,
)
from octavo.observe import Phases, setup_logging
from octavo.request.outputs import WEIGHTS_BROKEN, WEIGHTS_DISCARDED
from octavo.request.sampling_params import Limits, ParameterError, check, check_request_options, check_token_ids
from octavo.request.updates import RequestUpdate
from octavo.rl.session import WeightsBrokenError
from octavo.serve.engine.refusals import lost_weights
from octavo.startup import gc_control, warm_start
from octavo.startup.child import exit_with_parent

_LOG = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.25
MAX_BAD_FRAMES = 16  # after so many the front end is taken for broken
EXIT_CONFIG, EXIT_FAILED, EXIT_BAD_FRAMES = 2, 1, 3
_RECV_BYTES = 1 << 18
_LOOK_SECONDS = 1.0  # between two looks at whether an open update of the weights was given up

# From a config to a core and what there is to say about it. Raises ValueError for what cannot run.
BuildCore = Callable[[EngineConfig, Phases], tuple[EngineCore, EngineInfo]]


class EngineProcess:
    """The threads around one core. `run` is the main thread's."""

    def __init__(self, connection: socket.socket) -> None:
        """`connection` leads to the front end."""
        self._connection = connection
        self._frames = FrameReader()
        self._send_lock, self._beat_lock = threading.Lock(), threading.Lock()
        self._wake = threading.Event()
        self._client: InProcessClient | None = None  # once it is loaded
        self._limits = Limits(vocab_size=0, max_model_len=0)
        self._sequences: set[str] = set()  # unfinished ones
        self._calls: collections.deque[Call] = collections.deque()
        self._answers: dict[int, Future[bytes]] = {}  # of calls that were begun and wait for a trainer
        self._withdrawn: set[int] = set()  # calls of the two, that nobody waits for any more
        self._stopping = False
        self._is_answering = False  # a call, or what one has begun, which has a deadline of its own, and no step
        self._told_weights = (0, "")  # updates and label, as every front end knows them that has an answer
        self._is_idle = False  # and the front end was told so
        self._num_turns = 0
        self._num_bad_frames = 0
        self._num_unknown_aborts = 0

    def run(self, build: BuildCore) -> int:
        """Until Stop; the exit code."""
        phases = Phases()
        try:
            start = self._first_message()
            config, _ = load_config(python_kwargs=start.config, environ={})
            setup_logging(config.log_level)
            core, info = build(config, phases)
        except (ValueError, TypeError) as error:
            self._send_failure(str(error), is_users=isinstance(error, ValueError))
            return EXIT_CONFIG
        except Exception as error:
            self._send_failure(describe(error, MAX_TEXT))
            return EXIT_FAILED
        core.weights.num_past = start.num_past_updates
        if start.lost_version:
            core.break_weights(lost_weights(start.lost_version))
        self._client = client = InProcessClient(core)
        self._limits = Limits(
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            max_logprobs=info.max_logprobs,
            max_n=config.max_n,
            max_total_tokens=config.max_total_tokens,
            experts=info.experts,
            request_fields=tuple(info.request_fields),
        )
        gc_control.settle()
        self.send(Ready(info))
        for target in (self._read, self._beat):
            threading.Thread(target=target, name=f"octavo{target.__name__}", daemon=True).start()
        try:
            self._loop(client)
        except Exception as error:
            _LOG.exception("the engine failed")
            self._send_failure(describe(error, MAX_TEXT))
            return EXIT_FAILED
        core.close()
        return 0

    def send(self, message: FromEngine) -> None:
        """One frame, from any thread. Waits while the front end does not read."""
        self._send_frames(encode(message))

    def _send_frames(self, frames: bytearray) -> None:
        """What goes together wakes the front end once."""
        with self._send_lock:
            self._connection.sendall(frames)

    def _first_message(self) -> Start:
        while True:
            data = self._connection.recv(_RECV_BYTES)
            if not data:
                _exit(0)
            for frame in self._frames.feed(data):
                message = decode_to_engine(frame)
                if isinstance(message, Start) and message.protocol == PROTOCOL:
                    return message
                raise BadFrameError(f"the front end does not speak protocol {PROTOCOL}")

    def _loop(self, client: InProcessClient) -> None:
        core = client.core
        core.weights.moves.on_news = self._wake.set
        while not self._stopping:
            self._wake.clear()
            if core.weights.moves.is_busy or core.weights.is_open or self._withdrawn:
                self._look_after(core)
            if not (core.has_unfinished or self._calls):
                if not self._is_idle:
                    self._is_idle = True
                    self._send_heartbeat(client)
                if not self._stopping and not core.capture_next():
                    self._wake.wait(_LOOK_SECONDS if core.weights.is_open else None)
                continue
            calls = [self._calls.popleft() for _ in range(len(self._calls))]
            has_work = core.has_unfinished
            updates = core.step()
            self._is_idle = self._is_idle and not (has_work or updates)  # a call's answer says how the engine stands
            self._num_turns += 1
            if updates:
                self._sequences.difference_update(u.request_id for u in updates if u.finish_reason is not None)
                self._send_updates(core.times.num_steps, updates)
            for call in calls:
                self._answer(client, call)

    def _look_after(self, core: EngineCore) -> None:
        """What changes beside the steps. It may end requests: whether anything is left to do is read behind it."""
        self._is_answering = True  # what a call has begun may be carried on here
        try:
            core.weights.moves.poll()
            if self._withdrawn:
                self._withdraw()
            if not core.has_unfinished:
                core.weights.expire()
        finally:
            self._is_answering = False

    def _answer(self, client: InProcessClient, call: Call) -> None:
        """Ask the core. What goes wrong is told to whoever called; the engine goes on."""
        if call.call_id in self._withdrawn:
            self._withdrawn.discard(call.call_id)
            self.send(CallDone(call.call_id, error=WITHDRAWN))
            return
        self._is_answering = True
        try:
            answer = client.call(call.name, call.payload)
        finally:
            self._is_answering = False
        self._answers[call.call_id] = answer
        answer.add_done_callback(lambda done: self._tell(call, done))  # at once, unless it waits for a trainer

    def _tell(self, call: Call, answer: Future[bytes]) -> None:
        """Send what came of a call; ahead of it, what it made of the weights: this process may end behind it."""
        assert self._client is not None, "calls are answered once the core is there"
        core = self._client.core
        self._answers.pop(call.call_id, None)
        self._withdrawn.discard(call.call_id)
        now = core.weights.stats.num_updates, core.weights.version
        if self._told_weights != now or not core.has_unfinished:
            self._told_weights = now
            self._send_heartbeat(self._client, _done(call, answer))
        else:
            self._send_frames(_done(call, answer))

    def _withdraw(self) -> None:
        """Let go of calls whose clients have left; those that were answered meanwhile are not known here."""
        waiting = {call.call_id for call in list(self._calls)}
        for call_id in list(self._withdrawn):
            answer = self._answers.get(call_id)
            if answer is not None:
                answer.cancel()
            elif call_id not in waiting:
                self._withdrawn.discard(call_id)

    def _send_updates(self, step: int, updates: list[RequestUpdate]) -> None:
        """In one frame, or in as few as may be."""
        try:
            self.send(Updates(step, updates))
        except BadFrameError:
            if len(updates) > 1:
                half = len(updates) // 2
                self._send_updates(step, updates[:half])
                self._send_updates(step, updates[half:])
                return
            update, scores = updates[0], updates[0].prompt_logprobs
            if scores.num_positions > 1:
                first, rest = scores.cut()
                self._send_updates(step, [RequestUpdate(update.request_id, prompt_logprobs=first)])
                self._send_updates(step, [msgspec.structs.replace(update, prompt_logprobs=rest)])
                return
            request_id = update.request_id
            assert self._client is not None, "updates come from a core"
            self._client.abort([request_id])
            self._sequences.discard(request_id)
            self._send_refusal(request_id, "output_too_large")

    def _send_refusal(self, sequence_id: str, reason: str) -> None:
        self.send(Updates(0, [RequestUpdate(sequence_id, finish_reason="error", error=reason)]))

    def _send_failure(self, text: str, *, is_users: bool = False) -> None:
        with contextlib.suppress(OSError):  # the front end may be gone as well
            self.send(Failed(text[:MAX_TEXT], is_users))

    def _beat(self) -> None:
        """The heartbeat thread."""
        assert self._client is not None, "the heart beats once the core is there"
        pause = threading.Event()
        while True:
            self._send_heartbeat(self._client)
            pause.wait(HEARTBEAT_SECONDS)

    def _send_heartbeat(self, client: InProcessClient, behind: bytearray | bytes = b"") -> None:
        """behind: frames that go with it."""
        own = {"num_bad_frames": self._num_bad_frames, "num_unknown_aborts": self._num_unknown_aborts}
        with self._beat_lock:  # none comes behind one that knows more
            is_busy = client.core.has_unfinished and not self._is_answering
            message = Heartbeat(self._num_turns, is_busy, msgspec.structs.replace(client.stats, **own))
            try:
                self._send_frames(encode(message) + behind)
            except OSError:
                _exit(0)

    def _read(self) -> None:
        """The reader thread: it blocks in recv, and ends the process with the front end."""
        while True:
            try:
                data = self._connection.recv(_RECV_BYTES)
            except OSError:
                data = b""
            if not data:
                _exit(0)
            for frame in self._frames.feed(data):
                try:
                    self._take(decode_to_engine(frame))
                except BadFrameError as error:
                    self._drop(str(error))
            self._wake.set()

    def _drop(self, reason: str) -> None:
        self._num_bad_frames += 1
        _LOG.error("dropped a message of the front end: %s", reason)
        if self._num_bad_frames >= MAX_BAD_FRAMES:
            self._send_failure(f"{self._num_bad_frames} messages of the front end could not be read")
            _exit(EXIT_BAD_FRAMES)

    def _take(self, message: ToEngine) -> None:
        assert self._client is not None, "the reader starts once the core is there"
        if isinstance(message, Add):
            self._add(self._client, message)
        elif isinstance(message, Abort):
            known = [sequence_id for sequence_id in message.sequence_ids if sequence_id in self._sequences]
            self._num_unknown_aborts += len(message.sequence_ids) - len(known)
            self._sequences.difference_update(known)
            self._client.abort(known)
        elif isinstance(message, Call):
            self._calls.append(message)
        elif isinstance(message, Withdraw):
            self._withdrawn.add(message.call_id)
        elif isinstance(message, Stop):
            self._stopping = True
        else:
            raise BadFrameError("a message that has no place here")

    def _add(self, client: InProcessClient, message: Add) -> None:
        """Queue it if it cannot hurt: the front end has checked everything, this checks what is indexed here."""
        ids = message.sequence_ids
        if len(set(ids)) != len(ids) or len(ids) != message.params.n or not self._sequences.isdisjoint(ids):
            raise BadFrameError("sequence ids that are in use, or not one per completion")
        self._sequences.update(ids)
        try:
            check_request_options(message.cache_salt, message.priority)
            check_token_ids(message.prompt_token_ids, self._limits)
            most = check(message.params, self._limits, len(message.prompt_token_ids))
            if not 1 <= message.max_tokens <= most:
                raise ParameterError("max_tokens", f"must be in [1, {most}], got {message.max_tokens}")
            if client.core.gate.lost:
                raise WeightsBrokenError(client.core.gate.lost_because)
            client.add(message)
        except Exception as error:  # nothing that a request holds may end this thread
            _LOG.error("refused a request: %s", error if isinstance(error, ValueError) else describe(error, MAX_TEXT))
            self._sequences.difference_update(ids)
            for sequence_id in ids:
                reason = "refused_by_engine"
                if isinstance(error, WeightsBrokenError):
                    reason = WEIGHTS_BROKEN if client.core.gate.broken else WEIGHTS_DISCARDED
                self._send_refusal(sequence_id, reason)


def build_core(config: EngineConfig, phases: Phases) -> tuple[EngineCore, EngineInfo]:
    """The engine with a model, without a tokenizer."""
    core, facts, _ = warm_start.start(config, phases, text=False)
    resolved, memory = facts.resolved, facts.memory
    info = EngineInfo(
        device=resolved.device,
        dtype=resolved.dtype,
        attention_backend=resolved.attention_backend,
        quantization=resolved.quantization,
        vocab_size=facts.vocab_size,
        max_model_len=resolved.max_model_len,
        max_logprobs=resolved.max_logprobs,
        max_num_seqs=resolved.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        enable_prefix_caching=resolved.enable_prefix_caching,
        block_size=resolved.block_size,
        num_blocks=memory.num_blocks,
        weight_bytes=memory.weight_bytes,
        request_fields=list(facts.request_fields),
        experts=resolved.kept_experts,
        numerics_contract=facts.numerics_contract(),
        phases=phases.entries,
    )
    return core, info


def main(argv: Sequence[str], build: BuildCore = build_core) -> NoReturn:
    """Run an engine process. `argv`: the socket's number and the parent's process id."""
    connection, parent = int(argv[0]), int(argv[1])
    if not exit_with_parent(parent):
        _exit(0)
    # Ctrl-C and service managers signal the whole group; the front end decides when the engine ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError, ValueError):  # without a stderr nobody would read them
        faulthandler.enable(all_threads=True)
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # the watchdog asks before it kills
    with socket.socket(fileno=connection) as sock:
        _exit(EngineProcess(sock).run(build))


def _exit(code: int) -> NoReturn:
    """At once, from any thread: there is nothing to clean up that the kernel does not."""
    sys.stderr.flush()
    os._exit(code)


def _done(call: Call, answer: Future[bytes]) -> bytearray:
    """The frame of what came of a call."""
    if answer.cancelled():
        return encode(CallDone(call.call_id, error=WITHDRAWN))
    try:
        return encode(CallDone(call.call_id, answer.result()))
    except Exception as error:
        is_users = isinstance(error, ValueError)
        text = str(error) if is_users else describe(error, MAX_TEXT)
        _LOG.error("call %s failed: %s", call.name, text)
        return encode(CallDone(call.call_id, error=text[:MAX_TEXT], is_users=is_users))


if __name__ == "__main__":
    main(sys.argv[1:])
