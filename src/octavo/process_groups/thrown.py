"""Thrown: an exception of gloo's own threads ends its group, and not the process.

A peer that sends more than its receiver has room for makes gloo throw in a thread of its own, where nobody can catch
it: C++ then ends the process. Here such a thread stops for good instead, and what it said is kept. Invariant: any
other exception ends the process, as before. A thread that has stopped is not used again, nor what it holds. It cannot
be given back either: gloo takes a connection out of a loop by waiting for that loop's next turn, which never comes.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo.process_groups import ending

_LOG = logging.getLogger(__name__)
_KIND = b"N4gloo13EnforceNotMetE"  # as the C++ ABI writes gloo::EnforceNotMet
_TASKS = Path("/proc/self/task")  # a folder for each thread of this process
_said: dict[int, str] = {}  # thread -> what it said; one that stands still keeps its number
_still: set[int] = set()  # threads that want nothing of Python any more
_STILL_SECONDS = 1.0  # for those that threw as the process ends
_threads_of: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()  # by group
_making = threading.Lock()


def with_thread(make: Callable[[], Any]) -> tuple[Any, frozenset[int]]:
    """What `make` gives, a device of gloo's, and the numbers of the threads that began meanwhile: its own is one."""
    with _making:  # so that no other device's is
        before = _threads()
        return make(), _threads() - before


def belong(group: Any, threads: frozenset[int]) -> None:
    """What these threads throw is the group's."""
    _threads_of[group] = threads


def threads_of(group: Any) -> frozenset[int]:
    """Those whose exceptions are the group's."""
    return _threads_of.get(group, frozenset())


def said_by(threads: frozenset[int]) -> str | None:
    """What one of these threads threw: lengths, where they are known. None: none has thrown."""
    return next((said for thread, said in list(_said.items()) if thread in threads), None)


@functools.cache
def catch() -> bool:
    """From now on; whether this system's C++ library lets us."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        kind_of, text_of = getattr(library, "__cxa_current_exception_type"), library._ZSt17current_exceptionv
        replace = library._ZSt13set_terminatePFvvE
    except (OSError, AttributeError):
        return False
    kind_of.restype = replace.restype = ctypes.c_void_p
    before: list[Callable[[], None]] = []

    def terminate() -> None:
        if _kind(kind_of()) != _KIND:
            for each in before:  # which ends the process
                each()
            return
        said = _said[thread := threading.get_native_id()] = _text(text_of)
        _LOG.error("a group of gloo was given up, and a thread of it stands still: %s", said or "it threw")
        forever = threading.Lock()
        forever.acquire()
        _still.add(thread)
        forever.acquire()

    kept = _HANDLER(terminate)
    _kept.append(kept)
    address = replace(kept)
    if address:
        before.append(_HANDLER(address))

    def end() -> None:
        replace(ctypes.c_void_p(address))  # what fails behind that finds no Python to run
        until = time.monotonic() + _STILL_SECONDS
        while _said.keys() - _still and time.monotonic() < until:
            time.sleep(0.001)
        if _said:
            time.sleep(0.01)  # for the last of them to let go of Python's lock

    ending.last(end)
    return True


def _threads() -> frozenset[int]:
    """The numbers of this process's threads, where the system tells."""
    return frozenset(int(each.name) for each in _TASKS.iterdir()) if _TASKS.is_dir() else frozenset()


_HANDLER = ctypes.CFUNCTYPE(None)
_WHAT = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)
_kept: list[Any] = []  # handlers, for as long as the process lives


def _kind(type_info: int | None) -> bytes | None:
    """The name of an exception's type, as the C++ ABI writes it."""
    return ctypes.cast(_pointer(type_info, 1), ctypes.c_char_p).value if type_info else None


def _text(current_exception: Any) -> str:
    """What the exception says. It is asked where functions return objects as they do on x86."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ""
    found = ctypes.c_void_p()
    current_exception(ctypes.byref(found))
    assert found.value is not None, "an exception ends this thread"
    said = _WHAT(_pointer(_pointer(found.value, 0), 2))(found.value)
    return str(said.decode(errors="replace"))


def _pointer(address: int, number: int) -> int:
    """The pointer with a number, of those that begin at an address."""
    return int(ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))[number] or 0)
