"""Python's garbage collector beside an engine.

Owns how seldom it runs there, and what it no longer looks at. Knows no engine. Invariant: nothing that becomes garbage
in a cycle is kept for good, but by `settle`, for a process whose loaded objects live as long as itself.

A batch makes thousands of objects and drops them again without a cycle: at Python's thresholds the collector would go
through the young ones every 700, and now and then through all that torch has loaded, for 80 to 90 ms.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_RELAXED = (50_000, 20, 50)
_LOCK = threading.Lock()
_before: list[tuple[int, int, int]] = []  # the thresholds outside, once for each that is within `seldom`


def settle() -> None:
    """For a process that serves: what is loaded is never looked at again, and new objects seldom are."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_RELAXED)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Within: no collections, unless the process has its own idea of them.

    What is loaded meanwhile, as torch's 300,000 objects, lives on: 0.2 s of looking at it would find nothing. It is
    then as old as what has survived collections.
    """
    own = gc.isenabled() and not gc.get_freeze_count()
    if own:
        gc.disable()
    try:
        yield
    finally:
        if own:
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
            gc.enable()


def forget_threads() -> None:
    """For a forked process: none of those that were within `relaxed` is there."""
    global _LOCK
    _LOCK = threading.Lock()
    if _before:
        gc.set_threshold(*_before[0])
        _before.clear()


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """Within: collections are seldom, unless the process has its own idea of them. Threads may be within together."""
    with _LOCK:
        _before.append(_before[0] if _before else gc.get_threshold())
        if 0 < _before[0][0] < _RELAXED[0]:
            gc.set_threshold(*_RELAXED)
    try:
        yield
    finally:
        with _LOCK:
            outside = _before.pop() if _before else gc.get_threshold()  # in a forked process they are forgotten
            if not _before:
                gc.set_threshold(*outside)
