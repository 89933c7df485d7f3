"""Ending: a process ends beside libraries whose threads want Python's lock.

Before 3.14 Python ends a thread that wants its lock while the interpreter goes away, and a thread that C++ is beneath
ends the whole process with it, by SIGABRT. So, at the exit and before the interpreter goes: who is in a call that lets
go of the lock is waited for, nobody begins one, and what has such threads is taken apart, or kept if it is in use.
A wait that was left to itself is waited for where it is about to give up. Invariant: nothing here takes longer than
_SECONDS, or _WAIT_SECONDS where such a wait is near its end.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

_SECONDS = 1.0  # for calls to return, and for what is on its way to arrive
_WAIT_SECONDS = 4.0  # for waits that are about to give up, or should have: a library may take a second more
_NEAR_SECONDS = 1.5  # in which a process ends
_LOOK_SECONDS = 0.005
_process = os.getpid()
_changed = threading.Condition()
_inside = 0  # calls
_ender: threading.Thread | None = None  # once the process ends


class Ends(Protocol):
    """What has threads that want Python's lock."""

    @property
    def is_quiet(self) -> bool:
        """Whether `end` takes no time."""

    def end(self) -> None:
        """Take it apart, so that its threads are gone; what is in use is kept."""


_ends: weakref.WeakSet[Any] = weakref.WeakSet()
_last: list[Callable[[], None]] = []
_waits: weakref.WeakKeyDictionary[threading.Thread, float] = weakref.WeakKeyDictionary()  # -> when it gives up


def ends(each: Ends) -> None:
    """It ends before the interpreter does."""
    _ends.add(each)


def waits(thread: threading.Thread, until: float) -> None:
    """It is in a call that lets go of the lock, and gives up at a time of `time.monotonic`, about."""
    _waits[thread] = until


def last(call: Callable[[], None]) -> None:
    """It is called when all of those have ended."""
    _last.append(call)


@contextlib.contextmanager
def inside() -> Iterator[None]:
    """Around a call that lets go of Python's lock, and returns soon. At the exit others wait here for good."""
    global _inside
    with _changed:
        is_over = _ender not in (None, threading.current_thread())
        _inside += not is_over
    if is_over:
        threading.Event().wait()
    try:
        yield
    finally:
        with _changed:
            _inside -= 1
            _changed.notify_all()


def keep(*objects: Any) -> None:
    """For as long as the process lives, also when modules are taken apart."""
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _is_near() -> bool:
    """Whether a wait may return while the interpreter goes away."""
    near = time.monotonic() + _NEAR_SECONDS
    return any(thread.is_alive() and until < near for thread, until in list(_waits.items()))


@atexit.register
def _end() -> None:
    global _ender
    if os.getpid() != _process:
        return  # a fork has no thread of those
    until = time.monotonic() + _SECONDS
    with _changed:
        _ender = threading.current_thread()
        _changed.wait_for(lambda: not _inside, _SECONDS)
    left = list(_ends)
    while not all(each.is_quiet for each in left) and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    for each in left:
        each.end()
    until = time.monotonic() + _WAIT_SECONDS
    while _is_near() and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    for call in _last:
        call()
