"""Moves: what is asked of an update, in its order; one that waits for a trainer does so beside the steps.

Owns the thread of the move that waits, and the line of those behind it. Knows neither weights nor workers. Invariants:
the thread runs what a move gives it and nothing else; whatever else a move does is done between two steps, by who calls
`do` and `poll`; each answer comes once.
"""

from __future__ import annotations

import collections
import queue
import threading
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from typing import Any

Waiting = Generator[Callable[[int], Any], Any, Any]
"""A move that waits: it yields what is to be run beside the steps, is sent what came of it, and returns its result."""
Move = Callable[[], Any]
"""Gives a result, or a Waiting."""


_Works = queue.SimpleQueue[tuple[Callable[[], Any], Future[Any], Callable[[], object]] | None]


def _nobody() -> None:
    """Nobody waits for news."""


class Moves:
    """One engine's. All but `wait` is called between two steps."""

    def __init__(self, tell: Callable[[Callable[[], Any]], bytes], cut: Callable[[int, str], None]) -> None:
        """`tell`: a move's result, or what it raised, as an answer; `cut`: end what runs under a number, and why."""
        self.on_news: Callable[[], object] = _nobody  # called by the thread, when `poll` has something to do
        self._tell, self._cut = tell, cut
        self._number = 0  # of the move that waits, or waited last
        self._thread: threading.Thread | None = None
        self._works: _Works = queue.SimpleQueue()  # of the thread
        self._waiting: tuple[Waiting, Future[bytes], Future[Any]] | None = None
        self._line: collections.deque[tuple[Move, Future[bytes]]] = collections.deque()

    @property
    def is_busy(self) -> bool:
        """Whether a move waits for a trainer."""
        return self._waiting is not None

    def do(self, move: Move) -> Future[bytes]:
        """Begin it now; its answer. One that is cancelled is cut short."""
        answer = Future[bytes]()
        self._begin(move, answer)
        return answer

    def line_up(self, move: Move) -> Future[bytes]:
        """Begin it when no other waits. Cancelled before that, it is none."""
        if not self.is_busy:
            return self.do(move)
        answer = Future[bytes]()
        self._line.append((move, answer))
        return answer

    def cut(self, reason: str) -> None:
        """End the wait of the one that waits, soon: it fails with the reason."""
        if self.is_busy:
            self._cut(self._number, reason)

    def poll(self) -> None:
        """Go on with a move whose wait is over, and with those behind it."""
        while self._waiting is not None and self._waiting[2].done():
            (move, answer, work), self._waiting = self._waiting, None
            self._go_on(move, answer, work)
            while self._line and not self.is_busy:
                following, its_answer = self._line.popleft()
                if not its_answer.cancelled():
                    self._begin(following, its_answer)

    def wait(self) -> None:
        """Until `poll` has something to do, or nothing waits. For any thread."""
        waiting = self._waiting
        if waiting is not None:
            wait([waiting[2]])

    def _begin(self, move: Move, answer: Future[bytes]) -> None:
        def begin() -> Any:
            result = move()
            if not isinstance(result, Generator):
                return result
            waiting: Waiting = result
            self._go_on(waiting, answer, None)
            return _LATER

        self._finish(answer, begin)

    def _go_on(self, move: Waiting, answer: Future[bytes], done: Future[Any] | None) -> None:
        """Let a move that waits take its next step. done: what it has waited for."""
        error = None if done is None else done.exception()

        def advance() -> Any:
            try:
                work = move.throw(error) if error is not None else move.send(done.result() if done else None)
            except StopIteration as end:
                return end.value
            self._start(move, answer, work)
            return _LATER

        self._finish(answer, advance)

    def _finish(self, answer: Future[bytes], step: Callable[[], Any]) -> None:
        """Answer with what a step gives, unless the answer comes later, was given, or nobody wants it."""
        is_later = False

        def result() -> Any:
            nonlocal is_later
            made = step()
            is_later = made is _LATER
            return None if is_later else made

        def result_or_error() -> Any:
            try:
                return result()
            except Exception as error:
                _let_go(error)
                raise

        try:
            told = self._tell(result_or_error)
        except Exception as error:
            if not answer.done():
                answer.set_exception(error)
            return
        if not is_later and not answer.done():
            answer.set_result(told)

    def _start(self, move: Waiting, answer: Future[bytes], work: Callable[[int], Any]) -> None:
        assert self._waiting is None, "one move waits at a time"
        self._number += 1
        number, done = self._number, Future[Any]()
        self._waiting = move, answer, done
        if self._thread is None or not self._thread.is_alive():  # a forked process has none
            self._works = queue.SimpleQueue()
            self._thread = threading.Thread(
                target=_work_through, args=(self._works,), daemon=True, name="octavo-weights"
            )
            self._thread.start()
            weakref.finalize(self, self._works.put, None)
        self._works.put((lambda: work(number), done, self.on_news))
        answer.add_done_callback(lambda each: each.cancelled() and self._cut(number, "who asked for it has left"))


def _work_through(works: _Works) -> None:
    """The thread: one for all waits, since what libraries keep for a thread takes time to make. It holds no engine."""
    while (work := works.get()) is not None:
        run, done, on_news = work
        try:
            done.set_result(run())
        except BaseException as error:
            _let_go(error)
            done.set_exception(error)
        on_news()
        del work, run, done, on_news


def _let_go(error: BaseException) -> None:
    """Of what those who failed had in hand: an error is in a cycle with its frames, which had buffers of weights.

    One that is told by its words alone needs no frames; another one is nobody's fault but ours, and keeps them.
    """
    each: BaseException | None = error
    while each is not None and isinstance(error, ValueError | OSError):
        each.__traceback__ = None
        each = each.__context__


_LATER = object()  # in place of a result that comes later
