"""Ctrl-C, held back while state changes that must change as a whole.

Owns the handling of SIGINT for that time. Knows nothing of engines. Invariant: an interrupt that comes within is raised
at the end; a second one is raised at once, since what is within may hang.
"""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# Without the wrappers, which make an enum of every number: a third of the time that holding takes a step.
_get: Callable[[int], Any] = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
_set: Callable[[int, Any], Any] = getattr(signal.signal, "__wrapped__", signal.signal)


class HeldInterrupt:
    """Within: KeyboardInterrupt waits. Does nothing outside the main thread or where SIGINT is handled already."""

    def __enter__(self) -> None:
        """Hold."""
        self._noted = False
        in_main = threading.current_thread() is threading.main_thread()
        self._holds = in_main and _get(signal.SIGINT) is signal.default_int_handler
        if self._holds:
            _set(signal.SIGINT, self._note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Raise KeyboardInterrupt if one came and nothing else is being raised."""
        if self._holds:
            _set(signal.SIGINT, signal.default_int_handler)
            if self._noted and error is None:
                raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted:
            raise KeyboardInterrupt
        self._noted = True


def may_be_a_signal(error: BaseException) -> bool:
    """Whether a signal may have raised it, and not the code that it came through: then it is no failure of that."""
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    handler = _get(signal.SIGINT)
    if getattr(handler, "__func__", None) is HeldInterrupt._note:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        return frame.f_code is HeldInterrupt._note.__code__
    return callable(handler)
