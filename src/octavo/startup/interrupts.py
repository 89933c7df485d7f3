"""Ctrl-C, and what other signals' handlers raise, held back while state changes that must change as a whole.

Owns the handling of signals for that time. Knows no engine. Invariants: a signal that comes within is handled at the
end; a second one, or one that has waited for long, is handled at once, since what is within may hang; the system's part
of a handler, its flags and what C code has set there, is never changed.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import signal
import threading
import traceback
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# Without the wrappers, which make an enum of every number: a third of the time that holding takes a step.
_get: Callable[[int], Any] = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
_set: Callable[[int, Any], Any] = getattr(signal.signal, "__wrapped__", signal.signal)
# Those by which programs end a call that takes too long, or themselves.
_HELD = tuple(int(getattr(signal, name)) for name in ("SIGINT", "SIGALRM", "SIGTERM") if hasattr(signal, name))
_Action = ctypes.c_char * 512  # room for a struct sigaction, which is 152 bytes with glibc
_PATIENCE = 30.0  # seconds that a signal waits: far longer than a step takes


def _find_sigaction() -> Callable[[int, Any, Any], int]:
    try:
        found = ctypes.PyDLL(None).sigaction
    except (AttributeError, OSError, TypeError):  # of a system without it
        return lambda number, new, old: -1
    found.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    return found


_sigaction = _find_sigaction()


def _put(number: int, handler: Any) -> None:
    """Set the handler in Python alone.

    `signal.signal` takes the system's part of it back to Python's own: asyncio's flags go, and faulthandler's handler.
    """
    action = _Action()
    is_read = not _sigaction(number, None, action)
    try:
        _set(number, handler)
    finally:
        if is_read and _get(number) == handler:  # else a handler that came in between has set another one
            _sigaction(number, action, None)


class HeldSignals:
    """Within: signals that have a handler in Python wait. Does nothing outside the main thread."""

    def __enter__(self) -> None:
        """Hold."""
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._noted: dict[int, tuple[FrameType | None, _thread.LockType]] = {}  # the lock: held while it waits
        self._taken: list[int] = []  # signals whose handlers are to be put back
        self._holds = False  # until all are: a handler that raises in between leaves nothing that holds
        if threading.current_thread() is threading.main_thread():
            try:
                for number in _HELD:
                    if callable(handler := _get(number)):
                        self._handlers[number] = handler
                        self._taken.append(number)
                        _put(number, self._note)
                self._holds = True
            except BaseException:
                self._holds = False
                self._put_back()
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Handle what came; not by a KeyboardInterrupt while something else is being raised."""
        self._holds = False
        try:
            self._put_back()
        finally:
            if self._noted:
                self._handle(error)

    def _put_back(self) -> None:
        """All of them, whatever a handler raises that is called meanwhile."""
        try:
            while self._taken:
                number = self._taken[-1]
                if _get(number) == self._note:  # else it has got another handler within
                    _put(number, self._handlers[number])
                self._taken.pop()
        except BaseException:
            self._put_back()
            raise

    def _handle(self, error: BaseException | None) -> None:
        with contextlib.ExitStack() as stack:  # each is handled, whatever another one's handler raises
            for number, (frame, waits) in self._noted.items():
                waits.release()
                handler = self._handlers[number]
                if error is None or handler is not signal.default_int_handler:
                    stack.callback(handler, number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        waits = _thread.allocate_lock()
        waits.acquire()
        noted = frame, waits
        if not self._holds or self._noted.setdefault(number, noted) is not noted:
            self._handlers[number](number, frame)
            return
        with contextlib.suppress(RuntimeError):  # no thread can begin: then it waits for the end, or for a second one
            # threading's are not for a handler of signals
            _thread.start_new_thread(_lose_patience, (weakref.ref(self), number, waits, _thread.get_ident()))


def _lose_patience(whose: weakref.ReferenceType[HeldSignals], number: int, waits: _thread.LockType, main: int) -> None:
    """A thread's, which may end when the interpreter does: what it kept until then, as an engine, would end there."""
    if not waits.acquire(timeout=_PATIENCE) and (held := whose()) is not None and held._holds:
        if hasattr(signal, "pthread_kill"):  # there it ends a call of the system that waits, too
            signal.pthread_kill(main, number)
        else:
            signal.raise_signal(number)


def may_be_a_signal(error: BaseException) -> bool:
    """Whether a signal may have raised it, and not the code that it came through: then it is no failure of that."""
    if threading.current_thread() is not threading.main_thread():
        return False
    note = HeldSignals._note.__code__
    if any(frame.f_code is note for frame, _ in traceback.walk_tb(error.__traceback__)):
        return True
    handler = _get(signal.SIGINT)
    is_held = getattr(handler, "__func__", None) is HeldSignals._note
    return isinstance(error, KeyboardInterrupt) and callable(handler) and not is_held
