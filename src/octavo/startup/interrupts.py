"""Ctrl-C, and what other signals' handlers raise, held back while state changes that must change as a whole.

Owns the handling of signals for that time. Knows no engine. Invariant: a signal that comes within is handled at the
end; a second one, or one that has waited for long, is handled at once, since what is within may hang.
"""

from __future__ import annotations

import _thread
import contextlib
import signal
import threading
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# Without the wrappers, which make an enum of every number: a third of the time that holding takes a step.
_get: Callable[[int], Any] = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
_set: Callable[[int, Any], Any] = getattr(signal.signal, "__wrapped__", signal.signal)
# Those by which programs end a call that takes too long, or themselves.
_HELD = tuple(int(getattr(signal, name)) for name in ("SIGINT", "SIGALRM", "SIGTERM") if hasattr(signal, name))
_PATIENCE = 30.0  # seconds that a signal waits: far longer than a step takes


class HeldSignals:
    """Within: signals that have a handler in Python wait. Does nothing outside the main thread."""

    def __enter__(self) -> None:
        """Hold."""
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._noted: dict[int, FrameType | None] = {}
        if threading.current_thread() is threading.main_thread():
            for number in _HELD:
                if callable(handler := _get(number)):
                    self._handlers[number] = handler
                    _set(number, self._note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Handle what came; not an interrupt while something else is being raised."""
        for number, handler in self._handlers.items():
            _set(number, handler)
        if self._noted:
            self._ended.release()
            with contextlib.ExitStack() as stack:  # each is handled, whatever another one's handler raises
                for number, frame in self._noted.items():
                    if error is None or number != signal.SIGINT:
                        stack.callback(self._handlers[number], number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in self._noted:
            self._handlers[number](number, frame)
            return
        if not self._noted:
            self._ended = _thread.allocate_lock()
            self._ended.acquire()
            _thread.start_new_thread(self._lose_patience, (number,))  # threading's are not for a handler of signals
        self._noted[number] = frame

    def _lose_patience(self, number: int) -> None:
        if not self._ended.acquire(timeout=_PATIENCE):
            signal.raise_signal(number)  # the main thread handles it


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
