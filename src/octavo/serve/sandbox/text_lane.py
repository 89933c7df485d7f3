"""ShortLane: short jobs for a text sandbox, asked on the event loop, one behind the other.

Owns one child at a time, the line of jobs before it, and the clock of the one that it works on. Knows what no job is
about. Invariant: every job is answered in its turn, or told why not; a child that ends takes down the job that it
worked on and no other.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from concurrent.futures import ThreadPoolExecutor

import msgspec

from octavo.frontend.messages import FrameReader
from octavo.text.sandbox import SPARE_SECONDS, Child, SandboxError, TextSandbox, told
from octavo.text.sandbox_child import Answer, Job, frame_of

_LOG = logging.getLogger(__name__)

_NUM_AHEAD = 4  # jobs that a child has before it has answered: it need not wait for the next one
MAX_WAITING = 4096


class _Entry:
    """A job in the line."""

    __slots__ = ("answer", "has_warning", "job")

    def __init__(self, job: Job, answer: asyncio.Future[bytes]) -> None:
        self.job, self.answer = job, answer
        self.has_warning = False  # a new child has ended with it; it may have been killed by a stranger


class ShortLane(asyncio.Protocol):
    """One event loop's. `ask` may be called by any number of tasks."""

    def __init__(self, sandbox: TextSandbox) -> None:
        """Nothing is started before `open`, or before it is needed."""
        self._sandbox = sandbox
        self._starter = ThreadPoolExecutor(1, "octavo-text-start")  # a child ends with the thread that started it
        self._child: Child | None = None
        self._is_fresh = False  # it has not answered yet
        self._transport: asyncio.Transport | None = None
        self._opening: asyncio.Task[None] | None = None
        self._frames = FrameReader()
        self._waiting: collections.deque[_Entry] = collections.deque()
        self._sent: collections.deque[_Entry] = collections.deque()
        self._clock: asyncio.TimerHandle | None = None
        self._closed = False

    async def ask(self, job: Job) -> bytes:
        """What a child makes of a job. Raises ParameterError or SandboxError, as TextSandbox.ask."""
        if self._closed or len(self._waiting) >= MAX_WAITING:
            raise SandboxError("", "the line is closed" if self._closed else "too many short texts wait")
        entry = _Entry(job, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._send()
        return await entry.answer

    def open(self) -> None:
        """Have a child started, in the background."""
        if self._opening is None and not self._closed:
            self._opening = asyncio.create_task(self._open(), name="octavo-text-child")

    def close(self) -> None:
        """Fail what waits. The child is the sandbox's to end."""
        self._closed = True
        self._stop_clock()
        if self._opening is not None:
            self._opening.cancel()
        if self._transport is not None:
            self._transport.abort()
        self._fail_all(SandboxError("", "the server stops"))
        self._starter.shutdown(wait=False, cancel_futures=True)

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            child, self._is_fresh = await loop.run_in_executor(self._starter, self._sandbox.take)
            child.socket.setblocking(False)
            self._frames = FrameReader()
            self._child = child
            transport, _ = await loop.create_unix_connection(lambda: self, sock=child.socket.dup())
        except (SandboxError, OSError) as error:
            _LOG.error("a text's child cannot be started: %s", error)
            self._opening = None
            self._fail_all(error if isinstance(error, SandboxError) else SandboxError("", str(error)))
            return
        self._transport, self._opening = transport, None
        self._send()

    def data_received(self, data: bytes) -> None:
        """Answers of the child."""
        for frame in self._frames.feed(data):
            self._is_fresh = False
            entry = self._sent.popleft()
            self._stop_clock()
            if not entry.answer.done():
                try:
                    assert frame is not None, "an answer is shorter than a frame may be"
                    entry.answer.set_result(told(entry.job, msgspec.msgpack.decode(frame, type=Answer)))
                except Exception as error:
                    entry.answer.set_exception(error)
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        """The child has ended: by its limits, or because it was told to."""
        self._end(is_late=False)

    def _end(self, *, is_late: bool) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        self._stop_clock()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
        sent, self._sent = self._sent, collections.deque()
        if sent:
            first = sent[0]
            is_to_blame = self._is_fresh and first.has_warning
            refusal = self._sandbox.end(child, first.job, is_fresh=is_to_blame, is_late=is_late)
            first.has_warning |= self._is_fresh
            if refusal is not None:
                sent.popleft()
                if not first.answer.done():
                    first.answer.set_exception(refusal)
        else:
            child.kill()
        self._waiting.extendleft(reversed(sent))
        self._send()

    def _send(self) -> None:
        """Give the child what it may have, oldest first; what nobody waits for any more is dropped."""
        while self._waiting and len(self._sent) < _NUM_AHEAD:
            if self._waiting[0].answer.done():
                self._waiting.popleft()
            elif self._transport is None:
                self.open()
                break
            else:
                entry = self._waiting.popleft()
                self._sent.append(entry)
                self._transport.write(frame_of(entry.job))
        if self._sent and self._clock is None:
            seconds = self._sent[0].job.seconds + SPARE_SECONDS
            self._clock = asyncio.get_running_loop().call_later(seconds, lambda: self._end(is_late=True))

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _fail_all(self, error: SandboxError) -> None:
        for entry in (*self._sent, *self._waiting):
            if not entry.answer.done():
                entry.answer.set_exception(error)
        self._sent.clear()
        self._waiting.clear()
