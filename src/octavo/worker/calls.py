"""What may be asked of a worker by name, between two steps, beside what a start needs: messages and their answers.

Owns the table of names: each says what message it takes, as msgpack, and what is done. A new one is a line there.
Knows the runner; who asks knows a name and two types. Invariant: an unknown name, and a message of another type, is a
ValueError and changes nothing.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from octavo.device.sleep import WorkerMemory
from octavo.worker.observe_logits import LogitsDigest
from octavo.worker.runner import Runner

if TYPE_CHECKING:
    from octavo.rl.receiver import WeightReceiver

# Names of a runner's methods -> what they are told as.
_TIMED = {"_apply": "apply", "_bring": "stage"}
Span = tuple[str, int, int]
"""A part of a step's issue, its start and its end, in nanoseconds of perf_counter."""


class Calls:
    """A worker's answers."""

    def __init__(self, runner: Runner, receiver: Callable[[], WeightReceiver], memory: WorkerMemory) -> None:
        """Nobody watches. receiver: of new weights, made when it is first told of some."""
        self._runner, self._memory = runner, memory
        self._make_receiver, self._making = receiver, threading.Lock()
        self._receiver: WeightReceiver | None = None
        self._digest: LogitsDigest | None = None
        self._spans: list[Span] = []

    def answer(self, name: str, payload: bytes) -> bytes:
        """Do what is asked. Raises ValueError for an unknown name and for a message of another type."""
        handler = _HANDLERS.get(name)
        if handler is None:
            raise ValueError(f"unknown call {name!r} of a worker: known are {', '.join(sorted(_HANDLERS))}")
        request = msgspec.msgpack.decode(payload, type=handler.request)
        own = self._weights() if name.startswith("weights_") else self
        run: Callable[..., object] = getattr(own, handler.method)
        return msgspec.msgpack.encode(run(*([] if request is None else [request])))

    def capture_next(self) -> bool:
        """Capture one of the graphs that the start has left; False if there is none. Takes 10 to 30 ms."""
        return self._runner.capture_next()

    def digest_logits(self) -> None:
        """Remember a 64-bit digest of the logits of each request and position from now on, until they are taken."""
        if self._digest is None:
            self._digest = LogitsDigest()
            self._runner.observe(self._digest)

    def take_digests(self) -> dict[str, dict[int, int]]:
        """Sequence id -> position -> digest, of what was seen since the last call. Raises ValueError if none is."""
        if self._digest is None:
            raise ValueError("take_digests needs digest_logits before")
        return self._digest.take()

    def time_issue(self, wanted: bool) -> None:
        """Time the parts of issuing a step from now on, or no more."""
        for method, name in _TIMED.items():
            vars(self._runner).pop(method, None)
            if wanted:
                setattr(self._runner, method, self._timed(name, getattr(self._runner, method)))

    def take_spans(self) -> list[Span]:
        """What was timed since the last call."""
        spans, self._spans = self._spans, []
        return spans

    def check_sleep(self, keeps: dict[str, bool]) -> list[str]:
        """Of tags and whether their values are kept: whose memory would go. Raises ValueError where none can."""
        return self._memory.going(keeps)

    def sleep(self, keeps: dict[str, bool]) -> str:
        """Give the memory of these tags back; or why that cannot be, and then nothing has changed."""
        return self._memory.sleep(keeps)

    def wake(self, tags: list[str]) -> str:
        """Take the memory of these tags again; or why not, and then they sleep on."""
        return self._memory.wake(tags)

    def _weights(self) -> WeightReceiver:
        with self._making:  # what is asked beside the steps comes from several threads
            if self._receiver is None:
                self._receiver = self._make_receiver()
            return self._receiver

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(*args: Any) -> Any:
            started = time.perf_counter_ns()
            result = call(*args)
            self._spans.append((name, started, time.perf_counter_ns()))
            return result

        return run


class _Handler(NamedTuple):
    """What is done with a message of a type: a method of Calls, or of a WeightReceiver, by its name."""

    method: str
    request: Any = None


_HANDLERS = {
    "capture_next": _Handler("capture_next"),
    "digest_logits": _Handler("digest_logits"),
    "take_digests": _Handler("take_digests"),
    "time_issue": _Handler("time_issue", bool),
    "take_spans": _Handler("take_spans"),
    "check_sleep": _Handler("check_sleep", dict[str, bool]),
    "sleep": _Handler("sleep", dict[str, bool]),
    "wake": _Handler("wake", list[str]),
    "weights_init": _Handler("init", tuple[int, dict[str, Any]]),
    "weights_shutdown": _Handler("shutdown"),
    "weights_start": _Handler("start", bool),
    "weights_expect": _Handler("expect", dict[str, Any]),
    "weights_update": _Handler("update", tuple[int, dict[str, Any]]),
    "weights_cut": _Handler("cut", tuple[int, str]),
    "weights_peer_is_gone": _Handler("peer_is_gone"),
    "weights_prepare": _Handler("prepare"),
    "weights_apply": _Handler("apply", str),
    "weights_abort": _Handler("abort"),
    "weights_checksums": _Handler("checksums"),
    "weights_values": _Handler("values", tuple[str, int]),
}
